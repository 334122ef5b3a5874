"""Libraries of custom operators, which are registered with every session of ONNX Runtime.

A process has one set of them, named on its command line (``--custom-ops``). All code that loads a
graph makes its session options here, so that the libraries cannot be forgotten. Rejected: passing
the set through all code that runs a graph, about twenty places of compiler, calibration, server and
benchmarks.
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
"""The option that names a library, for messages."""
_EXTENSIONS: Final = (
    "for ai.onnx.contrib pip install onnxruntime-extensions, whose get_library_path() names it"
)
_UNKNOWN: Final = re.compile(r"(?P<domain>[^\s:]*):(?P<name>[^\s(]+)\(-?\d+\) is not a registered")
"""ONNX Runtime's message that an operator of a domain and name is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedLibrary:
    """A library that is registered with sessions."""

    path: Path
    sha256: str
    """SHA-256 of the file's content when the library was loaded."""


_libraries: tuple[LoadedLibrary, ...] = ()


def libraries() -> tuple[LoadedLibrary, ...]:
    """Return the libraries of this process, in the order in which the command line names them."""
    return _libraries


@contextmanager
def using_libraries(paths: Sequence[Path]) -> Iterator[None]:
    """Register these libraries with all sessions made in this context, instead of any others.

    This runs code of the libraries. BackendError if a file is not such a library.
    """
    global _libraries  # noqa: PLW0603 - one set a process, see above
    named = {library.sha256: library for library in map(_loaded, paths)}
    before, _libraries = _libraries, tuple(named.values())
    try:
        yield
    finally:
        _libraries = before


def session_options(
    only: Sequence[LoadedLibrary] | None = None, *, weights: Path | None = None
) -> ort.SessionOptions:
    """Return the options of a session, with the process's libraries, or ``only`` some of them.

    ``weights``, if given, is the folder of the weights that a graph stores outside of its file.
    """
    options = ort.SessionOptions()
    for library in _libraries if only is None else only:
        options.register_custom_ops_library(str(library.path.resolve()))
    name_weights(options, weights)
    return options


def load_session(model: bytes | str, options: ort.SessionOptions) -> ort.InferenceSession:
    """Load a graph, or the file of one, on the CPU.

    Raises ONNX Runtime's own exceptions; for an operator that no library has, a BackendError with
    the remedy.
    """
    try:
        # Disables ONNX Runtime's second attempt, which is useless here and prints to standard
        # output.
        return ort.InferenceSession(
            model, options, providers=["CPUExecutionProvider"], enable_fallback=0
        )
    except Exception as error:  # ONNX Runtime's own classes derive from Exception only
        if (found := _UNKNOWN.search(str(error))) is None:
            raise
        raise BackendError(unknown_operators([(found["domain"], found["name"])])) from error


def unknown_operators(names: Sequence[tuple[str, str]]) -> str:
    """Return the message about operators (domain, name) that no library has, with the remedy."""
    told = ", ".join(f"{name} of domain {domain}" for domain, name in names)
    given = ", ".join(library.path.name for library in _libraries)
    have = f"; {given} {'have' if len(_libraries) > 1 else 'has'} no such" if given else ""
    hint = f" ({_EXTENSIONS})" if any(domain == "ai.onnx.contrib" for domain, _ in names) else ""
    return (
        f"ONNX Runtime {ort.__version__} has no operator {told}{have}: load the library that has "
        f"it with {FLAG}{hint}"
    )


def open_runnable(path: Path) -> Bundle:
    """Open a bundle whose graphs can be loaded with the process's libraries.

    Raises:
        BundleError: The bundle is absent, damaged or of another version.
        BackendError: A library that the bundle needs was not given.
    """
    bundle = Bundle.open(path)
    require_libraries(bundle.manifest, path)
    return bundle


def require_libraries(manifest: Manifest, path: Path) -> None:
    """Raise BackendError if the process lacks a library that the bundle needs.

    A library with another content counts as a different build of the needed one, for instance for
    another processor: it is accepted with a warning.
    """
    hashes = {needed.sha256 for needed in manifest.custom_ops}
    spare = [given for given in _libraries if given.sha256 not in hashes]
    given = {library.sha256 for library in _libraries}
    lacking = [needed for needed in manifest.custom_ops if needed.sha256 not in given]
    if len(lacking) > len(spare):
        told = "; ".join(needed.describe() for needed in lacking)
        raise BackendError(
            f"{path} needs operators of a library that was not given: {told}; give it with "
            f"{FLAG}. A library is code: only use one from a trusted source"
        )
    for needed in lacking:
        _log.warning(
            "%s: was compiled with another library than %s: %s. Its answers may differ: "
            "check with eecompile verify",
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
