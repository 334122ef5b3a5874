"""The structs are those of the C++ side, and what it would misread is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.facts import Told, facts
from tests.unit.kernels.shim import SOURCES, Cpu

from offramp.engine.kernels import kernel_arguments
from offramp.engine.kernels.kernel_arguments import (
    ENTRY_POINTS,
    CheckKind,
    ExitCheck,
    Launch,
    Results,
    RowCopy,
    Scratch,
    gather_rows,
    stage_end,
)

STRUCTS = {
    "RowCopy": kernel_arguments.ROW_COPY,
    "RowScratch": kernel_arguments.ROW_SCRATCH,
    "StageEnd": kernel_arguments.STAGE_END_ARGUMENTS,
    "GatherRows": kernel_arguments.GATHER_ROWS_ARGUMENTS,
}
RESULTS = Results(confidence=0x10, survivors=0x40, survivor_count=0x50)
SCRATCH = Scratch(address=0x1000, rows=64)
COPY = RowCopy(source=0x100000, target=0x900000, row_bytes=2048)


def test_structs_are_those_of_the_device(cpu: Cpu) -> None:
    layout = {}
    for name, dtype in STRUCTS.items():
        layout[name] = dtype.itemsize
        assert dtype.fields is not None
        layout |= {f"{name}.{field}": dtype.fields[field][1] for field in dtype.names or ()}
    layout |= {kind.name: int(kind) for kind in CheckKind}
    layout |= {
        "Scratch.tickets": 0,
        "Scratch.rows": Scratch.bytes_for(1) - kernel_arguments.ROW_SCRATCH.itemsize,
        "alignof Scratch": kernel_arguments.SCRATCH_ALIGNMENT,
        "MOST_TENSORS": kernel_arguments.MOST_TENSORS,
        "WORDS_A_PIECE": 128,
    }
    assert cpu.layout() == layout


def test_every_entry_point_is_a_kernel_of_the_sources() -> None:
    text = "".join(path.read_text() for path in SOURCES.glob("*.cu"))
    for name in ENTRY_POINTS:
        assert f"{name}(" in text or f"({name}," in text


def test_structs_fit_every_device() -> None:
    for dtype in STRUCTS.values():
        assert dtype.itemsize <= 4096  # of parameters; more needs compute capability 7.0


def make(check: ExitCheck | None = None, **changes: Any) -> Launch:
    given: dict[str, Any] = {
        "rows": 32,
        "scores": 0x200,
        "score_type": "float32",
        "results": RESULTS,
        "scratch": SCRATCH,
        "multiprocessors": 132,
    } | changes
    check = check or ExitCheck(kind=CheckKind.LOGITS, classes=1000, threshold=0.5)
    return stage_end(check, **given)


def test_a_batch_of_32_takes_a_block_a_row_and_copies_with_the_whole_device() -> None:
    large = RowCopy(source=1 << 40, target=1 << 41, row_bytes=256 * 56 * 56 * 2)
    launch = make(tensors=[large])
    assert launch.entry_point == "stage_end_float32"
    assert launch.block == 256
    assert launch.arguments["check_blocks"] == 32
    assert launch.grid == 32 + 4 * 132
    assert launch.arguments["tensor_count"] == 1
    assert launch.arguments["tensors"][0].tolist() == (1 << 40, 1 << 41, large.row_bytes)


def test_small_tensors_take_no_more_blocks_than_there_is_work() -> None:
    assert make(tensors=[COPY]).grid == 32 + 4  # 32 pieces, 8 warps a block
    assert make(tensors=[COPY, COPY]).grid == 32 + 8


def test_nothing_to_copy_takes_no_copy_block() -> None:
    assert make().grid == 32
    empty = RowCopy(source=0, target=0, row_bytes=0)
    assert make(tensors=[empty]).grid == 32
    assert make(rows=0, tensors=[COPY]).grid == 1  # which still writes the count


def test_no_more_blocks_check_than_are_resident() -> None:
    launch = make(rows=2000, scratch=replace(SCRATCH, rows=2000))
    assert launch.grid == launch.arguments["check_blocks"] == 4 * 132


def test_many_classes_take_larger_blocks() -> None:
    check = ExitCheck(kind=CheckKind.PROBABILITIES, classes=21843, threshold=0.5)
    assert make(check).block == 1024


def test_structs_can_be_kept_and_changed() -> None:
    launch = make()
    launch.arguments["threshold"] = 0.75
    assert np.frombuffer(launch.arguments.tobytes(), launch.arguments.dtype)["threshold"] == 0.75


@pytest.mark.parametrize(
    ("source", "target", "row_bytes", "word_bytes"),
    [(256, 512, 64, 16), (256, 512, 8, 4), (260, 512, 64, 4), (256, 514, 64, 2), (256, 512, 3, 1)],
)
def test_words_are_as_wide_as_all_rows_allow(source, target, row_bytes, word_bytes) -> None:
    copy = RowCopy(source=source, target=target, row_bytes=row_bytes)
    assert copy.word_bytes == word_bytes


@pytest.mark.parametrize("threshold", [2.5, float("nan")])
def test_thresholds_that_make_no_sense_are_refused(threshold: float) -> None:
    with pytest.raises(ValueError, match=f"confidence threshold {threshold} is not in"):
        ExitCheck(kind=CheckKind.LOGITS, classes=10, threshold=threshold)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": -1}, ("-1 rows",)),
        ({"rows": 65}, ("65 rows", "64")),
        ({"scratch": Scratch(address=0x1040, rows=64)}, ("aligned to 128",)),
        ({"scores": 0}, ("scores at 0x0",)),
        ({"scores": 0x202}, ("0x202", "float32")),
        ({"results": replace(RESULTS, confidence=0)}, ("confidence at 0x0",)),
        ({"results": replace(RESULTS, survivors=2)}, ("survivors at 0x2",)),
        ({"tensors": [COPY] * 17}, ("17 tensors", "at most 16")),
        (
            {"tensors": [RowCopy(source=0x1000, target=0x1000 + 31 * 16, row_bytes=16)]},
            ("would overwrite their source",),
        ),
        (
            {"tensors": [RowCopy(source=1 << 40, target=(1 << 50) + 1, row_bytes=2**31 - 2)] * 1},
            ("too many",),
        ),
    ],
)
def test_stage_ends_that_would_do_harm_are_refused(changes: dict[str, Any], message: Told) -> None:
    if "too many" in message:
        changes = changes | {"rows": 64}
    with pytest.raises(ValueError, match=facts(*message)):
        make(**changes)


@pytest.mark.parametrize(
    ("source", "row_bytes", "message"),
    [
        (1, -1, "a row of -1 bytes"),
        (1, 2**31, "a row of 2147483648 bytes"),
        (0, 4, "null is not an address"),
    ],
)
def test_rows_that_cannot_be_copied_are_refused(source: int, row_bytes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RowCopy(source=source, target=1 << 40, row_bytes=row_bytes)


def test_gathers_that_would_do_harm_are_refused() -> None:
    with pytest.raises(ValueError, match="row numbers at 0x2"):
        gather_rows([COPY], rows=2, count=1, source_rows=1, multiprocessors=1)
    overlapping = RowCopy(source=0x1000, target=0x1040, row_bytes=16)
    with pytest.raises(ValueError, match="would overwrite"):
        gather_rows([overlapping], rows=4, count=1, source_rows=5, multiprocessors=1)
    gather_rows([overlapping], rows=4, count=1, source_rows=4, multiprocessors=1)
