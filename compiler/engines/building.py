"""Which engines are fresh, and building, verifying and keeping those that are not."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import onnx

from offramp.bundle import Bundle, BundleError
from offramp.bundle.engine_index import checkable_key
from offramp.bundle.engines import (
    ENGINES,
    EngineEntry,
    EngineStore,
    EngineTarget,
    ShapeProfile,
    list_targets,
    parts_digest,
)
from offramp.calibration.data.dataset import Dataset
from offramp.compiler.common.errors import CompileError, EngineBuildError, EngineOptionsError
from offramp.compiler.common.progress import Advance, Progress
from offramp.compiler.engines.build_options import BuildSettings
from offramp.compiler.engines.builder_protocol import BuildProgress, EngineBuilder
from offramp.compiler.engines.engine_verification import Verifier
from offramp.compiler.engines.profiles import ModelShapes, SizedProfile, Sizes, unit_profiles
from offramp.compiler.engines.units import Unit, UnitGraphs
from offramp.compiler.graphs.graph import Dataflow

Status: TypeAlias = Literal["built", "fresh", "failed"]
"""Of a unit after a build."""
NOT_BUILT = "not there yet"
_PERCENT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEngine:
    """A unit, and whether its engine has to be built."""

    unit: Unit
    profiles: tuple[SizedProfile, ...]
    key: dict[str, str]
    stale: str
    """Why it has to be built; empty if the engine that is there is fresh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitResult:
    """What a build did about a unit."""

    unit: Unit
    status: Status
    entry: EngineEntry | None = None
    """The engine that is in the store now, if it is good."""
    error: float | None = None
    """Largest difference from ONNX Runtime, relative to the scale of each value,
    measured; only of what was built."""
    problem: str = ""
    """Why it failed."""


