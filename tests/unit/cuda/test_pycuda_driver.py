"""The PyCUDA driver against a PyCUDA that is faked; its names are held against the real one's.

That every name of PyCUDA exists in the real package, ``tests/unit/tensorrt/test_api.py`` checks.
What no fake can show, ``tests/gpu`` does.
"""

from __future__ import annotations

import gc
import inspect
import logging
import sys
import threading
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
from tests.facts import facts, tells
from tests.unit.cuda.fake_pycuda import ENTRY_POINTS_OF_CUBIN, Gpu, Mode, installed
from tests.unit.tensorrt.bindings import pycuda, signatures_of

from offramp.engine.common.errors import BackendError
from offramp.engine.cuda.driver import DeviceLostError, DeviceMemoryError, Driver
from offramp.engine.cuda.pycuda_driver import PyCudaDriver, require_pycuda
from offramp.engine.kernels.kernel_arguments import ENTRY_POINTS, RowCopy, gather_rows


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    with installed(monkeypatch) as gpu:
        yield gpu
    assert not any(gpu.depth.values()), "a context was left current"


@pytest.fixture
def driver(gpu: Gpu) -> Iterator[PyCudaDriver]:
    """Yield a driver; all resources of the test must be released afterwards."""
    driver = PyCudaDriver()
    with driver.current():
        yield driver
        gc.collect()
    driver.close()
    assert (gpu.memory, gpu.pinned, gpu.alive, gpu.graphs) == ({}, {}, [], {})


def test_pycuda_that_is_there_is_enough(gpu: Gpu) -> None:
    require_pycuda()


def test_pycuda_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "pycuda":
                raise ModuleNotFoundError("No module named 'pycuda'", name="pycuda")

    forget_pycuda(monkeypatch)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(BackendError, match=r"pycuda is not installed: pip install .*pycuda"):
        require_pycuda()


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libcurand.so.10: cannot open shared object file"),
        ModuleNotFoundError("No module named 'libcurand.so.10'", name="pytools"),
        OSError("libcurand.so.10: of another version"),
        RuntimeError("libcurand.so.10: anything else"),
    ],
)
def test_pycuda_that_does_not_load_is_told(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    class Broken:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "pycuda":
                raise error

    forget_pycuda(monkeypatch)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(BackendError, match=r"cannot be imported \(.*libcurand.*pip inst"):
        require_pycuda()


def forget_pycuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "pycuda"]:
        monkeypatch.delitem(sys.modules, name)


def test_the_device_is_described(driver: PyCudaDriver, gpu: Gpu) -> None:
    assert driver.device == "NVIDIA H200"
    assert driver.compute_capability == (9, 0)
    assert driver.multiprocessors == 132
    assert driver.memory() == (1 << 20, 1 << 20)


def test_the_context_is_current_within_its_block_on_its_thread_only(gpu: Gpu) -> None:
    driver = PyCudaDriver()
    assert not gpu.is_current
    with driver.current():
        assert gpu.is_current
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.append(gpu.is_current))
        thread.start()
        thread.join()
        assert elsewhere == [False]
    assert not gpu.is_current


def test_only_the_outermost_block_of_a_thread_pushes_the_context(gpu: Gpu) -> None:
    driver = PyCudaDriver()

    def nest() -> None:
        with driver.current():
            for _ in range(3):
                with pytest.raises(ZeroDivisionError), driver.current():
                    raise ZeroDivisionError
            assert gpu.is_current
        assert not gpu.is_current

    with driver.current():
        thread = threading.Thread(target=nest)
        thread.start()
        thread.join()
        nested = gpu.pushes
        with driver.current():
            pass
        assert gpu.is_current
    assert (nested, gpu.pushes) == (2, 2)
    assert not any(gpu.depth.values())


def test_bytes_go_in_and_come_back(driver: PyCudaDriver, gpu: Gpu) -> None:
    stream, event = driver.stream(), driver.event()
    first, second = driver.allocate(8), driver.allocate(8)
    here, back = driver.allocate_pinned(8), driver.allocate_pinned(8)
    here.array[:] = range(8)
    driver.copy_in(first, here.array, stream)
    driver.clear(second, 8, stream)
    driver.copy_within(second + 2, first, 4, stream)
    driver.copy_out(back.array, second, stream)
    driver.record(event, stream)
    driver.synchronize(event)
    assert back.array.tolist() == [0, 0, 0, 1, 2, 3, 0, 0]
    assert [(entry[0], entry[-1]) for entry in gpu.log] == [
        (name, stream.handle) for name in ("in", "set", "within", "out", "record")
    ]
    for address in (first, second):
        driver.free(address)
    here.free()
    here.free()
    assert here.array.size == 0
    back.free()
    stream.close()
    event.close()
    event.close()


def test_streams_wait_for_each_other_only_by_events(driver: PyCudaDriver, gpu: Gpu) -> None:
    first, second, event = driver.stream(), driver.stream(), driver.event()
    assert first.owned.flags == 1  # CU_STREAM_NON_BLOCKING
    assert event.owned.flags == 2  # CU_EVENT_DISABLE_TIMING
    driver.record(event, first)
    driver.wait_on(second, event)
    assert [(entry[0], entry[-1]) for entry in gpu.log] == [
        ("record", first.handle),
        ("wait", second.handle),
    ]
    for handle in (first, second, event):
        handle.close()


