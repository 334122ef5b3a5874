"""The quantised copy that a bundle begins with: of the kind that is fastest on this machine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np

from offramp.bundle import CpuFeatures
from offramp.calibration.dataset import Dataset, DataSplit
from offramp.calibration.precision.choice import choose_kind
from offramp.calibration.precision.kinds import CpuPrecision
from offramp.calibration.quantization import RANGE_SAMPLES
from offramp.compiler.graph import serialised
from offramp.compiler.model import SourceModel
from offramp.compiler.options import CompileOptions
from offramp.compiler.progress import Progress
from offramp.engine.environment import cpu_features

_log = logging.getLogger(__name__)

LEAST_AGREEMENT: Final = 0.8
"""With the float32 model, of a copy that is used. What it is not sure of is deferred to that model,
so a copy may err more often than the bundle; but exits and threshold have to tell where."""

Quantise: TypeAlias = Callable[[SourceModel, Dataset], bytes]
"""Makes a quantised copy of a model, by samples of its training data."""


def fastest_copy(
    model: SourceModel, parts: DataSplit, options: CompileOptions, progress: Progress
) -> bytes | None:
    """Make every kind of copy that there is for the model, and give the fastest on this machine.

    ``None``, and a warning that says why, if none is faster than float32: a precision that brings
    nothing here is not used. Scales are measured on training samples, agreement on the tune split.
    """
    calibration = parts.train.subset(np.arange(min(len(parts.train), RANGE_SAMPLES)))
    judged = np.arange(max(len(parts.tune), options.reference_batch_size)) % len(parts.tune)
    _say_what_the_cpu_has(cpu_features())
    with progress.step("Try kinds of int8", len(CpuPrecision)) as advance:
        choice = choose_kind(
            serialised(model.proto),
            model.answer.output,
            calibration,
            parts.tune.subset(judged),
            threads=options.threads,
            least_agreement=LEAST_AGREEMENT,
            batch_sizes=sorted({1, options.reference_batch_size}),
            progress=advance,
        )
    for note in choice.disturbed:
        _log.warning("The machine was disturbed while kinds of int8 were timed: %s.", note)
    if choice.kind is None:
        nothing = "PRECISION int8 BRINGS NOTHING HERE, the bundle will be of fp32: %s."
        _log.warning(nothing, choice.reason)
        return None
    _log.info("int8 on this machine is %s.", choice.reason)
    return choice.graph


def _say_what_the_cpu_has(cpu: CpuFeatures) -> None:
    """Log the CPU's instructions, and warn where int8 computes otherwise than on most servers."""
    _log.info("The CPU that int8 is made on: %s.", cpu.describe())
    if cpu.saturates:
        _log.warning(
            "This CPU (%s) has no VNNI: sums of int8 products saturate in 16 bits, and the copy "
            "agrees less with the float32 model than it does elsewhere. What is certified here "
            "holds on CPUs like this one: compile on the kind that serves, or with --precision "
            "fp32.",
            cpu.describe(),
        )
