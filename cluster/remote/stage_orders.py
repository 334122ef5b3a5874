"""Names of stages: from a name, a worker makes the stage that the router means; no code is sent.

A stage of a bundle is named by the bundle's path and hash, and the parts of its graph. A worker on
the same host opens the bundle there and compares the hash; one on another host uses its own bundle
with that hash. Both ends make the stage with the same functions. A stage without a bundle, from the
compiler or tests, is described, and its graph is sent.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import quote, unquote_to_bytes

from offramp.bundle import CLASSIFICATION, AnswerForm, AnswerTask, Bundle
from offramp.bundle.files import dump
from offramp.bundle.schema.answers import PROBABILITY, Criterion
from offramp.bundle.schema.errors import BundleError, BundleSchemaError
from offramp.bundle.schema.serde import from_plain, to_plain
from offramp.certify import MODEL_END
from offramp.cluster.remote.worker_messages import FrameError
from offramp.engine.common.errors import BackendError
from offramp.engine.graphs.external_weights import WeightForm
from offramp.engine.stages.plan import StageSpec, make_stage, source_stage

_SHOWN: Final = 12
"""Number of characters of a hash that messages show."""
_NOT_COMPARED: Final = frozenset({"load", "bundle"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StageName:
    """Name of a stage of a bundle."""

    path: str
    """Absolute path of the bundle on the router's host, with its bytes quoted as in URLs."""
    manifest_sha256: str
    """Hash of the manifest, for both ends to compare; the manifest has the hashes of all files."""
    variant: int
    unmodified: bool
    index: int
    first_segment: int
    last_segment: int
    exit: int | None
    carried: tuple[str, ...]
    threshold: float
    weight_form: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDescription:
    """Description of a stage without a bundle, whose graph is sent with it."""

    index: int
    first_segment: int
    last_segment: int
    exit: int | None
    inputs: tuple[str, ...]
    carried: tuple[str, ...]
    given: tuple[str, ...]
    answer: str | None
    confidence: str | None
    form: AnswerForm
    task: AnswerTask = CLASSIFICATION
    criterion: Criterion = PROBABILITY
    threshold: float
    weight_form: str


def describe_stage(spec: StageSpec) -> tuple[str, bytes]:
    """Return a stage's document for a worker, and the stage's graph if the graph must be sent.

    BackendError if the stage belongs to a bundle, but is not fully determined by the bundle.
    """
    if spec.bundle is None:
        return describe_graph(spec)
    named = StageName(
        path=quote(os.fsencode(spec.bundle.folder)),
        manifest_sha256=manifest_hash(spec.bundle),
        variant=spec.bundle.number,
        unmodified=spec.unmodified,
        index=spec.index,
        first_segment=spec.first_segment,
        last_segment=spec.last_segment,
        exit=spec.exit,
        carried=spec.carried,
        threshold=spec.threshold,
        weight_form=spec.weight_form.value,
    )
    again = _plan(named, spec.bundle)
    unlike = [
        f.name
        for f in fields(StageSpec)
        if f.name not in _NOT_COMPARED and getattr(again, f.name) != getattr(spec, f.name)
    ]
    if unlike:
        raise BackendError(
            f"stage {spec.index} differs in {', '.join(unlike)} from its bundle's plan, "
            "so no worker can make it; serve without workers"
        )
    return json.dumps({"named": to_plain(named)}), b""


def describe_graph(spec: StageSpec) -> tuple[str, bytes]:
    """Return a stage's document, as for a stage without a bundle, and its serialised graph."""
    names = {f.name for f in fields(StageDescription)} - {"weight_form"}
    said = {name: getattr(spec, name) for name in names}
    described = StageDescription(**said, weight_form=spec.weight_form.value)
    return json.dumps({"described": to_plain(described)}), spec.load()


class BundlesByPath:
    """Bundles on the router's own host; each path that the router names is opened once."""

    def __init__(
        self, open_bundle: Callable[[Path], Bundle] = lambda path: Bundle.open(path).held()
    ) -> None:
        self._open = open_bundle
        self._opened: dict[Path, Bundle] = {}

    def __call__(self, named: StageName) -> Bundle:
        """Return the bundle's variant with a stage; BackendError if the bundle was replaced."""
        path = Path(os.fsdecode(unquote_to_bytes(named.path)))
        if path not in self._opened:
            self._opened[path] = self._open(path)
        bundle = self._opened[path]
        if not 0 <= named.variant <= len(bundle.manifest.variants):
            raise FrameError(f"there is no variant {named.variant} in {path}")
        bundle = bundle.variant(named.variant)
        if manifest_hash(bundle) != named.manifest_sha256:
            raise BackendError(
                f"{path} is not the bundle that the server has opened; start the server again"
            )
        return bundle


