"""Fakes of ``pycuda.driver`` and ``cuda.bindings.driver``: host memory as device memory.

Work runs when it is enqueued, or is recorded while a stream is captured. Calls that PyCUDA would
refuse, or that need its context to be current on the thread, fail an assertion here.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from offramp.engine.cuda.primary_context import primary_context

ENTRY_POINTS_OF_CUBIN = b"a cubin"


class Gpu:
    """State of the device, and the modules to put into ``sys.modules``."""

    def __init__(self) -> None:
        self.depth: dict[int, int] = {}
        """Number of contexts on the stack of each thread."""
        self.pushes = 0
        """Total number of pushed contexts."""
        self.memory: dict[int, np.ndarray] = {}
        self.pinned: dict[int, np.ndarray] = {}
        self.alive: list[str] = []
        """Streams, events and modules that were not destroyed."""
        self.log: list[tuple[Any, ...]] = []
        """Enqueued work: name, arguments, stream."""
        self.captured: dict[int, list[tuple[Any, ...]]] = {}
        """Captured work by stream, during capture."""
        self.free_bytes = 1 << 20
        self.fault = ""
        """Device error that the next wait reports."""
        self.invalid = False
        """True if captures produce no graph."""
        self.graphs: dict[int, list[tuple[Any, ...]]] = {}
        self.driver = _pycuda(self)
        self.bindings = _bindings(self)

    @property
    def is_current(self) -> bool:
        return self.depth.get(threading.get_ident(), 0) > 0

    def enqueue(self, stream: int, *what: Any) -> None:
        assert self.is_current
        if stream in self.captured:
            self.captured[stream].append(what)
        else:
            self.log.append((*what, stream))

    def view(self, address: int, size_bytes: int) -> np.ndarray:
        for start, content in self.memory.items():
            if start <= address and address + size_bytes <= start + content.size:
                return content[address - start :][:size_bytes]
        raise AssertionError(f"{size_bytes} bytes at {address:#x} are not on the device")


@contextmanager
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """Replace PyCUDA and cuda-bindings by these fakes on import."""
    gpu = Gpu()
    package = ModuleType("pycuda")
    package.driver = gpu.driver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pycuda", package)
    monkeypatch.setitem(sys.modules, "pycuda.driver", gpu.driver)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", gpu.bindings)
    primary_context.cache_clear()
    yield gpu
    primary_context.cache_clear()


def _pycuda(gpu: Gpu) -> ModuleType:
    module: Any = ModuleType("pycuda.driver")

    class Error(Exception):
        pass

    class MemoryError(Error):  # noqa: A001
        pass

    class LogicError(Error):
        pass

    class LaunchError(Error):
        pass

    class Context:
        def push(self) -> None:
            thread = threading.get_ident()
            gpu.depth[thread] = gpu.depth.get(thread, 0) + 1
            gpu.pushes += 1

        @staticmethod
        def pop() -> None:
            gpu.depth[threading.get_ident()] -= 1

    class device_attribute(IntEnum):  # noqa: N801
        MULTIPROCESSOR_COUNT = 16

    class event_flags(IntEnum):  # noqa: N801
        DEFAULT = 0
        DISABLE_TIMING = 2

    class host_alloc_flags:  # noqa: N801
        PORTABLE = 1
        DEVICEMAP = 2

    class Device:
        def __init__(self, index: int) -> None:
            assert index == 0

        def retain_primary_context(self) -> Context:
            return Context()

        def name(self) -> str:
            return "NVIDIA H200"

        def compute_capability(self) -> tuple[int, int]:
            return 9, 0

        def get_attribute(self, attribute: device_attribute) -> int:
            return {device_attribute.MULTIPROCESSOR_COUNT: 132}[attribute]

    class Owned:
        """Must be destroyed where the context is current, or it leaks."""

        def __init__(self, kind: str) -> None:
            assert gpu.is_current
            self._kind = kind
            gpu.alive.append(kind)

        def __del__(self) -> None:
            if gpu.is_current:
                gpu.alive.remove(self._kind)

    class Stream(Owned):
        def __init__(self, flags: int = 0) -> None:
            super().__init__("stream")
            self.flags = flags
            self.handle = 7000 + len(gpu.alive)

        def wait_for_event(self, event: Event) -> None:
            gpu.enqueue(self.handle, "wait", id(event))

    class Event(Owned):
        def __init__(self, flags: int = 0) -> None:
            super().__init__("event")
            self.flags = flags

        def record(self, stream: Stream) -> Event:
            gpu.enqueue(stream.handle, "record", id(self))
            return self

        def synchronize(self) -> Event:
            assert gpu.is_current
            if gpu.fault:
                raise LogicError(f"cuEventSynchronize failed: {gpu.fault}")
            return self

    class DeviceAllocation:
        """Releasing never raises for want of a context that works: PyCUDA prints a line."""

        def __init__(self, size: int) -> None:
            self._content = np.zeros(size, np.uint8)
            gpu.memory[int(self)] = self._content

        def __int__(self) -> int:
            return int(self._content.ctypes.data)

        def free(self) -> None:
            assert gpu.is_current
            del gpu.memory[int(self)]

    class PagelockedHostAllocation:
        def __init__(self, size: int) -> None:
            self._content = np.zeros(size, np.uint8)
            self.__array_interface__ = self._content.__array_interface__
            gpu.pinned[self._content.ctypes.data] = self._content

        def get_device_pointer(self) -> int:
            assert gpu.is_current
            return int(self._content.ctypes.data) + (1 << 40)

        def free(self) -> None:
            assert gpu.is_current
            del gpu.pinned[self._content.ctypes.data]

    class Module(Owned):
        def __init__(self, cubin: bytes) -> None:
            super().__init__("module")
            if cubin != ENTRY_POINTS_OF_CUBIN:
                raise LogicError("cuModuleLoadDataEx failed: device kernel image is invalid")

        def get_function(self, name: str) -> Function:
            return Function(self, name)

    class Function:
        def __init__(self, owner: Module, name: str) -> None:
            self._owner = owner
            self.name = name

        def prepare(self, arg_types: list[str]) -> Function:
            (self._format,) = arg_types
            return self

        def prepared_async_call(
            self, grid: Any, block: Any, stream: Stream, *args: bytes, shared_size: int = 0
        ) -> None:
            (arguments,) = args
            assert f"{len(arguments)}s" == self._format
            assert (len(grid), len(block)) == (2, 3)
            gpu.enqueue(stream.handle, "launch", self.name, grid, block, arguments, shared_size)

    def init(flags: int = 0) -> None:
        pass

    def mem_get_info() -> tuple[int, int]:
        assert gpu.is_current
        return gpu.free_bytes, 1 << 20

    def mem_alloc(size: int) -> DeviceAllocation:
        assert gpu.is_current
        assert size > 0
        if size > gpu.free_bytes:
            raise MemoryError("cuMemAlloc failed: out of memory")
        return DeviceAllocation(size)

    def pagelocked_empty(
        shape: int, dtype: Any, order: str = "C", mem_flags: int = 0
    ) -> np.ndarray:
        assert gpu.is_current
        assert shape > 0
        assert mem_flags == 3
        if shape > gpu.free_bytes:
            raise MemoryError("cuMemHostAlloc failed: out of memory")
        made = np.asarray(PagelockedHostAllocation(shape))
        assert isinstance(made.base, PagelockedHostAllocation)
        return made

    def pinned(array: np.ndarray) -> np.ndarray:
        assert array.flags.c_contiguous
        start = array.ctypes.data
        assert any(
            first <= start and start + array.nbytes <= first + content.size
            for first, content in gpu.pinned.items()
        ), "not pinned"
        return array

    def memcpy_htod_async(dest: int, src: np.ndarray, stream: Stream) -> None:
        gpu.view(dest, src.nbytes)[:] = pinned(src)
        gpu.enqueue(stream.handle, "in", dest, src.nbytes)

    def memcpy_dtoh_async(dest: np.ndarray, src: int, stream: Stream) -> None:
        pinned(dest)[:] = gpu.view(src, dest.nbytes)
        gpu.enqueue(stream.handle, "out", src, dest.nbytes)

    def memcpy_dtod_async(dest: int, src: int, size: int, stream: Stream) -> None:
        if gpu.fault:
            raise LogicError(f"cuMemcpyDtoDAsync failed: {gpu.fault}")
        gpu.view(dest, size)[:] = gpu.view(src, size)
        gpu.enqueue(stream.handle, "within", dest, src, size)

    def memset_d8_async(dest: int, data: int, size: int, stream: Stream) -> None:
        gpu.view(dest, size)[:] = data
        gpu.enqueue(stream.handle, "set", dest, data, size)

    def module_from_buffer(buffer: bytes) -> Module:
        return Module(buffer)

    for public in (Error, MemoryError, LogicError, LaunchError, Context, Device, Stream, Event,
                   DeviceAllocation, PagelockedHostAllocation, Module, Function, device_attribute,
                   event_flags, host_alloc_flags, init, mem_get_info, mem_alloc, pagelocked_empty,
                   memcpy_htod_async, memcpy_dtoh_async, memcpy_dtod_async, memset_d8_async,
                   module_from_buffer):  # fmt: skip
        setattr(module, public.__name__, public)
    return module


class Result(IntEnum):
    """Results of calls of ``cuda.bindings.driver``."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901


