"""A load of recorded samples, forecasts for it, and the settings and results of a rehearsal.

:func:`offramp.bundle.schema.serde.to_plain` converts settings and results to JSON values.
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
    """Recorded samples of a load (the paper's D), and batches of them."""

    confidence: Float32Array
    """float32[K, samples] in [0, 1]: confidences of all exits of the bundle."""
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
        """Draw batches: random orders of all samples, one after the other, cut into batches."""
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
        """Number of recorded samples, which may be in several batches."""
        return int(self.confidence.shape[1])

    def rows(self, going_on: BoolArray) -> IntArray:
        """Return how many samples of each batch are marked in ``going_on``: int64[k]."""
        return np.asarray(going_on[self.batches].sum(axis=1), dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A forecast of latency and agreement: from counted rows and profiled times, not measured."""

    average_ms: float
    """Mean over samples of the time until the answer."""
    tail_ms: float
    """Mean over batches of the time until the last answer (the paper's figure 9)."""
    source_ms: float
    """Time of a batch of the unmodified model, to compare the two times above with."""
    violations: float
    """Share of batches whose last answer takes longer than ``source_ms``."""
    disagreement: float
    """Share of the load answered unlike the source model."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Position:
    """A position of the search: after an exit, with the results so far."""

    active: tuple[ActiveExit, ...]
    """Exits found so far."""
    rows: int
    """Largest number of rows of a batch that may arrive at this position."""
    waiting: BoolArray
    """bool[samples]: true if not answered yet."""
    errors: int
    """Samples answered unlike the source model."""

    @classmethod
    def start(cls, load: RehearsalLoad) -> Position:
        """Return the position at the model's start."""
        everything = np.ones(load.samples, dtype=np.bool_)
        return cls(active=(), rows=load.batches.shape[1], waiting=everything, errors=0)

    @property
    def after_exit(self) -> int | None:
        """Last exit found, or ``None``."""
        return self.active[-1].exit if self.active else None

    def advance(self, load: RehearsalLoad, exit_: int, threshold: float, rows: int) -> Position:
        """Return the position after one more exit, where at most ``rows`` rows may go on."""
        leaving = self.waiting & leaves(load.confidence[exit_], np.float32(threshold))
        return Position(
            active=(*self.active, ActiveExit(exit=exit_, threshold=threshold)),
            rows=rows,
            waiting=self.waiting & ~leaving,
            errors=self.errors + int(np.count_nonzero(leaving & ~load.agrees[exit_])),
        )


def forecast(load: RehearsalLoad, times: StageTimes, active: Sequence[ActiveExit]) -> Forecast:
    """Predict the outcome of a policy by following every batch through all stages."""
    used = [a for a in active if a.threshold < NEVER]
    stages_ms = times.stages_ms([a.exit for a in used], load.batches.shape[1])
    at = Position.start(load)
    arriving = load.rows(at.waiting)
    elapsed_ms, answered_ms = np.zeros(len(arriving)), 0.0
    for stage_ms, exit_ in zip(stages_ms, [*used, None], strict=True):
        elapsed_ms += stage_ms[arriving]
        going_on = np.zeros_like(arriving)
        if exit_ is not None:
            at = at.advance(load, exit_.exit, exit_.threshold, rows=0)
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
"""File of a bundle with a :class:`Rehearsed`; only rehearsed bundles have it."""

Verdict: TypeAlias = Literal["chosen", "possible", "precision", "latency", "gain"]
"""Verdict on a candidate: ``chosen``; ``possible`` if another candidate was better; or the limit
that it violates."""
Ending: TypeAlias = Literal["precision", "latency", "gain", "all left", "last exit", "kept"]
"""Reason why the search ended: the limit that every remaining candidate violates, or that no sample
or candidate was left. With ``kept`` nothing was searched: the exits of a policy were evaluated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalSettings:
    """Settings of a rehearsal; the largest shares that are allowed default to those of PAME 7.1."""

    batch_size: int = 32
    """Rows of a batch at its start, n."""
    interval: int = 1
    """Difference in rows between two neighbouring columns of the matrices, v."""
    batches: int = 1000
    """Number of batches drawn from the load, k."""
    max_disagreement: float = 0.01
    """Largest share of the load answered unlike the source model, 1 − η."""
    max_violations: float = 0.02
    """Largest share of batches that an exit may make late, τ_l."""
    min_gain: float = 0.01
    """Smallest share of the source model's time by which each exit reduces the mean latency; 0 is
    the published rule."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "interval", "batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_disagreement", "max_violations", "min_gain"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An exit that was evaluated as the next exit to use: a row of both matrices."""

    exit: int
    threshold: float
    """Threshold of the candidate configuration of this exit (6.2); ``NEVER`` if none keeps the
    precision."""
    moving_on: float
    """Share of the load that goes on after this exit."""
    disagreement: float
    """Share of the load answered unlike the source model, including earlier exits."""
    violations: float
    """Share of the batches that are late with this exit."""
    allowed_rows: int
    """Largest number of rows that may go on after this exit, n_i; −1 if batches are late even with
    0 rows."""
    average_ms: float
    """Average two-stage latency of a row (equation 2)."""
    tail_ms: float
    """Two-stage latency that batches keep, except for the tolerated share of late batches (6.4)."""
    mean_ms: float
    """Predicted mean latency of the load from the model's start, including all exits so far."""
    verdict: Verdict
    times_ms: tuple[float, ...]
    """The exit's row of the inference time matrix, in milliseconds."""
    pattern: tuple[int, ...]
    """The exit's row of the batching pattern matrix: number of batches by rows that go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalStep:
    """One round of the search: both matrices, and the choice."""

    after_exit: int | None
    """Exit that the previous step chose; ``None`` at the model's start."""
    rows: int
    """Largest number of rows in the first stage: n, or the number that may go on after
    ``after_exit``."""
    columns: tuple[int, ...]
    """Number of rows in the second stage, for each column of the matrices."""
    limit_ms: float
    """Limit of two-stage times: the time of ``rows`` rows without a further exit."""
    mean_ms: float
    """Predicted mean latency of the load with the exits found before."""
    candidates: tuple[Candidate, ...]
    chosen: int | None
    """Chosen exit; ``None`` ends the search."""

    def candidate(self, exit_: int) -> Candidate:
        """Return this step's candidate at an exit, an index in the bundle."""
        return next(candidate for candidate in self.candidates if candidate.exit == exit_)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The steps of a rehearsal and its result; :func:`.schema.serde.to_plain` makes JSON of it."""

    settings: RehearsalSettings
    samples: int
    """Number of samples of the load."""
    allowed_errors: int
    """Largest number of samples of the load that may be answered unlike the source model."""
    steps: tuple[RehearsalStep, ...]
    ended: Ending
    active: tuple[ActiveExit, ...]
    """Exits found, in depth order, with their rehearsed thresholds."""
    forecast: Forecast


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """Content of :data:`REHEARSAL`: the choice of exits; a forecast of the certified policy."""

    rehearsal: Rehearsal
    """Rehearsal on the tuning split."""
    shipped: Forecast
    """Forecast of the certified policy on the certify split."""
    data_sha256: str
    """SHA-256 of the file that both splits are from."""

    @property
    def too_late(self) -> str:
        """Sentence on too many batches that the certified policy makes late; empty if few."""
        late, tolerated = self.shipped.violations, self.rehearsal.settings.max_violations
        if late <= tolerated:
            return ""
        return (
            f"{late:.1%} of the batches are predicted to be later than without exits, more than "
            f"the {tolerated:.3g} of --max-violations: thresholds that could be certified let more "
            "samples go on than those rehearsed; pass more calibration data, or a larger "
            "--max-disagreement"
        )

    def dump(self) -> bytes:
        """Return the rehearsals as JSON, the content of their file."""
        return (json.dumps(to_plain(self), allow_nan=False) + "\n").encode()

    @classmethod
    def parse(cls, document: bytes) -> Rehearsed:
        """Read the content; BundleSchemaError if another version wrote it, or it is not JSON."""
        try:
            plain = json.loads(document)
        except (ValueError, RecursionError) as error:
            raise BundleSchemaError(f"{REHEARSAL}: not JSON ({error})") from error
        return from_plain(cls, plain, REHEARSAL)
