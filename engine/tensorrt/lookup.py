"""Lookup of the engines of a bundle that run a stage on this machine.

A stage whose segments and exit were built as one engine uses that engine. Until it is built, the
stage uses the engines of its segments one after the other, which costs time at each cut. Engines of
another GPU, TensorRT or model are never used.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from offramp.bundle import Bundle, BundleError
from offramp.bundle.engine_index import ROUNDED, checkable_key, model_digest, unit_name
from offramp.bundle.engines import (
    EngineEntry,
    EngineStore,
    EngineTarget,
    Precision,
    list_targets,
    parts_digest,
)
from offramp.engine.common.errors import BackendError
from offramp.engine.stages.backend_protocol import MissingEngine
from offramp.engine.stages.plan import StageSpec

_LOG = logging.getLogger(__name__)

PREFERRED: Final[tuple[Precision, ...]] = ("int8", "fp16", "tf32", "fp32")
"""Precisions in order of preference. A bundle has another precision than fp32 only if this
precision was requested; the build reported its effect on answers, or failed. So the lowest built
precision is served."""

TOLERANCES: Final[Mapping[Precision, float]] = {
    "fp32": 1e-3,  # other order of sums, through all layers of a model
    "tf32": 5e-3,  # 10-bit products, sums in fp32
    "fp16": 2e-2,  # each side rounds elsewhere: rounding less, or sums too, differed by 0.011
    "int8": 0.15,  # roundings to either side of a step add up: two kernels on a CPU differ by 0.044
}
"""Largest difference that is allowed, relative to the scale of each value. A wrong engine differs
far more: a missing layer or a swapped input changes most of an output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlace:
    """The GPU and TensorRT version that run engines, for messages and for the store of engines."""

    gpu: str
    compute_capability: tuple[int, int]
    tensorrt: str
    device: str
    """Device, for instance ``cuda:0``."""
    precision: Precision | None = None
    """Precision of engines that may be run; ``None`` is the lowest that a bundle has."""

    def target(self, precision: Precision) -> EngineTarget:
        """Return the target, which names the folder of the store."""
        return EngineTarget(
            gpu=self.gpu,
            compute_capability=self.compute_capability,
            tensorrt=self.tensorrt,
            precision=precision,
        )

    def describe(self) -> str:
        """Describe it: ``NVIDIA H200 with TensorRT 10.16.0.72``, and the precision if set."""
        asked = f", {self.precision}" if self.precision else ""
        return f"{self.gpu} with TensorRT {self.tensorrt}{asked}"

    def served(self, bundle: Path) -> tuple[Precision, ...]:
        """Return the precisions of a bundle's engines that may be run here, preferred first."""
        known = list_targets(bundle)
        wanted = PREFERRED if self.precision is None else (self.precision,)
        return tuple(p for p in wanted if self.target(p) in known)

    def remedy(self, bundle: Path) -> str:
        """Return the command that builds the missing engines."""
        path = shlex.quote(str(bundle))
        asked = f" --precision {self.precision}" if self.precision else ""
        return f"build them here: eecompile build {path} --device {self.device}{asked}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEngine:
    """An engine of the store that may be run."""

    store: EngineStore
    entry: EngineEntry

    def read(self) -> bytes:
        """Read the plan; BackendError if it is missing or altered."""
        try:
            return self.store.read(self.entry)
        except BundleError as error:
            raise BackendError(str(error)) from error


def open_store(bundle: Bundle, place: EnginePlace) -> EngineStore:
    """Open the store of the engines that run at a place; BackendError if there are none.

    A bundle that is already served keeps its first precision (:func:`as_computed`), whatever is
    built later, because its policy is certified for this precision.
    """
    built = place.served(bundle.path)
    if bundle.arithmetic:
        built = tuple(p for p in built if place.target(p).folder == bundle.arithmetic)
    if not built:
        known = list_targets(bundle.path)
        elsewhere = f" (it has some for {known[0].describe()})" if known else ""
        raise BackendError(
            f"{bundle.path} has no engines for {place.describe()}{elsewhere}; "
            f"{place.remedy(bundle.path)}"
        )
    if len(built) > 1:
        _LOG.info(
            "%s: there are engines in %s; those in %s run, unless --precision names others",
            bundle.path, ", ".join(built), built[0],
        )  # fmt: skip
    try:
        return EngineStore.open(bundle.path, place.target(built[0]))
    except BundleError as error:
        raise BackendError(str(error)) from error


