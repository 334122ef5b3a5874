"""Generating bundles are written whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from offramp.bundle.bundle import hash_line
from offramp.bundle.files import (
    CheckedFolder,
    FileContent,
    check_writable,
    dump,
    put_in_place,
    write_described,
)
from offramp.bundle.graph_weights import WEIGHTS
from offramp.bundle.schema.errors import BundleExistsError, BundleWriteError
from offramp.bundle.stored_graphs import describe_filled
from offramp.compiler.graphs.weights import pack_weights
from offramp.generation.bundle.generating_bundle import (
    GENERATION,
    GENERATION_HASH,
    GENERATION_VERSION,
    TOKENIZER,
    GeneratingBundle,
    GeneratingManifest,
)
from offramp.generation.bundle.text_model import TextModel


def write_generating_bundle(
    path: str | os.PathLike[str],
    model: TextModel,
    graphs: Mapping[str, bytes],
    *,
    tokenizer: bytes | None = None,
    overwrite: bool = False,
) -> GeneratingBundle:
    """Write a model and its graphs, which hold their weights, and put the folder in place at once.

    ``tokenizer`` is the content of a ``tokenizer.json``. Each weight of a page or more is written
    once, whatever number of graphs has it. ``overwrite`` replaces a generating bundle that is
    there, and never anything else: BundleExistsError. If the file system refuses, what was there is
    still there: BundleWriteError. Gives the bundle, opened.
    """
    target = Path(path)
    check_generating_target(target, overwrite=overwrite)
    missing = sorted({*model.graphs} - graphs.keys())
    if missing:
        raise ValueError(f"the model names graphs that are not given: {missing}")
    packed = pack_weights({name: graphs[name] for name in model.graphs}, None)
    files: dict[str, FileContent] = dict(packed.graphs)
    if packed.sizes.file_bytes:
        files[WEIGHTS] = packed.pieces()
    if tokenizer is not None:
        files[TOKENIZER] = tokenizer
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            _write(scratch, model, files)
            scratch.chmod(0o755)
            opened = GeneratingBundle.open(scratch)
            put_in_place(scratch, target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise BundleWriteError(
            f"{target} cannot be written: {error}; free the space or choose another --output"
        ) from error
    return replace(opened, path=target)


def _write(folder: Path, model: TextModel, files: Mapping[str, FileContent]) -> None:
    written, entries = CheckedFolder(folder), []
    for name in sorted(files):
        place = written.inside(name)
        place.parent.mkdir(parents=True, exist_ok=True)
        entries.append(write_described(place, name, files[name]))
    described = tuple(describe_filled(written, entries, model.graphs))
    manifest = GeneratingManifest(schema_version=GENERATION_VERSION, model=model, files=described)
    document = dump(manifest)
    (folder / GENERATION).write_bytes(document)
    (folder / GENERATION_HASH).write_bytes(hash_line(document))


def check_generating_target(target: Path, *, overwrite: bool) -> None:
    """Check that a generating bundle may and can be written at a place, before any long work.

    A damaged one may be replaced; only a folder with both its files passes for one.
    """
    if target.exists() or target.is_symlink():
        marks = [target / GENERATION, target / GENERATION_HASH]
        if target.is_symlink() or not all(mark.is_file() for mark in marks):
            raise BundleExistsError(
                f"{target} exists and is not a generating bundle; choose another --output"
            )
        if not overwrite:
            raise BundleExistsError(f"{target} exists; choose another --output, or add --overwrite")
    for folder in target.parents:
        if folder.exists() and not folder.is_dir():
            raise BundleExistsError(f"{folder} is not a folder; choose another --output")
    check_writable(target)
