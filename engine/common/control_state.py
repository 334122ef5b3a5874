"""Saves a controller's state across restarts: one file next to the bundle, whole or absent.

The file is a numpy archive without pickles: the arrays, and one JSON text with everything else, in
which ``{"$array": 3}`` refers to the array called ``array_3``. :mod:`.state_file` determines its
place, and which of several servers writes it.

A state only shortens the start. So if the file cannot be used, serving starts without it, and the
log states why. It is read only if the circumstances (the fingerprint) are those in which it was
saved.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Bundle
from offramp.bundle.files import write_whole
from offramp.bundle.npz import PLAIN_KINDS, open_regular, read_npz
from offramp.bundle.schema.serde import to_plain

_log = logging.getLogger(__name__)

SCHEMA_VERSION: Final = 2
MAX_BYTES: Final = 32 * 2**20
"""Largest size of a file, and of its unpacked content: thousands of times a usual state."""
_DOCUMENT: Final = "document"
"""Member that holds the JSON text, ASCII."""
_ARRAY: Final = "array_"
_REFERENCE: Final = "$array"
_unwritable: set[Path] = set()
"""Files whose last save failed: one warning is logged until a save succeeds."""


class _UnusableError(Exception):
    """Raised if the file was not written by :func:`save_state`."""


def identity_of(bundle: Bundle) -> dict[str, str]:
    """Return the identity of a bundle, for a fingerprint: the SHA-256 of its manifest.

    It changes with any of the files, also the policy and the weights: the manifest holds their
    hashes.
    """
    content = json.dumps(to_plain(bundle.manifest), sort_keys=True).encode()
    return {"bundle": hashlib.sha256(content).hexdigest()}


def save_state(
    path: str | os.PathLike[str], state: Mapping[str, Any], *, fingerprint: Mapping[str, str]
) -> bool:
    """Save a state, replacing the one saved before; readers find one of the two, complete.

    Args:
        path: The file.
        state: ``None``, bools, ints, floats (NaN and infinities too), strings and numpy arrays, in
            lists and in mappings with string keys, to any depth. They are restored unchanged,
            arrays with dtype and shape; tuples are restored as lists, numpy's scalars as Python's.
            The state must not change during the call. Any other value is a TypeError that names its
            place.
        fingerprint: Circumstances in which the state was found, and may be used.

    Returns:
        Whether it was saved. If the file system refuses, a warning is logged, once.
    """
    place = Path(path)
    arrays: list[NDArray[Any]] = []
    document = {
        "schema_version": SCHEMA_VERSION,
        "fingerprint": dict(fingerprint),
        "state": _encode(state, "state", arrays),
    }
    members = {f"{_ARRAY}{index}": array for index, array in enumerate(arrays)}
    members[_DOCUMENT] = np.array(json.dumps(document).encode())
    content = io.BytesIO()
    np.savez(content, **members)  # type: ignore[arg-type]
    try:
        write_whole(place, content.getvalue())
    except OSError as error:
        if place not in _unwritable:
            _unwritable.add(place)
            remedy = "the learned state is lost when the server ends; make its folder writable"
            _log.warning("%s cannot be written (%s): %s", place, error, remedy)
        return False
    _unwritable.discard(place)
    return True


def load_state(
    path: str | os.PathLike[str], *, fingerprint: Mapping[str, str]
) -> Mapping[str, Any] | None:
    """Return the state that was saved under the same circumstances.

    ``None`` if there is none, if it was saved under other circumstances or by another version
    (logged at INFO), or if the file cannot be read or is not a state (a warning).
    """
    place = Path(path)
    try:
        return _read(place, fingerprint)
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("%s cannot be read (%s); starting afresh", place, error)
        return None
    except Exception as error:  # zipfile, zlib, numpy and json raise many types for damaged files
        found = f"{type(error).__name__}: {error}"
        _log.warning("%s is damaged or not a state file (%.200s); starting afresh", place, found)
        return None


def _read(place: Path, fingerprint: Mapping[str, str]) -> dict[str, Any] | None:
    with open_regular(place) as file:
        if (size := os.fstat(file.fileno()).st_size) > MAX_BYTES:
            raise _UnusableError(f"{size:,} bytes, a state has at most {MAX_BYTES:,}")
        members = read_npz(file, max_bytes=MAX_BYTES)
    document = json.loads(members[_DOCUMENT].item())
    if (version := document["schema_version"]) != SCHEMA_VERSION:
        reads = f"this Offramp reads {SCHEMA_VERSION}"
        _log.info("%s is of schema version %.20r, %s; starting afresh", place, version, reads)
        return None
    if differs := _differences(document["fingerprint"], fingerprint):
        _log.info("%s was saved for another %s; starting afresh", place, differs)
        return None
    state = _decode(document["state"], members)
    if not isinstance(state, dict):
        raise _UnusableError(f"expected a mapping, found {type(state).__name__}")
    return state


def _differences(kept: Mapping[str, Any], now: Mapping[str, str]) -> str:
    """Return the names that differ, with both values; empty if none does."""
    names = sorted(name for name in kept.keys() | now.keys() if kept.get(name) != now.get(name))
    return ", ".join(
        f"{name} ({kept.get(name, 'none')!s:.16}, now {now.get(name, 'none')!s:.16})"
        for name in names
    )


def _encode(value: Any, where: str, arrays: list[NDArray[Any]]) -> Any:
    """Return JSON values; arrays are appended to ``arrays``."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_encode(item, f"{where}[{i}]", arrays) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {
            _escape(key, where): _encode(item, f"{where}[{key!r}]", arrays)
            for key, item in value.items()
        }
    if type(value) is np.ndarray and value.dtype.kind in PLAIN_KINDS:
        arrays.append(value)
        return {_REFERENCE: len(arrays) - 1}
    kind = type(value).__name__
    if isinstance(value, np.ndarray):
        kind += f" of dtype {value.dtype}"
    raise TypeError(
        f"{where}: a value of type {kind} cannot be kept; expected None, bool, int, float, str, "
        "a list, a mapping or a numpy.ndarray of numbers or strings"
    )


def _escape(key: Any, where: str) -> str:
    """Double a key's leading ``$``, so that no key reads as a reference."""
    if not isinstance(key, str):
        raise TypeError(f"{where} has the key {key!r}; expected strings")
    return f"${key}" if key.startswith("$") else key


def _decode(value: Any, arrays: Mapping[str, NDArray[Any]]) -> Any:
    if isinstance(value, list):
        return [_decode(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    if _REFERENCE in value:
        return arrays[f"{_ARRAY}{value[_REFERENCE]}"]
    return {
        key.removeprefix("$") if key.startswith("$$") else key: _decode(item, arrays)
        for key, item in value.items()
    }
