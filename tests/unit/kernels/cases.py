"""Stage ends and gathers on random data, with numpy's results, for any device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from tests.unit.kernels.shim import Device, Guarded

from offramp.bundle import NEVER
from offramp.engine.answers.exit_check import confidence_of, exits
from offramp.engine.kernels.kernel_arguments import (
    CheckKind,
    ExitCheck,
    Launch,
    Results,
    RowCopy,
    ScoreType,
    Scratch,
    gather_rows,
    stage_end,
)

SCORE_TYPES: tuple[ScoreType, ...] = ("float32", "float16", "bfloat16")
ROW_BYTES = (0, 1, 2, 3, 6, 8, 16, 17, 100, 2048, 2064, 4096)
RTOL = 1e-5
"""Tolerance of confidences. Both sides add float32 values, numpy sequentially and the kernel in
threads: some dozen roundings of 6e-8, and as many of exp."""


def stored(values: np.ndarray, score_type: ScoreType) -> np.ndarray:
    """float32 values as the device stores them; bfloat16 (cut off) in uint16."""
    if score_type == "bfloat16":
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        nan = np.isnan(values)  # whose last bits may be all there is to them
        return np.where(nan, np.uint16(0x7FC0), bits)
    with np.errstate(over="ignore"):
        return values.astype(score_type)


def widened(values: np.ndarray) -> np.ndarray:
    """Stored values as float32."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def random_scores(rng: np.random.Generator, shape: tuple[int, ...], kind: CheckKind) -> np.ndarray:
    """Usual rows, and among them every sort of unusual one; float32."""
    if kind is CheckKind.LOGITS:
        values = rng.normal(0, rng.choice([0.1, 3, 30]), shape)
    else:
        values = rng.random(shape) ** rng.choice([1, 4])
    values = values.astype(np.float32)
    inf, nan = np.float32(np.inf), np.float32(np.nan)
    for row in values:
        sort = rng.integers(0, 14)
        some = rng.random(row.shape) < rng.choice([0.02, 0.3])
        if sort == 0:
            row[...] = row.flat[0]  # all equal
        elif sort == 1:
            row[...] = np.round(row)  # ties, also of ±0
        elif sort in (2, 3, 4):
            row[some] = (nan, inf, -inf)[sort - 2]
        elif sort == 5:
            row[...] = -inf
        elif sort == 6:
            row[some] = nan
            row[rng.random(row.shape) < 0.1] = inf
        elif sort == 7:
            row[some] = row.max()  # ties of the largest
        elif sort == 8:
            row[...] *= np.float32(1e30)
        elif sort == 9:
            row[...] *= np.float32(1e-6)  # subnormal in float16
        elif sort == 10:
            row.flat[rng.integers(row.size)] = 60  # one is sure
    return values


