"""Bundles that tests compile, in seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
import pytest

from offramp.bundle import Bundle, write_bundle
from offramp.bundle.graph_weights import WEIGHTS
from offramp.calibration.choose import limits
from offramp.calibration.data.dataset import Dataset
from offramp.calibration.data.training_options import TrainingOptions
from offramp.calibration.measure import profiling
from offramp.calibration.measure.measuring import Budget
from offramp.compiler.blueprints.precision_choice import on_copy
from offramp.compiler.common.options import CompileOptions
from offramp.compiler.graphs import weights
from offramp.compiler.graphs.source_model import SourceModel
from offramp.compiler.steps import compile as compiling
from offramp.compiler.steps.compile import compile_model
from offramp.engine.common.timing import Effort
from tests.quantised import quantised

Quantise: TypeAlias = Callable[[SourceModel, Dataset], bytes]
"""Makes a quantised copy of a model, by samples of its training data."""
EXAMPLE = Path(__file__).parent.parent / "examples" / "fashion"


@contextmanager
def equal_times(*, staged_ms: float = 1.0) -> Iterator[None]:
    """Make a graph take 1 ms for the compiler, and all stages ``staged_ms``, on any machine.

    Then exits are in use, however small the model is, and measurements do not exclude them.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(profiling.TimedGraph, "time_ms", lambda _self, _tensors: 1.0)
        patched.setattr(profiling, "_staged_ms", lambda *_: staged_ms)
        patched.setattr(profiling, "disturbances", lambda *_: ())
        patched.setattr(limits, "measured_loss", lambda *_: None)
        yield


@contextmanager
def brief_measurements() -> Iterator[None]:
    """Limit measurements to the rounds that an interval needs: tests assert no times."""
    with pytest.MonkeyPatch.context() as patched:
        for effort in (Effort, Budget):
            patched.setitem(effort.__init__.__kwdefaults__, "seconds", 0.1)
        yield


def sharing_weights(bundle: Bundle, path: Path) -> Bundle:
    """Write a bundle again, whose graphs name all weights but the very smallest."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(weights, "LEAST_BYTES", 64)
        graphs = {name: bundle.read(name) for name in bundle.manifest.graphs}
        packed = weights.pack_weights(graphs, None)
        left = {*packed.graphs, WEIGHTS, "policy.json"}
        names = [entry.path for entry in bundle.manifest.files if entry.path not in left]
        files = {**{name: bundle.read(name) for name in names}, **packed.graphs}
        files[WEIGHTS] = b"".join(packed.pieces())
    return write_bundle(path, bundle.manifest, bundle.policy, files)


@brief_measurements()
def compile_example(folder: Path, *, samples: int, epochs: int) -> Bundle:
    """Compile the shipped example on a part of its calibration data."""
    with np.load(EXAMPLE / "calibration.npz") as archive:
        np.savez(folder / "calibration.npz", **{k: archive[k][:samples] for k in archive.files})
    return compile_model(
        CompileOptions.of(
            model=EXAMPLE / "fashion_resnet56.onnx",
            data=folder / "calibration.npz",
            output=folder / "fashion.ee",
            candidates=3,
            max_overhead=0.99,  # what is timed on a busy machine must not decide what is tested
            augment="off",
            training=TrainingOptions(epochs=epochs, threads=2),
        )
    )


@brief_measurements()
def compile_tiny(
    model: onnx.ModelProto,
    arrays: Mapping[str, np.ndarray[Any, Any]],
    folder: Path,
    *,
    name: str = "tiny",
    epochs: int = 6,
    quantise: Quantise = quantised,
    staged_ms: float = 1.0,
    own_times: bool = False,
    **options: Any,
) -> Bundle:
    """Compile a model on the given arrays; exits may cost what they will, it is so small.

    All graphs take equal times, unless the caller has set ``own_times`` for them. With a precision,
    the copy that ``quantise`` makes goes before the model, faster or not.
    """
    onnx.save(model, folder / "model.onnx")
    np.savez(folder / "data.npz", **arrays)
    settings = {
        "max_disagreement": 0.05,
        "max_overhead": 0.99,
        "training": TrainingOptions(epochs=epochs, batch_size=64),
        **options,
    }
    asked = CompileOptions.of(
        model=folder / "model.onnx",
        data=folder / "data.npz",
        output=folder / f"{name}.ee",
        **settings,
    )
    times = nullcontext() if own_times else equal_times(staged_ms=staged_ms)
    with times, pytest.MonkeyPatch.context() as patched:
        patched.setattr(limits, "measured_loss", lambda *_: None)
        patched.setattr(
            compiling,
            "choose_precision",
            lambda plain, exits: on_copy(
                plain, exits, quantise(plain.sliced.whole_model(), plain.timed.run.parts.train)
            ),
        )
        return compile_model(asked)
