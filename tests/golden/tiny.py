"""Write the tiny models and their data that ``tests.golden.compare`` compiles.

    python -m tests.golden.tiny FOLDER

The models have random weights. Their last bias is moved, so that they answer with all their classes
and exits have something to learn.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import numpy_helper

from tests import models, tasks
from tests.integration.test_compile_tiny import images, sentences

Arrays = dict[str, NDArray[Any]]
WIDTH = 256


def vectors(samples: int = 1400) -> Arrays:
    """Sixteen kinds of vector, slightly varied."""
    rng = np.random.default_rng(0)
    kinds = np.random.default_rng(99).standard_normal((16, WIDTH)) * 6
    x = kinds[rng.integers(0, 16, samples)] + rng.standard_normal((samples, WIDTH))
    return {"x": x.astype(np.float32)}


def pairs() -> Arrays:
    """The same with a key of groups of two."""
    arrays = vectors()
    return {**arrays, "pair": np.arange(len(arrays["x"])) // 2}


def pixels() -> Arrays:
    return tasks.images(600)


MLP = functools.partial(models.mlp, layers=16, width=WIDTH)
TINY: dict[str, tuple[Callable[[], onnx.ModelProto], Callable[[], Arrays]]] = {
    "images": (functools.partial(models.residual_cnn, blocks=6), images),
    "sentences": (models.bert_like, sentences),
    "vectors": (functools.partial(MLP, ending="Softmax"), vectors),
    "pairs": (functools.partial(MLP, ending="Softmax"), pairs),
    "values": (MLP, vectors),
    "pixels": (functools.partial(models.residual_cnn, blocks=8, dense="Softmax"), pixels),
}


def balanced(model: onnx.ModelProto, arrays: Arrays) -> onnx.ModelProto:
    """Move the bias of the last layer, so that classes are about equally likely."""
    (layer,) = [n for n in model.graph.node if n.op_type == "Gemm"][-1:]
    (bias,) = [w for w in model.graph.initializer if w.name == layer.input[2]]
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [tensor.name for tensor in session.get_inputs()]
    (answers,) = session.run(None, {name: arrays[name] for name in names})
    scores = np.log(answers + 1e-9) if model.graph.node[-1].op_type == "Softmax" else answers
    moved = numpy_helper.to_array(bias) - scores.mean(axis=0)
    bias.CopyFrom(numpy_helper.from_array(moved.astype(np.float32), bias.name))
    return model


def main() -> None:
    """Write every model and its data."""
    folder = Path(sys.argv[1])
    for name, (build, data) in TINY.items():
        model, arrays = build(), data()
        if name in ("images", "vectors", "pairs"):
            model = balanced(model, arrays)
        onnx.save(model, folder / f"{name}.onnx")
        np.savez(folder / f"{name}.npz", **arrays)


if __name__ == "__main__":
    main()