def find_engines(spec: StageSpec, place: EnginePlace) -> tuple[StoredEngine, ...]:
    """Return the engines of a stage: one engine, or one for every segment.

    BackendError if the bundle has neither; the message has the command that builds the engines.
    """
    bundle = spec.bundle
    if bundle is None:
        raise BackendError(f"stage {spec.index} belongs to no bundle, so it has no engines")
    store = open_store(bundle, place)
    if bundle.number and store.index.target.precision in ROUNDED:
        raise BackendError(
            "variants are certified in float32, but the engines that run here are of "
            f"{store.index.target.precision}; build engines with --precision fp32, and serve with "
            "those"
        )
    finder = _Finder(bundle, store)
    whole = finder.find(*spec.unit)
    if whole is not None:
        return (whole,)
    exits = {exit_.after_segment: exit_.index for exit_ in bundle.manifest.exits}
    chain = [
        finder.find(index, index, exits.get(index))
        for index in range(spec.first_segment, spec.last_segment + 1)
    ]
    found = tuple(link for link in chain if link is not None)
    if len(found) < len(chain):
        raise BackendError(_lacking(spec, finder, place, bundle))
    if len(found) > 1:
        _LOG.info(
            "%s: %s is run as %d engines, one for each segment, which is slower; %s --units %s",
            bundle.path, _name_of(spec), len(found), place.remedy(bundle.path), _name_of(spec),
        )  # fmt: skip
    return found


def missing_engine(
    spec: StageSpec, place: EnginePlace, found: Sequence[StoredEngine]
) -> MissingEngine | None:
    """Return the missing engine of a stage that a chain of engines runs now; otherwise ``None``."""
    bundle = spec.bundle
    if bundle is None or len(found) < 2:
        return None
    target = found[0].store.index.target

    def is_built() -> bool:
        try:
            store = EngineStore.open(bundle.path, target)
        except BundleError:
            return False
        return _Finder(bundle, store).find(*spec.unit) is not None

    return MissingEngine(
        unit=_name_of(spec),
        bundle=bundle.path,
        device=place.device,
        precision=target.precision,
        is_built=is_built,
    )


def as_computed(bundle: Bundle, place: EnginePlace) -> Bundle:
    """Return a bundle with the policy and records of the engines that run at a place.

    BackendError if these are damaged. If there is no certificate for the engines' precision, the
    bundle is unchanged, and a warning is logged.
    """
    if not place.served(bundle.path):
        return bundle  # loading its stages reports what is missing
    store = open_store(bundle, place)
    evidence, precision = store.index.evidence, store.index.target.precision
    bundle = replace(bundle, arithmetic=store.index.target.folder)
    if evidence is None or evidence.model != model_digest(bundle.manifest):
        if precision in ROUNDED and bundle.policy.promise is not None:
            _LOG.warning(
                "%s: its promise was certified in fp32, and not for the engines in %s that are "
                "served: build them with the --data that it was compiled with",
                bundle.path, precision,
            )  # fmt: skip
        return bundle
    try:
        return bundle.under(evidence, store.read_evidence(evidence))
    except BundleError as error:
        raise BackendError(str(error)) from error


class _Finder:
    """Searches one store for engines of units, and records why some were not found."""

    def __init__(self, bundle: Bundle, store: EngineStore) -> None:
        self._bundle = bundle
        self._store = store
        self.refused: dict[str, str] = {}
        """Reasons why units were not found, by the unit's name."""

    def find(self, first: int, last: int, exit_: int | None) -> StoredEngine | None:
        bundle, engines = self._bundle, self._store.index
        name = unit_name(first, last, exit_, bundle.number)
        wanted = checkable_key(engines.target, parts_digest(bundle.manifest, first, last, exit_))
        entry = self._store.entry(name)
        if bundle.number and first >= bundle.manifest.source_begins:
            # The full model after a variant has the same file under any name.
            same = (e for e in engines.engines if wanted.items() <= e.key.items())
            entry = next(same, None)
        if entry is None:
            self.refused.setdefault(name, "is not built")
            return None
        unlike = [fact for fact, value in wanted.items() if entry.key.get(fact) != value]
        if unlike:
            what = "an older model" if unlike == ["parts"] else f"another {unlike[0]}"
            self.refused[name] = f"was built for {what}"
            return None
        return StoredEngine(store=self._store, entry=entry)


def _name_of(spec: StageSpec) -> str:
    return unit_name(*spec.unit, spec.bundle.number if spec.bundle else 0)


def _lacking(spec: StageSpec, finder: _Finder, place: EnginePlace, bundle: Bundle) -> str:
    name = _name_of(spec)
    whole = finder.refused.pop(name)
    parts = [f"{unit} {why}" for unit, why in finder.refused.items()]
    shown = "; ".join(parts[:3]) + (f"; and {len(parts) - 3} more" if len(parts) > 3 else "")
    chain = f", nor are there its segments one by one ({shown})" if parts else ""
    return (
        f"{bundle.path} lacks engines for {place.describe()}: {name} {whole}{chain}; "
        f"{place.remedy(bundle.path)}"
    )
