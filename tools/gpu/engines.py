"""Builds engines of whole models and of their stages, checks them, and measures them."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from offramp.bundle import Bundle
from offramp.bundle.engines import Precision, ShapeProfile, ShapeRange
from offramp.compiler.engines.build_options import BuildSettings
from offramp.compiler.engines.halving import halve
from offramp.compiler.engines.tensorrt_builder import TensorRTBuilder
from offramp.compiler.engines.units import UnitGraphs, units_of
from offramp.engine.answers.differences import relative_difference
from offramp.engine.cuda.primary_context import primary_context
from offramp.engine.tensorrt.lookup import TOLERANCES
from offramp.engine.tensorrt.standalone import PreparedEngine, StandaloneEngine
from offramp.tools.gpu import resnets
from offramp.tools.gpu.device import time_ms

Tensors = Mapping[str, NDArray[Any]]

_RUNS_A_ROUND = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A graph whose engine is built, and the function that makes its inputs."""

    name: str
    model: str
    graph: bytes
    """Graph in the measured precision."""
    reference: bytes
    """The same graph in float32, as the reference."""
    feeds: Callable[[int], Tensors]
    """Function that returns the inputs of a batch of a given number of rows."""

    def profiles(self, batches: Sequence[int]) -> tuple[ShapeProfile, ...]:
        """Disjoint profiles, each tuned for and ending at one of ``batches``."""
        rows = {name: array.shape[1:] for name, array in self.feeds(1).items()}
        firsts = [1, *(batch + 1 for batch in batches[:-1])]
        return tuple(
            ShapeProfile(
                first_batch=first,
                last_batch=last,
                inputs={
                    name: ShapeRange(least=(first, *row), best=(last, *row), most=(last, *row))
                    for name, row in rows.items()
                },
            )
            for first, last in zip(firsts, batches, strict=True)
        )


def resnet_subjects(precision: Precision, seed: int) -> Iterator[Subject]:
    """Yield ResNet-50 with random weights, as a whole and as stages that read earlier outputs."""
    rng = np.random.default_rng(seed)
    images = rng.standard_normal((1, *resnets.INPUT_SHAPE)).astype(np.float32)
    pieces = (resnets.whole(seed), *resnets.stages(seed))
    rows: dict[str, NDArray[Any]] = {resnets.INPUT: images}
    for piece in pieces:
        feed = rows[piece.input]

        def feeds(batch: int, name: str = piece.input, row: NDArray[Any] = feed) -> Tensors:
            """Return rows that differ only in scale, so that their answers differ."""
            factors = np.linspace(1.0, 0.5, batch, dtype=np.float32)
            return {name: row * factors.reshape(-1, *[1] * (row.ndim - 1))}

        yield Subject(
            name=piece.name,
            model="resnet50",
            graph=halve(piece.graph) if precision == "fp16" else piece.graph,
            reference=piece.graph,
            feeds=feeds,
        )
        if piece.carry:
            rows[piece.carry] = _Reference(piece.graph).run({piece.input: feed})[piece.carry]


