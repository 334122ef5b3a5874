"""Writes bundles, completely or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from offramp.bundle.bundle import MANIFEST, MANIFEST_HASH, POLICY, Bundle, hash_line
from offramp.bundle.engines import carry_engines
from offramp.bundle.files import (
    CheckedFolder,
    FileContent,
    check_writable,
    dump,
    put_in_place,
    write_described,
)
from offramp.bundle.schema.errors import BundleExistsError, BundleWriteError
from offramp.bundle.schema.manifest import FileEntry, Manifest
from offramp.bundle.schema.policy import ExitPolicy
from offramp.bundle.stored_graphs import describe_filled


def write_bundle(
    path: str | os.PathLike[str],
    manifest: Manifest,
    policy: ExitPolicy,
    files: Mapping[str, FileContent],
    *,
    overwrite: bool = False,
    engines_of: Path | None = None,
) -> Bundle:
    """Write a bundle to a temporary folder next to ``path``, then rename it to ``path``.

    The manifest's ``files`` are filled in here. ``files`` is the content of every other file, by
    relative path; each is read once, so that content produced in pieces needs memory for one piece
    only. Where there is a ``weights.bin``, graphs may name their weights in it.

    ``overwrite`` replaces an existing bundle; anything else at ``path`` is a ``BundleExistsError``.
    ``engines_of`` is a bundle of the same graphs, whose engines are copied to the new one; without
    it, engines of a replaced bundle are removed. If the file system refuses (``BundleWriteError``),
    the previous bundle is still there. When this returns, the bundle is on the disk, not only in
    the system's cache.
    """
    target = Path(path)
    check_target(target, overwrite=overwrite)
    said = dump(policy)
    with scratch_folder(target) as scratch:
        listed = write_listed(scratch, {**files, POLICY: said}, manifest.graphs)
        document = dump(replace(manifest, files=listed))
        (scratch / MANIFEST).write_bytes(document)
        (scratch / MANIFEST_HASH).write_bytes(hash_line(document))
        scratch.chmod(0o755)
        opened = Bundle.open(scratch)
        if engines_of is not None:
            carry_engines(engines_of, scratch)
        put_in_place(scratch, target)
    return replace(opened, path=target)


@contextmanager
def scratch_folder(target: Path) -> Iterator[Path]:
    """Make a folder next to ``target``, to be renamed to it; removed at the end if it still exists.

    BundleWriteError where the file system refuses, here or within the context.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise BundleWriteError(
            f"{target} cannot be written: {error}; free the space or choose another --output"
        ) from error


def write_listed(
    folder: Path, files: Mapping[str, FileContent], graphs: Sequence[str]
) -> tuple[FileEntry, ...]:
    """Write files by relative path; return their entries for a manifest.

    ``graphs`` are the files that may name their weights.
    """
    written, entries = CheckedFolder(folder), []
    for name in sorted(files):
        place = written.inside(name)
        place.parent.mkdir(parents=True, exist_ok=True)
        entries.append(write_described(place, name, files[name]))
    return tuple(describe_filled(written, entries, graphs))


def check_target(
    target: Path,
    *,
    overwrite: bool,
    marks: Sequence[str] = (MANIFEST, MANIFEST_HASH),
    kind: str = "bundle",
) -> None:
    """Check that a bundle may and can be written at ``target``, before any long work.

    Only a folder with the files ``marks``, a manifest and its hash, counts as a ``kind``, since
    other tools also write files called ``manifest.json``. The manifest is not checked, so that a
    damaged bundle can be replaced.
    """
    if not target.exists() and not target.is_symlink():
        for folder in target.parents:
            if folder.exists() and not folder.is_dir():
                raise BundleExistsError(f"{folder} is not a folder; choose another --output")
        check_writable(target)
        return
    if target.is_symlink() or not all((target / mark).is_file() for mark in marks):
        raise BundleExistsError(f"{target} exists and is not a {kind}; choose another --output")
    if not overwrite:
        raise BundleExistsError(f"{target} exists; choose another --output, or add --overwrite")
    check_writable(target)
