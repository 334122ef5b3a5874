"""Layout of a model repository on disk, as in Triton: one folder a model, one entry a version.

::

    DIR/resnet/1.ee               bundle written by eecompile
    DIR/resnet/2.onnx             ONNX file, served as it is
    DIR/bert/1/model.onnx         ONNX file in Triton's place
    DIR/bert/1/model.ee           bundle in Triton's place
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

_SUFFIXES: Final = (".ee", ".onnx")
_MANIFEST: Final = "manifest.json"
TRITON_CONFIG: Final = "config.pbtxt"
"""Name of Triton's configuration of a model, next to its versions."""
_IN_MODEL: Final = frozenset({"name", "platform", "backend", "input", "output"})
"""Settings of Triton's configuration that the model itself has."""
_INNER: Final = frozenset({"label_filename"})
"""Settings inside of other settings that have no effect here."""
_TOKEN: Final = re.compile(
    r"""\#[^\n]* | "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*'   # comments and strings, skipped
        | (?P<opens>[{\[<]) | (?P<closes>[}\]>]) | (?P<key>[A-Za-z_]\w*)\s*(?=[:{\[<])""",
    re.VERBOSE,
)
"""Tokens of a text-format protobuf message that settings are found by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStamp:
    """Identity of a file's content; a different stamp means that the file has changed."""

    modified_ns: int
    size_bytes: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> Self | None:
        """Return the stamp of an ONNX file, of a bundle's manifest, or of another kind's folder.

        ``None`` if it is absent.
        """
        manifest = path / _MANIFEST
        try:
            status = (manifest if manifest.is_file() else path).stat()
        except OSError:
            return None
        return cls(modified_ns=status.st_mtime_ns, size_bytes=status.st_size, inode=status.st_ino)


def find_models(folder: Path) -> dict[str, dict[str, Path]]:
    """Return the paths of all versions in a repository, by model and version.

    Entries that are not models are ignored: files next to the model folders, names that start with
    a dot, and versions that are not numbers.
    """
    models = {}
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not entry.name.startswith(".") and (found := find_versions(entry)):
            models[entry.name] = found
    return models


def find_misplaced(folder: Path) -> list[str]:
    """Return the names of entries that look like models, and that :func:`find_models` ignores.

    These are bundles and ONNX files next to the model folders, or in a folder without a version.
    """
    found = list[str]()
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.suffix in _SUFFIXES:
            found.append(entry.name)
        elif entry.is_dir() and not find_versions(entry):
            inside = sorted(each.name for each in entry.iterdir())
            found += [f"{entry.name}/{name}" for name in inside if Path(name).suffix in _SUFFIXES]
    return found


def find_versions(folder: Path) -> dict[str, Path]:
    """Return the paths of a model's versions, the newest first; empty if there is no such folder.

    Versions are numbers from 1 on; a higher number is newer.
    """
    if not folder.is_dir():
        return {}
    found = {}
    for entry in folder.iterdir():
        name = entry.stem if entry.suffix in _SUFFIXES else entry.name
        path = _model_in(entry)
        if path is not None and name.isascii() and name.isdigit() and int(name) > 0:
            found[str(int(name))] = path
    return {version: found[version] for version in sorted(found, key=int, reverse=True)}


def _model_in(entry: Path) -> Path | None:
    if entry.suffix in _SUFFIXES:
        return entry
    inside = (entry / f"model{suffix}" for suffix in _SUFFIXES)
    return next((path for path in inside if path.exists()), None)


def ignored_settings(folder: Path) -> tuple[str, ...]:
    """Return the settings of a model's ``config.pbtxt`` that have no effect here, in their order.

    Empty if there is no such file, or if it only describes the model.
    """
    try:
        text = (folder / TRITON_CONFIG).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    found, depth = list[str](), 0
    for token in _TOKEN.finditer(text):
        depth += (token["opens"] is not None) - (token["closes"] is not None)
        key = token["key"]
        if key in _INNER or (key and depth == 0 and key not in _IN_MODEL):
            found.append(key)
    return tuple(dict.fromkeys(found))
