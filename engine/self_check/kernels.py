"""Checks of our kernels on the device, against numpy: the exit check, and compaction of rows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import NEVER, AnswerForm
from offramp.engine.answers.exit_check import confidence_of
from offramp.engine.kernels.kernel_arguments import (
    CheckKind,
    ExitCheck,
    RowCopy,
    ScoreType,
    gather_rows,
    stage_end,
)
from offramp.engine.self_check.bench import UNTOUCHED, DeviceBench
from offramp.engine.self_check.check_results import CheckFailedError, Facts, TimeLimit

_RTOL = 1e-5
"""Relative tolerance of confidences: both sides add float32 values in different orders."""
_ROW_BYTES = (4096, 2064, 100, 17, 3, 1)
"""Row sizes in bytes, with every kind of alignment."""
_ROWS = (1, 2, 33, 300, 1025)
"""Batch sizes from less than a warp to more than the largest block."""
_CLASSES = (10, 1, 2, 1000, 5000)
_SCORE_TYPES: tuple[ScoreType, ...] = ("float32", "float16")
_INF, _NAN = float("inf"), float("nan")
_EDGES = (
    (1.0, 2.0, 2.0, 0.0),  # a tie for the largest
    (_NAN, 2.0, _NAN, 0.0),
    (1.0, 2.0, _NAN, _INF),
    (_INF, 2.0, _INF, 0.0),
    (-_INF, -_INF, -_INF, -_INF),
    (-_INF, -_INF, 5.0, -_INF),
    (7.0, 7.0, 7.0, 7.0),
    (0.0, -0.0, 0.0, -0.0),
    (0.25, 0.75, 0.0, 0.0),
    (1.5, 0.0, -1.0, -2.0),  # not probabilities
    (65504.0, -65504.0, 1.0, 0.0),
)


class _Found(NamedTuple):
    """Results of the kernels at a stage's end."""

    confidence: NDArray[np.float32]
    survivors: NDArray[np.int32]
    copied: tuple[NDArray[np.uint8], ...]
    """Target memory of every tensor, [rows, row_bytes]."""


class _Scores(NamedTuple):
    kind: CheckKind
    score_type: ScoreType
    stored: NDArray[Any]
    """Scores on the device, [rows, classes]."""

    def describe(self) -> str:
        rows, classes = self.stored.shape
        return f"{self.kind.name.lower()} {self.score_type} [{rows}, {classes}]"