@dataclass
class StageEndCase:
    """Buffers of one stage end."""

    check: ExitCheck
    values: np.ndarray
    """[rows, classes], stored scores."""
    score_type: ScoreType
    rng: np.random.Generator
    row_bytes: Sequence[int] = ()
    misaligned: Sequence[int] = ()
    """Bytes by which sources and targets miss an alignment of 256, in turn."""
    scratch: Guarded | None = None
    multiprocessors: int = 1

    def __post_init__(self) -> None:
        rng, rows = self.rng, len(self.values)
        # The noise around them would change results if it were read.
        self.scores = filled(self.values, rng)
        self.scratch = self.scratch or new_scratch(rows, rng)
        sizes = {"confidence": 4, "survivors": 4}
        self.outputs = {name: Guarded(size * rows, rng) for name, size in sizes.items()}
        self.outputs["survivor_count"] = Guarded(4, rng)
        misses = (*self.misaligned, *([0] * (2 * len(self.row_bytes))))
        self.sources = [
            Guarded(rows * row_bytes, rng, misaligned=miss)
            for row_bytes, miss in zip(self.row_bytes, misses[::2], strict=False)
        ]
        self.targets = [
            Guarded(rows * row_bytes, rng, misaligned=miss)
            for row_bytes, miss in zip(self.row_bytes, misses[1::2], strict=False)
        ]
        self.before = {name: each.bytes.copy() for name, each in self.outputs.items()}
        self.targets_before = [target.bytes.copy() for target in self.targets]

    def memories(self) -> list[Guarded]:
        """All that the launch may touch."""
        assert self.scratch is not None
        return [self.scores, self.scratch, *self.outputs.values(), *self.sources, *self.targets]

    def launch(self, device: Device) -> Launch:
        """Place everything, and say what to launch."""
        assert self.scratch is not None
        rows = len(self.values)
        at = {id(memory): device.place(memory) for memory in self.memories()}
        return stage_end(
            self.check,
            rows=rows,
            scores=at[id(self.scores)],
            score_type=self.score_type,
            results=Results(**{name: at[id(each)] for name, each in self.outputs.items()}),
            scratch=Scratch(address=at[id(self.scratch)], rows=max(rows, 1)),
            multiprocessors=self.multiprocessors,
            tensors=[
                RowCopy(source=at[id(source)], target=at[id(target)], row_bytes=row_bytes)
                for source, target, row_bytes in zip(
                    self.sources, self.targets, self.row_bytes, strict=True
                )
            ],
        )

    def exited(self) -> list[int]:
        """Rows that did not go on."""
        count = int(self.outputs["survivor_count"].view(np.int32)[0])
        survivors = self.outputs["survivors"].view(np.int32)[:count]
        return np.setdiff1d(np.arange(len(self.values)), survivors).tolist()

    def run(
        self, device: Device, *, seed: int = 0, resident: int = 4, block: int | None = None
    ) -> None:
        """Launch, and hold everything against numpy.

        Args:
            device: On what.
            seed: See :meth:`Device.launch`.
            resident: See :meth:`Device.launch`.
            block: Threads of a block, if not the usual ones.
        """
        launch = self.launch(device)
        if block is not None:
            launch = dataclasses.replace(launch, block=block)
        device.launch(launch, seed=seed, resident=resident)
        for memory in self.memories():
            device.fetch(memory)
        passed = self._check_reduction()
        self._check_compaction(passed)
        for memory in self.memories():
            memory.check()
        assert self.scratch is not None
        assert is_ready(self.scratch)

    def _check_reduction(self) -> np.ndarray:
        """Confidences; return who passed by the kernel's own figures."""
        values = widened(self.values)
        form = "logits" if self.check.kind is CheckKind.LOGITS else "probabilities"
        confidence = self.outputs["confidence"].view(np.float32)
        np.testing.assert_allclose(confidence, confidence_of(values, form), rtol=RTOL)
        return exits(confidence, self.check.threshold)

    def _check_compaction(self, passed: np.ndarray) -> None:
        expected = np.flatnonzero(~passed)
        count = self.outputs["survivor_count"].view(np.int32)
        assert count.tolist() == [len(expected)]
        survivors = self.outputs["survivors"].view(np.int32)
        np.testing.assert_array_equal(survivors[: len(expected)], expected)
        before = self.before["survivors"].view(np.int32)
        np.testing.assert_array_equal(survivors[len(expected) :], before[len(expected) :])
        for source, target, row_bytes, untouched in zip(
            self.sources, self.targets, self.row_bytes, self.targets_before, strict=True
        ):
            rows = source.bytes.reshape(len(passed), row_bytes)
            copied = len(expected) * row_bytes
            np.testing.assert_array_equal(target.bytes[:copied], rows[expected].reshape(-1))
            np.testing.assert_array_equal(target.bytes[copied:], untouched[copied:])


