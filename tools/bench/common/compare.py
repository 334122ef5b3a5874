"""Comparison of a bundle with its source model, batch by batch, in one process.

All systems run each batch before the next one, in rotating order, so that other work on the machine
affects them equally. The source model (``source.onnx``: the given model, simplified) runs on the
bundle's device; otherwise devices would be compared. On the CPU it runs as a user would run it
without Offramp, in a plain session with the same number of threads; on a GPU it is one stage of the
same backend, which with TensorRT is one engine. A sample's latency runs from the start of its batch
until its own answer is available. Times are medians over rounds; each round uses its own part of
the data. Shares are over all data.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Bundle, Manifest, TensorSpec
from offramp.calibration.data.dataset import Dataset
from offramp.calibration.measure.paired import (
    BatchRunner,
    ComparedSystem,
    PlainModel,
    StagedModel,
    measure_in_turn,
    never_exiting,
    plain_session,
)
from offramp.engine.answers.agreement import agreement_of
from offramp.engine.backends import Backend
from offramp.engine.backends.factory import CPU, CPU_RUNTIMES
from offramp.engine.graphs.external_weights import graphs_of
from offramp.engine.stages.pipeline import Departure, Pipeline
from offramp.engine.stages.plan import Mode, Plan, exit_label, make_plan

SOURCE, OFFRAMP, NO_EXIT = "source", "offramp", "offramp-no-exit"
_RUNS_UNTIL_STEADY = 3
"""Runs of a batch size before it is timed: a GPU's backend captures a CUDA graph at the second run,
and launches it from then on."""


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
    """Time per sample from a batch's start until its last answer: the inverse of throughput."""
    agreement: float
    """Share of the samples whose answer is that of the source model."""
    accuracy: float | None
    exit_shares: dict[str, float]


def compare(
    bundle: Bundle,
    backend: Backend,
    dataset: Dataset,
    *,
    threads: int,
    batch_sizes: Sequence[int],
    rounds: int,
    samples: int,
    others: Mapping[str, BatchRunner] | None = None,
    methods: Mapping[str, Plan] | None = None,
    progress: Callable[[int], None] = lambda _: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Row]:
    """Measure source model, bundle, and the bundle without exits in use; BackendError.

    Args:
        bundle: In ``leave`` mode.
        backend: Executes the bundle; on a GPU the source model as well (:func:`baseline_of`).
        dataset: Real data, with labels if there are any.
        threads: Number of threads of the source model's session on the CPU, and of the backend.
        batch_sizes: Batch sizes to measure; an incomplete last batch is omitted.
        rounds: Number of parts of the data; figures are medians over these.
        samples: Largest number of samples to use.
        others: Further systems by name, which are measured on the same samples.
        methods: Further plans of the bundle's exits by name (``benchmarks.methods``), likewise.
        progress: Called with the number of samples of each batch.
        clock: Clock in seconds. ``time.thread_time``, for one thread on the CPU, does not count the
            time that other processes take.
    """
    bundle = backend.as_computed(bundle)
    plan = make_plan(bundle)
    plans = {SOURCE: make_plan(bundle, mode=Mode.OFF), OFFRAMP: plan, NO_EXIT: never_exiting(plan)}
    plans |= methods or {}
    pipelines = {
        name: Pipeline(backend, plan)
        for name, plan in plans.items()
        if name != SOURCE or backend.name != CPU
    }
    slot = backend.open_slot()
    try:
        runners: dict[str, BatchRunner] = {}
        if SOURCE not in pipelines:
            source, output = bundle.manifest.source.file, bundle.manifest.answer.output
            with graphs_of(bundle) as read:
                runners[SOURCE] = PlainModel(read(source), output, threads)
        until_steady = 1 if backend.name in CPU_RUNTIMES else _RUNS_UNTIL_STEADY
        runners |= {
            name: StagedModel(pipeline, slot, warm_up_runs=until_steady)
            for name, pipeline in pipelines.items()
        }
        runners |= others or {}
        rows: list[Row] = []
        agreement = agreement_of(bundle.manifest.answer)
        for size in batch_sizes:
            systems = [
                ComparedSystem(name, runner, agreement, clock) for name, runner in runners.items()
            ]
            used = measure_size(
                systems,
                dataset,
                size,
                before=backend.sizes(size),
                rounds=rounds,
                samples=samples,
                progress=progress,
            )
            labels = None if dataset.labels is None else dataset.labels[:used]
            for system in systems:
                plan = plans.get(system.name, plans[SOURCE])
                rows.append(_row(system, systems[0], plan, size, labels))
        return rows
    finally:
        slot.close()


