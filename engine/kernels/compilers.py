"""The two CUDA compilers for our kernels, nvcc and NVRTC, and their errors.

Both make a cubin (machine code of one GPU architecture) from the same text with the same options.
NVRTC is a library: it needs no toolkit and no C++ compiler, and like nvcc it needs no GPU and no
driver. Its Python bindings are imported only when it is searched for::

    BackendError
    ├── KernelCompilerNotFoundError  neither nvcc nor NVRTC is installed
    └── KernelCompileError           there is a compiler, but it made no cubin
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from offramp.bundle.optional_imports import optional_import
from offramp.engine.common.errors import BackendError

OPTIONS = ("-std=c++17", "--ptxas-options=-v")
"""Options of both compilers. Never ``--use_fast_math``: confidences must equal those of numpy.
``-v`` lists registers and spills, which tests check."""

INSTALL = (
    "install the compiler as a library: pip install 'cuda-bindings==13.*' 'nvidia-cuda-nvrtc==13.*'"
    " (for a driver of CUDA 12: 'cuda-bindings==12.*' 'nvidia-cuda-nvrtc-cu12'),"
    " or install the CUDA toolkit and put its nvcc on PATH"
)
"""Remedy if there is no compiler, or only one that is too old."""

_TOOLKIT = Path("/usr/local/cuda")
"""Default folder of NVIDIA's toolkit, where nvcc is searched."""
_TIMEOUT_S = 300
"""Time limit of one run of nvcc: the kernels take about two seconds."""


class KernelCompilerNotFoundError(BackendError):
    """No CUDA compiler was found; the message has the searched places and what to install."""


class KernelCompileError(BackendError):
    """The compilers cannot make the kernels for a GPU; the message has their output."""


class Compiled(NamedTuple):
    """Machine code that a compiler made, and its messages."""

    cubin: bytes
    """An ELF file with machine code for one architecture."""
    log: str
    """Output of the compiler: warnings, registers, spills."""


class KernelCompiler(Protocol):
    """Makes machine code from CUDA C++."""

    @property
    def name(self) -> str:
        """Name and version, for messages."""

    @property
    def cuda_major(self) -> int:
        """Major version of its CUDA; older drivers cannot run its output."""

    @property
    def architectures(self) -> tuple[str, ...]:
        """Architectures that it can compile for, such as ``sm_90``."""

    def compile(self, text: str, architecture: str, folder: Path) -> Compiled:
        """Compile a text for one of ``architectures``; ``folder`` has the files of quoted includes.

        KernelCompileError if the compiler made no cubin; the message has its output.
        """


class Nvcc:
    """The toolkit's compiler; it also needs a C++ compiler."""

    def __init__(self) -> None:
        self._path = _find_nvcc()
        version = re.search(r"release ((\d+)\.\d+)", self._ask("--version"))
        if version is None:
            raise KernelCompilerNotFoundError(f"{self._path} --version names no release of CUDA")
        self.name = f"nvcc {version[1]} ({self._path})"
        self.cuda_major = int(version[2])
        self.architectures = tuple(self._ask("--list-gpu-code").split())

    def compile(self, text: str, architecture: str, folder: Path) -> Compiled:
        """Compile source text with nvcc, for an architecture such as ``sm_90``."""
        try:
            with tempfile.TemporaryDirectory(prefix="offramp-kernels-") as scratch:
                return self._compile_in(Path(scratch), text, architecture, folder)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise KernelCompileError(f"{self.name} failed: {error}") from error

    def _compile_in(self, scratch: Path, text: str, architecture: str, folder: Path) -> Compiled:
        source, cubin = scratch / "kernels.cu", scratch / "kernels.cubin"
        source.write_text(text)
        command: list[str | Path] = [self._path, "--cubin", *OPTIONS]
        command += [f"--gpu-architecture={architecture}", f"--include-path={folder}"]
        command += [f"--output-file={cubin}", source]
        done = _run(command)
        log = done.stdout + done.stderr
        if done.returncode != 0 or not cubin.is_file():
            raise KernelCompileError(
                f"{self.name} ended with {done.returncode} for {architecture}:\n{log.strip()}"
            )
        return Compiled(cubin.read_bytes(), log)

    def _ask(self, option: str) -> str:
        try:
            done = _run([self._path, option])
        except (OSError, subprocess.TimeoutExpired) as error:
            raise KernelCompilerNotFoundError(f"{self._path} cannot run: {error}") from error
        if done.returncode != 0:
            raise KernelCompilerNotFoundError(
                f"{self._path} {option} ended with {done.returncode}: {done.stderr.strip()}"
            )
        return done.stdout


