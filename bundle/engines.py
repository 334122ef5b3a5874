"""Engines built for a GPU, kept in the bundle: ``engines/FOLDER``, one folder a target.

They are a cache, made on the machine that serves. They are not in the manifest, are not checked
when a bundle is opened (they may be gigabytes), and are built again whenever they do not fit. So a
folder has a separate ``index.json``, and files are only loaded through it, by size and hash.

Every file's name contains its hash, so a file that an index names is never overwritten. First the
new file is renamed into place, then the index that names it; finally, files that the index no
longer names are removed. So the index on disk is valid at any moment.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from offramp.bundle.engine_index import (
    ENGINES_SCHEMA_VERSION,
    INDEX,
    PRECISIONS,
    EngineEntry,
    EngineIndex,
    EngineTarget,
    Precision,
    PrecisionEvidence,
    ShapeProfile,
    ShapeRange,
    addressed,
    kernels_stem,
    parts_digest,
)
from offramp.bundle.files import CheckedFolder, dump, parse_versioned, write_whole
from offramp.bundle.schema.errors import (
    BundleBusyError,
    BundleError,
    BundleIntegrityError,
    BundleSchemaError,
    BundleWriteError,
)
from offramp.bundle.schema.manifest import FileEntry
from offramp.bundle.schema.serde import from_plain

try:
    import fcntl
except ImportError:  # no such locks on Windows, where concurrent builds are not prevented
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "ENGINES",
    "PRECISIONS",
    "EngineEntry",
    "EngineIndex",
    "EngineStore",
    "EngineTarget",
    "Precision",
    "PrecisionEvidence",
    "Pruned",
    "ShapeProfile",
    "ShapeRange",
    "carry_engines",
    "list_targets",
    "parts_digest",
    "prune_targets",
    "remove_targets",
]

ENGINES = "engines"
"""Folder of a bundle that holds the engines."""
_LOCK = ".lock"

_LOG = logging.getLogger(__name__)


class EngineStore:
    """The engines of a bundle for one target.

    Reading needs only :meth:`open`, and raises ``BundleIntegrityError`` where a file is missing,
    altered, or outside the bundle. A writer holds :meth:`exclusively`.
    """

    def __init__(self, bundle_path: Path, index: EngineIndex) -> None:
        self.bundle_path = bundle_path
        self._name = f"{ENGINES}/{index.target.folder}"
        self.index = index
        """Current index; only the methods of this class replace it."""

    @classmethod
    def open(cls, bundle_path: str | os.PathLike[str], target: EngineTarget) -> EngineStore:
        """Read the index of a target but no engine; without an index the store is empty.

        ``BundleIntegrityError`` where it is for another target or outside the bundle,
        ``BundleSchemaError`` where this version cannot read it.
        """
        root = Path(bundle_path)
        name = f"{ENGINES}/{target.folder}/{INDEX}"
        if not _files(root).inside(name).exists():
            return cls.empty(root, target)
        index = _read_index(root, name)
        if index.target != target:
            raise BundleIntegrityError(
                f"{root / name} is for {index.target.describe()}, not for {target.describe()}; "
                f"{_files(root).remedy}"
            )
        return cls(root, index)

    @classmethod
    def empty(cls, bundle_path: str | os.PathLike[str], target: EngineTarget) -> EngineStore:
        """Return an empty store; the first engine stored replaces everything in the folder."""
        version = ENGINES_SCHEMA_VERSION
        index = EngineIndex(
            schema_version=version, target=target, engines=(), timing_cache=None, kernels=None
        )
        return cls(Path(bundle_path), index)

    @property
    def folder(self) -> Path:
        """The target's folder, created when the first file is stored."""
        return self.bundle_path / self._name

    def entry(self, unit: str) -> EngineEntry | None:
        """Return the engine of a unit, or ``None``."""
        return next((entry for entry in self.index.engines if entry.unit == unit), None)

    def read(self, entry: EngineEntry) -> bytes:
        """Read the plan (the serialised engine) of an entry."""
        return self._read(entry.content)

    def read_timing_cache(self) -> bytes:
        """Read TensorRT's timing cache; empty if there is none."""
        return self._read(self.index.timing_cache) if self.index.timing_cache else b""

    def read_kernels(self, source: str) -> bytes | None:
        """Read the compiled kernels, a cubin; ``None`` if there are none for a source's hash."""
        kernels = self.index.kernels
        if kernels is None or not kernels.path.startswith(f"{kernels_stem(source)}-"):
            return None
        return self._read(kernels)

    def put(self, entry: EngineEntry, plan: bytes) -> None:
        """Replace the unit's engine; if writing fails, the previous engine stays."""
        if entry.content != addressed(entry.unit, plan, ".plan"):
            raise ValueError(f"the entry of {entry.unit} does not describe this plan")
        others = [e for e in self.index.engines if e.unit != entry.unit]
        engines = tuple(sorted([*others, entry], key=lambda e: e.unit))
        self._write(entry.file, plan)
        self._commit(replace(self.index, engines=engines))

    def put_timing_cache(self, content: bytes) -> None:
        """Store TensorRT's timing cache in place of the previous one."""
        file = addressed("timing", content, ".cache")
        self._write(file.path, content)
        self._commit(replace(self.index, timing_cache=file))

    def put_kernels(self, cubin: bytes, *, source: str) -> None:
        """Store the compiled kernels in place of the old ones; ``source`` is the source's hash."""
        file = addressed(kernels_stem(source), cubin, ".cubin")
        self._write(file.path, cubin)
        self._commit(replace(self.index, kernels=file))

    def drop_kernels(self) -> None:
        """Remove the compiled kernels."""
        if self.index.kernels is not None:
            self._commit(replace(self.index, kernels=None))

    def put_evidence(self, evidence: PrecisionEvidence | None, records: bytes = b"") -> None:
        """Store the precision's evidence in place of the previous evidence; ``None`` removes it."""
        if evidence is not None:
            if evidence.records != addressed("records", records, ".npz"):
                raise ValueError("the evidence does not describe these records")
            self._write(evidence.records.path, records)
        if evidence != self.index.evidence:
            self._commit(replace(self.index, evidence=evidence))

    def read_evidence(self, evidence: PrecisionEvidence) -> bytes:
        """Read the records that an evidence refers to, as bytes of an npz file."""
        return self._read(evidence.records)

    def drop(self, unit: str) -> None:
        """Remove the engine of a unit, if there is one."""
        self.prune([entry.unit for entry in self.index.engines if entry.unit != unit])

    def prune(self, keep: Collection[str]) -> tuple[str, ...]:
        """Remove the engines of all units but ``keep``; return the names of those removed."""
        engines = tuple(e for e in self.index.engines if e.unit in keep)
        dropped = tuple(e.unit for e in self.index.engines if e.unit not in keep)
        if dropped:
            self._commit(replace(self.index, engines=engines))
        return dropped

    def clean(self) -> tuple[str, ...]:
        """Remove files that the index does not name, left by an interrupted build."""
        kept = {*self.index.files, INDEX, _LOCK}
        with _writing(self.folder):
            found = sorted(self.folder.iterdir()) if self.folder.is_dir() else []
            foreign = [place for place in found if place.name not in kept]
            for place in foreign:
                _remove(place)
        return tuple(place.name for place in foreign)

    @contextlib.contextmanager
    def exclusively(self) -> Iterator[None]:
        """Create the folder and lock it; BundleBusyError if another build has the lock."""
        with _writing(self.folder):
            self._make_folder()
        with _locked(self.folder):
            yield

    def _read(self, file: FileEntry) -> bytes:
        inner = replace(file, path=f"{self._name}/{file.path}")
        return _files(self.bundle_path).read(inner)

    def _commit(self, index: EngineIndex) -> None:
        """Replace the index, then remove files that only the previous index named."""
        before = self.index.files
        self._write(INDEX, dump(index))
        self.index = index
        for name in before - index.files:
            (self.folder / name).unlink(missing_ok=True)

    def _write(self, name: str, content: bytes) -> None:
        with _writing(self.folder):
            self._make_folder()
            write_whole(self.folder / name, content, durable=False, mode=0o644)

    def _make_folder(self) -> None:
        _files(self.bundle_path).inside(self._name)
        self.folder.mkdir(parents=True, exist_ok=True)


