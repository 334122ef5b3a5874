"""TensorRT, PyCUDA and the driver, all of them fakes."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from tests.unit.tensorrt.bindings import TENSORRT_VERSIONS
from tests.unit.tensorrt.fake_cuda import Cuda
from tests.unit.tensorrt.fake_driver import FakeDriver
from tests.unit.tensorrt.fake_tensorrt import FakeTensorRT

from offramp.engine.cuda.primary_context import primary_context
from offramp.engine.tensorrt import probe, tensorrt_messages


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(probe, "_load_driver", lambda: fake)
    return fake


@pytest.fixture(params=TENSORRT_VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def fake(
    version: str, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeTensorRT]:
    """A TensorRT of each version, installed on a machine with a GPU; nothing may leak on it."""
    cuda = Cuda()
    tensorrt = FakeTensorRT(version, cuda)
    monkeypatch.setitem(sys.modules, "tensorrt", tensorrt.module)
    monkeypatch.setitem(sys.modules, "pycuda", cuda.package)
    monkeypatch.setitem(sys.modules, "pycuda.driver", cuda.driver)
    forget()
    yield tensorrt
    forget()
    assert cuda.memory == {}, "device memory was not freed"
    assert not any(cuda.stacks.values()), "a context was left current"
    assert not tensorrt_messages._collectors


def forget() -> None:
    """Drop what is kept for a whole process."""
    tensorrt_messages.logger.cache_clear()
    primary_context.cache_clear()