def _run(command: list[str | Path]) -> subprocess.CompletedProcess[str]:
    # S603: the program is the user's own nvcc, the arguments are ours, and no shell reads them.
    return subprocess.run(  # noqa: S603
        command, check=False, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S
    )


def _find_nvcc() -> Path:
    """Search PATH first, then the configured and the usual folders of toolkits."""
    if found := shutil.which("nvcc"):
        return Path(found)
    told = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    for root in [*(Path(root) for root in told if root), _TOOLKIT]:
        path = root / "bin" / "nvcc"
        if path.is_file():
            return path
    raise KernelCompilerNotFoundError(
        f"no nvcc on PATH, below CUDA_HOME or CUDA_PATH, nor in {_TOOLKIT}"
    )


class Nvrtc:
    """The compiler as a library, through the Python package ``cuda-bindings``."""

    def __init__(self) -> None:
        install = "pip install cuda-bindings"
        with optional_import("cuda", install=install, raises=KernelCompilerNotFoundError):
            self._nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
        # The bindings search for the library at the first call, and each of their versions raises
        # another error if there is none.
        try:
            major, minor = self._checked(self._nvrtc.nvrtcVersion())
            (supported,) = self._checked(self._nvrtc.nvrtcGetSupportedArchs())
        except (RuntimeError, OSError, KernelCompileError) as error:
            why = " ".join(str(error).split())
            raise KernelCompilerNotFoundError(f"libnvrtc cannot be used ({why})") from error
        self.name = f"NVRTC {major}.{minor}"
        self.cuda_major = major
        self.architectures = tuple(f"sm_{number}" for number in supported)

    def compile(self, text: str, architecture: str, folder: Path) -> Compiled:
        """Compile source text with NVRTC, for an architecture such as ``sm_90``."""
        nvrtc = self._nvrtc
        (program,) = self._checked(
            nvrtc.nvrtcCreateProgram(text.encode(), b"kernels.cu", 0, [], [])
        )
        try:
            options = [f"--gpu-architecture={architecture}", *OPTIONS, f"--include-path={folder}"]
            encoded = [option.encode() for option in options]
            (status, *_) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
            log = self._fetch(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            said = log.rstrip(b"\0").decode(errors="replace")
            if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
                raise KernelCompileError(
                    f"{self.name} ended with {status.name} for {architecture}:\n{said.strip()}"
                )
            cubin = self._fetch(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        finally:
            nvrtc.nvrtcDestroyProgram(program)
        return Compiled(cubin, said)

    def _fetch(self, size_of: Callable[..., Any], get: Callable[..., Any], program: Any) -> bytes:
        (size_bytes,) = self._checked(size_of(program))
        content = bytearray(size_bytes)
        self._checked(get(program, content))
        return bytes(content)

    def _checked(self, returned: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the results of a call, which follow its status."""
        status, *results = returned
        if status != self._nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise KernelCompileError(f"NVRTC ended with {status.name}")
        return tuple(results)


def find_compilers() -> tuple[KernelCompiler, ...]:
    """Return the compilers of this machine, in the order to try them: nvcc, then NVRTC.

    nvcc is first: an installed toolkit is assumed to fit the driver. KernelCompilerNotFoundError if
    there is none; the message states what to install.
    """
    found: list[KernelCompiler] = []
    missing = []
    for compiler in (Nvcc, Nvrtc):
        try:
            found.append(compiler())
        except KernelCompilerNotFoundError as error:
            missing.append(str(error))
    if not found:
        raise KernelCompilerNotFoundError(
            f"No CUDA compiler for the kernels: {'; '.join(missing)}. To fix it, {INSTALL}."
        )
    return tuple(found)
