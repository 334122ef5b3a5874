"""Measures the savings of a policy: its stages as they are served, next to the unmodified model.

Predictions rely on times of parts, and on the assumption that a sample that leaves saves its share
of the batch. Here nothing is assumed: the policy and the unmodified model run the same batches in
alternation.
"""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import NEVER, Answer, ExitPolicy, Measured, MeasuredSize, Ratio
from offramp.calibration.choose.exit_records import ExitRecords
from offramp.calibration.data.dataset import Dataset
from offramp.calibration.measure.paired import (
    BatchRunner,
    ComparedSystem,
    LoadedRunner,
    PlainModel,
    StagedModel,
    Tensors,
    measure_in_turn,
    never_exiting,
)
from offramp.certify import MODEL_END, first_exit
from offramp.engine.answers.agreement import Agreement, agreement_of
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.common.timing import Estimate, MachineLoad, Rounds, clock_of, disturbances
from offramp.engine.stages.loaded import Loaded, fits_together
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import Plan

MEASURED_BATCH_SIZES = (1, 16)
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The time to spend on measuring at a batch size.

    Measuring takes about ``seconds``. If ``least_rounds`` batches of a large model take longer, it
    takes as long as these batches: about 25 passes of the model at that batch size, loading and
    warm-up included.
    """

    seconds: float = 1.8
    rounds: int = 12
    least_rounds: int = 6
    """Smallest number of rounds from which a median has a 95 % interval."""

    def batches(self, seconds_a_batch: float, available: float) -> tuple[int, int]:
        """Return the number of rounds to run, and of batches in each.

        ``seconds_a_batch`` is the time of everything that is done with a batch; ``available`` is
        the number of batches in the data.
        """
        affordable = int(min(self.seconds / max(seconds_a_batch, 1e-9), available))
        rounds = min(max(affordable, self.least_rounds), self.rounds)
        return rounds, max(1, affordable // rounds)


class Compared(NamedTuple):
    """The three systems that are measured on the same batches."""

    source: BatchRunner
    bundle: BatchRunner
    nothing_exits: BatchRunner
    """The bundle, with thresholds that no sample reaches."""


def measure_policy(
    source: bytes,
    plan: Plan,
    dataset: Dataset,
    stage: NDArray[np.int64],
    *,
    answer: Answer,
    threads: int,
    progress: Callable[[int], None] = lambda _: None,
) -> Measured:
    """Measure a policy on the CPU and the unmodified model in a plain session of ONNX Runtime.

    ``plan`` has the policy's stages, run as the engine runs them; ``dataset`` is the certify split,
    and ``stage`` [samples] is the stage where each sample leaves (:func:`stages_of_samples`).
    ``progress`` is called with 1 after each of :data:`MEASURED_BATCH_SIZES`.
    """
    backend = OnnxRuntimeBackend(threads=threads)
    slot = backend.open_slot()
    try:
        makers = (
            lambda: PlainModel(source, answer.output, threads),
            lambda: StagedModel(Pipeline(backend, plan), slot),
            lambda: StagedModel(Pipeline(backend, never_exiting(plan)), slot),
        )
        loaded = Loaded[BatchRunner](makers, together=fits_together(source))
        return measure_runners(
            Compared(*(LoadedRunner(loaded, place) for place in range(len(loaded)))),
            dataset,
            stage,
            agreement=agreement_of(answer),
            batch_sizes=MEASURED_BATCH_SIZES,
            threads=threads,
            progress=progress,
            one_by_one=not loaded.together,
        )
    finally:
        slot.close()


def stages_of_samples(policy: ExitPolicy, records: ExitRecords) -> NDArray[np.int64]:
    """Return the stage of the policy that answers each sample of some records: int64[samples]."""
    active = [a for a in policy.active if a.threshold < NEVER]
    thresholds = np.array([a.threshold for a in active])
    first = first_exit(records.confidence[[a.exit for a in active]], thresholds)
    return np.where(first == MODEL_END, len(active), first)


def measure_runners(
    compared: Compared,
    dataset: Dataset,
    stage: NDArray[np.int64],
    *,
    agreement: Agreement,
    batch_sizes: Sequence[int],
    threads: int,
    budget: Budget | None = None,
    clock: Clock | None = None,
    wall_clock: Clock = time.perf_counter,
    cpu_clock: Clock = time.process_time,
    progress: Callable[[int], None] = lambda _: None,
    one_by_one: bool = False,
) -> Measured:
    """Measure any systems that answer batches; see :func:`measure_policy`.

    ``clock`` times the systems; ``None`` is the clock for ``threads``. ``one_by_one`` is for
    systems that cannot all be loaded together: each answers all batches of a round before the next
    system does.
    """
    clock = clock or clock_of(threads)
    sizes, rounds, agrees = [], [], []
    used: set[int] = set()
    started_s, started_cpu_s = wall_clock(), cpu_clock()
    for size in batch_sizes:
        seconds = _warm_up(compared, dataset.take(np.arange(size) % len(dataset)), wall_clock)
        how_many = (budget or Budget()).batches(seconds, len(stage) / size)
        batches = deal(stage, *how_many, size)
        # Rows that remain after an exit form batches of many sizes, and each size is slower the
        # first time. Running the batches once covers the sizes that occur, in less time than all
        # possible sizes.
        for rows in batches.reshape(-1, size):
            collections.deque(compared.bundle.run(dataset.take(rows)), maxlen=0)
        systems = [
            ComparedSystem(name, r, agreement, clock) for name, r in compared._asdict().items()
        ]
        (_run_one_by_one if one_by_one else _run)(systems, dataset, batches)
        used |= set(batches.ravel().tolist())
        sizes.append(_measured_size(systems, size))
        rounds.append(_busy(systems))
        source, bundle = systems[:2]
        agrees.append(bundle.codes(source) == source.codes(source))
        progress(1)
    load = MachineLoad(wall_s=wall_clock() - started_s, own_cpu_s=cpu_clock() - started_cpu_s)
    return Measured(
        device="cpu",
        threads=threads,
        samples=len(used),
        agreement=float(np.concatenate(agrees).mean()),
        sizes=tuple(sizes),
        disturbed=disturbances("policy", load, rounds),
    )


def deal(
    stage: NDArray[np.int64], rounds: int, batches: int, size: int, *, seed: int = 0
) -> NDArray[np.int64]:
    """Choose samples for all rounds, such that each round has the mix of the whole split.

    Samples are sorted by the stage where they leave and taken at even distances, so that random
    differences between samples do not appear as differences in time; within a round, batches are
    random. Samples repeat if there are too few. Returns rows of the split,
    int64[rounds, batches, size].
    """
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(len(stage))
    ordered = shuffled[np.argsort(stage[shuffled], kind="stable")]
    wanted = rounds * batches * size
    picked = ordered[((np.arange(wanted) + 0.5) * len(stage) / wanted).astype(np.int64)]
    each = [rng.permutation(picked[round_::rounds]) for round_ in range(rounds)]
    return np.stack(each).reshape(rounds, batches, size)


def _warm_up(compared: Compared, first: Tensors, clock: Clock) -> float:
    """Warm up at a batch size; return about how many seconds all work on a batch takes."""
    seconds = 0.0
    for runner in (compared.source, compared.nothing_exits):
        runner.warm_up(first)
        started = clock()
        collections.deque(runner.run(first), maxlen=0)
        seconds += clock() - started
    return 1.5 * seconds  # the bundle takes less time than the model, but runs twice


def _run(systems: Sequence[ComparedSystem], dataset: Dataset, batches: NDArray[np.int64]) -> None:
    """Run all batches, int64[rounds, batches, size], through all systems."""
    turns = itertools.count()
    for of_round in batches:
        for system in systems:
            system.begin_round()
        for rows in of_round:
            measure_in_turn(systems, dataset.take(rows), len(rows), next(turns))


def _run_one_by_one(
    systems: Sequence[ComparedSystem], dataset: Dataset, batches: NDArray[np.int64]
) -> None:
    """Run all batches through all systems, one system after another in each round."""
    for of_round in batches:
        for system in systems:
            system.begin_round()
            system.runner.warm_up(dataset.take(of_round[0]))
            for rows in of_round:
                system.measure(dataset.take(rows), len(rows))


def _measured_size(systems: Sequence[ComparedSystem], size: int) -> MeasuredSize:
    busy, nothing_exits = _busy(systems).ratios()
    return MeasuredSize(
        batch_size=size,
        rounds=busy.rounds,
        samples=systems[0].samples,
        mean=_ratio(_latency(systems, np.mean).ratios()[0]),
        median=_ratio(_latency(systems, np.median).ratios()[0]),
        busy=_ratio(busy),
        nothing_exits=_ratio(nothing_exits),
    )


def _busy(systems: Sequence[ComparedSystem]) -> Rounds:
    """Return each system's mean time of a batch, by round."""
    times_ms = [[float(np.mean(batches)) for batches in s.busy_ms] for s in systems]
    return Rounds(times_ms=np.array(times_ms).T)


def _latency(
    systems: Sequence[ComparedSystem], statistic: Callable[[NDArray[np.float64]], Any]
) -> Rounds:
    """Return a statistic of each system's latencies, by round."""
    times_ms = [[float(statistic(np.concatenate(b))) for b in s.latency_ms] for s in systems]
    return Rounds(times_ms=np.array(times_ms).T)


def _ratio(found: Estimate) -> Ratio:
    return Ratio(value=found.value, half_width=found.half_width)
