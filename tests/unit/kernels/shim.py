"""The kernels on a CPU: their very sources, compiled as C++ with ``cuda_shim.h``."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import numpy as np

from offramp.engine import kernels
from offramp.engine.kernels.kernel_arguments import Launch

SOURCES = Path(kernels.__file__).parent
_HERE = Path(__file__).parent
_FAILURES = MappingProxyType(
    {
        1: "threads wait at a barrier that others never reach",
        2: "blocks wait for ever for blocks that cannot begin",
        3: "no such kernel",
    }
)
_OPTIONS = ("-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-unknown-pragmas")


def find_compiler() -> str | None:
    """A C++ compiler of this machine."""
    names = (os.environ.get("CXX"), "g++", "c++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def build(folder: Path, sources: Path = SOURCES) -> Path:
    """Compiles the kernels of a folder into a library."""
    compiler = find_compiler()
    assert compiler is not None
    library = folder / "kernels.so"
    command = [compiler, "-std=c++17", *_OPTIONS, "-fPIC", "-shared", f"-I{sources}"]
    command += ["-o", str(library), str(_HERE / "cuda_shim.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return library


class Guarded:
    """Memory at a chosen alignment, with noise on both sides that must stay unchanged."""

    MARGIN = 256

    def __init__(self, size_bytes: int, rng: np.random.Generator, *, misaligned: int = 0) -> None:
        """Allocate memory full of noise, ``misaligned`` bytes after an alignment of 256."""
        self.offset = self.MARGIN + misaligned
        """Offset of its first byte in ``whole``."""
        size_whole = self.offset + size_bytes + self.MARGIN
        room = rng.integers(0, 256, size_whole + self.MARGIN, np.uint8)
        start = -room.ctypes.data % self.MARGIN
        self.whole = room[start : start + size_whole]
        """With the noise; begins aligned to 256 bytes."""
        self.bytes = self.whole[self.offset : self.offset + size_bytes]
        self._before = [side.copy() for side in self._sides()]

    def view(self, dtype: np.dtype | type) -> np.ndarray:
        """Return its content as values."""
        return self.bytes.view(dtype)

    def check(self) -> None:
        """Check that no byte outside it was written."""
        for side, before in zip(self._sides(), self._before, strict=True):
            np.testing.assert_array_equal(side, before)

    def _sides(self) -> tuple[np.ndarray, np.ndarray]:
        return self.whole[: self.offset], self.whole[self.offset + len(self.bytes) :]


class Device(Protocol):
    """Device to test kernels on."""

    def place(self, memory: Guarded) -> int:
        """Bring a memory's ``whole`` there, aligned to 256; gives the address of its ``bytes``."""
        ...

    def launch(self, launch: Launch, *, seed: int = 0, resident: int = 4) -> None:
        """Run a kernel to its end.

        Args:
            launch: Which, and on what.
            seed: Of the order in which threads and blocks run, where it can be chosen.
            resident: Blocks that run at the same time, where it can be chosen.
        """
        ...

    def fetch(self, memory: Guarded) -> None:
        """Bring back what was placed."""
        ...


class Cpu:
    """The device whose addresses are this process's own."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.shim_layout.restype = ctypes.c_char_p

    def layout(self) -> dict[str, int]:
        """Sizes and offsets of the parameter structs, and constants, as C++ has them."""
        found = {}
        value = ctypes.c_size_t()
        while name := self._library.shim_layout(ctypes.c_size_t(len(found)), ctypes.byref(value)):
            found[name.decode()] = value.value
        return found

    def widen(self, stored: np.ndarray, *, brain: bool) -> np.ndarray:
        """The kernels' own float32 of the bits of halfs or bfloat16s."""
        wide = np.empty(stored.shape, np.float32)
        self._library.shim_widen(
            ctypes.c_bool(brain),
            ctypes.c_void_p(stored.ctypes.data),
            ctypes.c_void_p(wide.ctypes.data),
            ctypes.c_size_t(stored.size),
        )
        return wide

    def place(self, memory: Guarded) -> int:
        return memory.bytes.ctypes.data

    def fetch(self, memory: Guarded) -> None:
        """Do nothing: the memory is on the host."""

    def launch(self, launch: Launch, *, seed: int = 0, resident: int = 4) -> None:
        assert launch.shared_bytes == 0
        assert launch.block % 32 == 0
        failure = self._library.shim_launch(
            launch.entry_point.encode(),
            ctypes.create_string_buffer(launch.arguments.tobytes(), launch.arguments.nbytes),
            *map(ctypes.c_uint, (launch.grid, launch.block, resident)),
            ctypes.c_uint64(seed),
        )
        assert failure == 0, _FAILURES[failure]