class BundlesByHash:
    """The bundles that a worker was started with; a router refers to them by hash."""

    def __init__(self, bundles: Sequence[Bundle]) -> None:
        self._names = [f"{b.path.name} {manifest_hash(b)[:_SHOWN]}" for b in bundles]
        self._variants = {
            (manifest_hash(variant), variant.number): variant
            for bundle in bundles
            for variant in bundle.variants()
        }

    @property
    def described(self) -> str:
        """List of the bundles, each with the beginning of its hash."""
        return ", ".join(self._names)

    def __call__(self, named: StageName) -> Bundle:
        """Return the variant of a bundle that a stage belongs to; BackendError if it is missing."""
        found = self._variants.get((named.manifest_sha256, named.variant))
        if found is None:
            name = Path(os.fsdecode(unquote_to_bytes(named.path))).name
            which = f"{name!r:.60} {named.manifest_sha256[:_SHOWN]!a}"
            which += f" (variant {named.variant})" if named.variant else ""
            raise BackendError(
                f"this worker has no bundle {which}; copy it there and name it when the worker is "
                f"started; it has: {self.described}"
            )
        return found


FindBundle: TypeAlias = Callable[[StageName], Bundle]
"""Function that returns the variant of a bundle that a stage belongs to; BackendError or FrameError
if there is none."""


def make_described(
    document: str, graph: bytes, find: FindBundle, *, any_graph: bool = True
) -> StageSpec:
    """Make the stage that a document names; without ``any_graph`` it must be a stage of a bundle.

    FrameError if the document is malformed, BackendError if the bundle is missing.
    """
    try:
        plain = json.loads(document)
        if not isinstance(plain, dict) or len(plain) != 1:
            raise FrameError("a stage is not an object with the one key 'named' or 'described'")
        if "named" in plain:
            named = from_plain(StageName, plain["named"], "stage")
        elif not any_graph:
            raise BackendError(
                "this worker only runs stages of the bundles that it was started with, not graphs "
                "that a server sends"
            )
        elif "described" in plain:
            described = from_plain(StageDescription, plain["described"], "stage")
            said = {f.name: getattr(described, f.name) for f in fields(described)}
            form = WeightForm(said.pop("weight_form"))
            return StageSpec(**said, weight_form=form, load=lambda: graph)
        else:
            raise FrameError(
                f"a stage has the key {[*plain]!s:.100}, expected 'named' or 'described'"
            )
        WeightForm(named.weight_form)
    except (ValueError, RecursionError, BundleSchemaError) as error:
        raise FrameError(f"a stage is malformed: {error!s:.200}") from error
    try:
        return _plan(named, find(named))
    except BundleError as error:
        raise BackendError(str(error)) from error


def manifest_hash(bundle: Bundle) -> str:
    """Return the hash of a bundle's manifest as it was read, for the selected variant."""
    return hashlib.sha256(dump(bundle.manifest)).hexdigest()


def _plan(named: StageName, bundle: Bundle) -> StageSpec:
    """Return the specification of stage ``named``; FrameError if ``bundle`` has no such stage."""
    manifest, form = bundle.manifest, WeightForm(named.weight_form)
    if named.unmodified:
        return replace(source_stage(bundle), weight_form=form)
    exits = {None, MODEL_END, *range(len(manifest.exits))}
    in_order = 0 <= named.first_segment <= named.last_segment < len(manifest.segments)
    if named.exit not in exits or not in_order:
        raise FrameError(
            f"there is no stage of segments {named.first_segment} to {named.last_segment} with "
            f"exit {named.exit} in {bundle.path}"
        )
    spec = make_stage(
        manifest,
        bundle.read,
        index=named.index,
        first=named.first_segment,
        last=named.last_segment,
        exit_index=named.exit,
        carried=named.carried,
        threshold=named.threshold,
    )
    return replace(spec, weight_form=form, bundle=bundle)
