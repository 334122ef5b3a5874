"""Libraries with operators of the user's own, which every session of ONNX Runtime gets.

A process has one set of them, as its command line names it (``--custom-ops``): whatever loads a
graph makes its options here, so that none can forget them. Rejected: handing the set through all
that runs a graph, some twenty places of compiler, calibration, server and bench.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import onnxruntime as ort

from offramp.bundle import Bundle, Manifest
from offramp.engine.common.errors import BackendError
from offramp.engine.graphs.external_weights import name_weights

_log = logging.getLogger(__name__)

FLAG: Final = "--custom-ops LIB.so"
"""What gives a library, in messages."""
_EXTENSIONS: Final = (
    "for ai.onnx.contrib pip install onnxruntime-extensions, whose get_library_path() names it"
)
_UNKNOWN: Final = re.compile(r"(?P<domain>[^\s:]*):(?P<name>[^\s(]+)\(-?\d+\) is not a registered")
"""How ONNX Runtime says that it has no operator of a domain and name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedLibrary:
    """A library that sessions are given."""

    path: Path
    sha256: str
    """Of its content, when it was named."""


_libraries: tuple[LoadedLibrary, ...] = ()


def libraries() -> tuple[LoadedLibrary, ...]:
    """Give the libraries of this process, in the order in which they were named."""
    return _libraries


@contextmanager
def using_libraries(paths: Sequence[Path]) -> Iterator[None]:
    """Give these libraries to all sessions that are made meanwhile, instead of any others.

    This runs code of theirs. BackendError if one is no such library.
    """
    global _libraries  # noqa: PLW0603 - a process's one set, see above
    named = {library.sha256: library for library in map(_loaded, paths)}
    before, _libraries = _libraries, tuple(named.values())
    try:
        yield
    finally:
        _libraries = before


def session_options(
    only: Sequence[LoadedLibrary] | None = None, *, weights: Path | None = None
) -> ort.SessionOptions:
    """Make the options of a session, with the process's libraries, or ``only`` some of them.

    Weights that a graph names in a file are found too, in the folder ``weights`` if it is given.
    """
    options = ort.SessionOptions()
    for library in _libraries if only is None else only:
        options.register_custom_ops_library(str(library.path.resolve()))
    name_weights(options, weights)
    return options


def load_session(model: bytes | str, options: ort.SessionOptions) -> ort.InferenceSession:
    """Load a graph, or the file of one, on the CPU.

    Raises ONNX Runtime's own exceptions; a BackendError that tells the remedy where the graph has
    an operator of nobody's.
    """
    try:
        # Without the second attempt on what there is no other of, which it tells on standard output
        return ort.InferenceSession(
            model, options, providers=["CPUExecutionProvider"], enable_fallback=0
        )
    except Exception as error:  # ONNX Runtime's own classes derive from Exception only
        if (found := _UNKNOWN.search(str(error))) is None:
            raise
        raise BackendError(unknown_operators([(found["domain"], found["name"])])) from error


def unknown_operators(names: Sequence[tuple[str, str]]) -> str:
    """Say which operators, by domain and name, nobody has given, and how to give them."""
    told = ", ".join(f"{name} of domain {domain}" for domain, name in names)
    given = ", ".join(library.path.name for library in _libraries)
    have = f"; {given} {'have' if len(_libraries) > 1 else 'has'} no such" if given else ""
    hint = f" ({_EXTENSIONS})" if any(domain == "ai.onnx.contrib" for domain, _ in names) else ""
    return (
        f"ONNX Runtime {ort.__version__} has no operator {told}{have}: give the library that has "
        f"it with {FLAG}{hint}"
    )


def open_runnable(path: Path) -> Bundle:
    """Open a bundle whose graphs can be loaded with the process's libraries, or say what lacks.

    Raises:
        BundleError: It is absent, damaged or of another version.
        BackendError: A library that it needs was not given.
    """
    bundle = Bundle.open(path)
    require_libraries(bundle.manifest, path)
    return bundle


def require_libraries(manifest: Manifest, path: Path) -> None:
    """Refuse a bundle, by a BackendError, of which a library was not given.

    One of another content stands for one that was built otherwise, for instance for another kind
    of processor: it is taken, with a warning.
    """
    hashes = {needed.sha256 for needed in manifest.custom_ops}
    spare = [given for given in _libraries if given.sha256 not in hashes]
    given = {library.sha256 for library in _libraries}
    lacking = [needed for needed in manifest.custom_ops if needed.sha256 not in given]
    if len(lacking) > len(spare):
        told = "; ".join(needed.describe() for needed in lacking)
        raise BackendError(
            f"{path} needs operators of a library that was not given: {told}; give it with "
            f"{FLAG}. A library is code: take it from whom you would take a program from"
        )
    for needed in lacking:
        _log.warning(
            "%s: was compiled with another library than %s: %s. Its answers may be others: "
            "eecompile verify tells",
            path,
            ", ".join(f"{o.path.name} (sha256 {o.sha256[:12]}…)" for o in spare),
            needed.describe(),
        )


def _loaded(path: Path) -> LoadedLibrary:
    try:
        with path.open("rb") as file:
            digest = hashlib.sha256()
            for chunk in iter(partial(file.read, 2**20), b""):
                digest.update(chunk)
    except OSError as error:
        raise BackendError(f"--custom-ops {path}: cannot be read: {error.strerror}") from error
    library = LoadedLibrary(path=path, sha256=digest.hexdigest())
    try:
        session_options([library])
    except Exception as error:  # ONNX Runtime's own classes derive from Exception only
        reason = " ".join(str(error).split()).partition(" : FAIL : ")[2] or str(error)
        raise BackendError(
            f"--custom-ops {path}: ONNX Runtime {ort.__version__} cannot load it ({reason}); "
            "expected a shared library for this machine that exports RegisterCustomOps"
        ) from error
    return library
