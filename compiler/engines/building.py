"""Planning which engines have to be built, and building, verifying and storing these."""

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
"""Status of a unit after a build."""
NOT_BUILT = "not there yet"
_PERCENT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEngine:
    """A unit, and whether its engine has to be built."""

    unit: Unit
    profiles: tuple[SizedProfile, ...]
    key: dict[str, str]
    stale: str
    """Reason to build the engine; empty if the existing engine is fresh (up to date)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitResult:
    """Result of a build for a unit."""

    unit: Unit
    status: Status
    entry: EngineEntry | None = None
    """Engine that is in the store after the build; ``None`` if the unit failed."""
    error: float | None = None
    """Largest difference between engine and ONNX Runtime, relative to the scale of each value;
    ``None`` if the engine was not built."""
    problem: str = ""
    """Reason why the unit failed; empty if it did not."""


Planned: TypeAlias = PlannedEngine | UnitResult
"""Plan of a unit. If no graph can be made for the unit, the plan is a failed result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Building:
    """Engines of a bundle: the plan, and the results of building them."""

    bundle: Bundle
    target: EngineTarget
    planned: tuple[Planned, ...]
    results: tuple[UnitResult, ...] | None = None
    """Results in the order of ``planned``; ``None`` after a dry run."""

    @property
    def failed(self) -> tuple[UnitResult, ...]:
        """Units whose engine could not be built."""
        return tuple(result for result in self.results or () if result.status == "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWork:
    """Engines that a bundle should have: their sources, sizes and settings."""

    bundle: Bundle
    graphs: UnitGraphs
    settings: BuildSettings
    sizes: tuple[Sizes, ...]
    """Sizes of the profiles that every engine is built with."""
    shapes: ModelShapes
    samples: Dataset | None = None
    """Samples to verify engines with; with ``None`` inputs are random."""
    keep_timings: bool = True
    """True to keep TensorRT's timings for later builds; timings from a busy GPU should not be
    kept."""
    variant_shapes: dict[int, ModelShapes] = field(default_factory=dict)
    """Shapes of variants, which are added when they are needed."""

    def plan(
        self, units: Sequence[Unit], store: EngineStore, *, rebuild: bool = False
    ) -> Iterator[Planned]:
        """Yield the plan of each unit, with the reason to build it, if any; nothing is built yet.

        EngineOptionsError if the model does not work at the sizes asked for.
        """
        for unit in units:
            try:
                yield self._plan_unit(unit, store, rebuild=rebuild)
            except EngineOptionsError:  # the same for every unit
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
        """Build engines that are not fresh; each engine is stored as soon as it is verified.

        A failing engine does not affect the others. The stored engine that it was to replace is
        dropped, if that would count as fresh next time. An interruption loses only the engine being
        built. BundleError if the store cannot be written.
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
        with contextlib.suppress(BundleError):  # a damaged cache only costs time
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
        except (
            CompileError,
            RuntimeError,
        ) as problem:  # ONNX Runtime's errors are RuntimeErrors here
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
        """Make the graph of a unit again; graphs are not kept in memory between plan and build."""
        graph = self.graphs.of(plan.unit)
        if hashlib.sha256(graph).hexdigest() != plan.key["graph"]:
            raise EngineBuildError("its graph differs each time it is made; please report this")
        return graph


def explain(planned: Sequence[Planned], store: EngineStore) -> list[str]:
    """Return lines on why existing engines are built again, or why none are found for this GPU."""
    target = store.index.target
    lines = []
    if not store.index.engines:
        known = list_targets(store.bundle_path)
        others = [t.describe() for t in known if not t.runs_where(target)]
        if others and len(others) == len(known):
            lines.append(
                f"{store.bundle_path}/{ENGINES} has engines for {'; '.join(others)}; this is "
                f"{target.describe()}: building all engines"
            )
    reasons: dict[str, list[str]] = {}
    for plan in planned:
        if isinstance(plan, PlannedEngine) and plan.stale and plan.stale != NOT_BUILT:
            reasons.setdefault(plan.stale, []).append(plan.unit.name)
    return lines + [f"rebuilding {_list(names)}: {reason}" for reason, names in reasons.items()]


def outermost(advance: Advance) -> BuildProgress:
    """Return a callback that reports the builder's first phase, the outermost one, in percent."""
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
"""Properties of engines whose old and new values are shown to users. For others only the fact of a
change is shown."""


def engine_key(
    target: EngineTarget,
    settings: BuildSettings,
    graph: bytes,
    profiles: Sequence[ShapeProfile],
    *,
    parts: str,
) -> dict[str, str]:
    """Return all properties that an engine depends on; with an equal key it is not built again.

    ``graph`` is in the target's precision; ``parts`` is the hash of the bundle's files that the
    graph is made of.
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
    """Describe how the stored key differs from the wanted key; empty if both are equal."""
    names = dict.fromkeys([*wanted, *stored])
    changed = [name for name in names if stored.get(name) != wanted.get(name)]
    # A change of the first of each pair implies a change of the second.
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
