"""The counters of a served model, and their immutable snapshots.

The executor counts per batch and stage, never per sample in Python; status page and metrics read
snapshots.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from offramp.certify.decision import MODEL_END, NEVER
from offramp.engine.control.controller import ControlStatus
from offramp.engine.requests.departures import Departures
from offramp.engine.requests.learning_status import LearningStatus
from offramp.engine.stages.plan import exit_label

HISTOGRAM_BOUNDS_S = tuple(round(0.00025 * 2 ** (step / 2), 6) for step in range(31))
"""Upper bounds of the time histograms' buckets: 0.25 ms to 8.2 s, two per octave; the last bucket
is open."""

FAILURE_CAUSES = ("cancelled", "expired", "hopeless", "rejected", "backend_error", "stopped")
"""Reasons why a sample may get no answer."""

BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Upper bounds of the batch size histograms' buckets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """A histogram: counts per bucket (not cumulative), and the sum."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    """Counts by bucket, one more than ``bounds``: the last is above all of them."""
    total: float
    """Sum of the observed values."""

    @property
    def count(self) -> int:
        """Number of all observations."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Mean of the observations; 0 if there were none."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, q: float) -> float:
        """Return a quantile by linear interpolation inside its bucket; 0 without observations."""
        wanted, seen = q * self.count, 0
        for index, count in enumerate(self.counts):
            if count and seen + count >= wanted:
                low = self.bounds[index - 1] if index else 0.0
                high = self.bounds[min(index, len(self.bounds) - 1)]
                return low + (high - low) * (wanted - seen) / count
            seen += count
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStatistics:
    """The counts of one exit that is or was in use, or of the model's end."""

    label: str
    """Name: ``exit 3`` or ``final``."""
    threshold: float
    """Smallest confidence with which a sample leaves; ``NEVER`` if no sample leaves here (any
    more)."""
    answered: int
    """Number of samples that left here with an answer."""
    forced: int
    """Number of these that were forced to leave here, below the threshold."""
    batch_size: Histogram
    """Rows per run of the stage."""
    run_s: Histogram
    """Time of each run of the stage, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantStatistics:
    """The counts of a variant (a subnet) of the model."""

    name: str
    answered: int
    """Number of samples that the variant answered."""
    forced: int
    """Number of these that no certificate covers."""
    audited: int
    """Number of these that the full model answered too, for comparison."""
    disagreed: int
    """Number of the audited samples whose answers differ."""
    agreement: float
    """Share of the calibration samples that the whole subnet answers like the full model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountersSnapshot:
    """A snapshot of all counts since the model was loaded.

    ``samples`` is ``answered + queued + in_flight`` and the samples in ``failed`` that were
    accepted (all causes but ``rejected``).
    """

    stages: tuple[StageStatistics, ...]
    requests: int
    samples: int
    """Number of accepted requests and samples."""
    answered: int
    failed: dict[str, int]
    """Samples without an answer, by cause (:data:`FAILURE_CAUSES`), where there are any."""
    failed_requests: int = 0
    """Number of requests that ended with an error, or that their callers withdrew."""
    retried: int
    """Samples of failed batches that were retried."""
    queued: int
    """Samples waiting now."""
    in_flight: int
    """Samples in running batches, at splits, or waiting for a retry."""
    resumed: int = 0
    """Samples of batches that were resumed elsewhere after losing their worker, counted each
    time."""
    auditing: int = 0
    """Samples that have their answer and run on to the model's end, to compare the answers."""
    lost_feedback: int = 0
    """Samples whose comparison was lost: their batch failed, or the result was not read in time."""
    out_of_range: int = 0
    """Samples that no exit answered because their inputs are unlike those of calibration."""
    discounted: int = 0
    """Samples that control ignores: equal ones came before, or one source sent too many."""
    unseen_lengths: int = 0
    """Accepted samples of a length that calibration never had."""
    padded: int = 0
    """Samples that were padded to share a batch, counted each time."""
    padded_positions: int = 0
    """Positions (of sequences) by which samples were padded."""
    variants: tuple[VariantStatistics, ...] = ()
    """Variants that may serve in addition to the full model."""
    departures: tuple[Departures, ...] = ()
    """Numbers of the full model's answers, by exit, for each set of exits that was in use."""
    queue_s: Histogram
    """Seconds from submission to the start of its first batch, per answered request."""
    latency_s: Histogram
    """Seconds from submission to the response, per request."""

    def exit_shares(self) -> dict[str, float]:
        """Return the share of the answered samples by exit."""
        total = max(self.answered, 1)
        return {stage.label: stage.answered / total for stage in self.stages}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatistics(CountersSnapshot):
    """The counts of the served version of a model, and its configuration."""

    version: int = 1
    """Version: 1, plus 1 for each replacement of the model."""
    earlier: CountersSnapshot | None = None
    """Counts of all earlier versions, including those that still finish requests; ``None`` for the
    first version."""
    mode: str
    backend: str
    policy_version: int
    scheduling: str
    streams: int
    """Streams of the device, shared by all models."""
    streams_in_service: int
    workers: int = 0
    workers_in_service: int = 0
    """Number of worker processes that run the stages, and number of these that are available; 0 if
    this process runs the stages."""
    worker_restarts: int = 0
    """Number of workers that were started to replace a lost one."""
    restarts: int
    """Number of times that a stream of the device was restarted after failures."""
    parallel_below: int | None
    """Current value of PAME's τ_b; ``None`` where it does not limit."""
    uptime_s: float
    control: ControlStatus | None = None
    """Status of the controller; ``None`` in modes without observation (leave, off)."""
    extensions: Mapping[str, object] = field(default_factory=dict)
    """Statistics of extensions, by the names of their :class:`.BackgroundTask`."""
    learning: LearningStatus | None = None
    """Progress of learning exits; ``None`` without learning."""


