"""Compare a bundle with its source model, batch by batch, in one process.

Every batch is run by all systems before the next one, in rotating order, so that what else the
machine does hits them alike. The source model (``source.onnx``: the given model, simplified) runs
where the bundle runs, or the comparison would be one of devices: on the CPU as a user would run it
without Offramp, a plain session with as many threads; on a GPU as one stage of the same backend,
which with TensorRT is one engine. A sample's latency runs from the start of its batch to the moment
its own answer is there. Times are medians over rounds, each on its own part of the data; shares are
over all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Bundle
from offramp.calibration.dataset import Dataset
from offramp.calibration.paired import (
    PlainModel,
    Runner,
    StagedModel,
    System,
    measure_in_turn,
    never_exiting,
)
from offramp.engine.backends import Backend
from offramp.engine.backends.factory import CPU
from offramp.engine.pipeline import Pipeline
from offramp.engine.plan import Mode, Plan, exit_label, make_plan

SOURCE, OFFRAMP, NO_EXIT = "source", "offramp", "offramp-no-exit"
_RUNS_UNTIL_STEADY = 3
"""A GPU's backend captures a CUDA graph of a size at its second run, and launches it from then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A system at a batch size; times are measured milliseconds."""

    system: str
    batch_size: int
    mean_ms: float
    median_ms: float
    p95_ms: float
    p99_ms: float
    busy_ms_per_sample: float
    """From a batch's start until its last answer, per sample: the inverse of throughput."""
    agreement: float
    """Share of the samples answered like the source model."""
    accuracy: float | None
    exit_shares: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def compare(
    bundle: Bundle,
    backend: Backend,
    dataset: Dataset,
    *,
    threads: int,
    batch_sizes: Sequence[int],
    rounds: int,
    samples: int,
    others: Mapping[str, Runner] | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Row]:
    """Measure source model, bundle, and bundle with nothing exiting.

    Args:
        bundle: The bundle, in ``leave`` mode.
        backend: Executes the bundle; on a GPU the source model as well (:func:`baseline_of`).
        dataset: Real data, with labels if there are any.
        threads: Of the source model's session on the CPU; the backend's too.
        batch_sizes: To measure at; an incomplete last batch is left out.
        rounds: Parts of the data; figures are medians over them.
        samples: How many of the data to use, at most.
        others: Further systems that answer the same samples, by name, measured along: other ways
            to run the source model, or other models.
        progress: Called with the number of samples of each batch.

    Raises:
        BackendError: A stage, or the source model, cannot be run.
    """
    plan = make_plan(bundle)
    plans = {
        SOURCE: make_plan(bundle, mode=Mode.OFF),
        OFFRAMP: plan,
        NO_EXIT: never_exiting(plan),
    }
    pipelines = {
        name: Pipeline(backend, plan)
        for name, plan in plans.items()
        if name != SOURCE or backend.name != CPU
    }
    slot = backend.open_slot()
    try:
        runners: dict[str, Runner] = {}
        if SOURCE not in pipelines:
            source, output = bundle.manifest.source.file, bundle.manifest.answer.output
            runners[SOURCE] = PlainModel(bundle.read(source), output, threads)
        until_steady = 1 if backend.name == CPU else _RUNS_UNTIL_STEADY
        runners |= {
            name: StagedModel(pipeline, slot, warm_up_runs=until_steady)
            for name, pipeline in pipelines.items()
        }
        runners |= others or {}
        rows: list[Row] = []
        for size in batch_sizes:
            systems = [System(name, runner) for name, runner in runners.items()]
            used = _measure_size(
                systems, dataset, size, rounds=rounds, samples=samples, progress=progress
            )
            labels = None if dataset.labels is None else dataset.labels[:used]
            truth = np.concatenate(systems[0].prediction)
            for system in systems:
                plan = plans.get(system.name, plans[SOURCE])
                rows.append(_row(system, plan, size, truth, labels))
        return rows
    finally:
        slot.close()


def baseline_of(backend: Backend, threads: int) -> str:
    """Tell how :func:`compare` runs the source model beside a backend, for tables and files."""
    if backend.name == CPU:
        plural = "" if threads == 1 else "s"
        return f"plain ONNX Runtime session on the CPU, {threads} thread{plural}"
    what = "engine" if backend.name == "tensorrt" else "session"
    return f"the source model as one {what} of {backend.name}"


def batches_of(dataset: Dataset, size: int, rounds: int, samples: int) -> int:
    """Batches per round."""
    available = min(len(dataset), samples) // size // rounds
    if available < 1:
        raise ValueError(
            f"{min(len(dataset), samples)} samples are too few for {rounds} rounds of batches "
            f"of {size}; give more data, or smaller --batch-sizes or --rounds"
        )
    return available


def _measure_size(
    systems: Sequence[System],
    dataset: Dataset,
    size: int,
    *,
    rounds: int,
    samples: int,
    progress: Callable[[int], None],
) -> int:
    """Measure all systems at one batch size; gives the number of samples used."""
    per_round = batches_of(dataset, size, rounds, samples)
    for smaller in range(1, size + 1):
        for system in systems:
            system.runner.warm_up(dataset.take(slice(smaller)))
    start = 0
    for _ in range(rounds):
        for system in systems:
            system.begin_round()
        for batch in range(per_round):
            tensors = dataset.take(slice(start, start + size))
            measure_in_turn(systems, tensors, size, turn=batch)
            start += size
            progress(size)
    return start


def _row(
    system: System,
    plan: Plan,
    size: int,
    truth: NDArray[np.int64],
    labels: NDArray[np.int64] | None,
) -> Row:
    per_round = [np.concatenate(batches) for batches in system.latency_ms]
    prediction, stage = np.concatenate(system.prediction), np.concatenate(system.stage)

    def over_rounds(statistic: Callable[[NDArray[np.float64]], Any]) -> float:
        return float(np.median([statistic(latencies) for latencies in per_round]))

    return Row(
        system=system.name,
        batch_size=size,
        mean_ms=over_rounds(np.mean),
        median_ms=over_rounds(np.median),
        p95_ms=over_rounds(lambda x: np.quantile(x, 0.95)),
        p99_ms=over_rounds(lambda x: np.quantile(x, 0.99)),
        busy_ms_per_sample=float(np.median([np.mean(b) for b in system.busy_ms])) / size,
        agreement=float((prediction == truth).mean()),
        accuracy=None if labels is None else float((prediction == labels).mean()),
        exit_shares={
            exit_label(spec.answered_by): float((stage == spec.index).mean())
            for spec in plan.stages
        },
    )
