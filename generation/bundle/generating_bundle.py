"""A generating bundle on disk; every file is checked before it is read.

A generating bundle is a folder of its own kind: it has ``generation.json`` in place of a bundle's
manifest. As in other bundles, graphs refer to their weights in one file, ``weights.bin``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from offramp.bundle.bundle import hash_line
from offramp.bundle.files import REMEDY, CheckedFolder, names_under, parse_versioned
from offramp.bundle.graph_weights import WEIGHTS
from offramp.bundle.schema.errors import BundleIntegrityError, BundleNotFoundError
from offramp.bundle.schema.manifest import FileEntry
from offramp.bundle.schema.serde import from_plain
from offramp.bundle.stored_graphs import FileIdentity, check_graph, fill, identity_of_file
from offramp.generation.bundle.text_model import TextModel

GENERATION: Final = "generation.json"
GENERATION_HASH: Final = "generation.sha256"
"""File with the hash of ``generation.json``, which holds the hashes of all other files."""
TOKENIZER: Final = "tokenizer.json"
"""Optional tokenizer, as the package ``tokenizers`` writes it."""
GENERATION_VERSION: Final = 1
"""The only version that is written and read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratingManifest:
    """The content of ``generation.json``."""

    schema_version: int
    model: TextModel
    files: tuple[FileEntry, ...]

    def __post_init__(self) -> None:
        listed = [entry.path for entry in self.files]
        absent = sorted({*self.model.graphs} - {*listed})
        if absent or len(set(listed)) < len(listed):
            raise ValueError(
                f"files must list each graph and each file once; absent: {absent or 'none'}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratingBundle:
    """A bundle of a model that generates text, opened after a check of all its files."""

    path: Path
    manifest: GeneratingManifest
    _weights: FileIdentity | None = field(default=None, compare=False, repr=False)
    """Identity of the weights file at the time when it was hashed."""

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GeneratingBundle:
        """Open a bundle and check every file in it.

        Raise BundleNotFoundError, BundleIntegrityError or BundleSchemaError, which name the file.
        """
        root = Path(path)
        if not (root / GENERATION).is_file():
            raise BundleNotFoundError(
                f"{root} is not a generating bundle (no {GENERATION} there); {REMEDY}: "
                "eecompile generation MODEL --data DATA"
            )
        files = CheckedFolder(root, listing=GENERATION)
        document = files.read_regular(GENERATION)
        if files.read_regular(GENERATION_HASH) != hash_line(document):
            raise BundleIntegrityError(
                f"{root / GENERATION} or {GENERATION_HASH} was altered (SHA-256 differs); {REMEDY}"
            )
        remedy = "compile the model again, or install the Offramp that wrote it"
        plain = parse_versioned(document, GENERATION, GENERATION_VERSION, remedy)
        manifest = from_plain(GeneratingManifest, plain, GENERATION)
        weights = identity_of_file(root / WEIGHTS)  # before hashing, to detect later writes
        for entry in manifest.files:
            files.check(entry)
        listed = {entry.path for entry in manifest.files} | {GENERATION, GENERATION_HASH}
        foreign = sorted(names_under(root, without="") - listed)
        if foreign:
            raise BundleIntegrityError(
                f"{root}: {', '.join(foreign)} does not belong to this bundle; remove it"
            )
        bundle = cls(path=root, manifest=manifest, _weights=weights)
        for name in manifest.model.graphs:
            bundle.graph(name)
        return bundle

    @property
    def model(self) -> TextModel:
        """Layers, stages and exits of the model."""
        return self.manifest.model

    def graph(self, name: str) -> bytes:
        """Read a graph as it is stored; the graph may refer to weights in :meth:`weight_folder`.

        Raise BundleIntegrityError if the file changed, BundleSchemaError if it refers to weights
        elsewhere.
        """
        content = self._files.read(self._entry(name))
        check_graph(self._files, name, content, self._weight_bytes)
        return content

    def whole_graph(self, name: str) -> bytes:
        """Read a graph with its weights included; errors as for :meth:`graph`."""
        entry = self._entry(name)
        return fill(self._files, entry, self._files.read(entry), self._weight_bytes)

    def weight_folder(self) -> Path | None:
        """Return the folder with the weights that graphs refer to; ``None`` without such weights.

        Raise BundleIntegrityError if the file changed since the bundle was opened.
        """
        if not self._weight_bytes:
            return None
        if identity_of_file(self.path / WEIGHTS) != self._weights:
            self._files.check(self._entry(WEIGHTS))
        return self.path.resolve()

    def tokenizer(self) -> bytes | None:
        """Read ``tokenizer.json``; ``None`` if the bundle has no tokenizer."""
        if TOKENIZER not in {entry.path for entry in self.manifest.files}:
            return None
        return self._files.read(self._entry(TOKENIZER))

    @property
    def _files(self) -> CheckedFolder:
        return CheckedFolder(self.path, listing=GENERATION)

    @property
    def _weight_bytes(self) -> int:
        return next((e.size_bytes for e in self.manifest.files if e.path == WEIGHTS), 0)

    def _entry(self, name: str) -> FileEntry:
        found = next((entry for entry in self.manifest.files if entry.path == name), None)
        if found is None:
            raise BundleIntegrityError(f"{self.path}: {name} is not part of this bundle")
        return found