Place: TypeAlias = tuple[int, int]
"""A variant, and one of the variant's exits or ``MODEL_END``."""


def _depth(place: Place) -> tuple[int, bool, int]:
    """Return a sort key, deepest place first: the model's end, its exits, then its variants."""
    variant, exit_index = place
    return variant, exit_index != MODEL_END, -exit_index


class HistogramCounter:
    """Counts observations; one writer at a time."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count ``count`` observations of ``value``."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._total += value * count

    def snapshot(self) -> Histogram:
        """Return the counts so far."""
        return Histogram(bounds=self._bounds, counts=tuple(self._counts), total=self._total)


class StageCounters:
    """Counts the events of one exit of a variant (or of the variant's end), over all plans."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.threshold = NEVER
        """Threshold of the active policy; ``NEVER`` where no stage ends here any more."""
        self.answered = 0
        self.forced = 0
        self.batch_size = HistogramCounter(BATCH_BOUNDS)
        self.run_s = HistogramCounter(HISTOGRAM_BOUNDS_S)

    def snapshot(self) -> StageStatistics:
        """Return the counts so far."""
        return StageStatistics(
            label=self.label,
            threshold=self.threshold,
            answered=self.answered,
            forced=self.forced,
            batch_size=self.batch_size.snapshot(),
            run_s=self.run_s.snapshot(),
        )


class DepartureCounters:
    """Counts of the exits where rows of the full model leave, for one set of exits in use."""

    def __init__(self, exits: Sequence[int]) -> None:
        self.exits = tuple(exits)
        self._places = {exit_: place for place, exit_ in enumerate((*self.exits, MODEL_END))}
        self._left = [0] * len(self._places)
        self._forced = [0] * len(self._places)

    def count(self, exit_index: int, rows: int, forced: int) -> None:
        """Count ``rows`` that leave at an exit or at the end; ``forced`` of them were forced."""
        place = self._places[exit_index]
        self._left[place] += rows - forced
        self._forced[place] += forced

    def snapshot(self) -> Departures:
        """Return the counts so far."""
        return Departures(exits=self.exits, left=tuple(self._left), forced=tuple(self._forced))


class Counters:
    """All counts of a model; written under the executor's lock.

    ``variants`` are the names of the variants below the full model.
    """

    def __init__(self, variants: Sequence[str] = ()) -> None:
        self._variants = tuple(variants)
        self.stages: dict[Place, StageCounters] = {}
        """Counters by variant and exit at the end of the stage; ``MODEL_END`` is the model's own
        answer. For a variant, ``MODEL_END`` is the answer of the full model, which runs for audits.
        """
        self._departures: dict[tuple[int, ...], DepartureCounters] = {}
        self.requests = 0
        self.samples = 0
        self.failed: Counter[str] = Counter()
        self.failed_requests = 0
        self.retried = 0
        self.resumed = 0
        self.unseen_lengths = 0
        self.padded = self.padded_positions = 0
        self.queue_s = HistogramCounter(HISTOGRAM_BOUNDS_S)
        self.latency_s = HistogramCounter(HISTOGRAM_BOUNDS_S)

    def activate(self, thresholds: Mapping[Place, float]) -> None:
        """Set the active thresholds by place; counts are kept."""
        for place in thresholds.keys() - self.stages.keys():
            self.stages[place] = StageCounters(self._label(*place))
        for place, counters in self.stages.items():
            counters.threshold = thresholds.get(place, NEVER)

    def reject(self, samples: int) -> None:
        """Count a request that was not accepted."""
        self.failed["rejected"] += samples
        self.failed_requests += 1

    def departures_of(self, exits: Sequence[int]) -> DepartureCounters:
        """Return the counters of the full model for these exits in use."""
        exits = tuple(exits)
        return self._departures.setdefault(exits, DepartureCounters(exits))

    def _label(self, variant: int, exit_index: int) -> str:
        label = exit_label(exit_index)
        return f"{self._variants[variant - 1]}: {label}" if variant else label

    def of_variant(self, variant: int) -> tuple[int, int]:
        """Return how many samples a variant answered, and how many of them were forced."""
        mine = [counters for (number, _), counters in self.stages.items() if number == variant]
        return sum(c.answered for c in mine), sum(c.forced for c in mine)

    def snapshot(
        self,
        *,
        queued: int,
        in_flight: int,
        auditing: int = 0,
        lost_feedback: int = 0,
        out_of_range: int = 0,
        discounted: int = 0,
        variants: Sequence[VariantStatistics] = (),
    ) -> CountersSnapshot:
        """Return the counts so far, together with counts of the scheduler and the recorder."""
        in_depth_order = sorted(self.stages, key=_depth, reverse=True)
        stages = tuple(self.stages[place].snapshot() for place in in_depth_order)
        return CountersSnapshot(
            stages=stages,
            requests=self.requests,
            samples=self.samples,
            answered=sum(stage.answered for stage in stages),
            failed=dict(self.failed),
            failed_requests=self.failed_requests,
            retried=self.retried,
            resumed=self.resumed,
            queued=queued,
            in_flight=in_flight,
            auditing=auditing,
            lost_feedback=lost_feedback,
            out_of_range=out_of_range,
            discounted=discounted,
            unseen_lengths=self.unseen_lengths,
            padded=self.padded,
            padded_positions=self.padded_positions,
            variants=tuple(variants),
            departures=tuple(counters.snapshot() for counters in self._departures.values()),
            queue_s=self.queue_s.snapshot(),
            latency_s=self.latency_s.snapshot(),
        )
