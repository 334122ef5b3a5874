"""The measurement of the frontier: all systems answer the same batches in the same rounds.

The source model and the plain int8 copy run as a user would run them without Offramp, as plain
sessions; policies run as the engine runs them. Predictions, from the profiles and certify splits of
the bundles, are shown next to measurements and never mixed with them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from benchmarks.frontier.policies import (
    ALONE,
    BOTH,
    INT8,
    SOURCE,
    BundlePair,
    FrontierPolicy,
)
from numpy.typing import NDArray

from offramp.bundle import Bundle, ExitPolicy, Ratio
from offramp.calibration.data.dataset import Dataset
from offramp.calibration.measure.paired import BatchRunner, ComparedSystem, PlainModel, StagedModel
from offramp.engine.answers.agreement import agreement_of
from offramp.engine.backends import Backend, Slot
from offramp.engine.common.timing import MachineLoad, Rounds, disturbances
from offramp.engine.control.costs import CostModel
from offramp.engine.graphs.assembly import assemble
from offramp.engine.models.profile_check import predicted_savings
from offramp.engine.stages.backend_protocol import Stage
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import Plan, StageSpec, exit_label, make_plan
from offramp.tools.bench.common.compare import measure_size

_LEAST_ROUNDS = 6
"""Smallest number of rounds that gives a 95 % interval of the median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """Measurements of a system at a batch size, on the test data."""

    batch_size: int
    samples: int
    busy_ms_per_sample: float
    """From a batch's start until its last answer, per sample; the median over rounds."""
    busy: Ratio
    """Busy time relative to the source model's."""
    mean: Ratio
    """Mean latency of the samples, from the start of their batch to their own answer, relative to
    the source model's."""
    disagreement: float
    """Share of the samples whose answer differs from the source model's."""
    accuracy: float | None
    """Share of answers that equal the labels; ``None`` without labels."""
    exit_shares: dict[str, float]
    """Share of the answers that come from each exit."""
    round_busy_ms: tuple[float, ...]
    """Mean time of a batch, by round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierSystem:
    """A system at a bound, if it has one, with promise, predictions and measurements."""

    system: str
    max_disagreement: float | None
    """The bound; ``None`` for a system that is not certified."""
    policy: ExitPolicy | None
    reason: str | None
    """Reason why no policy could be certified; nothing was measured then."""
    predicted_ratio: dict[int, float]
    """Predicted time relative to the source model's, by profiled batch size; from the certify
    split."""
    measured: tuple[FrontierPoint, ...]
    """Measured points by batch size."""

    def at(self, batch_size: int) -> FrontierPoint | None:
        """Return the measured point at a batch size."""
        return next((p for p in self.measured if p.batch_size == batch_size), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CombiningGain:
    """Gain of int8 with exits over the better of the two alone, at a bound and a batch size."""

    max_disagreement: float
    batch_size: int
    better: str
    """The system that was the faster one of the two alone; the source model where neither is
    certified to be faster."""
    measured_ratio: Ratio
    """Busy time of both over that of the better one: below 1, combining gains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """All systems, and the gain of combining."""

    systems: tuple[FrontierSystem, ...]
    """Source model, int8 copy, then by bound."""
    gains: tuple[CombiningGain, ...]
    """Gains at bounds where the combination has a certified policy."""
    disturbed: tuple[str, ...]
    """Descriptions of disturbances of the machine during the measurement."""

    @property
    def bounds(self) -> tuple[float, ...]:
        """Bounds of all systems, in the order of the systems."""
        known = (s.max_disagreement for s in self.systems if s.max_disagreement is not None)
        return tuple(dict.fromkeys(known))

    def find(self, system: str, bound: float | None = None) -> FrontierSystem:
        """Return the system with a name, at a bound."""
        return next(s for s in self.systems if (s.system, s.max_disagreement) == (system, bound))

    def describe_width(self) -> str:
        """Return the meaning of ± in measured ratios."""
        rounds = len(self.systems[0].measured[0].round_busy_ms)
        if rounds < _LEAST_ROUNDS:
            return (
                f"median over {rounds} rounds ± half of their range: {_LEAST_ROUNDS} rounds are "
                "the least for an interval"
            )
        return f"median over {rounds} rounds ± half of its 95 % interval"


