"""A stand-in for ``pycuda.driver``: host memory as device memory, and all misuse an error.

Work happens when it is enqueued. What the real one would not notice is an assertion here: a copy
from freed memory, an allocation that outlives its context, a context left on the stack.
"""

from __future__ import annotations

import threading
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np


class Cuda:
    """State of the fake device, and the modules to put into ``sys.modules``."""

    def __init__(self) -> None:
        self.memory: dict[int, bytearray] = {}
        self.stacks: dict[int, list[Any]] = {}
        self.retained: list[int] = []
        self.streams = 0
        self.waits = 0
        self.pending = False
        """Something was enqueued that was not waited for."""
        self.free_bytes = 1 << 20
        self.broken = False
        """The next wait fails, as after a kernel that went wrong."""
        self.copy_fails = False
        """True if copies to the host fail."""
        self.driver = _driver(self)
        self.package = ModuleType("pycuda")
        self.package.__spec__ = ModuleSpec("pycuda", None)
        self.package.driver = self.driver  # type: ignore[attr-defined]

    @property
    def depth(self) -> int:
        """Contexts on the calling thread's stack."""
        return len(self.stacks.get(threading.get_ident(), []))

    def at(self, address: int) -> bytearray:
        assert self.depth, "no CUDA context is current on this thread"
        return self.memory[address]

    def write(self, address: int, data: bytes) -> None:
        assert len(data) <= len(self.at(address)), "more than was allocated"
        self.at(address)[: len(data)] = data


def _driver(cuda: Cuda) -> ModuleType:
    module: Any = ModuleType("pycuda.driver")

    class Error(Exception):
        pass

    class Context:
        def __init__(self, index: int) -> None:
            self._index = index

        def push(self) -> None:
            cuda.stacks.setdefault(threading.get_ident(), []).append(self)

        @staticmethod
        def pop() -> None:
            cuda.stacks[threading.get_ident()].pop()

    class Device:
        def __init__(self, index: int) -> None:
            self._index = index

        def retain_primary_context(self) -> Context:
            if cuda.broken:
                raise Error("cuDevicePrimaryCtxRetain failed: out of memory")
            cuda.retained.append(self._index)
            return Context(self._index)

    class Stream:
        def __init__(self) -> None:
            assert cuda.depth
            cuda.streams += 1
            self.handle = 7000 + cuda.streams

        def synchronize(self) -> None:
            cuda.waits += 1
            cuda.pending = False
            if cuda.broken:
                raise Error("cuStreamSynchronize failed: an illegal memory access was encountered")

    class Event:
        def record(self, stream: Stream) -> None:
            self._at = cuda.waits

        def synchronize(self) -> None:
            cuda.waits += 1
            cuda.pending = False

        def time_since(self, other: Event) -> float:
            return 0.5

    class DeviceAllocation:
        def __init__(self, size: int) -> None:
            self._address = 256 * (1 + max(cuda.memory, default=0) // 256 + 1)
            cuda.memory[self._address] = bytearray(size)

        def __int__(self) -> int:
            return self._address

        def free(self) -> None:
            assert not cuda.pending, "freed while work may still use it"
            del cuda.memory[self._address]

    def mem_alloc(size: int) -> DeviceAllocation:
        assert cuda.depth
        assert size > 0
        if size > cuda.free_bytes:
            raise Error("cuMemAlloc failed: out of memory")
        return DeviceAllocation(size)

    def memcpy_htod_async(dest: DeviceAllocation, src: np.ndarray, stream: Stream) -> None:
        assert src.flags.c_contiguous
        cuda.pending = True
        cuda.write(int(dest), src.tobytes())

    def memcpy_dtoh_async(dest: np.ndarray, src: DeviceAllocation, stream: Stream) -> None:
        if cuda.copy_fails:
            raise Error("cuMemcpyDtoHAsync failed: invalid argument")
        cuda.pending = True
        data = bytes(cuda.at(int(src))[: dest.nbytes])
        dest[...] = np.frombuffer(data, dest.dtype).reshape(dest.shape)

    def memset_d8_async(dest: DeviceAllocation, data: int, size: int, stream: Stream) -> None:
        cuda.pending = True
        cuda.write(int(dest), bytes([data]) * size)

    def init() -> None:
        pass

    for public in (Error, Context, Device, Stream, Event, DeviceAllocation, init, mem_alloc,
                   memcpy_htod_async, memcpy_dtoh_async, memset_d8_async):  # fmt: skip
        setattr(module, public.__name__, public)
    return module
