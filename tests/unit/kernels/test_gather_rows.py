"""Rows picked by their numbers, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.kernels.cases import GatherCase, gathers
from tests.unit.kernels.shim import Cpu


@settings(max_examples=80)
@given(case=gathers(), seed=st.integers(0, 2**32))
def test_rows_arrive_in_the_given_order(cpu: Cpu, case: GatherCase, seed: int) -> None:
    case.run(cpu, seed=seed, resident=2)


@pytest.mark.parametrize("row_bytes", [(), (16, 3)])
def test_no_rows_are_no_fault(cpu: Cpu, row_bytes: tuple[int, ...]) -> None:
    numbers = np.empty(0, np.int32)
    rng = np.random.default_rng(0)
    GatherCase(numbers=numbers, source_rows=5, row_bytes=row_bytes, rng=rng).run(cpu)
