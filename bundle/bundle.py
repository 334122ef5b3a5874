"""Bundles on disk: written completely or not at all, and never read unchecked."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from numpy.typing import NDArray

from offramp.bundle.engines import ENGINES, PrecisionEvidence
from offramp.bundle.files import (
    REMEDY,
    CheckedFolder,
    interrupted_backup,
    names_under,
    parse_json,
    parse_versioned,
)
from offramp.bundle.graph_weights import WEIGHTS
from offramp.bundle.notebook import BundleReport, bundle_html, describe_policy
from offramp.bundle.onnx_wire import without_inputs
from offramp.bundle.records import no_records, parse_records
from offramp.bundle.schema.errors import (
    BundleIntegrityError,
    BundleNotFoundError,
    BundleSchemaError,
)
from offramp.bundle.schema.inputs import INPUT_RANGES, InputRanges
from offramp.bundle.schema.manifest import SCHEMA_VERSION, FileEntry, Manifest
from offramp.bundle.schema.measured import MEASURED, Measured, Profile
from offramp.bundle.schema.parts import folder_of
from offramp.bundle.schema.policy import ExitPolicy
from offramp.bundle.schema.serde import from_plain
from offramp.bundle.stored_graphs import (
    FileIdentity,
    HeldFolder,
    check_graph,
    fill,
    identity_of_file,
)

MANIFEST = "manifest.json"
MANIFEST_HASH = "manifest.sha256"
"""File with the hash of the manifest, which in turn lists the hashes of all other files."""
POLICY = "policy.json"
RECORDS = "records.npz"
REPORT = "report.html"

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Bundle:
    """An opened bundle whose files were all checked."""

    path: Path
    manifest: Manifest
    policy: ExitPolicy
    arithmetic: str = ""
    """Folder of the engines that serve the bundle, if their precision differs from the bundle's."""
    evidence: PrecisionEvidence | None = None
    """Policy and records for the precision of these engines; ``None`` if the bundle's own are
    used."""
    number: int = 0
    """Number of the variant that this object shows; 0 is the full model."""
    _records: bytes | None = None
    """Content of the records' file that belongs to :attr:`evidence`."""
    _weights: FileIdentity | None = field(default=None, compare=False, repr=False)
    """Identity of ``weights.bin`` when it was opened and hashed."""
    _held: HeldFolder | None = field(default=None, compare=False, repr=False)
    """Held files, which stay readable if another bundle replaces this one; ``None`` if files are
    not held."""

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Bundle:
        """Open a bundle and check every file in it; raises the errors of :mod:`.schema.errors`."""
        root = Path(path)
        manifest = _read_manifest(root)
        weights = identity_of_file(root / WEIGHTS)  # before the hash: what is written later differs
        _check_files(root, manifest)
        policy = _parse_policy(CheckedFolder(root).read_regular(POLICY), POLICY, manifest)
        bundle = cls(path=root, manifest=manifest, policy=policy, _weights=weights)
        bundle.variants()  # this reads their policies
        return bundle

    def __repr__(self) -> str:
        return f"<Bundle {self.path}: {describe_policy(self)}>"

    def held(self) -> Bundle:
        """Hold the files, so that they stay readable when another bundle replaces this one.

        Raises BundleIntegrityError if another bundle has already replaced it.
        """
        return replace(self, _held=HeldFolder(self.path, self.manifest.files))

    @property
    def folder(self) -> Path:
        """Absolute path of the folder; links are resolved if the files are held."""
        return self._held.resolved if self._held else self.path.absolute()

    def variant(self, number: int) -> Bundle:
        """Return the variant ``number`` as a bundle of the same files.

        It has the form of a cascade (:class:`.Variant`). Segments, exits, policy, profile and
        records are the variant's; variant 0 is the bundle itself.
        """
        if number == 0:
            return self
        manifest = self.manifest.of_variant(number)
        name = f"{folder_of(number)}{POLICY}"
        policy = _parse_policy(self.read(name), name, manifest)
        return replace(
            self, manifest=manifest, policy=policy, evidence=None, number=number, _records=None
        )

    def variants(self) -> tuple[Bundle, ...]:
        """Return all variants as bundles; the first is the bundle itself."""
        return tuple(self.variant(number) for number in range(len(self.manifest.variants) + 1))

    def read(self, name: str) -> bytes:
        """Read a file of the bundle; a graph includes all of its weights.

        In the source model, inputs that no operator reads are removed.

        BundleIntegrityError if file or weights changed since the opening; BundleSchemaError if a
        graph names weights in another file than the bundle's ``weights.bin``.
        """
        entry = self._entry(name)
        content = self._files.read(entry)
        if name not in self.manifest.graphs:
            return content
        return self._as_run(name, fill(self._files, entry, content, self._weight_bytes))

    def graph(self, name: str) -> bytes:
        """Read a graph as it is stored: it may name weights in :meth:`weight_folder`.

        The named weights were checked to exist there. Raises the errors of :meth:`read`.
        """
        content = self._files.read(self._entry(name))
        check_graph(self._files, name, content, self._weight_bytes)
        return self._as_run(name, content)

    def _as_run(self, name: str, graph: bytes) -> bytes:
        """Remove from the source model's graph the inputs that nothing reads."""
        if not self.manifest.unread or name != self.manifest.source.file:
            return graph
        return without_inputs(graph, self.manifest.unread_names)

    def weight_folder(self) -> Path | None:
        """Return the folder of ``weights.bin``, for runtimes; ``None`` if there is no such file.

        The file may be mapped from there: this call checks that it is the file that was hashed when
        the bundle was opened, or hashes it again. If the file changed, this raises
        BundleIntegrityError, or returns ``None`` if the files are held.
        """
        if not self._weight_bytes:
            return None
        if self._weights is None or identity_of_file(self.folder / WEIGHTS) != self._weights:
            try:
                CheckedFolder(self.folder).check(self._entry(WEIGHTS))
            except BundleIntegrityError:
                if self._held is None:
                    raise
                return None
        return self.folder.resolve()

    def stored(self, name: str) -> Iterator[bytes]:
        """Yield a file as stored, in pieces; raises the errors of :meth:`read` at the end."""
        return CheckedFolder(self.path).pieces(self._entry(name))

    @property
    def _files(self) -> CheckedFolder:
        return self._held or CheckedFolder(self.path)

    def _entry(self, name: str) -> FileEntry:
        found = next((entry for entry in self.manifest.files if entry.path == name), None)
        if found is None:
            raise BundleIntegrityError(f"{self.path}: {name} is not part of this bundle")
        return found

    @property
    def _weight_bytes(self) -> int:
        return next((e.size_bytes for e in self.manifest.files if e.path == WEIGHTS), 0)

    def profile(self, device: str = "cpu") -> Profile:
        """Return the latencies measured on a device."""
        name = f"{folder_of(self.number)}profiles/{device}.json"
        return self.parse_profile(parse_json(self.read(name), name), name)

    def parse_profile(self, plain: Any, name: str) -> Profile:
        """Return the profile of this bundle from ``plain``, parsed JSON.

        BundleSchemaError if it is not a profile, or has rows for other segments and exits. Messages
        begin with ``name``.
        """
        profile = from_plain(Profile, plain, name)
        parts = (len(profile.segments_ms), len(profile.exits_ms))
        expected = (len(self.manifest.segments), len(self.manifest.exits))
        if parts != expected:
            raise BundleSchemaError(
                f"{name}: has rows for {parts[0]} segments and {parts[1]} exits, the {MANIFEST} "
                f"has {expected[0]} and {expected[1]}; {REMEDY}"
            )
        return profile

    def measured(self) -> Measured | None:
        """Read the measured savings of the policy; ``None`` where they were not measured."""
        name = folder_of(self.number) + MEASURED
        if name not in {entry.path for entry in self.manifest.files}:
            return None
        return _parse(Measured, self.read(name), name)

    def input_ranges(self) -> InputRanges | None:
        """Read the ranges of the inputs in the calibration data; ``None`` if there are none."""
        if INPUT_RANGES not in {entry.path for entry in self.manifest.files}:
            return None
        ranges = _parse(InputRanges, self.read(INPUT_RANGES), INPUT_RANGES)
        unknown = {seen.name for seen in ranges.inputs} - {i.name for i in self.manifest.inputs}
        if unknown:
            raise BundleSchemaError(
                f"{INPUT_RANGES}: names {sorted(unknown)}, which are not inputs of the model; "
                f"{REMEDY}"
            )
        for length in ranges.lengths:
            having = [i for i in self.manifest.inputs if length.size in i.shape[1:]]
            masks = [i.name for i in having if i.shape[1:] == (length.size,)]
            if not having or length.mask not in ("", *masks):
                raise BundleSchemaError(
                    f"{INPUT_RANGES}: has lengths of size {length.size!r:.50} and mask "
                    f"{length.mask!r:.50}, but the model has no such inputs; {REMEDY}"
                )
        return ranges

    def report(self) -> BundleReport:
        """Read the compiler's report: notebooks show it, and a browser can open its ``path``."""
        return BundleReport(self.path / REPORT, self.read(REPORT).decode())

    def _repr_html_(self) -> str:
        return bundle_html(self)

    def records(self) -> dict[str, NDArray[Any]]:
        """Read the answers of all exits on the calibration data.

        ``confidence`` float32 [exits, samples], ``prediction`` int32 [exits, samples],
        ``final_prediction`` int32 and ``final_confidence`` float32 [samples], ``split`` uint8
        [samples] (1 is tune, 2 is certify; both occur), and ``label`` int64 [samples] where the
        data had labels. There are 0 samples where the bundle was made without data.
        """
        if self.manifest.is_plain:
            return no_records()
        if self._records is None:
            name = folder_of(self.number) + RECORDS
            content = self.read(name)
        else:
            name, content = "records of engines", self._records
        try:
            return parse_records(content, self.manifest)
        except ValueError as error:
            raise BundleSchemaError(f"{self.path / name}: {error}; {REMEDY}") from error

    def under(self, evidence: PrecisionEvidence, records: bytes) -> Bundle:
        """Return the bundle with the policy and records of the precision that it is served in.

        BundleSchemaError if the policy names exits that the bundle does not have.
        """
        if any(active.exit >= len(self.manifest.exits) for active in evidence.policy.active):
            raise BundleSchemaError(
                f"{self.path}: the policy of engines names an exit beyond the bundle's "
                f"{len(self.manifest.exits)}; build them again"
            )
        return replace(self, policy=evidence.policy, evidence=evidence, _records=records)


