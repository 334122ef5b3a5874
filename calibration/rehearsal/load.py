"""A load of recorded samples in batches, and a forecast of what a policy brings for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offramp.bundle import NEVER, ActiveExit
from offramp.calibration.rehearsal.two_stage import StageTimes, is_late
from offramp.certify import BoolArray, ConfidenceArray, Float32Array, IntArray, leaves
from offramp.certify.records import check_confidence


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RehearsalLoad:
    """Recorded samples as they may come in (the paper's D), and batches of them."""

    confidence: Float32Array
    """float32[K, samples] in [0, 1], of all exits of the bundle."""
    agrees: BoolArray
    """bool[K, samples]: the exit's prediction equals the source model's."""
    batches: IntArray
    """int64[k, n]: samples of each batch."""

    @classmethod
    def of(
        cls,
        confidence: ConfidenceArray,
        agrees: BoolArray,
        *,
        batch_size: int,
        batches: int,
        rng: np.random.Generator,
    ) -> RehearsalLoad:
        """Draw batches: the samples in one random order after the other, cut into batches."""
        confidence, agrees = check_confidence(confidence, agrees)
        samples = confidence.shape[1]
        wanted = batches * batch_size
        orders = [rng.permutation(samples) for _ in range(-(-wanted // samples))]
        return cls(
            confidence=confidence.astype(np.float32),
            agrees=agrees,
            batches=np.concatenate(orders)[:wanted].reshape(batches, batch_size),
        )

    @property
    def samples(self) -> int:
        """Number of samples."""
        return int(self.confidence.shape[1])

    def rows(self, going_on: BoolArray) -> IntArray:
        """int64[k]: rows of each batch that are among the samples bool[samples]."""
        return np.asarray(going_on[self.batches].sum(axis=1), dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A forecast of latency and agreement: counted rows, profiled times, nothing measured."""

    average_ms: float
    """Mean over samples until the answer is there."""
    tail_ms: float
    """Mean over batches until the last answer is there (the paper's figure 9)."""
    source_ms: float
    """A batch of the unmodified model, for both."""
    violations: float
    """Share of batches whose last answer comes later than that."""
    disagreement: float
    """Share of the load answered unlike the source model."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Position:
    """Where the search stands: behind an exit, with what has come so far."""

    active: tuple[ActiveExit, ...]
    """Found so far."""
    rows: int
    """Most rows that may arrive."""
    waiting: BoolArray
    """bool[samples]: not answered yet."""
    errors: int
    """Samples answered unlike the source model."""

    @classmethod
    def start(cls, load: RehearsalLoad) -> Position:
        """The model's start."""
        everything = np.ones(load.samples, dtype=np.bool_)
        return cls(active=(), rows=load.batches.shape[1], waiting=everything, errors=0)

    @property
    def after_exit(self) -> int | None:
        """The last exit found."""
        return self.active[-1].exit if self.active else None

    def behind(self, load: RehearsalLoad, exit_: int, threshold: float, rows: int) -> Position:
        """The position behind one more exit, which lets ``rows`` rows on at most."""
        leaving = self.waiting & leaves(load.confidence[exit_], np.float32(threshold))
        return Position(
            active=(*self.active, ActiveExit(exit=exit_, threshold=threshold)),
            rows=rows,
            waiting=self.waiting & ~leaving,
            errors=self.errors + int(np.count_nonzero(leaving & ~load.agrees[exit_])),
        )


def forecast(load: RehearsalLoad, times: StageTimes, active: Sequence[ActiveExit]) -> Forecast:
    """Follow every batch through all stages of a policy."""
    used = [a for a in active if a.threshold < NEVER]
    stages_ms = times.stages_ms([a.exit for a in used], load.batches.shape[1])
    at = Position.start(load)
    arriving = load.rows(at.waiting)
    elapsed_ms, answered_ms = np.zeros(len(arriving)), 0.0
    for stage_ms, exit_ in zip(stages_ms, [*used, None], strict=True):
        elapsed_ms += stage_ms[arriving]
        going_on = np.zeros_like(arriving)
        if exit_ is not None:
            at = at.behind(load, exit_.exit, exit_.threshold, rows=0)
            going_on = load.rows(at.waiting)
        answered_ms += float(((arriving - going_on) * elapsed_ms).sum())
        arriving = going_on
    source_ms = times.source_ms(load.batches.shape[1])
    return Forecast(
        average_ms=answered_ms / load.batches.size,
        tail_ms=float(elapsed_ms.mean()),
        source_ms=source_ms,
        violations=float(is_late(elapsed_ms, source_ms).mean()),
        disagreement=at.errors / load.samples,
    )