def list_targets(bundle_path: str | os.PathLike[str]) -> tuple[EngineTarget, ...]:
    """Return the targets that a bundle has engines for; damaged folders do not count."""
    root = Path(bundle_path)
    targets = []
    for folder in _folders(root):
        with contextlib.suppress(BundleError):
            index = _read_index(root, f"{ENGINES}/{folder.name}/{INDEX}")
            if index.engines and index.target.folder == folder.name:
                targets.append(index.target)
    return tuple(targets)


class Pruned(NamedTuple):
    """Result of removing the folders of targets."""

    removed: tuple[str, ...]
    busy: tuple[str, ...]
    """Folders that another build is using; they were not removed."""


def prune_targets(bundle_path: str | os.PathLike[str], keep: Collection[EngineTarget]) -> Pruned:
    """Remove the folders of all targets but ``keep``, including damaged ones."""
    names = {target.folder for target in keep}
    return _remove_all(each for each in _folders(Path(bundle_path)) if each.name not in names)


def remove_targets(bundle_path: str | os.PathLike[str], gone: Collection[EngineTarget]) -> Pruned:
    """Remove the folders of these targets."""
    names = {target.folder for target in gone}
    return _remove_all(each for each in _folders(Path(bundle_path)) if each.name in names)


def _remove_all(folders: Iterable[Path]) -> Pruned:
    removed, busy = [], []
    for folder in folders:
        try:
            # No build follows a link, and a lock file there would be written outside the bundle.
            lock = contextlib.nullcontext() if folder.is_symlink() else _locked(folder)
            with lock, _writing(folder):
                _remove(folder)
        except BundleBusyError:
            busy.append(folder.name)
        else:
            removed.append(folder.name)
    return Pruned(tuple(removed), tuple(busy))


