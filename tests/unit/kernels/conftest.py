"""The kernels compiled for the CPU, once a session."""

from __future__ import annotations

import pytest
from tests.unit.kernels.shim import Cpu, build, find_compiler


@pytest.fixture(scope="session")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> Cpu:
    if find_compiler() is None:
        pytest.skip("no C++ compiler here: CXX, g++, c++, clang++")
    return Cpu(build(tmp_path_factory.mktemp("kernels")))
