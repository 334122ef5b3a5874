"""Our kernels in numpy, for the fake driver: they need no compiler, and their accesses are checked.

The arguments of a launch are parsed from the bytes that a GPU would get.
``engine/answers/exit_check.py`` defines the results; tests compare both with the kernels' sources,
compiled for the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import AnswerForm
from offramp.engine.answers.exit_check import confidence_of, exits
from offramp.engine.kernels.kernel_arguments import (
    GATHER_ROWS,
    MOST_TENSORS,
    ROW_SCRATCH,
    STAGE_END,
    CheckKind,
    Launch,
    Scratch,
)
from offramp.testing.cuda_memory import ByteRange, MisuseError

Use: TypeAlias = Callable[[ByteRange], NDArray[np.uint8]]
"""Function that returns the content of a range of device memory, for reading or writing."""

_COUNTERS_BYTES: Final = Scratch.bytes_for(1) - ROW_SCRATCH.itemsize
_SCORE_TYPES: Final = {entry_point: score_type for score_type, entry_point in STAGE_END.items()}


def ranges_of(launch: Launch) -> tuple[ByteRange, ...]:
    """Return the ranges that a launch may touch, as far as they are known before it runs."""
    if launch.entry_point == GATHER_ROWS:
        return tuple(_ranges_of_gather(launch.arguments))
    return tuple(_ranges_of_stage_end(launch))


def run(launch: Launch, use: Use) -> None:
    """Run the kernel in numpy; MisuseError for an access that is not allowed."""
    if launch.entry_point == GATHER_ROWS:
        _gather_rows(launch.arguments, use)
    elif launch.entry_point in _SCORE_TYPES:
        _stage_end(launch, use)
    else:
        raise MisuseError(f"there is no kernel {launch.entry_point!r}")


def touch(launch: Launch, use: Use) -> None:
    """Check the accesses of a launch without running it: another implementation runs the kernel."""
    for used in ranges_of(launch):
        use(used)
    if launch.entry_point == GATHER_ROWS:
        numbers = _row_numbers(launch.arguments, use)
        for source, _, row_bytes in _tensors(launch.arguments):
            _rows_between(source, row_bytes, numbers, use)


def _ranges_of_stage_end(launch: Launch) -> Iterator[ByteRange]:
    end = launch.arguments
    rows = int(end["rows"])
    yield ByteRange(int(end["scores"]), _scores_bytes(launch), writes=False)
    yield ByteRange(int(end["confidence"]), 4 * rows, writes=True)
    yield ByteRange(int(end["survivors"]), 4 * rows, writes=True)
    yield ByteRange(int(end["survivor_count"]), 4, writes=True)
    yield ByteRange(int(end["scratch"]), Scratch.bytes_for(rows), writes=True)
    for source, target, row_bytes in _tensors(end):
        yield ByteRange(source, rows * row_bytes, writes=False)
        yield ByteRange(target, rows * row_bytes, writes=True)


def _ranges_of_gather(gather: np.void) -> Iterator[ByteRange]:
    count = int(gather["count"])
    yield ByteRange(int(gather["rows"]), 4 * count, writes=False)
    for _, target, row_bytes in _tensors(gather):
        yield ByteRange(target, count * row_bytes, writes=True)


def _stage_end(launch: Launch, use: Use) -> None:
    end = launch.arguments
    rows = int(end["rows"])
    scratch = use(ByteRange(int(end["scratch"]), Scratch.bytes_for(rows), writes=True))
    if scratch[:_COUNTERS_BYTES].any():
        raise MisuseError("a stage end's scratch was not cleared after it was allocated")

    stored = use(ByteRange(int(end["scores"]), _scores_bytes(launch), writes=False))
    scores = _widened(stored, _SCORE_TYPES[launch.entry_point]).reshape(rows, int(end["classes"]))
    form: AnswerForm = "logits" if end["kind"] == CheckKind.LOGITS else "probabilities"
    confidence = confidence_of(scores, form)
    survivors = np.flatnonzero(~exits(confidence, float(end["threshold"]))).astype(np.int32)

    _put(end, "confidence", confidence, use)
    _put(end, "survivors", survivors, use)
    _put(end, "survivor_count", np.array([len(survivors)], np.int32), use)
    for source, target, row_bytes in _tensors(end):
        content = use(ByteRange(source, rows * row_bytes, writes=False)).reshape(rows, row_bytes)
        _copy(content[survivors], target, use)


def _gather_rows(gather: np.void, use: Use) -> None:
    numbers = _row_numbers(gather, use)
    for source, target, row_bytes in _tensors(gather):
        if len(numbers):
            rows, first = _rows_between(source, row_bytes, numbers, use)
            _copy(rows[numbers - first], target, use)


def _row_numbers(gather: np.void, use: Use) -> NDArray[np.int32]:
    held = use(ByteRange(int(gather["rows"]), 4 * int(gather["count"]), writes=False))
    numbers: NDArray[np.int32] = held.view(np.int32)
    if (numbers < 0).any():
        raise MisuseError(f"row numbers {numbers[numbers < 0]} to gather are below 0")
    return numbers


def _rows_between(
    source: int, row_bytes: int, numbers: NDArray[np.int32], use: Use
) -> tuple[NDArray[np.uint8], int]:
    """Return the rows of a source from the lowest to the highest number, and the lowest number."""
    first, last = (int(numbers.min()), int(numbers.max())) if len(numbers) else (0, -1)
    count = last + 1 - first
    content = use(ByteRange(source + first * row_bytes, count * row_bytes, writes=False))
    return content.reshape(count, row_bytes), first


def _tensors(arguments: np.void) -> Iterator[tuple[int, int, int]]:
    """Yield source address, target address and bytes per row of every tensor to copy."""
    count = int(arguments["tensor_count"])
    if not 0 <= count <= MOST_TENSORS:
        raise MisuseError(f"{count} tensors to copy: at most {MOST_TENSORS} in one launch")
    for tensor in arguments["tensors"][:count]:
        yield int(tensor["source"]), int(tensor["target"]), int(tensor["row_bytes"])


def _scores_bytes(launch: Launch) -> int:
    end = launch.arguments
    size_bytes = 4 if _SCORE_TYPES[launch.entry_point] == "float32" else 2
    return int(end["rows"]) * int(end["classes"]) * size_bytes


def _widened(stored: NDArray[np.uint8], score_type: str) -> NDArray[np.float32]:
    if score_type == "bfloat16":
        wide: NDArray[np.float32] = (stored.view(np.uint16).astype(np.uint32) << 16).view(
            np.float32
        )
        return wide
    return stored.view(score_type).astype(np.float32)


def _put(end: np.void, name: str, values: NDArray[Any], use: Use) -> None:
    _copy(values, int(end[name]), use)


def _copy(values: NDArray[Any], target: int, use: Use) -> None:
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    if flat.size:
        use(ByteRange(target, flat.size, writes=True))[:] = flat