@dataclass
class GatherCase:
    """Buffers of one gather of rows."""

    numbers: np.ndarray
    """int32 [count], rows of the sources in any order."""
    source_rows: int
    row_bytes: Sequence[int]
    rng: np.random.Generator
    misaligned: int = 0
    """Bytes by which sources miss an alignment of 256."""
    multiprocessors: int = 1

    def __post_init__(self) -> None:
        rng, rows = self.rng, len(self.numbers)
        self.rows = filled(self.numbers, rng)
        self.sources = [
            Guarded(self.source_rows * size, rng, misaligned=self.misaligned)
            for size in self.row_bytes
        ]
        self.targets = [Guarded(rows * size, rng) for size in self.row_bytes]

    def run(self, device: Device, *, seed: int = 0, resident: int = 4) -> None:
        """Launch, and hold everything against numpy."""
        sources, targets = (
            [device.place(memory) for memory in memories]
            for memories in (self.sources, self.targets)
        )
        launch = gather_rows(
            [
                RowCopy(source=source, target=target, row_bytes=size)
                for source, target, size in zip(sources, targets, self.row_bytes, strict=True)
            ],
            rows=device.place(self.rows),
            count=len(self.numbers),
            source_rows=self.source_rows,
            multiprocessors=self.multiprocessors,
        )
        device.launch(launch, seed=seed, resident=resident)
        for memory in (self.rows, *self.sources, *self.targets):
            device.fetch(memory)
            memory.check()
        for source, target, size in zip(self.sources, self.targets, self.row_bytes, strict=True):
            expected = source.bytes.reshape(self.source_rows, size)[self.numbers]
            np.testing.assert_array_equal(target.bytes, expected.reshape(-1))


def filled(values: np.ndarray, rng: np.random.Generator) -> Guarded:
    """Memory with these values."""
    memory = Guarded(values.nbytes, rng)
    memory.bytes[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return memory


def new_scratch(rows: int, rng: np.random.Generator) -> Guarded:
    """Return the scratch memory of a stream before its first launch."""
    scratch = Guarded(Scratch.bytes_for(rows), rng)
    scratch.bytes[:] = 0
    return scratch


def is_ready(scratch: Guarded) -> bool:
    """Return True if all counters are zero, as the next launch needs them."""
    return not scratch.bytes[:512].any()


@st.composite
def stage_ends(draw: st.DrawFn) -> StageEndCase:
    """Any check on any data, with any tensors to carry. Sizes are drawn, contents are random."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(CheckKind))
    rows = draw(st.integers(1, 40) | st.integers(1, 257))
    classes = draw(st.integers(1, 40) | st.integers(1, 3000))
    score_type = draw(st.sampled_from(SCORE_TYPES))
    values = stored(random_scores(rng, (rows, classes), kind), score_type)
    check = ExitCheck(
        kind=kind,
        classes=classes,
        threshold=draw(st.sampled_from([0, 0.3, 0.5, 0.9, 1, NEVER]) | st.floats(0, 1, width=32)),
    )
    tensors = draw(st.integers(0, 3) | st.just(16))
    return StageEndCase(
        check=check,
        values=values,
        score_type=score_type,
        rng=rng,
        row_bytes=draw(st.lists(st.sampled_from(ROW_BYTES), min_size=tensors, max_size=tensors)),
        misaligned=draw(st.lists(st.sampled_from([0, 1, 2, 4, 8, 16]), max_size=2 * tensors)),
        multiprocessors=draw(st.integers(1, 3)),
    )


@st.composite
def gathers(draw: st.DrawFn) -> GatherCase:
    """Any rows, also twice, of any tensors."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    source_rows = draw(st.integers(1, 60))
    return GatherCase(
        numbers=rng.integers(0, source_rows, draw(st.integers(0, 70))).astype(np.int32),
        source_rows=source_rows,
        row_bytes=draw(st.lists(st.sampled_from(ROW_BYTES), max_size=16)),
        rng=rng,
        misaligned=draw(st.sampled_from([0, 1, 2, 4, 8])),
        multiprocessors=draw(st.integers(1, 3)),
    )