def check_exit_check_kernel(bench: DeviceBench, limit: TimeLimit) -> Facts:
    """Compare confidences and survivors with numpy, on usual and unusual scores."""
    facts: Facts = {"allowed": _RTOL, "launches": 0, "rows": 0, "largest_difference": 0.0}
    for scores in limit.cases(_scores()):
        with bench:
            found = _end_stage(bench, scores, 0.5, ())
            _hold_reduction(scores, found, facts)
            sure = np.sort(found.confidence)
            middle = float(sure[len(sure) // 2])
            for threshold in (middle, float(sure[0]), float(sure[-1]), 0.0, NEVER):
                found = _end_stage(bench, scores, threshold, ())
                _hold_survivors(scores, found, threshold, facts)
                facts["launches"] += 1
                facts["rows"] += len(scores.stored)
    facts["left_out"] = limit.left_out
    return facts


def check_compaction_kernel(bench: DeviceBench, limit: TimeLimit) -> Facts:
    """Compare compacted and gathered rows with numpy, if none, all, one or some rows are kept."""
    facts: Facts = {"launches": 0, "rows": 0}
    rng = np.random.default_rng(0)
    for rows, pattern in limit.cases(product(reversed(_ROWS), range(6))):
        leaves = _leaves(rows, pattern, rng)
        stored = np.where(leaves, 0.75, 0.25).astype(np.float32)[:, None]
        scores = _Scores(CheckKind.PROBABILITIES, "float32", stored)
        tensors = tuple(rng.integers(0, 256, (rows, n)).astype(np.uint8) for n in _ROW_BYTES)
        with bench:
            found = _end_stage(bench, scores, 0.5, tensors)
            _hold_survivors(scores, found, 0.5, facts)
            _hold_rows(f"{rows} rows", tensors, found.copied, np.flatnonzero(~leaves), facts)
            numbers = rng.integers(0, rows, max(1, rows // 2)).astype(np.int32)
            gathered = _gather(bench, tensors, numbers)
            _hold_rows(f"a gather of {rows} rows", tensors, gathered, numbers, facts)
        facts["launches"] += 2
        facts["rows"] += 2 * rows
    facts["left_out"] = limit.left_out
    return facts


def _scores() -> Iterator[_Scores]:
    """Yield edge cases, then batches of every size with different numbers of classes."""
    rng = np.random.default_rng(1)
    values: NDArray[np.float32]
    kinds = (CheckKind.LOGITS, CheckKind.PROBABILITIES)
    edges = np.array(_EDGES, np.float32)
    for kind, score_type in product(kinds, _SCORE_TYPES):
        yield _Scores(kind, score_type, _stored(edges, score_type))
    for rows, classes in zip(_ROWS, _CLASSES, strict=True):
        for kind, score_type in product(kinds, _SCORE_TYPES):
            values = rng.normal(0, 3, (rows, classes)).astype(np.float32)
            if kind is CheckKind.PROBABILITIES:
                values = np.abs(values / 16, dtype=np.float32)
            yield _Scores(kind, score_type, _stored(values, score_type))


def _stored(values: NDArray[np.float32], score_type: ScoreType) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        return values.astype(score_type)


def _leaves(rows: int, pattern: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Return which rows leave, [rows]: none, all, all but one, one, every other, or random."""
    number = np.arange(rows)
    return (
        np.zeros(rows, np.bool_),
        np.ones(rows, np.bool_),
        number != rows // 2,
        number == rows - 1,
        number % 2 == 0,
        rng.random(rows) < 0.5,
    )[pattern]


def _end_stage(
    bench: DeviceBench, scores: _Scores, threshold: float, tensors: tuple[NDArray[np.uint8], ...]
) -> _Found:
    rows, classes = scores.stored.shape
    buffers = bench.row_buffers(rows)
    copies = _copies(bench, tensors, rows)
    bench.launch(
        stage_end(
            ExitCheck(kind=scores.kind, classes=classes, threshold=threshold),
            rows=rows,
            scores=bench.place(scores.stored),
            score_type=scores.score_type,
            results=buffers.results,
            scratch=buffers.scratch,
            multiprocessors=bench.kernels.multiprocessors,
            tensors=copies,
        )
    )
    confidence, survivors, count = buffers.views(rows)
    most = min(max(int(count[0]), 0), rows)
    return _Found(
        confidence.copy(),
        survivors[:most].copy(),
        _fetched(bench, copies, rows),
    )


def _gather(
    bench: DeviceBench, tensors: tuple[NDArray[np.uint8], ...], numbers: NDArray[np.int32]
) -> tuple[NDArray[np.uint8], ...]:
    copies = _copies(bench, tensors, len(numbers))
    bench.launch(
        gather_rows(
            copies,
            rows=bench.place(numbers),
            count=len(numbers),
            source_rows=len(tensors[0]),
            multiprocessors=bench.kernels.multiprocessors,
        )
    )
    return _fetched(bench, copies, len(numbers))


def _copies(
    bench: DeviceBench, tensors: tuple[NDArray[np.uint8], ...], rows: int
) -> tuple[RowCopy, ...]:
    return tuple(
        RowCopy(
            source=bench.place(tensor),
            target=bench.allocate_filled(rows * tensor.shape[1]),
            row_bytes=tensor.shape[1],
        )
        for tensor in tensors
    )


def _fetched(
    bench: DeviceBench, copies: tuple[RowCopy, ...], rows: int
) -> tuple[NDArray[np.uint8], ...]:
    return tuple(
        bench.fetch(copy.target, rows * copy.row_bytes).reshape(rows, copy.row_bytes)
        for copy in copies
    )


def _hold_reduction(scores: _Scores, found: _Found, facts: Facts) -> None:
    wide = scores.stored.astype(np.float32)
    form: AnswerForm = "logits" if scores.kind is CheckKind.LOGITS else "probabilities"
    expected = confidence_of(wide, form)
    worst, where = 0.0, scores.describe()
    for row, (mine, theirs) in enumerate(zip(found.confidence, expected, strict=True)):
        apart = abs(float(mine) - float(theirs)) / max(float(theirs), 1e-30)
        if not apart <= _RTOL:
            raise CheckFailedError(
                f"{where}: row {row}, {_shown(wide[row])}, has confidence {mine}, expected "
                f"{theirs}",
                facts,
            )
        worst = max(worst, apart)
    facts["largest_difference"] = max(worst, facts["largest_difference"])


def _hold_survivors(scores: _Scores, found: _Found, threshold: float, facts: Facts) -> None:
    """Check survivors against the kernel's own confidences; one may equal the threshold."""
    goes_on = ~(found.confidence >= np.float32(threshold))
    expected = np.flatnonzero(goes_on)
    if found.survivors.tolist() != expected.tolist():
        wrong = set(found.survivors.tolist()) ^ set(expected.tolist())
        row = min(wrong) if wrong else 0
        raise CheckFailedError(
            f"{scores.describe()} with threshold {threshold!r}: row {row}, with confidence "
            f"{float(found.confidence[row])!r}, {'stays' if row in found.survivors else 'leaves'}; "
            f"{len(expected)} rows should continue, in their order, but {len(found.survivors)} did",
            facts,
        )


def _hold_rows(
    what: str,
    tensors: tuple[NDArray[np.uint8], ...],
    found: tuple[NDArray[np.uint8], ...],
    rows: NDArray[Any],
    facts: Facts,
) -> None:
    for tensor, target in zip(tensors, found, strict=True):
        wrong = np.flatnonzero((target[: len(rows)] != tensor[rows]).any(axis=1))
        where = f"{what} of {tensor.shape[1]} bytes"
        if len(wrong):
            raise CheckFailedError(
                f"{where}: output row {int(wrong[0])} is not source row {int(rows[wrong[0]])} "
                f"({len(wrong)} of {len(rows)} places are wrong)",
                facts,
            )
        if (target[len(rows) :] != UNTOUCHED).any():
            raise CheckFailedError(f"{where}: more than {len(rows)} rows were written", facts)


def _shown(row: NDArray[Any]) -> str:
    values = ", ".join(f"{value:g}" for value in row[:4])
    return f"[{values}{', …' if len(row) > 4 else ''}]"
