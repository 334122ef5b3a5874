"""Memory and disk usage of a run is known and reported at the end."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from rich.console import Console

from offramp.calibration.data.scratch import ScratchSpace
from offramp.compiler.commands.printing import print_use
from offramp.compiler.common import resources
from offramp.compiler.common.progress import Advance
from offramp.compiler.common.resources import (
    MemoryReleasingProgress,
    count_process,
    give_back,
    peak_bytes,
)
from offramp.engine.backends.onnxruntime import make_session


@pytest.fixture(autouse=True)
def _nothing_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "_most_together", 0)


def test_the_peak_stays_when_memory_is_given_back() -> None:
    held = np.ones(2**23)
    size = held.nbytes
    del held
    peak = peak_bytes()
    assert peak is not None
    assert peak > size


def test_peak_memory_adds_another_process_to_this_one() -> None:
    before = peak_bytes()
    assert before is not None
    count_process(2**50)
    together = peak_bytes()
    assert together is not None
    assert 2**50 < together <= 2**50 + before + 2**30
    count_process(1)
    assert peak_bytes() == together


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="only Linux tells a process's memory so"
)


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


@needs_proc
def test_what_large_batches_took_is_given_back() -> None:
    size = 2**26
    nodes = [helper.make_node("Abs", ["x"], ["y"]), helper.make_node("Neg", ["y"], ["z"]),
             helper.make_node("ReduceMax", ["z"], ["m"])]  # fmt: skip
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n"])
    m = helper.make_tensor_value_info("m", onnx.TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "g", [x], [m])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = make_session(model.SerializeToString(), 1)
    zeros = np.zeros(size // 4, np.float32)
    session.run(None, {"x": zeros})
    before = anonymous_bytes()
    give_back()
    assert anonymous_bytes() < before - size // 2
    assert session.run(None, {"x": zeros}) == [0.0]


def test_steps_begin_with_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(resources, "give_back", lambda: done.append("given back"))

    class Told:
        @contextmanager
        def step(self, title: str, total: int) -> Iterator[Advance]:
            done.append((title, total))
            yield done.append

    with MemoryReleasingProgress(Told()).step("Slice", 2) as advance:
        advance(1)
    assert done == ["given back", ("Slice", 2), 1]


def test_scratch_counts_the_most_at_once() -> None:
    scratch = ScratchSpace()
    scratch.take(5)
    with scratch.taking(10):
        pass
    with scratch.taking(2):
        assert scratch.taken_bytes == 7
    assert (scratch.taken_bytes, scratch.peak_bytes) == (5, 15)


def test_what_a_run_took_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "_most_together", 5 * 2**40)
    scratch = ScratchSpace()
    scratch.take(3 * 2**30)
    out = io.StringIO()
    print_use(scratch, Console(file=out))
    told = f"Took:   at most 5,120.00 GiB of memory and 3.00 GiB of scratch in {scratch.place}\n"
    assert out.getvalue() == told