def carry_engines(source: Path, target: Path) -> None:
    """Copy the engines of a bundle to ``target``, which has the same graphs.

    Files may be large, so they are hard-linked where the file system supports that. Symbolic links,
    and files that a concurrent build removes, are not copied: those engines are built again.
    """
    for folder in _folders(source):
        if folder.is_symlink():
            continue
        copy = target / ENGINES / folder.name
        copy.mkdir(parents=True)
        places = []
        with contextlib.suppress(FileNotFoundError):
            # Copy the index first, so that it names no file that a build adds during the copying.
            places = sorted(folder.iterdir(), key=lambda place: (place.name != INDEX, place.name))
        for place in places:
            if place.is_file() and not place.is_symlink() and not place.name.startswith("."):
                with contextlib.suppress(FileNotFoundError):
                    try:
                        (copy / place.name).hardlink_to(place)
                    except OSError:  # another file system, or one without links
                        shutil.copyfile(place, copy / place.name)


def _folders(root: Path) -> list[Path]:
    engines = root / ENGINES
    if engines.is_symlink() or not engines.is_dir():
        return []
    return sorted(place for place in engines.iterdir() if place.is_dir())


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of an existing folder; where the system has no locks, log a warning."""
    # A bundle from elsewhere may have a link there: it is not followed, and nothing is truncated.
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    with _writing(folder):
        lock = os.open(folder / _LOCK, flags, 0o644)
    try:
        if fcntl is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise BundleBusyError(
                    f"another build is at work in {folder}; wait until it has ended"
                ) from error
            except OSError as error:  # network file systems may raise it
                _LOG.warning(
                    "%s cannot be locked (%s); do not start a second build there", folder, error
                )
        yield
    finally:
        os.close(lock)


def _remove(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


def _read_index(root: Path, name: str) -> EngineIndex:
    files = _files(root)
    document = files.read_regular(name)
    plain = parse_versioned(document, str(root / name), ENGINES_SCHEMA_VERSION, files.remedy)
    try:
        return from_plain(EngineIndex, plain, name)
    except BundleSchemaError as error:
        raise BundleSchemaError(f"{root / name} is damaged: {error}; {files.remedy}") from error


def _files(root: Path) -> CheckedFolder:
    remedy = f"build the engines again: eecompile build {root}"
    return CheckedFolder(root, listing=INDEX, remedy=remedy)


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BundleWriteError(
            f"{folder} cannot be written: {error}; free the space or correct its permissions"
        ) from error
