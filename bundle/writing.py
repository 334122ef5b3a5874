"""Bundles are written whole or not at all."""

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
    """Write a bundle to a temporary folder beside ``path``, then put it in place in one step.

    The manifest's ``files`` are filled in here; ``files`` has the content of every
    other file, by relative path, and is asked for each once: of a content that is made then, in
    pieces, no more than a piece need be in memory. Where there is a ``weights.bin``, graphs may
    name their weights in it. ``overwrite`` replaces a bundle that is already there, and never
    anything else: that is a ``BundleExistsError``.
    ``engines_of`` is a bundle of the same graphs, whose engines the new one gets too; without it,
    engines of the bundle that is replaced go with it. If the file system refuses
    (``BundleWriteError``), what was at ``path`` is still there. When this returns, the bundle is on
    the disk, and not only in the system's memory.
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
    """Make a folder beside ``target``, to be put in place of it; what is left of it is removed.

    BundleWriteError where the file system refuses, there or within the context.
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
    """Write files by relative path, and return what a manifest lists of them.

    ``graphs`` are those that may name their weights.
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

    Only a folder with its ``marks``, a manifest and its hash, passes for one of its ``kind``: other
    tools have files called ``manifest.json`` too. What it holds is not checked, so that a damaged
    bundle can be replaced.
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