def test_what_is_closed_is_gone_at_once_and_refused(driver: PyCudaDriver, gpu: Gpu) -> None:
    stream, event = driver.stream(), driver.event()
    stream.close()
    assert gpu.alive == ["event"]
    event.close()
    assert gpu.alive == []
    with pytest.raises(BackendError, match="stream was used after it was closed"):
        driver.clear(0, 1, stream)
    with pytest.raises(BackendError, match="event was used after it was closed"):
        driver.synchronize(event)


def test_pinned_memory_has_the_size_asked_for_and_an_address_for_kernels(
    driver: PyCudaDriver,
) -> None:
    for size_bytes in (0, 5):
        pinned = driver.allocate_pinned(size_bytes)
        assert pinned.array.shape == (size_bytes,)
        if size_bytes:
            assert pinned.address == pinned.array.ctypes.data + (1 << 40)
        pinned.free()


def test_missing_memory_says_how_much(driver: PyCudaDriver, gpu: Gpu) -> None:
    gpu.free_bytes = 1000
    with pytest.raises(DeviceMemoryError, match="of NVIDIA H200") as raised:
        driver.allocate(2000)
    assert (raised.value.size_bytes, raised.value.free_bytes) == (2000, 1000)
    with pytest.raises(DeviceMemoryError, match="the host's pinned memory"):
        driver.allocate_pinned(2000)


def test_memory_is_freed_once(driver: PyCudaDriver) -> None:
    address = driver.allocate(0)
    driver.free(address)
    with pytest.raises(BackendError, match="no device memory at"):
        driver.free(address)


def test_kernels_are_launched_with_their_struct(driver: PyCudaDriver, gpu: Gpu) -> None:
    kernels = driver.load(ENTRY_POINTS_OF_CUBIN)
    assert tuple(kernels) == ENTRY_POINTS
    stream = driver.stream()
    launch = gather_rows(
        [RowCopy(source=256, target=512, row_bytes=4)],
        rows=1024, count=2, source_rows=3, multiprocessors=1,
    )  # fmt: skip
    driver.launch(kernels["gather_rows"], launch, stream)
    size = (launch.grid, 1), (launch.block, 1, 1)
    expected = ("launch", "gather_rows", *size, launch.arguments.tobytes(), 0, stream.handle)
    assert gpu.log == [expected]
    stream.close()


def test_a_cubin_of_another_gpu_is_a_backend_error(driver: PyCudaDriver) -> None:
    with pytest.raises(BackendError, match="kernel image is invalid"):
        driver.load(b"other")


def test_close_says_what_memory_was_left(gpu: Gpu) -> None:
    driver = PyCudaDriver()
    with driver.current():
        driver.allocate(4)
    with pytest.raises(BackendError, match=facts("1 pieces", "device memory")):
        driver.close()
    assert gpu.memory == {}


def test_kernels_are_unloaded_by_close_even_if_somebody_keeps_them(gpu: Gpu) -> None:
    driver = PyCudaDriver()
    with driver.current():
        kernels = driver.load(ENTRY_POINTS_OF_CUBIN)
    assert gpu.alive == ["module"]
    driver.close()
    assert gpu.alive == []
    assert len(kernels) == 0


def test_an_error_is_a_backend_error_until_a_wait_finds_the_context_lost(
    driver: PyCudaDriver, gpu: Gpu
) -> None:
    stream, event, address = driver.stream(), driver.event(), driver.allocate(8)
    gpu.fault = "an illegal memory access was encountered"
    with pytest.raises(BackendError, match=r"CUDA failed: cuMemcpyDtoDAsync failed") as raised:
        driver.copy_within(address, address + 4, 4, stream)
    assert not isinstance(raised.value, DeviceLostError)
    with pytest.raises(DeviceLostError, match=r"illegal memory access.*restarted"):
        driver.synchronize(event)
    with pytest.raises(DeviceLostError, match=r"cuEventSynchronize"):
        driver.copy_within(address, address + 4, 4, stream)
    gpu.fault = ""
    driver.free(address)
    stream.close()
    event.close()


def test_close_of_a_lost_context_releases_what_can_be(gpu: Gpu) -> None:
    driver = PyCudaDriver()
    with driver.current():
        event = driver.event()
        driver.load(ENTRY_POINTS_OF_CUBIN)
        driver.allocate(4)
        gpu.fault = "unspecified launch failure"
        with pytest.raises(DeviceLostError):
            driver.synchronize(event)
        event.close()
    with pytest.raises(BackendError, match="1 pieces"):
        driver.close()
    assert gpu.alive == []


# Graphs.