Planned: TypeAlias = PlannedEngine | UnitResult
"""What is planned for a unit; a failure where there is no graph to build from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Building:
    """The engines of a bundle as they were planned, and built."""

    bundle: Bundle
    target: EngineTarget
    planned: tuple[Planned, ...]
    results: tuple[UnitResult, ...] | None = None
    """In the order of ``planned``; ``None`` after a dry run."""

    @property
    def failed(self) -> tuple[UnitResult, ...]:
        """Units without a good engine."""
        return tuple(result for result in self.results or () if result.status == "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWork:
    """The engines that a bundle shall have: what they are built of, for which sizes, and how."""

    bundle: Bundle
    graphs: UnitGraphs
    settings: BuildSettings
    sizes: tuple[Sizes, ...]
    """Of the profiles of every engine."""
    shapes: ModelShapes
    samples: Dataset | None = None
    """To verify with; ``None`` verifies on random inputs."""
    keep_timings: bool = True
    """Whether what TensorRT timed is kept for later builds: not what it timed on a busy GPU."""
    variant_shapes: dict[int, ModelShapes] = field(default_factory=dict)
    """Those of variants; filled as they are asked for."""

    def plan(
        self, units: Sequence[Unit], store: EngineStore, *, rebuild: bool = False
    ) -> Iterator[Planned]:
        """Find out which engines are fresh, without building any; gives what is planned for each.

        EngineOptionsError if the model does not work at the sizes asked for.
        """
        for unit in units:
            try:
                yield self._plan_unit(unit, store, rebuild=rebuild)
            except EngineOptionsError:  # would be said of every unit
                raise
            except CompileError as error:
                yield _failure(unit, error)

    def build(
        self,
        planned: Sequence[Planned],
        builder: EngineBuilder,
        store: EngineStore,
        progress: Progress,
    ) -> tuple[UnitResult, ...]:
        """Build what is not fresh; each engine is kept as soon as it is verified.

        One that fails leaves the others alone; what is there for the same unit is dropped if it
        would count as fresh the next time, as it was to be replaced. An interruption loses the
        engine in work only. BundleError if the store cannot be written.
        """
        verifiers: dict[int, Verifier] = {}
        work = sum(isinstance(plan, PlannedEngine) and bool(plan.stale) for plan in planned)
        results: list[UnitResult] = []
        number = 0
        for plan in planned:
            if isinstance(plan, UnitResult):
                results.append(plan)
            elif not plan.stale:
                entry = store.entry(plan.unit.name)
                results.append(UnitResult(unit=plan.unit, status="fresh", entry=entry))
            else:
                number += 1
                variant = plan.unit.variant
                if variant not in verifiers:
                    verifiers[variant] = self._verifier(variant)
                verifier = verifiers[variant]
                title = f"Build {plan.unit.name} ({number} of {work})"
                with progress.step(title, _PERCENT) as advance:
                    results.append(self._build_unit(plan, builder, store, verifier, advance))
        return tuple(results)

    def _verifier(self, variant: int) -> Verifier:
        shown, precision = self.bundle.variant(variant), self.settings.precision
        return Verifier(shown, self._shapes_of(variant), precision, samples=self.samples)

    def _shapes_of(self, variant: int) -> ModelShapes:
        if not variant:
            return self.shapes
        if variant not in self.variant_shapes:
            self.variant_shapes[variant] = ModelShapes(self.bundle.variant(variant))
        return self.variant_shapes[variant]

    def _plan_unit(self, unit: Unit, store: EngineStore, *, rebuild: bool) -> PlannedEngine:
        graph = self.graphs.of(unit)
        inputs = Dataflow(onnx.load_from_string(graph).graph).inputs
        profiles = unit_profiles(inputs, self.sizes, self._shapes_of(unit.variant))
        shapes = [profile.shapes for profile in profiles]
        parts = parts_digest(self.bundle.manifest, *unit)
        key = engine_key(store.index.target, self.settings, graph, shapes, parts=parts)
        stale = _staleness(store, unit, key)
        if rebuild and stale != NOT_BUILT:
            stale = "asked for by --rebuild"
        return PlannedEngine(unit=unit, profiles=profiles, key=key, stale=stale)

    def _build_unit(
        self,
        plan: PlannedEngine,
        builder: EngineBuilder,
        store: EngineStore,
        verifier: Verifier,
        advance: Advance,
    ) -> UnitResult:
        timing_cache = b""
        with contextlib.suppress(BundleError):  # a damaged one only costs time
            timing_cache = store.read_timing_cache()
        shapes = tuple(profile.shapes for profile in plan.profiles)
        try:
            graph = self._graph_again(plan)
            began = time.perf_counter()
            built = builder.build(
                graph,
                shapes,
                self.settings,
                timing_cache=timing_cache,
                progress=outermost(advance),
            )
            took = time.perf_counter() - began
            if built.timing_cache and self.keep_timings:
                store.put_timing_cache(built.timing_cache)
            error = verifier.check(
                plan.unit,
                graph,
                plan.profiles,
                lambda inputs, index: builder.run(built.plan, inputs, index),
            )
        except (CompileError, RuntimeError) as problem:  # ONNX Runtime's are RuntimeErrors here
            before = store.entry(plan.unit.name)
            if before is not None and before.key == plan.key:
                store.drop(plan.unit.name)
            return _failure(plan.unit, problem)
        entry = EngineEntry.of(
            plan.unit.name, built.plan, key=plan.key, profiles=shapes, build_s=took
        )
        store.put(entry, built.plan)
        return UnitResult(unit=plan.unit, status="built", entry=entry, error=error)

    def _graph_again(self, plan: PlannedEngine) -> bytes:
        """Make the graph once more, rather than keep those of all units in memory."""
        graph = self.graphs.of(plan.unit)
        if hashlib.sha256(graph).hexdigest() != plan.key["graph"]:
            raise EngineBuildError(
                "its graph differs each time that it is made; please report this"
            )
        return graph


def explain(planned: Sequence[Planned], store: EngineStore) -> list[str]:
    """Say, in few lines, why engines that could have been expected to be there are built."""
    target = store.index.target
    lines = []
    if not store.index.engines:
        known = list_targets(store.bundle_path)
        others = [t.describe() for t in known if not t.runs_where(target)]
        if others and len(others) == len(known):
            lines.append(
                f"{store.bundle_path}/{ENGINES} has engines for {'; '.join(others)}; this is "
                f"{target.describe()}: building anew"
            )
    reasons: dict[str, list[str]] = {}
    for plan in planned:
        if isinstance(plan, PlannedEngine) and plan.stale and plan.stale != NOT_BUILT:
            reasons.setdefault(plan.stale, []).append(plan.unit.name)
    return lines + [f"rebuilding {_list(names)}: {reason}" for reason, names in reasons.items()]


def outermost(advance: Advance) -> BuildProgress:
    """Drive a bar of 100 by the builder's first phase, which holds the others."""
    phases: list[str] = []
    shown = 0

    def report(phase: str, step: int, steps: int) -> None:
        nonlocal shown
        if not phases:
            phases.append(phase)
        if phase == phases[0] and steps > 0:
            reached = min(_PERCENT, _PERCENT * step // steps)
            if reached > shown:
                advance(reached - shown)
                shown = reached

    return report


def _staleness(store: EngineStore, unit: Unit, key: dict[str, str]) -> str:
    entry = store.entry(unit.name)
    if entry is None:
        return NOT_BUILT
    changed = differences(entry.key, key)
    if changed:
        return changed
    try:
        store.read(entry)
    except BundleError:
        return "its file is missing or was altered"
    return ""


def _failure(unit: Unit, error: Exception) -> UnitResult:
    return UnitResult(unit=unit, status="failed", problem=f"{unit.name}: {error}")


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return shown if len(names) == 1 else f"{len(names)} engines ({shown})"


_WORDS = {
    "tensorrt": "TensorRT",
    "gpu": "GPU",
    "compute_capability": "compute capability",
    "precision": "precision",
    "batches": "batches",
    "optimization_level": "optimization level",
    "workspace": "workspace",
    "builder": "Offramp's builder revision",
}
"""Facts whose values say something to a reader; of others only that they changed."""


def engine_key(
    target: EngineTarget,
    settings: BuildSettings,
    graph: bytes,
    profiles: Sequence[ShapeProfile],
    *,
    parts: str,
) -> dict[str, str]:
    """Name everything that an engine depends on; equal keys mean that it need not be built.

    ``graph`` is in the target's precision; ``parts`` is the hash of the bundle's files that it is
    made of.
    """
    workspace = settings.workspace_bytes
    batches = dict.fromkeys((p.first_batch, p.last_batch) for p in profiles)
    return {
        **checkable_key(target, parts),
        "graph": hashlib.sha256(graph).hexdigest(),
        "batches": ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in batches),
        "profiles": "; ".join(map(_describe, profiles)),
        "optimization_level": str(settings.optimization_level),
        "workspace": "all free memory" if workspace is None else f"{workspace} bytes",
    }


def differences(stored: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """Say what an engine was built with and what is asked for now; empty if all is equal."""
    names = dict.fromkeys([*wanted, *stored])
    changed = [name for name in names if stored.get(name) != wanted.get(name)]
    # The first of each says what the second does, which follows from it.
    for first, second in (("batches", "profiles"), ("parts", "graph")):
        if first in changed and second in changed:
            changed.remove(second)
    return ", ".join(_difference(name, stored, wanted) for name in changed)


def _difference(name: str, stored: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    if name in ("graph", "parts"):
        return "its graph has changed"
    if name == "profiles":
        return "the shapes of its profiles have changed"
    before, now = stored.get(name, "nothing"), wanted.get(name, "nothing")
    return f"built for {_WORDS.get(name, name)} {before}, now it is {now}"


def _describe(profile: ShapeProfile) -> str:
    return " ".join(
        f"{name} {list(s.least)} {list(s.best)} {list(s.most)}"
        for name, s in sorted(profile.inputs.items())
    )