def baseline_of(backend: Backend, threads: int) -> str:
    """Return how :func:`compare` runs the source model next to a backend, for tables and files."""
    if backend.name == CPU:
        plural = "" if threads == 1 else "s"
        return f"plain ONNX Runtime session on the CPU, {threads} thread{plural}"
    what = "engine" if backend.name == "tensorrt" else "session"
    return f"the source model as one {what} of {backend.name}"


def batches_of(dataset: Dataset, size: int, rounds: int, samples: int) -> int:
    """Return the number of batches per round."""
    available = min(len(dataset), samples) // size // rounds
    if available < 1:
        raise ValueError(
            f"{min(len(dataset), samples)} samples are too few for {rounds} rounds of batches "
            f"of {size}; give more data, or smaller --batch-sizes or --rounds"
        )
    return available


def samples_run(dataset: Dataset, batch_sizes: Sequence[int], *, rounds: int, samples: int) -> int:
    """Return the number of samples per system at all batch sizes; ValueError as for batches_of."""
    return sum(batches_of(dataset, n, rounds, samples) * rounds * n for n in batch_sizes)


def measure_size(
    systems: Sequence[ComparedSystem],
    dataset: Dataset,
    size: int,
    *,
    before: Sequence[int],
    rounds: int,
    samples: int,
    progress: Callable[[int], None],
) -> int:
    """Measure all systems at one batch size, batch by batch in turn.

    Batches of the sizes ``before`` run first as a warm-up, so that one-time costs are not measured.
    Return the number of samples that were used, from the first one on. Raise ValueError if they are
    too few.
    """
    per_round = batches_of(dataset, size, rounds, samples)
    for smaller in before:
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
    system: ComparedSystem,
    source: ComparedSystem,
    plan: Plan,
    size: int,
    labels: NDArray[np.int64] | None,
) -> Row:
    per_round = [np.concatenate(batches) for batches in system.latency_ms]
    prediction, stage = system.codes(source), np.concatenate(system.stage)

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
        agreement=float((prediction == source.codes(source)).mean()),
        accuracy=None if labels is None else float((prediction == labels).mean()),
        exit_shares={
            exit_label(spec.answered_by): float((stage == spec.index).mean())
            for spec in plan.stages
        },
    )


