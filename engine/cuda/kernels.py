"""Our kernels on a driver: the end of a stage, and gathering rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from offramp.engine.cuda.driver import Driver, Stream
from offramp.engine.kernels.arguments import (
    MOST_TENSORS,
    CheckKind,
    ExitCheck,
    Launch,
    Results,
    RowCopy,
    ScoreType,
    Scratch,
    gather_rows,
    stage_end,
)
from offramp.engine.plan import StageSpec

_SCORE_TYPES: dict[np.dtype[Any], ScoreType] = {
    np.dtype(np.float32): "float32",
    np.dtype(np.float16): "float16",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCheck:
    """How the kernel checks who leaves after a stage."""

    scores: str
    """Name of the output that it reads."""
    score_type: ScoreType
    kind: CheckKind
    channels: int
    """Of the scores."""


def check_of(spec: StageSpec, dtype: np.dtype[Any], classes: int) -> StageCheck | None:
    """How to check who leaves after a stage.

    A confidence that the graph computes is the largest of one probability: thresholds were tuned
    on these very numbers, so they are what is compared.

    Args:
        spec: Of the stage.
        dtype: Of the confidence on the device, or of the answer where the graph gives none.
        classes: Of the answer.

    Returns:
        ``None`` where the stage has no answer, or one of a type that the kernels do not read.
    """
    score_type = _SCORE_TYPES.get(dtype)
    if spec.answer is None or score_type is None:
        return None
    if spec.confidence is not None:
        kind, channels, scores = CheckKind.PROBABILITIES, 1, spec.confidence
    else:
        kind = CheckKind.LOGITS if spec.form == "logits" else CheckKind.PROBABILITIES
        channels, scores = classes, spec.answer
    return StageCheck(scores=scores, score_type=score_type, kind=kind, channels=channels)


class DeviceKernels:
    """The kernels, loaded once for all slots."""

    def __init__(self, driver: Driver, cubin: bytes) -> None:
        """Load them; the driver must be current."""
        self._driver = driver
        self._kernels = driver.load(cubin)
        self._multiprocessors = driver.multiprocessors

    def stage_end(
        self,
        check: StageCheck,
        *,
        threshold: float,
        rows: int,
        scores: int,
        results: Results,
        scratch: Scratch,
        tensors: Sequence[RowCopy],
    ) -> Launch:
        """Make the launch after a stage; see :func:`offramp.engine.kernels.arguments.stage_end`."""
        return stage_end(
            ExitCheck(kind=check.kind, channels=check.channels, threshold=threshold),
            rows=rows,
            scores=scores,
            score_type=check.score_type,
            results=results,
            scratch=scratch,
            multiprocessors=self._multiprocessors,
            tensors=tensors,
        )

    def launch(self, launch: Launch, stream: Stream) -> None:
        """Enqueue it."""
        self._driver.launch(self._kernels[launch.entry_point], launch, stream)

    def gather(
        self,
        tensors: Sequence[RowCopy],
        stream: Stream,
        *,
        rows: int,
        count: int,
        source_rows: int,
    ) -> None:
        """Enqueue copies of given rows; see :func:`offramp.engine.kernels.arguments.gather_rows`.

        Args:
            tensors: Any number of them.
            stream: Where.
            rows: Address of int32 [count].
            count: Rows to copy.
            source_rows: Rows that the sources have.
        """
        left = iter(tensors)
        while some := tuple(islice(left, MOST_TENSORS)):
            made = gather_rows(
                some,
                rows=rows,
                count=count,
                source_rows=source_rows,
                multiprocessors=self._multiprocessors,
            )
            self.launch(made, stream)
