"""The kernels on a GPU, on the cases that the CPU has had, held against numpy."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.kernels.cases import (
    SCORE_TYPES,
    GatherCase,
    StageEndCase,
    gathers,
    new_scratch,
    random_scores,
    stage_ends,
    stored,
)
from tests.unit.kernels.shim import Guarded

from offramp.engine.kernels.kernel_arguments import CheckKind, ExitCheck, Launch, ScoreType
from offramp.tools.gpu.device import Gpu, open_gpu

pytestmark = pytest.mark.gpu

EXAMPLES = int(os.environ.get("OFFRAMP_GPU_EXAMPLES", "300"))
"""Fewer under compute-sanitizer, which takes its time."""
CARRIED = (4096, 2064, 100, 17)
"""Rows of every kind of alignment."""


def stage_end_case(
    seed: int,
    rows: int,
    kind: CheckKind,
    *,
    score_type: ScoreType = "float32",
    multiprocessors: int = 132,
    scratch: Guarded | None = None,
) -> StageEndCase:
    """One whose rows partly exit."""
    rng = np.random.default_rng(seed)
    values = stored(random_scores(rng, (rows, 1000), kind), score_type)
    return StageEndCase(
        check=ExitCheck(kind=kind, classes=1000, threshold=0.5),
        values=values,
        score_type=score_type,
        rng=rng,
        row_bytes=CARRIED,
        multiprocessors=multiprocessors,
        scratch=scratch,
    )


@settings(max_examples=EXAMPLES)
@given(case=stage_ends(), multiprocessors=st.sampled_from([1, 3, None]))
def test_stage_ends_are_as_numpy_has_them(
    gpu: Gpu, case: StageEndCase, multiprocessors: int | None
) -> None:
    case.multiprocessors = multiprocessors or gpu.multiprocessors
    case.run(gpu)


@settings(max_examples=EXAMPLES)
@given(case=gathers())
def test_gathered_rows_are_as_numpy_has_them(gpu: Gpu, case: GatherCase) -> None:
    case.multiprocessors = gpu.multiprocessors
    case.run(gpu)


@pytest.mark.parametrize("score_type", SCORE_TYPES)
@pytest.mark.parametrize("kind", CheckKind)
@pytest.mark.parametrize("rows", [0, 1, 2, 31, 32, 33, 128, 257])
def test_batches_of_all_sizes(gpu: Gpu, rows: int, kind: CheckKind, score_type: ScoreType) -> None:
    stage_end_case(
        rows, rows, kind, score_type=score_type, multiprocessors=gpu.multiprocessors
    ).run(gpu)


def test_a_batch_of_65535(gpu: Gpu) -> None:
    """More blocks are needed than fit on the device together: copiers wait for checkers."""
    rng = np.random.default_rng(1)
    values = random_scores(rng, (65535, 10), CheckKind.LOGITS)
    StageEndCase(
        check=ExitCheck(kind=CheckKind.LOGITS, classes=10, threshold=0.5),
        values=values,
        score_type="float32",
        rng=rng,
        row_bytes=(2048, 3),
        multiprocessors=gpu.multiprocessors,
    ).run(gpu)


def test_more_blocks_than_fit(gpu: Gpu) -> None:
    """The grid is sized for a device many times as large: the wait must end all the same."""
    stage_end_case(2, 2048, CheckKind.LOGITS, multiprocessors=40 * gpu.multiprocessors).run(gpu)


def test_one_scratch_serves_launch_after_launch(gpu: Gpu) -> None:
    scratch = new_scratch(257, np.random.default_rng(3))
    for seed, (rows, kind) in enumerate(
        (rows, kind) for rows in (257, 0, 33, 1, 128) for kind in CheckKind
    ):
        stage_end_case(seed, rows, kind, scratch=scratch).run(gpu)


class Repeating:
    """A device that launches again and again, without a look in between."""

    def __init__(self, gpu: Gpu, times: int) -> None:
        self._gpu = gpu
        self._times = times

    def place(self, memory: Guarded) -> int:
        return self._gpu.place(memory)

    def launch(self, launch: Launch, *, seed: int = 0, resident: int = 4) -> None:
        for _ in range(self._times):
            self._gpu.enqueue(launch)
        self._gpu.launch(launch)

    def fetch(self, memory: Guarded) -> None:
        self._gpu.fetch(memory)


def test_repeated_launches_need_no_reset_in_between(gpu: Gpu) -> None:
    stage_end_case(4, 64, CheckKind.LOGITS).run(Repeating(gpu, times=500))


def test_streams_side_by_side_do_not_disturb_each_other(gpu: Gpu) -> None:
    """Each with scratch of its own, on a thread of its own, as slots have it."""

    def work(seed: int) -> int:
        with open_gpu() as own:
            device = Repeating(own, times=300)
            for kind in CheckKind:
                stage_end_case(seed, 40 + seed, kind).run(device)
        return seed

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(work, range(3))) == [0, 1, 2]


class Mapped:
    """A device whose small results lie in pinned host memory that it writes to."""

    def __init__(self, gpu: Gpu, on_device: list[Guarded]) -> None:
        self._gpu = gpu
        self._on_device = {id(memory) for memory in on_device}
        self._pinned: dict[int, np.ndarray] = {}

    def place(self, memory: Guarded) -> int:
        if id(memory) in self._on_device:
            return self._gpu.place(memory)
        self._pinned[id(memory)], address = self._gpu.pinned(memory.whole)
        return address + memory.offset

    def launch(self, launch: Launch, *, seed: int = 0, resident: int = 4) -> None:
        self._gpu.launch(launch)

    def fetch(self, memory: Guarded) -> None:
        if id(memory) in self._on_device:
            self._gpu.fetch(memory)
        else:
            memory.whole[:] = self._pinned[id(memory)]


@pytest.mark.parametrize("kind", CheckKind)
def test_results_go_straight_to_pinned_host_memory(gpu: Gpu, kind: CheckKind) -> None:
    case = stage_end_case(5, 33, kind)
    results = {id(memory) for memory in case.outputs.values()}
    on_device = [memory for memory in case.memories() if id(memory) not in results]
    case.run(Mapped(gpu, on_device))