class Mode(IntEnum):
    """Modes of capture."""

    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1


class Handle:
    """Handle of a stream or a graph."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __int__(self) -> int:
        return self._value


def _bindings(gpu: Gpu) -> ModuleType:
    module: Any = ModuleType("cuda.bindings.driver")
    module.CUresult, module.CUstreamCaptureMode, module.CUstream = Result, Mode, Handle
    ok = Result.CUDA_SUCCESS
    modes = []
    module.modes = modes

    def new(works: list[tuple[Any, ...]]) -> Handle:
        handle = max(gpu.graphs, default=100) + 1
        gpu.graphs[handle] = works
        return Handle(handle)

    def begin(stream: Handle, mode: Mode) -> tuple[Result]:
        modes.append(mode)
        if int(stream) in gpu.captured:
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        gpu.captured[int(stream)] = []
        return (ok,)

    def end(stream: Handle) -> tuple[Result, Handle]:
        works = gpu.captured.pop(int(stream))
        if gpu.invalid:
            return Result.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, Handle(0)
        return ok, new(works)

    def instantiate(graph: Handle, flags: int) -> tuple[Result, Handle]:
        assert flags == 0
        works = gpu.graphs[int(graph)]
        if ("bad",) in works:
            return Result.CUDA_ERROR_INVALID_VALUE, Handle(0)
        return ok, new(works)

    def launch(graph: Handle, stream: Handle) -> tuple[Result]:
        for work in gpu.graphs[int(graph)]:
            gpu.enqueue(int(stream), *work)
        return (ok,)

    def destroy(graph: Handle) -> tuple[Result]:
        del gpu.graphs[int(graph)]
        return (ok,)

    def text(status: Result) -> tuple[Result, bytes | None]:
        if status == Result.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED:
            return ok, b"operation failed due to a previous error during capture"
        return Result.CUDA_ERROR_INVALID_VALUE, None

    module.cuStreamBeginCapture, module.cuStreamEndCapture = begin, end
    module.cuGraphInstantiate, module.cuGraphLaunch = instantiate, launch
    module.cuGraphDestroy = module.cuGraphExecDestroy = destroy
    module.cuGetErrorString = text
    return module
