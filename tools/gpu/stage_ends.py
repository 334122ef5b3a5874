"""Measures our kernels: stage ends as in a model, and compaction compared with a plain copy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from offramp.engine.kernels.kernel_arguments import (
    CheckKind,
    ExitCheck,
    Launch,
    Results,
    RowCopy,
    Scratch,
    gather_rows,
    stage_end,
)
from offramp.tools.gpu.device import Allocation, Gpu

BATCHES = (1, 8, 32, 64, 128)
CLASSES = 1000
STAGES = {"resnet50 stage0": 256 * 56 * 56, "resnet50 stage1": 512 * 28 * 28,
          "resnet50 stage2": 1024 * 14 * 14, "no tensors": 0}  # fmt: skip
"""Number of float32 values that each row passes to the next stage, by name of the stage."""
SURVIVING = (0.0, 0.5, 1.0)
SIZES = ((32, 1 << 12), (32, 1 << 16), (32, 1 << 18), (32, 1 << 20), (32, 1 << 22), (32, 1 << 24),
         (4096, 1 << 10), (65536, 1 << 8))  # fmt: skip
"""Numbers of rows and bytes per row for compaction: 128 KiB to 512 MiB in total."""
_REPEATS = 50
_MOST_SETS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEnd:
    """Sizes of a stage end (exit check and compaction) to measure."""

    rows: int
    classes: int
    survivors: int
    """Number of rows that continue."""


def measure(gpu: Gpu, *, rounds: int, seed: int) -> dict[str, Any]:
    """Measure stage ends and compaction.

    Args:
        gpu: Device to measure.
        rounds: Rounds for the median; each runs everything once, so that a change of clocks
            affects all equally.
        seed: Seed of the scores and of the order of rows.

    Returns:
        JSON values.
    """
    return {
        "stage_ends": list(_stage_ends(gpu, rounds, seed)),
        "compaction": [_compaction(gpu, *size, rounds=rounds, seed=seed) for size in SIZES],
    }


def _stage_ends(gpu: Gpu, rounds: int, seed: int) -> Iterator[dict[str, Any]]:
    for name, values in STAGES.items():
        for rows in BATCHES:
            ends = {
                survivors: StageEnd(rows=rows, classes=CLASSES, survivors=survivors)
                for survivors in sorted({round(share * rows) for share in SURVIVING})
            }
            times: dict[int, list[float]] = {survivors: [] for survivors in ends}
            with _Buffers.of(gpu, rows, 4 * values) as buffers:
                works = {s: buffers.stage_end(end, seed) for s, end in ends.items()}
                for survivors, work in works.items():
                    buffers.check(work, survivors)
                for _ in range(rounds):
                    for survivors, work in works.items():
                        times[survivors].append(gpu.time_ms(work, _REPEATS))
            for survivors, found in times.items():
                yield {
                    "stage": name, "rows": rows, "classes": CLASSES, "row_bytes": 4 * values,
                    "survivors": survivors, "measured_ms": statistics.median(found),
                }  # fmt: skip


def _compaction(gpu: Gpu, rows: int, row_bytes: int, *, rounds: int, seed: int) -> dict[str, Any]:
    end = StageEnd(rows=rows, classes=10, survivors=rows)
    with _Buffers.of(gpu, rows, row_bytes) as buffers:
        works = {
            "copy": buffers.plain_copy(),
            "stage_end": buffers.stage_end(end, seed),
            "gather_rows": buffers.gather(seed),
        }
        buffers.check(works["stage_end"], rows)
        times: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(rounds):
            for name, work in works.items():
                times[name].append(gpu.time_ms(work, _REPEATS))
        sets = len(buffers)
    medians = {name: statistics.median(found) for name, found in times.items()}
    moved = 2 * rows * row_bytes
    return {
        "rows": rows, "row_bytes": row_bytes, "buffer_sets": sets,
        "measured_ms": medians,
        "gb_per_s": {name: moved / 1e6 / ms for name, ms in medians.items()},
        "share_of_copy": {
            name: medians["copy"] / medians[name] for name in ("stage_end", "gather_rows")
        },
    }  # fmt: skip


class _Buffers:
    """Memory for measurements of one size: several sets, together larger than the cache.

    With the same few megabytes copied repeatedly, the cache would be measured.
    """

    def __init__(self, gpu: Gpu, rows: int, row_bytes: int) -> None:
        self._gpu, self._rows, self._row_bytes = gpu, rows, row_bytes
        tensor = rows * row_bytes
        sets = -(-4 * gpu.l2_bytes // max(2 * tensor, 1))
        self._sets = [
            (gpu.zeros(tensor), gpu.zeros(tensor)) for _ in range(max(2, min(sets, _MOST_SETS)))
        ]
        results = {"confidence": 4, "survivors": 4}
        self._results = {name: gpu.zeros(size * rows) for name, size in results.items()}
        self._count = gpu.zeros(4)
        self._scratch = gpu.zeros(Scratch.bytes_for(rows))
        self._kept: list[Allocation] = []
        gpu.stream.synchronize()

    def __len__(self) -> int:
        return len(self._sets)

    @classmethod
    @contextmanager
    def of(cls, gpu: Gpu, rows: int, row_bytes: int) -> Iterator[_Buffers]:
        buffers = cls(gpu, rows, row_bytes)
        try:
            yield buffers
        finally:
            gpu.stream.synchronize()
            buffers.free()

    def free(self) -> None:
        small = [*self._results.values(), self._count, self._scratch, *self._kept]
        for memory in [m for pair in self._sets for m in pair] + small:
            memory.free()

    def stage_end(self, end: StageEnd, seed: int) -> Callable[[int], object]:
        scores = self._keep(_scores(end, seed))
        results = {name: int(memory) for name, memory in self._results.items()}
        launches = [
            stage_end(
                ExitCheck(kind=CheckKind.LOGITS, classes=end.classes, threshold=0.9),
                rows=end.rows,
                scores=scores,
                score_type="float32",
                results=Results(survivor_count=int(self._count), **results),
                scratch=Scratch(address=int(self._scratch), rows=max(end.rows, 1)),
                multiprocessors=self._gpu.multiprocessors,
                tensors=tensors,
            )
            for tensors in self._tensors()
        ]
        return self._launching(launches)

    def gather(self, seed: int) -> Callable[[int], object]:
        numbers = np.random.default_rng(seed).permutation(self._rows).astype(np.int32)
        address = self._keep(numbers)
        launches = [
            gather_rows(
                tensors,
                rows=address,
                count=self._rows,
                source_rows=self._rows,
                multiprocessors=self._gpu.multiprocessors,
            )
            for tensors in self._tensors()
        ]
        return self._launching(launches)

    def plain_copy(self) -> Callable[[int], object]:
        pairs = [(int(source), int(target)) for source, target in self._sets]
        size_bytes = self._rows * self._row_bytes

        def work(index: int) -> None:
            source, target = pairs[index % len(pairs)]
            self._gpu.copy(target, source, size_bytes)

        return work

    def check(self, work: Callable[[int], object], survivors: int) -> None:
        """Check the result of work before it is timed."""
        work(0)
        found = np.zeros(1, np.int32)
        self._gpu.download(self._count, found)
        if found[0] != survivors:
            raise RuntimeError(f"{found[0]} rows went on, not {survivors}: nothing to measure")

    def _tensors(self) -> list[list[RowCopy]]:
        if not self._row_bytes:
            return [[]]
        return [
            [RowCopy(source=int(source), target=int(target), row_bytes=self._row_bytes)]
            for source, target in self._sets
        ]

    def _launching(self, launches: Sequence[Launch]) -> Callable[[int], object]:
        return lambda index: self._gpu.enqueue(launches[index % len(launches)])

    def _keep(self, array: np.ndarray[Any, Any]) -> int:
        memory = self._gpu.upload(array)
        self._kept.append(memory)
        return int(memory)


def _scores(end: StageEnd, seed: int) -> np.ndarray[Any, Any]:
    """Return logits of which ``survivors`` rows, spread over the batch, are unsure."""
    rng = np.random.default_rng(seed)
    # Bounded, because of many rows some would be sure by chance: two classes reach at most 0.88.
    scores = rng.uniform(-1, 1, (end.rows, end.classes)).astype(np.float32)
    sure = rng.permutation(end.rows)[end.survivors :]
    scores[sure, rng.integers(0, end.classes, len(sure))] = 30
    return scores
