"""What a run took of memory and disk is known in the end, and said."""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from offramp.calibration.scratch import ScratchSpace
from offramp.compiler import memory
from offramp.compiler.memory import count_process, peak_bytes
from offramp.compiler.printing import print_use


@pytest.fixture(autouse=True)
def _nothing_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_most_together", 0)


def test_the_peak_stays_when_memory_is_given_back() -> None:
    held = np.ones(2**23)
    size = held.nbytes
    del held
    peak = peak_bytes()
    assert peak is not None
    assert peak > size


def test_a_process_counts_with_what_this_one_has_beside_it() -> None:
    before = peak_bytes()
    assert before is not None
    count_process(2**50)
    together = peak_bytes()
    assert together is not None
    assert 2**50 < together <= 2**50 + before + 2**30
    count_process(1)
    assert peak_bytes() == together


def test_scratch_counts_the_most_at_once() -> None:
    scratch = ScratchSpace()
    scratch.take(5)
    with scratch.taking(10):
        pass
    with scratch.taking(2):
        assert scratch.taken_bytes == 7
    assert (scratch.taken_bytes, scratch.peak_bytes) == (5, 15)


def test_what_a_run_took_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_most_together", 5 * 2**40)
    scratch = ScratchSpace()
    scratch.take(3 * 2**30)
    out = io.StringIO()
    print_use(scratch, Console(file=out))
    told = f"Took:   at most 5,120.00 GiB of memory and 3.00 GiB of scratch in {scratch.place}\n"
    assert out.getvalue() == told