def bundle_name(path: Path) -> str:
    """Return the name of a bundle at a path: its folder's name without ``.ee``."""
    return path.name.removesuffix(".ee")


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read a bundle's manifest without checking its other files.

    Raises the same errors as opening the bundle.
    """
    return _read_manifest(Path(path))


def _read_manifest(root: Path) -> Manifest:
    if not root.exists() and (kept := interrupted_backup(root)) is not None:
        raise BundleNotFoundError(
            f"{root} is missing: a process was killed while it replaced the bundle; the old one is "
            f"complete, put it back: mv {kept} {root}"
        )
    if root.is_file():
        raise BundleNotFoundError(
            f"{root} is a file, expected a bundle, which is a folder; make one of an ONNX model "
            f"with: eecompile MODEL.onnx --data DATA, or, as it is: eecompile wrap MODEL.onnx"
        )
    if not (root / MANIFEST).is_file():
        raise BundleNotFoundError(
            f"{root} is not a bundle (no {MANIFEST} there); make one with: eecompile MODEL.onnx"
        )
    files = CheckedFolder(root)
    document, expected = files.read_regular(MANIFEST), files.read_regular(MANIFEST_HASH)
    if expected != hash_line(document):
        raise BundleIntegrityError(
            f"{root / MANIFEST} or {MANIFEST_HASH} was altered (SHA-256 differs); {REMEDY}"
        )
    remedy = "compile the model again, or install the Offramp that wrote it"
    plain = parse_versioned(document, MANIFEST, SCHEMA_VERSION, remedy)
    return from_plain(Manifest, plain, MANIFEST)


def hash_line(document: bytes) -> bytes:
    """Return the content of the file with the manifest's hash."""
    return f"{hashlib.sha256(document).hexdigest()}\n".encode()


