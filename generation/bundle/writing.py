"""Writing of generating bundles: a bundle is written completely or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from offramp.bundle.bundle import hash_line
from offramp.bundle.files import FileContent, dump, put_in_place
from offramp.bundle.graph_weights import WEIGHTS
from offramp.bundle.writing import check_target, scratch_folder, write_listed
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


def check_place(path: Path, *, overwrite: bool) -> None:
    """Raise BundleExistsError if no bundle may be written to a path."""
    marks = (GENERATION, GENERATION_HASH)
    check_target(path, overwrite=overwrite, marks=marks, kind="generating bundle")


def write_generating_bundle(
    path: str | os.PathLike[str],
    model: TextModel,
    graphs: Mapping[str, bytes],
    *,
    tokenizer: bytes | None = None,
    overwrite: bool = False,
) -> GeneratingBundle:
    """Write a model and its graphs, weights included, and rename the folder into place atomically.

    ``tokenizer`` is the content of a ``tokenizer.json``. A weight of a memory page or more is
    stored once, even if several graphs contain it. ``overwrite`` replaces an existing generating
    bundle; anything else at the path raises BundleExistsError. If the file system fails,
    BundleWriteError is raised and the previous content stays. Return the opened bundle.
    """
    target = Path(path)
    check_place(target, overwrite=overwrite)
    missing = sorted({*model.graphs} - graphs.keys())
    if missing:
        raise ValueError(f"the model names graphs that are not given: {missing}")
    packed = pack_weights({name: graphs[name] for name in model.graphs}, None)
    files: dict[str, FileContent] = dict(packed.graphs)
    if packed.sizes.file_bytes:
        files[WEIGHTS] = packed.pieces()
    if tokenizer is not None:
        files[TOKENIZER] = tokenizer
    with scratch_folder(target) as scratch:
        manifest = GeneratingManifest(
            schema_version=GENERATION_VERSION,
            model=model,
            files=write_listed(scratch, files, model.graphs),
        )
        document = dump(manifest)
        (scratch / GENERATION).write_bytes(document)
        (scratch / GENERATION_HASH).write_bytes(hash_line(document))
        scratch.chmod(0o755)
        opened = GeneratingBundle.open(scratch)
        put_in_place(scratch, target)
    return replace(opened, path=target)
