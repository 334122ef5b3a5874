"""Models of tests/models.py, read and sliced as the compiler does, without a compile."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from offramp.calibration.data.dataset import Dataset, DataSplit
from offramp.calibration.data.scratch import ScratchSpace
from offramp.calibration.measure.estimates import BackboneTimes
from offramp.compiler.common.options import CompileOptions
from offramp.compiler.common.progress import SILENT
from offramp.compiler.cuts.slicing import Sliced, slice_model
from offramp.compiler.exits.timed_model import CompileRun, ProfileTimer, TimedModel
from offramp.compiler.frontend.model import read_model
from offramp.compiler.graphs.runtime import random_inputs
from tests import models

BUILDERS: dict[str, Callable[[], onnx.ModelProto]] = {
    "residual": models.residual_cnn,
    "vgg": models.vgg_chain,
    "bert": models.bert_like,
    "bert with types": functools.partial(models.bert_like, token_types=True),
    "bert without mask": functools.partial(models.bert_like, mask=False),
    "bert of padded ids": functools.partial(models.bert_like, padding=True),
    "two sequences": models.two_sequences,
    "rotary": models.rotary,
    "batch second": models.batch_second,
    "recurrent": models.recurrent,
    "towers": models.two_tower,
    "long towers": functools.partial(models.two_tower, layers=4, merged=1),
    "text cnn": models.text_cnn,
    "hidden states": models.hidden_states,
    "mlp": models.mlp,
    "log probabilities": functools.partial(models.mlp, ending="LogSoftmax"),
    "dense": models.dense_net,
    "inception": models.inception,
    "conditional": models.conditional,
}


@functools.cache
def sliced(name: str) -> Sliced:
    """Cut at every cut point that there is."""
    return slice_proto(BUILDERS[name]())


def slice_proto(
    proto: onnx.ModelProto, *, answer_tokens: Sequence[int] = (), **options: Any
) -> Sliced:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(proto, path)
        model = read_model(path, answer_tokens=answer_tokens)
    settings = {"candidates": 99, **options}
    return slice_model(model, CompileOptions.of(model=path, data=path, output=path, **settings))


def inputs_of(pieces: Sliced, samples: int, *, seed: int = 0) -> dict[str, NDArray[Any]]:
    return dict(random_inputs(pieces.model.proto, samples, seed=seed))


def dataset_of(pieces: Sliced, samples: int) -> Dataset:
    labels = np.arange(samples) % pieces.model.answer.classes
    return Dataset(inputs=inputs_of(pieces, samples), labels=labels, sha256="0")


def timed(pieces: Sliced, parts: DataSplit, options: CompileOptions) -> TimedModel:
    """Return times of 1 ms for every segment at batch 8; exits are timed normally."""
    segments = len(pieces.segments)
    return TimedModel(
        sliced=pieces,
        run=run_of(parts, options),
        timer=ProfileTimer(
            source=b"",
            segments=pieces.graphs,
            samples=lambda size: parts.train.take(slice(size)),
            threads=1,
            batch_sizes=(8,),
            progress=SILENT,
        ),
        times=BackboneTimes(
            batch_sizes=(8,), source_ms=(float(segments),), segments_ms=((1.0,),) * segments
        ),
    )


def run_of(parts: DataSplit, options: CompileOptions) -> CompileRun:
    space = ScratchSpace(options.scratch)
    return CompileRun(options=options, parts=parts, progress=SILENT, scratch=space)
