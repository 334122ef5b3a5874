"""Compilation of the kernels to machine code of one GPU architecture, cached between runs.

The output is machine code (a cubin), never PTX: the driver would have to compile that, and one
older than the toolkit cannot. A cubin runs on any driver of the toolkit's major version.

The kernels are compiled where engines are built, or at their first use, and then read from the
user's cache: compiling takes about two seconds. File names in the cache include the compiler: code
of CUDA 13 must not be loaded by a driver of CUDA 12.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path

from offramp.bundle.files import write_whole
from offramp.engine.kernels.compilers import (
    INSTALL,
    OPTIONS,
    KernelCompileError,
    KernelCompiler,
    KernelCompilerNotFoundError,
    find_compilers,
)

FOLDER = Path(__file__).parent

_DIGEST_BYTES = hashlib.sha256().digest_size

logger = logging.getLogger(__name__)


def architecture_of(compute_capability: tuple[int, int]) -> str:
    """Return the compilers' name of a compute capability: (9, 0) is ``sm_90``."""
    major, minor = compute_capability
    return f"sm_{major}{minor}"


def source_hash(folder: Path = FOLDER) -> str:
    """Return the hash of all kernel sources and compiler options: SHA-256 in hexadecimal.

    Two cubins of one architecture are interchangeable if their hashes are equal.
    """
    digest = hashlib.sha256("\0".join(OPTIONS).encode())
    for path in sorted(path for path in folder.iterdir() if path.suffix in (".cu", ".cuh")):
        content = path.read_bytes()
        digest.update(f"\0{path.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def program(folder: Path = FOLDER) -> str:
    """Return the text to compile: all kernels together, for one cubin."""
    return "".join(f'#include "{path.name}"\n' for path in sorted(folder.glob("*.cu")))


def compile_kernels(
    architecture: str,
    compilers: Iterable[KernelCompiler],
    *,
    folder: Path = FOLDER,
    driver_version: tuple[int, int] | None = None,
) -> tuple[KernelCompiler, bytes]:
    """Compile all kernels into one cubin for an architecture such as ``sm_90``.

    Returns the first compiler that succeeds, and its cubin. Compilers of a newer major version than
    ``driver_version``, the newest CUDA that the driver runs, are skipped, if it is known.
    KernelCompileError if none made a cubin for this architecture.
    """
    text = program(folder)
    said = []
    for compiler in compilers:
        if not _runs(compiler.cuda_major, driver_version):
            said.append(f"{compiler.name} is too new for the driver, {_cuda(driver_version)}")
            continue
        if architecture not in compiler.architectures:
            said.append(f"{compiler.name} compiles for {', '.join(compiler.architectures)} only")
            continue
        try:
            compiled = compiler.compile(text, architecture, folder)
        except KernelCompileError as error:
            # One compiler may be incomplete: nvcc may lack its C++ compiler.
            logger.warning("%s", error)
            said.append(str(error))
        else:
            logger.debug("%s, %s: %s", compiler.name, architecture, compiled.log)
            return compiler, compiled.cubin
    raise KernelCompileError(
        f"The CUDA kernels cannot be compiled for {architecture}.\n"
        + "\n".join(said)
        + f"\nIf the compiler does not fit GPU and driver or is incomplete, {INSTALL}."
    )


def _runs(cuda_major: int, driver_version: tuple[int, int] | None) -> bool:
    """Return whether a driver runs code of this major version of CUDA."""
    return driver_version is None or cuda_major <= driver_version[0]


def _cuda(driver_version: tuple[int, int] | None) -> str:
    return "" if driver_version is None else "which is of CUDA {}.{}".format(*driver_version)


def load_kernels(
    compute_capability: tuple[int, int],
    cache: Path | None = None,
    *,
    driver_version: tuple[int, int] | None = None,
) -> bytes:
    """Return the kernels' cubin for a GPU, compiled if it is not in the cache.

    ``cache`` is a folder of compiled kernels; ``None`` is the user's own. If it is not writable,
    the kernels are compiled each time. Code newer than ``driver_version``, the newest CUDA that the
    driver runs, is not used, if it is known. KernelCompilerNotFoundError if a compiler is needed,
    but there is none; KernelCompileError if none made a cubin for this GPU.
    """
    architecture = architecture_of(compute_capability)
    folder = _user_cache() if cache is None else cache
    stem = f"{architecture}-{source_hash()[:32]}"
    try:
        compilers = find_compilers()
    except KernelCompilerNotFoundError:
        kept = None if folder is None else _read_any(folder, stem, driver_version)
        if kept is None:
            raise
        return kept
    for compiler in compilers:
        if folder is not None and _runs(compiler.cuda_major, driver_version):
            kept = _read(folder / _file_name(stem, compiler))
            if kept is not None:
                return kept
    compiler, cubin = compile_kernels(architecture, compilers, driver_version=driver_version)
    if folder is not None:
        _write(folder / _file_name(stem, compiler), cubin)
    return cubin


def _file_name(stem: str, compiler: KernelCompiler) -> str:
    digest = hashlib.sha256(compiler.name.encode()).hexdigest()
    return f"{stem}-cuda{compiler.cuda_major}-{digest[:16]}.kernels"


def _read_any(folder: Path, stem: str, driver_version: tuple[int, int] | None) -> bytes | None:
    """Read a cubin of the cache that the driver runs, from any compiler."""
    for path in sorted(folder.glob(f"{stem}-cuda*.kernels")):
        major = re.match(r"cuda(\d+)-", path.name.removeprefix(f"{stem}-"))
        if major is not None and _runs(int(major[1]), driver_version):
            kept = _read(path)
            if kept is not None:
                return kept
    return None


def _user_cache() -> Path | None:
    root = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(root):  # noqa: PTH117 - the standard ignores other paths; "" is none
        return Path(root, "offramp", "kernels")
    with contextlib.suppress(RuntimeError):  # a user without a home
        return Path.home() / ".cache" / "offramp" / "kernels"
    return None


def _read(path: Path) -> bytes | None:
    """Read a cubin of the cache; ``None`` if it is missing or damaged.

    A file is the SHA-256 of the cubin followed by the cubin, so that one rename stores both.
    """
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, cubin = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(cubin).digest() == digest:
        return cubin
    logger.warning("%s is damaged; the kernels are compiled again", path)
    return None


def _write(path: Path, cubin: bytes) -> None:
    """Write a cubin to the cache, whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, hashlib.sha256(cubin).digest() + cubin, durable=False)
    except OSError as error:
        logger.info("The compiled kernels cannot be kept in %s: %s", path.parent, error)