def test_a_graph_is_captured_once_and_launched_often(driver: PyCudaDriver, gpu: Gpu) -> None:
    stream, address = driver.stream(), driver.allocate(8)
    graph = driver.capture(stream, lambda: driver.clear(address, 8, stream))
    assert graph is not None
    assert gpu.log == []
    assert gpu.bindings.modes == [Mode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL]
    assert len(gpu.graphs) == 1  # what it was made from is destroyed
    for _ in range(2):
        graph.launch(stream)
    assert gpu.log == [("set", address, 0, 8, stream.handle)] * 2
    graph.close()
    graph.close()
    with pytest.raises(BackendError, match="launched after it was closed"):
        graph.launch(stream)
    driver.free(address)
    stream.close()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_cannot_be_captured_runs_without_a_graph_and_says_so_once(
    driver: PyCudaDriver, gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    stream = driver.stream()

    def refuse() -> None:
        raise BackendError("TensorRT could not run the engine: not permitted when capturing")

    assert driver.capture(stream, refuse) is None
    assert driver.capture(stream, refuse) is None
    assert gpu.captured == {}  # the stream is as before
    gpu.invalid = True
    assert driver.capture(stream, refuse) is None
    assert driver.capture(stream, lambda: None) is None
    (first, second) = said(caplog)
    assert "not permitted when capturing" in first
    tells(second, "capture", "operation failed due to a previous error")
    assert "(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)" in second
    stream.close()


def test_a_graph_that_cannot_be_made_executable(
    driver: PyCudaDriver, gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    stream = driver.stream()
    bad = driver.capture(stream, lambda: gpu.enqueue(stream.handle, "bad"))
    assert bad is None
    assert "instantiate a graph: an unknown error (CUDA_ERROR_INVALID_VALUE)" in said(caplog)[0]
    assert gpu.graphs == {}
    stream.close()


def test_any_other_error_ends_the_capture_and_is_raised(driver: PyCudaDriver, gpu: Gpu) -> None:
    stream = driver.stream()
    with pytest.raises(ZeroDivisionError):
        driver.capture(stream, lambda: 1 // 0 and None)
    assert gpu.captured == {}
    assert gpu.graphs == {}
    stream.close()


def test_without_the_bindings_there_are_no_graphs_and_one_line_says_what_to_install(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    driver = PyCudaDriver()
    with driver.current():
        stream = driver.stream()
        ran: list[int] = []
        assert driver.capture(stream, lambda: ran.append(1)) is None
        assert driver.capture(stream, lambda: ran.append(1)) is None
        stream.close()
    assert ran == []
    (line,) = said(caplog)
    assert line.endswith("pip install cuda-bindings")


def test_bindings_that_find_no_driver_of_theirs_are_given_up(
    driver: PyCudaDriver,
    gpu: Gpu,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def begin(stream: object, mode: object) -> None:
        raise RuntimeError('Function "cuStreamBeginCapture" not found')

    stream = driver.stream()
    with monkeypatch.context() as patched:
        patched.setattr(gpu.bindings, "cuStreamBeginCapture", begin)
        assert driver.capture(stream, lambda: None) is None
    assert driver.capture(stream, lambda: None) is None
    assert "cuda-bindings: Function" in said(caplog)[0]
    stream.close()


# The fakes are like the real ones.


def test_the_fake_has_what_pycuda_has(gpu: Gpu) -> None:
    real = pycuda()
    for name, value in vars(gpu.driver).items():
        if name.startswith("__"):
            continue
        assert name in real.names
        if inspect.isfunction(value):
            ours = list(inspect.signature(value).parameters)
            (signature,) = signatures_of(real.names[name])
            theirs = [parameter.name for parameter in signature.parameters]
            assert theirs[: len(ours)] == ours or name == "mem_alloc"
        for member, method in vars(value).items() if name in real.classes else ():
            if not member.startswith("_") and inspect.isfunction(method):
                assert member in real.classes[name] or name == "DeviceAllocation"


def test_the_fake_has_what_the_bindings_have(gpu: Gpu) -> None:
    real = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    if real is gpu.bindings:
        real = _real_bindings()
    for name, value in vars(gpu.bindings).items():
        if name.startswith("cu"):
            documented = getattr(real, name).__doc__.partition("\n")[0]
            count = documented.partition("(")[2].count(",") + 1
            assert count == len(inspect.signature(value).parameters), documented
    for enum in ("CUresult", "CUstreamCaptureMode"):
        for member in getattr(gpu.bindings, enum):
            assert getattr(real, enum)[member.name] == member.value
    assert int(real.CUstream(5)) == 5
    assert int(real.CUgraph()) == 0  # what a capture that failed gives


def _real_bindings() -> ModuleType:
    """Return the real package instead of the fake."""
    fake = sys.modules.pop("cuda.bindings.driver")
    try:
        return pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    finally:
        sys.modules["cuda.bindings.driver"] = fake


def test_it_is_a_driver(driver: PyCudaDriver) -> None:
    asked = {name for name in vars(Driver) if not name.startswith("_")}
    for name in asked:
        given = getattr(driver, name)
        wanted = getattr(Driver, name)
        if callable(given):
            names = list(inspect.signature(wanted).parameters)[1:]
            assert list(inspect.signature(given).parameters) == names


def test_numbers_are_bytes(driver: PyCudaDriver) -> None:
    pinned = driver.allocate_pinned(8)
    assert pinned.array.dtype == np.uint8
    pinned.free()