def _check_files(root: Path, manifest: Manifest) -> None:
    for entry in manifest.files:
        CheckedFolder(root).check(entry)
    listed = {entry.path for entry in manifest.files} | {MANIFEST, MANIFEST_HASH}
    foreign = sorted(names_under(root, without=ENGINES) - listed)
    if foreign:
        raise BundleIntegrityError(
            f"{root}: {', '.join(foreign)} does not belong to this bundle; remove it"
        )
    referred = {POLICY, *manifest.graphs, *(v.folder + POLICY for v in manifest.variants)}
    absent = sorted(referred - listed)
    if absent:
        raise BundleIntegrityError(f"{root}: {MANIFEST} lists no hash for {', '.join(absent)}")


def _parse_policy(document: bytes, name: str, manifest: Manifest) -> ExitPolicy:
    """Read a policy; BundleSchemaError if it names an exit that does not exist."""
    policy, known = _parse(ExitPolicy, document, name), len(manifest.exits)
    if any(active.exit >= known for active in policy.active):
        raise BundleSchemaError(f"{name}: names an exit beyond the bundle's {known}")
    if policy.promise is not None and manifest.calibration.random_inputs:
        raise BundleSchemaError(
            f"{name}: has a promise, but the bundle was compiled on random inputs, which cannot "
            "certify one; compile the model again, on samples"
        )
    return policy


def _parse(cls: type[_T], document: bytes, name: str) -> _T:
    return from_plain(cls, parse_json(document, name), name)