def measure_frontier(
    pair: BundlePair,
    policies: Sequence[FrontierPolicy],
    backend: Backend,
    dataset: Dataset,
    *,
    threads: int,
    batch_sizes: Sequence[int],
    rounds: int,
    samples: int,
    progress: Callable[[int], None] = lambda _: None,
) -> Frontier:
    """Measure source model, int8 copy and all certified policies, on the CPU.

    Args:
        pair: The bundles.
        policies: From :func:`choose_policies`; where there is none, nothing is measured.
        backend: Executes the policies, on the CPU.
        dataset: Real data, with labels if there are any; the first samples are used.
        threads: Number of threads of the plain sessions and of the backend.
        batch_sizes: Batch sizes to measure.
        rounds: Parts of the data; ratios are medians over them.
        samples: Largest number of samples to use.
        progress: Called with the number of samples of each batch.

    Raises:
        BackendError: A stage cannot be loaded or run.
        ValueError: The data is too little for the rounds.
    """
    empty = FrontierSystem(
        system=SOURCE, max_disagreement=None, policy=None, reason=None, predicted_ratio={},
        measured=(),
    )  # fmt: skip
    systems = [
        empty,
        replace(empty, system=INT8, predicted_ratio=_predicted_copy(pair.cascade, batch_sizes)),
        *(
            FrontierSystem(
                system=p.system,
                max_disagreement=p.max_disagreement,
                policy=p.policy,
                reason=p.reason,
                predicted_ratio=_predicted(pair.bundle_of(p.system), p.policy, batch_sizes),
                measured=(),
            )
            for p in policies
        ),
    ]
    slot = backend.open_slot()
    try:
        measured = _Measuring(pair, systems, backend, slot, threads)
        points, disturbed = measured.run(dataset, batch_sizes, rounds, samples, progress)
    finally:
        slot.close()
    done = tuple(replace(s, measured=tuple(points.get(i, ()))) for i, s in enumerate(systems))
    bounds = dict.fromkeys(p.max_disagreement for p in policies)
    gains = (gain_of(done, bound, size) for bound in bounds for size in batch_sizes)
    return Frontier(systems=done, gains=tuple(gain for gain in gains if gain), disturbed=disturbed)


def gain_of(
    systems: Sequence[FrontierSystem], bound: float, batch_size: int
) -> CombiningGain | None:
    """Compare int8 with exits to the better of both alone; ``None`` without a policy of the pair.

    One of the two alone, if it has no certified policy, counts as the source model, which would be
    served.
    """
    source = systems[0].at(batch_size)
    found = {s.system: s.at(batch_size) for s in systems if s.max_disagreement == bound}
    both = found.get(BOTH)
    if both is None or source is None:
        return None
    alone = [(n, p) if (p := found.get(n)) else (SOURCE, source) for n in ALONE]
    better, point = min(alone, key=lambda pair: pair[1].busy.value)
    times_ms = np.array([point.round_busy_ms, both.round_busy_ms]).T
    return CombiningGain(
        max_disagreement=bound,
        batch_size=batch_size,
        better=better,
        measured_ratio=_ratio(Rounds(times_ms=times_ms)),
    )


class _Measuring:
    """All systems that can be measured, ready to run."""

    def __init__(
        self,
        pair: BundlePair,
        systems: Sequence[FrontierSystem],
        backend: Backend,
        slot: Slot,
        threads: int,
    ) -> None:
        self._plans: dict[int, Plan] = {}
        """Plans by index of the system, for systems with a policy."""
        self._runners: dict[int, BatchRunner] = {}
        self._agreement = agreement_of(pair.exits.manifest.answer)
        stages = {bundle.path: SharedStages(backend) for bundle in pair.bundles}
        for place, system in enumerate(systems):
            bundle = pair.bundle_of(system.system)
            if system.policy is not None:
                self._plans[place] = plan = make_plan(bundle, system.policy)
                pipeline = Pipeline(backend, plan, prepare=stages[bundle.path].prepare)
                self._runners[place] = StagedModel(pipeline, slot)
            elif system.system == SOURCE:
                manifest = bundle.manifest
                graph = bundle.read(manifest.source.file)
                self._runners[place] = PlainModel(graph, manifest.answer.output, threads)
            elif system.system == INT8:
                self._runners[place] = PlainModel(*whole_copy(bundle), threads)

    def run(
        self,
        dataset: Dataset,
        batch_sizes: Sequence[int],
        rounds: int,
        samples: int,
        progress: Callable[[int], None],
    ) -> tuple[Mapping[int, list[FrontierPoint]], tuple[str, ...]]:
        """Measure at all batch sizes; also return the disturbances of the machine."""
        points: dict[int, list[FrontierPoint]] = {place: [] for place in self._runners}
        of_source = []
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        for size in batch_sizes:
            compared = {
                p: ComparedSystem(str(p), r, self._agreement) for p, r in self._runners.items()
            }
            used = measure_size(
                list(compared.values()),
                dataset,
                size,
                before=range(1, size + 1),
                rounds=rounds,
                samples=samples,
                progress=progress,
            )
            labels = None if dataset.labels is None else dataset.labels[:used]
            first = next(iter(compared.values()))
            for place, system in compared.items():
                plan = self._plans.get(place)
                points[place].append(point_of(system, first, plan, size, labels))
            of_source.append(Rounds(times_ms=np.array([_by_round(first.busy_ms)]).T))
        load = MachineLoad(
            wall_s=time.perf_counter() - started_s,
            own_cpu_s=time.process_time() - started_cpu_s,
        )
        return points, disturbances("frontier", load, of_source)


