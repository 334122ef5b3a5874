"""Exit check and compaction on the CPU, held against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.kernels.cases import (
    SCORE_TYPES,
    StageEndCase,
    new_scratch,
    random_scores,
    stage_ends,
    stored,
    widened,
)
from tests.unit.kernels.shim import Cpu

from offramp.bundle import NEVER
from offramp.engine.kernels.kernel_arguments import CheckKind, ExitCheck, ScoreType


def classification(
    answer: npt.ArrayLike,
    *,
    threshold: float = 0.5,
    kind: CheckKind = CheckKind.LOGITS,
    score_type: ScoreType = "float32",
    **more: Any,
) -> StageEndCase:
    values = np.asarray(answer, np.float32)
    return StageEndCase(
        check=ExitCheck(kind=kind, classes=values.shape[1], threshold=threshold),
        values=stored(values, score_type),
        score_type=score_type,
        rng=np.random.default_rng(1),
        **more,
    )


@settings(max_examples=150)
@given(
    case=stage_ends(),
    seed=st.integers(0, 2**32),
    resident=st.integers(1, 6),
    block=st.sampled_from([None, 32, 64, 256, 512]),
)
def test_everything_is_as_numpy_has_it(
    cpu: Cpu, case: StageEndCase, seed: int, resident: int, block: int | None
) -> None:
    case.run(cpu, seed=seed, resident=resident, block=block)


@pytest.mark.parametrize("score_type", SCORE_TYPES)
@pytest.mark.parametrize("kind", CheckKind)
@pytest.mark.parametrize("rows", [1, 31, 32, 33, 257])
def test_batches_of_all_sizes(cpu: Cpu, rows: int, kind: CheckKind, score_type: ScoreType) -> None:
    rng = np.random.default_rng(rows)
    check = ExitCheck(kind=kind, classes=100, threshold=0.6)
    values = stored(random_scores(rng, (rows, 100), kind), score_type)
    case = StageEndCase(
        check=check, values=values, score_type=score_type, rng=rng, row_bytes=(48, 5)
    )
    case.run(cpu, seed=rows, block=64)
    assert rows == 1 or 0 < len(case.exited()) < rows  # the case is worth its name


def test_an_empty_batch_gives_a_count_of_none(cpu: Cpu) -> None:
    for row_bytes in ((), (16, 3)):
        case = classification(np.empty((0, 10)), row_bytes=row_bytes)
        case.run(cpu)
        assert case.outputs["survivor_count"].view(np.int32)[0] == 0


@pytest.mark.parametrize("resident", [1, 2, 64])
@pytest.mark.parametrize("threshold", [0, 0.5, NEVER])
def test_all_exit_or_none_however_few_blocks_fit(cpu: Cpu, threshold: float, resident: int) -> None:
    logits = np.random.default_rng(3).normal(0, 3, (64, 10))
    case = classification(logits, threshold=threshold, row_bytes=(4096, 100), multiprocessors=3)
    for seed in range(4):
        case.run(cpu, seed=seed, resident=resident)
    exited = len(case.exited())
    assert {0: exited == 64, 0.5: 0 < exited < 64, NEVER: exited == 0}[threshold]


def test_a_batch_of_65535(cpu: Cpu) -> None:
    rng = np.random.default_rng(4)
    check = ExitCheck(kind=CheckKind.PROBABILITIES, classes=1, threshold=0.5)
    values = rng.random((65535, 1)).astype(np.float32)
    case = StageEndCase(
        check=check, values=values, score_type="float32", rng=rng, row_bytes=(2, 16)
    )
    case.run(cpu, block=32, resident=2)


@pytest.mark.parametrize("kind", CheckKind)
def test_many_classes(cpu: Cpu, kind: CheckKind) -> None:
    rng = np.random.default_rng(5)
    logits = random_scores(rng, (6, 21843), kind)
    case = classification(logits, kind=kind, row_bytes=(16,))
    assert case.launch(cpu).block == 1024
    case.run(cpu, seed=1, resident=2)


@pytest.mark.parametrize("score_type", SCORE_TYPES)
@pytest.mark.parametrize("block", [32, 256])
def test_what_is_no_number_and_ties(cpu: Cpu, block: int, score_type: ScoreType) -> None:
    inf, nan = np.inf, np.nan
    rows = [
        ([2, 2, -inf, -inf], 0.5),
        ([nan, 2, nan, 0], 0),
        ([1, 2, nan, inf], 0),
        ([inf, 2, inf, 0], 0),
        ([-inf, -inf, -inf, -inf], 0),
        ([-inf, -inf, 5, -inf], 1),
        ([inf, -inf, nan, nan], 0),
        ([7, 7, 7, 7], 0.25),
        ([0.0, -0.0, 0, -0.0], 0.25),
        ([-0.0, 0.0, -inf, -inf], 0.5),
    ]
    case = classification([row for row, _ in rows], score_type=score_type)
    case.run(cpu, block=block)
    confidence = case.outputs["confidence"].view(np.float32)
    assert confidence.tolist() == [expected for _, expected in rows]


def test_probabilities_are_clipped_and_none_reaches_never(cpu: Cpu) -> None:
    answer = [[np.inf, 0], [1.5, 0], [-1, -2], [np.nan, 1], [0.25, 0.75]]
    case = classification(answer, kind=CheckKind.PROBABILITIES, threshold=NEVER)
    case.run(cpu)
    assert case.outputs["confidence"].view(np.float32).tolist() == [1, 1, 0, 0, 0.75]
    assert case.exited() == []


@pytest.mark.parametrize("score_type", SCORE_TYPES)
def test_thresholds_are_reached_by_what_equals_them(cpu: Cpu, score_type: ScoreType) -> None:
    answer = [[0.75, 0], [0.74609375, 0], [0.75390625, 0]]  # neighbours of 0.75 in bfloat16
    case = classification(
        answer, kind=CheckKind.PROBABILITIES, threshold=0.75, score_type=score_type
    )
    case.run(cpu)
    assert case.exited() == [0, 2]


def test_every_half_and_bfloat16_is_widened_exactly(cpu: Cpu) -> None:
    bits = np.arange(65536, dtype=np.uint16)
    halves = cpu.widen(bits, brain=False)
    np.testing.assert_array_equal(halves, bits.view(np.float16).astype(np.float32))
    np.testing.assert_array_equal(np.signbit(halves), bits >= 0x8000)  # −0, too
    np.testing.assert_array_equal(cpu.widen(bits, brain=True), widened(bits))


def test_one_scratch_serves_launches_of_all_sizes_and_kinds(cpu: Cpu) -> None:
    rng = np.random.default_rng(7)
    scratch = new_scratch(257, rng)
    for seed, (rows, kind) in enumerate(
        [
            (9, CheckKind.LOGITS),
            (0, CheckKind.LOGITS),
            (257, CheckKind.PROBABILITIES),
            (1, CheckKind.LOGITS),
        ]
    ):
        check = ExitCheck(kind=kind, classes=6, threshold=0.6)
        values = random_scores(rng, (rows, 6), kind)
        case = StageEndCase(
            check=check,
            values=values,
            score_type="float32",
            rng=rng,
            row_bytes=(16,) if seed % 2 else (),
            scratch=scratch,
        )
        case.run(cpu, seed=seed, block=64)


def test_results_do_not_depend_on_the_order_of_threads(cpu: Cpu) -> None:
    logits = np.random.default_rng(8).normal(0, 1, (20, 700))
    first, *others = (classification(logits) for _ in range(6))
    first.run(cpu, seed=0)
    for seed, case in enumerate(others):
        case.run(cpu, seed=seed + 1, resident=seed + 1)
        for name, memory in case.outputs.items():
            if name != "survivors":  # of which noise is left
                np.testing.assert_array_equal(memory.bytes, first.outputs[name].bytes)