_NAME = re.compile(r"[\w.+-]+")
_ORT_TYPES = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(bool)": "bool",
    **{f"tensor({t})": t for t in ("float16", "int8", "int16", "int32", "int64")},
    **{f"tensor({t})": t for t in ("uint8", "uint16", "uint32", "uint64")},
}
"""numpy's names of ONNX Runtime's element types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdditionalModel:
    """A further model that is measured on the same samples."""

    name: str
    """Name of the system in tables and files."""
    path: Path


def parse_also(texts: Sequence[str]) -> tuple[AdditionalModel, ...]:
    """Read texts ``NAME=FILE.onnx``; ValueError if one is malformed, repeated or has no file."""
    models: list[AdditionalModel] = []
    taken = {SOURCE, OFFRAMP, NO_EXIT}
    for text in texts:
        name, equals, file = text.partition("=")
        if not equals or not file or not _NAME.fullmatch(name):
            raise ValueError(
                f"--also {text}: expected NAME=FILE.onnx, the name of letters, digits and ._+-"
            )
        if name in taken:
            raise ValueError(
                f"--also {text}: the name {name!r} is taken; taken are {', '.join(sorted(taken))}"
            )
        if not Path(file).is_file():
            raise ValueError(f"--also {text}: {file} is not a file")
        taken.add(name)
        models.append(AdditionalModel(name=name, path=Path(file)))
    return tuple(models)


class AdditionalRunner:
    """A model in a session with ONNX Runtime's defaults, like the source model.

    Raise ValueError if it has other inputs or answers than the bundle's source model, or cannot be
    loaded.
    """

    def __init__(self, also: AdditionalModel, bundle: Bundle, threads: int) -> None:
        where = f"--also {also.name}={also.path}"
        try:
            self._session = plain_session(str(also.path), threads)
        except Exception as error:  # ONNX Runtime's own classes derive from Exception only
            reason = str(error).splitlines()[0]
            raise ValueError(f"{where}: ONNX Runtime cannot load it: {reason}") from error
        _check_inputs(where, bundle.manifest, self._session.get_inputs())
        self._inputs = {value.name for value in self._session.get_inputs()}
        self._manifest = bundle.manifest
        self._outputs = [_answer(where, bundle, self._session.get_outputs())]
        self._classes = bundle.manifest.answer.classes
        self._where = where

    def run(self, tensors: Mapping[str, NDArray[Any]]) -> Iterator[Departure]:
        """Run the model, and yield all rows at once."""
        answer = self._answered(tensors)
        yield Departure(0, np.arange(len(answer)), answer, np.empty(0, np.float32))

    def warm_up(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Run a batch and check the output; ValueError if it fails or has another shape."""
        answer = self._answered(tensors)
        wanted = (len(next(iter(tensors.values()))), self._classes)
        if answer.shape != wanted:
            raise ValueError(
                f"{self._where}: its output {self._outputs[0]!r} has the shape "
                f"{list(answer.shape)}, expected {list(wanted)}"
            )

    def _answered(self, tensors: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        try:
            (answer,) = self._session.run(self._outputs, self._fed(tensors))
        except Exception as error:
            rows = len(next(iter(tensors.values())))
            reason = str(error).splitlines()[0]
            raise ValueError(f"{self._where}: fails on {rows} rows: {reason}") from error
        flat = self._manifest.answer.flat and answer.ndim == 1
        return np.asarray(answer[:, None] if flat else answer)

    def _fed(self, tensors: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        """Return the model's inputs; an input that the bundle's model does not read is zeros."""
        missing = [e.spec for e in self._manifest.unread if e.spec.name in self._inputs]
        specs = self._manifest.inputs
        sizes = {
            size: found
            for spec in specs
            if missing
            for size, found in zip(spec.shape, tensors[spec.name].shape, strict=True)
        }
        return {**tensors, **{spec.name: _zeros(spec, sizes) for spec in missing}}


def describe_also(models: Sequence[AdditionalModel]) -> dict[str, dict[str, str]]:
    """Return the measured files by name, for the JSON document."""
    return {
        also.name: {
            "file": also.path.name,
            "sha256": hashlib.sha256(also.path.read_bytes()).hexdigest(),
        }
        for also in models
    }


def _zeros(spec: TensorSpec, sizes: Mapping[int | str, int]) -> NDArray[Any]:
    """Make an input of zeros; symbolic dimensions without a size are 1."""
    shape = [size if isinstance(size, int) else sizes.get(size, 1) for size in spec.shape]
    return np.zeros(shape, spec.dtype)


def _check_inputs(where: str, manifest: Manifest, given: Sequence[Any]) -> None:
    """Compare names, types and fixed sizes of inputs; ``given`` omits inputs with a default.

    Inputs that the bundle's model declares but does not read are optional.
    """
    found = {value.name: value for value in given}
    specs = {spec.name: spec for spec in manifest.declared}
    same_names = found.keys() | manifest.unread_names == specs.keys()
    if same_names and all(_fits(value, specs[name]) for name, value in found.items()):
        return
    said = "; ".join(map(_describe, given)) or "nothing"
    wanted = "; ".join(spec.describe() for spec in specs.values())
    raise ValueError(f"{where}: it takes {said}; expected the bundle's inputs, {wanted}")


def _fits(found: Any, wanted: TensorSpec) -> bool:
    """Return True if a model accepts every tensor of a description, with any number of rows."""
    if _ORT_TYPES.get(found.type) != wanted.dtype or len(found.shape) != len(wanted.shape):
        return False
    return all(
        size == other or not isinstance(size, int)
        for size, other in zip(found.shape, wanted.shape, strict=True)
    )


def _describe(value: Any) -> str:
    sizes = ", ".join("?" if size is None else str(size) for size in value.shape)
    return f"{value.name}: {_ORT_TYPES.get(value.type, value.type)} [{sizes}]"


def _answer(where: str, bundle: Bundle, outputs: Sequence[Any]) -> str:
    """Return the name of the output to compare: that of the bundle's answer, or the only output."""
    answer = bundle.manifest.answer
    named = {output.name: output for output in outputs}
    if answer.output not in named and len(named) != 1:
        raise ValueError(
            f"{where}: none of its outputs {', '.join(named)} is called {answer.output!r}, as the "
            "bundle's answer is, and there are several"
        )
    output = named.get(answer.output, outputs[0])
    sizes = output.shape
    if answer.flat and len(sizes) == 1:
        sizes = [*sizes, 1]
    if len(sizes) != 2 or (isinstance(sizes[1], int) and sizes[1] != answer.classes):
        raise ValueError(
            f"{where}: its output {output.name!r} has the shape {list(sizes)}, expected "
            f"[batch, {answer.classes}]"
        )
    return str(output.name)
