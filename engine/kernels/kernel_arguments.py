"""Arguments of the kernels: parameter structs, scratch memory and launch geometry.

Addresses are plain integers: of device memory, or of pinned host memory as the device sees it. The
structs are passed by value as the only parameter of their kernel (in PyCUDA a ``numpy.void``), so
that a CUDA graph contains them. Their layout is that of ``arguments.cuh``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Literal, TypeAlias, cast

import numpy as np

from offramp.bundle import NEVER

ScoreType: TypeAlias = Literal["float32", "float16", "bfloat16"]

STAGE_END: Final[dict[ScoreType, str]] = {
    "float32": "stage_end_float32",
    "float16": "stage_end_float16",
    "bfloat16": "stage_end_bfloat16",
}
"""Entry points by type of the scores."""
GATHER_ROWS: Final = "gather_rows"
ENTRY_POINTS: Final = (*STAGE_END.values(), GATHER_ROWS)
"""Entry points that a cubin must have."""

MOST_TENSORS: Final = 16
"""Largest number of tensors that one launch can copy."""

ROW_COPY: Final = np.dtype([("source", "u8"), ("target", "u8"), ("row_bytes", "u8")], align=True)
"""Layout of ``RowCopy`` in ``arguments.cuh``."""
ROW_SCRATCH: Final = np.dtype([("confidence", "f4"), ("survivor", "i4")], align=True)
"""Layout of ``RowScratch`` in ``arguments.cuh``."""
STAGE_END_ARGUMENTS: Final = np.dtype(
    [
        ("scores", "u8"),
        ("confidence", "u8"),
        ("survivors", "u8"),
        ("survivor_count", "u8"),
        ("scratch", "u8"),
        ("kind", "i4"),
        ("rows", "i4"),
        ("classes", "i4"),
        ("threshold", "f4"),
        ("check_blocks", "i4"),
        ("tensor_count", "i4"),
        ("tensors", ROW_COPY, MOST_TENSORS),
    ],
    align=True,
)
"""Layout of ``StageEnd`` in ``arguments.cuh``."""
GATHER_ROWS_ARGUMENTS: Final = np.dtype(
    [("rows", "u8"), ("count", "i4"), ("tensor_count", "i4"), ("tensors", ROW_COPY, MOST_TENSORS)],
    align=True,
)
"""Layout of ``GatherRows`` in ``arguments.cuh``."""

SCRATCH_ALIGNMENT: Final = 128
"""Alignment in bytes, which all CUDA allocations have."""
_COUNTERS_BYTES = 512
"""Bytes of ``Scratch`` before its rows: four counters, a cache line each."""
_MOST = 2**31 - 1
"""Largest count of the kernels, which use signed 32-bit integers."""

_THREADS = 256
_THREADS_MANY_CLASSES = 1024
_MANY_CLASSES = 4096
"""Number of classes from which a row gets a block of the largest size."""
_THREADS_A_MULTIPROCESSOR = 1024
"""Threads that are resident with 64 registers each; see ``row_copy.cuh`` for the reason."""
_WORDS_A_PIECE = 128
"""Words that a warp copies at a time, as in ``row_copy.cuh``."""


class CheckKind(IntEnum):
    """Kinds of exit check, by the meaning of the scores [rows, classes]."""

    LOGITS = 0
    """The confidence is the largest softmax probability."""
    PROBABILITIES = 1
    """The confidence is the largest probability."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitCheck:
    """The rule by which a row exits, as in ``engine/answers/exit_check.py``."""

    kind: CheckKind
    classes: int
    threshold: float
    """Confidence threshold, 0 to ``NEVER``."""

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= NEVER:
            raise ValueError(f"confidence threshold {self.threshold} is not in [0, {NEVER}]")

    @property
    def threads(self) -> int:
        """Number of threads of a block."""
        return _THREADS_MANY_CLASSES if self.classes >= _MANY_CLASSES else _THREADS


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCopy:
    """A tensor whose rows are copied to the front of another; the two do not overlap."""

    source: int
    target: int
    row_bytes: int
    """Bytes of one row of both tensors; may be 0."""

    def __post_init__(self) -> None:
        if not 0 <= self.row_bytes <= _MOST:
            raise ValueError(f"a row of {self.row_bytes} bytes: must be 0 to 2 GiB")
        if self.row_bytes and not (self.source > 0 and self.target > 0):
            raise ValueError(
                f"rows from {self.source:#x} to {self.target:#x}: null is not an address"
            )

    @property
    def word_bytes(self) -> int:
        """Bytes of the words that kernels copy; all rows of both sides are aligned to them."""
        bits = self.source | self.target | self.row_bytes
        return next(word for word in (16, 4, 2, 1) if bits % word == 0)

    def pieces(self, rows: int) -> int:
        """Return the number of pieces, each of which a warp copies at a time."""
        return rows * _parts(self.row_bytes // self.word_bytes, _WORDS_A_PIECE)

    def overlaps(self, rows: int, copied: int) -> bool:
        """Return whether ``copied`` rows of the target touch ``rows`` rows of the source."""
        source_end = self.source + rows * self.row_bytes
        target_end = self.target + copied * self.row_bytes
        return self.source < target_end and self.target < source_end


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Addresses of a stage end's results; the host reads them after it has waited."""

    confidence: int
    """Address of confidences, float32 [rows]."""
    survivors: int
    """Address of surviving row numbers, int32 [rows], ascending; only the first ones are
    written."""
    survivor_count: int
    """Address of the number of survivors, int32 [1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """A stream's scratch block: zeroed when allocated, and after a failed launch."""

    address: int
    rows: int
    """Largest batch of the block."""

    @staticmethod
    def bytes_for(rows: int) -> int:
        """Return the size of a block for batches of up to ``rows``, in bytes."""
        return _COUNTERS_BYTES + max(rows, 1) * ROW_SCRATCH.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A kernel, ready to be launched."""

    entry_point: str
    """Name of the kernel in the cubin."""
    grid: int
    """Number of blocks, in one dimension."""
    block: int
    """Number of threads of a block, in one dimension."""
    arguments: np.void
    """The kernel's only parameter, by value.

    With PyCUDA: ``function.prepare([f"{arguments.nbytes}s"])`` once, then
    ``function.prepared_async_call((grid, 1), (block, 1, 1), stream, arguments.tobytes())``. Called
    directly, versions after 2026.1 want to hash it, which numpy refuses.
    """
    shared_bytes: int = 0
    """Bytes of dynamic shared memory: none of our kernels needs it."""


def stage_end(
    check: ExitCheck,
    *,
    rows: int,
    scores: int,
    score_type: ScoreType,
    results: Results,
    scratch: Scratch,
    multiprocessors: int,
    tensors: Sequence[RowCopy] = (),
) -> Launch:
    """Make the launch after a stage: it checks which rows exit, and compacts the others.

    The batch has ``rows`` rows, perhaps 0. ``scores`` is the address of [rows, classes], dense.
    ``scratch`` is the stream's scratch block, used by one launch at a time; ``tensors`` are the
    inputs of the next stage, none after the last stage. ValueError if the kernel would misread an
    argument, or write where it must not.
    """
    _check_tensors(tensors, rows=rows, copied=rows)
    _check_results(results, scratch, rows)
    size_bytes = 4 if score_type == "float32" else 2
    if rows and (scores <= 0 or scores % size_bytes):
        raise ValueError(f"scores at {scores:#x} are not at an address aligned for {score_type}")
    check_blocks = _blocks(rows, multiprocessors, check.threads)
    copy_blocks = _copy_blocks(tensors, rows, multiprocessors, check.threads)
    arguments = _struct(
        STAGE_END_ARGUMENTS,
        tensors,
        scores=scores,
        confidence=results.confidence,
        survivors=results.survivors,
        survivor_count=results.survivor_count,
        scratch=scratch.address,
        kind=check.kind,
        rows=rows,
        classes=check.classes,
        threshold=check.threshold,
        check_blocks=check_blocks,
    )
    return Launch(
        entry_point=STAGE_END[score_type],
        grid=check_blocks + copy_blocks,
        block=check.threads,
        arguments=arguments,
    )


def gather_rows(
    tensors: Sequence[RowCopy], *, rows: int, count: int, source_rows: int, multiprocessors: int
) -> Launch:
    """Make the launch that copies given rows of tensors to the front of others.

    ``rows`` is the address of int32 [count], row numbers below ``source_rows`` in any order. Every
    warp reads its own from there, so device memory is the better place for more than a few.
    ValueError if the kernel would misread it, or write where it must not.
    """
    _check_tensors(tensors, rows=source_rows, copied=count)
    if count and (rows <= 0 or rows % 4):
        raise ValueError(f"row numbers at {rows:#x} are not at an address aligned for int32")
    arguments = _struct(GATHER_ROWS_ARGUMENTS, tensors, rows=rows, count=count)
    grid = max(1, _copy_blocks(tensors, count, multiprocessors, _THREADS))
    return Launch(entry_point=GATHER_ROWS, grid=grid, block=_THREADS, arguments=arguments)


def _parts(whole: int, part: int) -> int:
    return -(-whole // part)


def _blocks(wanted: int, multiprocessors: int, threads: int) -> int:
    return max(1, min(wanted, multiprocessors * _THREADS_A_MULTIPROCESSOR // threads))


def _copy_blocks(tensors: Sequence[RowCopy], rows: int, multiprocessors: int, threads: int) -> int:
    pieces = sum(tensor.pieces(rows) for tensor in tensors)
    if pieces == 0:
        return 0
    wanted = _parts(pieces, threads // 32)
    return _blocks(wanted, multiprocessors, threads)


def _check_tensors(tensors: Sequence[RowCopy], *, rows: int, copied: int) -> None:
    if rows < 0 or copied < 0:
        raise ValueError(f"{min(rows, copied)} rows: must be 0 or more")
    if len(tensors) > MOST_TENSORS:
        raise ValueError(f"{len(tensors)} tensors to copy: at most {MOST_TENSORS} in one launch")
    for tensor in tensors:
        if tensor.overlaps(rows, copied):
            raise ValueError(
                f"{copied} rows of {tensor.row_bytes} bytes to {tensor.target:#x} would overwrite "
                f"their source, {rows} rows at {tensor.source:#x}"
            )
        if tensor.pieces(copied) > _MOST // 2:
            raise ValueError(
                f"{copied} rows of {tensor.row_bytes} bytes, copied by {tensor.word_bytes} at a "
                "time: too many for one launch"
            )


def _check_results(results: Results, scratch: Scratch, rows: int) -> None:
    if rows > scratch.rows:
        raise ValueError(f"{rows} rows, but the scratch block is for {scratch.rows}")
    if scratch.address <= 0 or scratch.address % SCRATCH_ALIGNMENT:
        raise ValueError(
            f"scratch at {scratch.address:#x}: must be aligned to {SCRATCH_ALIGNMENT} bytes"
        )
    for name in ("confidence", "survivors", "survivor_count"):
        address = getattr(results, name)
        if address <= 0 or address % 4:
            raise ValueError(f"{name} at {address:#x} is not an address aligned for 32-bit values")


def _struct(dtype: np.dtype[Any], tensors: Sequence[RowCopy], **values: float) -> np.void:
    filled = np.zeros((), dtype)
    for name, value in values.items():
        filled[name] = value
    filled["tensor_count"] = len(tensors)
    for index, tensor in enumerate(tensors):
        filled["tensors"][index] = (tensor.source, tensor.target, tensor.row_bytes)
    return cast("np.void", filled[()])
