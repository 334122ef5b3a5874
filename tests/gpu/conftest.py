"""Skips what needs a GPU where there is none; see docs/gpu.md and tools/gpu."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from offramp.bundle import Bundle
from offramp.engine.common.errors import BackendError
from offramp.engine.tensorrt import probe
from offramp.tools.gpu.device import Gpu, open_gpu


def lacking(*, tensorrt: bool) -> str:
    """Return the reason why a test cannot run here; empty if it can."""
    try:
        if tensorrt:
            probe.require("cuda:0")
        else:
            probe.find_device(0)
    except BackendError as error:
        return str(error)
    return "" if find_spec("pycuda") else "PyCUDA is not installed"


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    assert marker is not None, "tests of this folder have the marker gpu"
    reason = lacking(tensorrt=item.path.stem == "test_engines")
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def gpu() -> Iterator[Gpu]:
    """A stream with our kernels; its context stays current on the tests' thread."""
    with open_gpu() as opened:
        yield opened


def carried(name: str) -> Bundle:
    """A bundle made elsewhere: making one takes torch, which may not be here."""
    place = os.environ.get("OFFRAMP_GPU_PLACE", "/tmp/offramp-gpu")
    path = Path(place) / "bundles" / f"{name}.ee"
    if not path.is_dir():
        pytest.skip(f"{path} is not here: tools/gpu/collect.sh carries it")
    return Bundle.open(path)


def copied(bundle: Bundle, folder: Path) -> Path:
    """A copy to build engines in."""
    path = folder / bundle.path.name
    shutil.copytree(bundle.path, path, ignore=shutil.ignore_patterns("engines"))
    return path


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The shipped example."""
    return copied(carried("fashion"), tmp_path)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """The bundle ``residual`` of tests/engines.py."""
    return copied(carried("residual"), tmp_path)


@pytest.fixture
def transformer(tmp_path: Path) -> Path:
    """The bundle ``bert`` of tests/engines.py."""
    return copied(carried("bert"), tmp_path)