class SharedStages:
    """The stages of a bundle, each prepared once: policies differ in thresholds, or in few exits.

    Without this class a large model would be loaded once for every policy.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._known: dict[tuple[object, object], Stage] = {}

    def prepare(self, spec: StageSpec) -> Stage:
        """Prepare a stage, or return an earlier one with the same graph."""
        key = spec.unit, spec.carried
        if key not in self._known:
            self._known[key] = self._backend.prepare(spec)
        return self._known[key]


def whole_copy(cascade: Bundle) -> tuple[bytes, str]:
    """Return the int8 copy as one graph, joined from its segments, and the name of its answer."""
    manifest = cascade.manifest
    front = manifest.segments[: manifest.source_begins]
    answer = front[-1].output
    return assemble([cascade.read(segment.file) for segment in front], [answer]), answer


def point_of(
    system: ComparedSystem,
    source: ComparedSystem,
    plan: Plan | None,
    size: int,
    labels: NDArray[np.int64] | None,
) -> FrontierPoint:
    """Return the figures of a system, with the source model's of the same rounds."""
    prediction, truth = system.codes(source), source.codes(source)
    stage = np.concatenate(system.stage)
    ends = {} if plan is None else {exit_label(s.answered_by): s.index for s in plan.stages}
    busy_ms, busy_ms_source = _by_round(system.busy_ms), _by_round(source.busy_ms)
    means = [[float(np.mean(np.concatenate(r))) for r in s.latency_ms] for s in (source, system)]
    return FrontierPoint(
        batch_size=size,
        samples=len(prediction),
        busy_ms_per_sample=float(np.median(busy_ms)) / size,
        busy=_ratio(Rounds(times_ms=np.array([busy_ms_source, busy_ms]).T)),
        mean=_ratio(Rounds(times_ms=np.array(means).T)),
        disagreement=float((prediction != truth).mean()),
        accuracy=None if labels is None else float((prediction == labels).mean()),
        exit_shares={label: float((stage == index).mean()) for label, index in ends.items()},
        round_busy_ms=tuple(busy_ms),
    )


def _by_round(busy_ms: Sequence[Sequence[float]]) -> list[float]:
    return [float(np.mean(batches)) for batches in busy_ms]


def _ratio(rounds: Rounds) -> Ratio:
    """Return the time of the second system relative to the first."""
    (found,) = rounds.ratios()
    return Ratio(value=found.value, half_width=found.half_width)


def _predicted(
    bundle: Bundle, policy: ExitPolicy | None, batch_sizes: Sequence[int]
) -> dict[int, float]:
    if policy is None:
        return {}
    served, profile = replace(bundle, policy=policy), bundle.profile()
    return {
        size: 1 - predicted_savings(served, profile, size)
        for size in batch_sizes
        if size in profile.batch_sizes
    }


def _predicted_copy(cascade: Bundle, batch_sizes: Sequence[int]) -> dict[int, float]:
    profile = cascade.profile()
    known = (size for size in batch_sizes if size in profile.batch_sizes)
    costs = {size: CostModel.of(cascade.manifest, profile, size) for size in known}
    return {size: cost.front_ms / cost.source_ms for size, cost in costs.items()}
