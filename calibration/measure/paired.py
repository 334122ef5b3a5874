"""Systems that answer the same batches in alternation, so that other load affects all of them.

A sample's latency is the time from the start of its batch until its answer is ready.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from offramp.bundle import NEVER
from offramp.engine.answers.agreement import Agreement, Codes
from offramp.engine.backends import Slot
from offramp.engine.backends.custom_ops import load_session, session_options
from offramp.engine.stages.loaded import Loaded
from offramp.engine.stages.pipeline import Departure, Pipeline
from offramp.engine.stages.plan import Plan

Tensors = Mapping[str, NDArray[Any]]


class BatchRunner(Protocol):
    """A system that answers batches."""

    def run(self, tensors: Tensors) -> Iterator[Departure]:
        """Yield the answered rows, as they leave."""

    def warm_up(self, tensors: Tensors) -> None:
        """Allocate memory for a batch size."""


class StagedModel:
    """The stages of a plan, run as the server runs them."""

    def __init__(self, pipeline: Pipeline, slot: Slot, *, warm_up_runs: int = 1) -> None:
        """Run in a slot; the backend's times are steady after ``warm_up_runs`` runs."""
        self._pipeline, self._slot, self._warm_up_runs = pipeline, slot, warm_up_runs

    def run(self, tensors: Tensors) -> Iterator[Departure]:
        """Yield the answered rows, as they leave."""
        return self._pipeline.run(self._slot, tensors)

    def warm_up(self, tensors: Tensors) -> None:
        """Run all stages, with no sample leaving."""
        for _ in range(self._warm_up_runs):
            self._pipeline.warm_up(self._slot, tensors)


def plain_session(model: bytes | str, threads: int) -> ort.InferenceSession:
    """Load a model, or a model file, with ONNX Runtime's defaults on the CPU.

    Systems that are compared with the source model are loaded by this function, too.
    """
    options = session_options()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return load_session(model, options)


class PlainModel:
    """The source model in a session with ONNX Runtime's defaults."""

    def __init__(self, model: bytes, output: str, threads: int) -> None:
        """Load the model; ``output`` is the name of its answer."""
        self._session = plain_session(model, threads)
        self._outputs = [output]

    def run(self, tensors: Tensors) -> Iterator[Departure]:
        """Yield all rows together."""
        (answer,) = self._session.run(self._outputs, tensors)
        yield Departure(0, np.arange(len(answer)), answer, np.empty(0, np.float32))

    def warm_up(self, tensors: Tensors) -> None:
        """Run the model once, without timing it."""
        self._session.run(self._outputs, tensors)


class LoadedRunner:
    """A system that answers batches, loaded when it is first used."""

    def __init__(self, loaded: Loaded[BatchRunner], index: int) -> None:
        """Take system ``index`` of several systems; it is loaded when it is first used."""
        self._loaded, self._index = loaded, index

    def run(self, tensors: Tensors) -> Iterator[Departure]:
        """Yield the answered rows, as they leave."""
        return self._loaded[self._index].run(tensors)

    def warm_up(self, tensors: Tensors) -> None:
        """Allocate memory for a batch size."""
        self._loaded[self._index].warm_up(tensors)


@dataclass(slots=True)
class ComparedSystem:
    """One of the systems that are compared, and its measurements at a batch size."""

    name: str
    runner: BatchRunner
    agreement: Agreement
    clock: Callable[[], float] = time.perf_counter
    """Clock that returns seconds."""
    latency_ms: list[list[NDArray[np.float64]]] = field(default_factory=list)
    """[rounds][batches]: latency of each sample."""
    busy_ms: list[list[float]] = field(default_factory=list)
    """[rounds][batches]: time from a batch's start until its last answer."""
    said: list[NDArray[Any]] = field(default_factory=list)
    """[batches]: answers, reduced to what is compared with other systems."""
    masks: list[NDArray[Any]] = field(default_factory=list)
    """[batches]: masks of the inputs, if the answers depend on one; else empty."""
    stage: list[NDArray[np.int64]] = field(default_factory=list)
    """[batches]: stage where each row left."""

    def begin_round(self) -> None:
        """Open the lists of a new round."""
        self.latency_ms.append([])
        self.busy_ms.append([])

    def measure(self, tensors: Tensors, size: int) -> None:
        """Answer a batch of ``size`` rows, and keep its times and answers."""
        latency = np.empty(size)
        departures, started = [], self.clock()
        for departure in self.runner.run(tensors):
            latency[departure.rows] = self.clock() - started
            departures.append(departure)
        self.busy_ms[-1].append((self.clock() - started) * 1e3)
        self.latency_ms[-1].append(latency * 1e3)
        self.stage.append(np.empty(size, np.int64))
        parts = [self.agreement.reduce(departure.answer) for departure in departures]
        self.said.append(np.empty((size, *parts[0].shape[1:]), parts[0].dtype))
        for departure, part in zip(departures, parts, strict=True):
            self.said[-1][departure.rows] = part
            self.stage[-1][departure.rows] = departure.stage
        if (mask := self.agreement.mask_in(tensors)) is not None:
            self.masks.append(mask)

    @property
    def samples(self) -> int:
        """Number of answers, repeated samples included."""
        return sum(map(len, self.said))

    def codes(self, source: ComparedSystem) -> Codes:
        """Return codes of answers, [samples]; equal to those of ``source`` where both agree."""
        ends = np.concatenate(source.said)
        if source is self:
            return self.agreement.codes(ends)
        mask = np.concatenate(self.masks) if self.masks else None
        return self.agreement.codes_against(np.concatenate(self.said), ends, mask)


def measure_in_turn(
    systems: Sequence[ComparedSystem], tensors: Tensors, size: int, turn: int
) -> None:
    """Run a batch through all systems; ``turn`` determines which of them is first."""
    for offset in range(len(systems)):
        systems[(turn + offset) % len(systems)].measure(tensors, size)


def never_exiting(plan: Plan) -> Plan:
    """Return the same plan with thresholds that no sample reaches."""
    stages = tuple(s if s.final else replace(s, threshold=NEVER) for s in plan.stages)
    return replace(plan, stages=stages)