def bundle_subjects(
    path: Path, data: Path, precision: Precision, tensorrt: str
) -> Iterator[Subject]:
    """Yield the source model and the stages of a bundle, with its calibration data."""
    bundle = Bundle.open(path)
    exact = UnitGraphs(bundle, "fp32", tensorrt_version=tensorrt)
    graphs = UnitGraphs(bundle, precision, tensorrt_version=tensorrt)
    with np.load(data) as archive:
        samples = {spec.name: archive[spec.name][:256] for spec in bundle.manifest.inputs}
    segments = [_Reference(bundle.read(segment.file)) for segment in bundle.manifest.segments]
    for unit in units_of(bundle, ("source", "stages")):
        reference = exact.of(unit)
        reads = _Reference(reference).inputs

        def feeds(
            batch: int, first: int = unit.first_segment, reads: Sequence[str] = reads
        ) -> Tensors:
            taken = np.arange(batch)
            values = {name: array[taken % len(array)] for name, array in samples.items()}
            for segment in segments[:first]:
                values |= segment.run(values)
            return {name: values[name] for name in reads}

        yield Subject(
            name=unit.name,
            model=bundle.manifest.name,
            graph=graphs.of(unit),
            reference=reference,
            feeds=feeds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBench:
    """Builds engines and measures them."""

    precision: Precision
    batches: tuple[int, ...]
    """Batch sizes, rising; each is the end of a profile."""
    rounds: int
    plans: Path
    """Folder where engines are kept, so that a later run need not build them."""
    optimization_level: int = 3

    def build(self, subject: Subject, builder: TensorRTBuilder) -> dict[str, Any]:
        """Build an engine, unless it exists, and compare every profile with ONNX Runtime."""
        self.plans.mkdir(parents=True, exist_ok=True)
        plan_path = self.plan_path(subject)
        facts_path = plan_path.with_suffix(".json")
        if plan_path.is_file() and facts_path.is_file():
            facts: dict[str, Any] = json.loads(facts_path.read_text())
            return facts
        cache = self.plans / f"timing-{builder.version}.cache"
        profiles = subject.profiles(self.batches)
        began = time.perf_counter()
        built = builder.build(
            subject.graph,
            profiles,
            BuildSettings(precision=self.precision, optimization_level=self.optimization_level),
            timing_cache=cache.read_bytes() if cache.is_file() else b"",
            progress=lambda *_: None,
        )
        build_s = time.perf_counter() - began
        cache.write_bytes(built.timing_cache)
        facts = {
            "model": subject.model,
            "unit": subject.name,
            "precision": self.precision,
            "profiles": [[p.first_batch, p.last_batch] for p in profiles],
            "plan_bytes": len(built.plan),
            "measured_build_s": build_s,
            **self._checked(subject, profiles, built.plan, builder),
        }
        plan_path.write_bytes(built.plan)
        facts_path.write_text(json.dumps(facts))
        return facts

    def measure(self, subjects: Sequence[Subject]) -> dict[str, dict[str, Any]]:
        """Load and time the built engines; every round times all of them.

        Returns:
            Seconds of loading and milliseconds by batch size, for each model and unit.
        """
        found: dict[str, dict[str, Any]] = {}
        with ExitStack() as stack:
            stack.enter_context(primary_context(0).current())
            prepared: dict[tuple[str, int], PreparedEngine] = {}
            for subject in subjects:
                key = f"{subject.model}/{subject.name}"
                began = time.perf_counter()
                plan = self.plan_path(subject).read_bytes()
                read_s = time.perf_counter() - began
                engine = stack.enter_context(StandaloneEngine(plan))
                found[key] = {"measured_load_s": engine.load_s, "measured_read_s": read_s}
                for index, batch in enumerate(self.batches):
                    shapes = {n: a.shape for n, a in subject.feeds(batch).items()}
                    made = engine.prepare(index, {n: shapes[n] for n in engine.inputs})
                    prepared[key, batch] = stack.enter_context(made)
            times: dict[tuple[str, int], list[float]] = {key: [] for key in prepared}
            for _ in range(self.rounds):
                for key_batch, each in prepared.items():
                    times[key_batch].append(statistics.median(time_ms(each, _RUNS_A_ROUND)))
        for (key, batch), rounds in times.items():
            of_unit = found[key].setdefault("measured_ms_by_batch", {})
            of_unit[str(batch)] = statistics.median(rounds)
        return found

    def plan_path(self, subject: Subject) -> Path:
        """Return the path of a subject's engine."""
        sizes = "-".join(map(str, self.batches))
        return self.plans / f"{subject.model}-{subject.name}-{self.precision}-{sizes}.plan"

    def _checked(
        self,
        subject: Subject,
        profiles: Sequence[ShapeProfile],
        plan: bytes,
        builder: TensorRTBuilder,
    ) -> dict[str, Any]:
        reference = _Reference(subject.reference)
        errors = []
        for index, profile in enumerate(profiles):
            worst = 0.0
            for batch in sorted({profile.first_batch, profile.last_batch}):
                inputs = subject.feeds(batch)
                found = builder.run(plan, inputs, index)
                for name, wanted in reference.run(inputs).items():
                    worst = max(worst, relative_difference(found[name], wanted))
            errors.append(worst)
        allowed = TOLERANCES[self.precision]
        return {
            "measured_difference_by_profile": errors,
            "allowed_difference": allowed,
            "agrees": max(errors) <= allowed,
        }


class _Reference:
    """A graph on all cores of the CPU, as the reference; its speed does not matter."""

    def __init__(self, graph: bytes) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        self._session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self.inputs = tuple(i.name for i in self._session.get_inputs())
        self._outputs = tuple(o.name for o in self._session.get_outputs())

    def run(self, values: Tensors) -> dict[str, NDArray[Any]]:
        found = self._session.run(None, {name: values[name] for name in self.inputs})
        return dict(zip(self._outputs, found, strict=True))
