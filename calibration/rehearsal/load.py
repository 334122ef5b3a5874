"""A load of recorded samples, the forecast for it, and the facts of a rehearsal.

Settings and findings become JSON by :func:`offramp.bundle.schema.serde.to_plain`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np

from offramp.bundle import NEVER, ActiveExit, BundleSchemaError
from offramp.bundle.schema.serde import from_plain, to_plain
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


REHEARSAL: Final = "rehearsal.json"
"""File of a bundle that holds a :class:`Rehearsed`; only in those that were rehearsed."""

Verdict: TypeAlias = Literal["chosen", "possible", "precision", "latency", "gain"]
"""Why a candidate was chosen, or was not: others were better, or what it violates."""
Ending: TypeAlias = Literal["precision", "latency", "gain", "all left", "last exit", "kept"]
"""Why the search ended: what every remaining candidate violates, or that there was none. ``kept``
is no search: the exits of a policy were looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalSettings:
    """The settings of a rehearsal; both bounds default to those of the paper's evaluation."""

    batch_size: int = 32
    """n: rows of a batch when it starts."""
    interval: int = 1
    """v: rows from one column of the matrices to the next."""
    batches: int = 1000
    """k: batches drawn from the load."""
    max_disagreement: float = 0.01
    """1 − η: largest share of the load answered unlike the source model."""
    max_violations: float = 0.02
    """τ_l: largest share of batches that an exit may make late."""
    min_gain: float = 0.01
    """Least share of the source model's time that each exit takes off the mean latency; 0 is as
    published."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "interval", "batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_disagreement", "max_violations", "min_gain"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An exit as it would be if it were attached next: a row of both matrices."""

    exit: int
    threshold: float
    """Of its candidate configuration; ``NEVER`` if none keeps the precision."""
    moving_on: float
    """Share of the load that goes on behind it."""
    disagreement: float
    """Share of the load answered unlike the source model, earlier exits included."""
    violations: float
    """Share of the batches that are late with it."""
    allowed_rows: int
    """n_i: most rows that may go on behind it; -1 if not even none may."""
    average_ms: float
    """Average two-stage latency of a row (equation 2)."""
    tail_ms: float
    """Two-stage latency that all but the tolerated share of batches stay within (6.4)."""
    mean_ms: float
    """Predicted mean latency of the load from the model's start, all exits so far included."""
    verdict: Verdict
    times_ms: tuple[float, ...]
    """Row of the inference time matrix."""
    pattern: tuple[int, ...]
    """Row of the batching pattern matrix: batches by rows that go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalStep:
    """One round of the search: both matrices, and what was chosen by them."""

    after_exit: int | None
    """The exit chosen before; ``None`` at the model's start."""
    rows: int
    """Of the first stage: n, then the most that the exit before may let go on."""
    columns: tuple[int, ...]
    """Rows of the second stage."""
    limit_ms: float
    """Boundary: time of the first stage's rows with no further exit."""
    mean_ms: float
    """Predicted mean latency of the load with the exits found before."""
    candidates: tuple[Candidate, ...]
    chosen: int | None
    """The exit; ``None`` ends the search."""

    def candidate(self, exit_: int) -> Candidate:
        """One of the candidates, by its exit."""
        return next(candidate for candidate in self.candidates if candidate.exit == exit_)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The steps of a rehearsal and what it found; JSON by :func:`.schema.serde.to_plain`."""

    settings: RehearsalSettings
    samples: int
    """Of the load."""
    allowed_errors: int
    """Most samples of the load that were allowed to be answered unlike the source model."""
    steps: tuple[RehearsalStep, ...]
    ended: Ending
    active: tuple[ActiveExit, ...]
    """Exits found, in depth order, with the thresholds that they were rehearsed with."""
    forecast: Forecast


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """The content of :data:`REHEARSAL`: how a bundle's exits were chosen, and what that brings."""

    rehearsal: Rehearsal
    """On the tuning split."""
    shipped: Forecast
    """The certified policy, on the certify split."""
    data_sha256: str
    """Of the file that both splits are from."""

    @property
    def too_late(self) -> str:
        """The sentence on too many batches that the certified policy makes late; empty if few."""
        late, tolerated = self.shipped.violations, self.rehearsal.settings.max_violations
        if late <= tolerated:
            return ""
        return (
            f"{late:.1%} of the batches are predicted to be later than without exits, more than "
            f"the {tolerated:.3g} of --max-violations: thresholds that could be certified let more "
            "samples go on than those rehearsed; give more calibration data, or a larger "
            "--max-disagreement"
        )

    def dump(self) -> bytes:
        """Give the content of the file."""
        return (json.dumps(to_plain(self), allow_nan=False) + "\n").encode()

    @classmethod
    def parse(cls, document: bytes) -> Rehearsed:
        """Read the content; BundleSchemaError if another version wrote it, or it is not JSON."""
        try:
            plain = json.loads(document)
        except (ValueError, RecursionError) as error:
            raise BundleSchemaError(f"{REHEARSAL}: not JSON ({error})") from error
        return from_plain(cls, plain, REHEARSAL)
