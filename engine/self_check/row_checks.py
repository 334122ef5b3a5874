"""Checks of rows between stages: selected, buffered and merged rows, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.engine.backends import Slot, TensorBatch
from offramp.engine.self_check.bench import read_tensors
from offramp.engine.self_check.check_results import (
    CheckFailedError,
    CheckSkippedError,
    Facts,
    TimeLimit,
)
from offramp.engine.self_check.subject import CheckSubject, take
from offramp.engine.stages.backend_protocol import Rows

_Tensors = Mapping[str, NDArray[Any]]


def check_select(subject: CheckSubject, limit: TimeLimit) -> Facts:
    """Select rows after every stage, and after an exit: content and order must be kept."""
    facts: Facts = {"selections": 0, "rows": 0}
    count, carrying = subject.max_rows, _carrying(subject)
    cases = [(stage, rows) for rows in _row_sets(count) for stage in carrying]
    inputs = take(subject.samples, slice(0, count))
    for stage, rows in limit.cases(cases):
        with subject.slot() as slot:
            carry = subject.before(slot, inputs, stage + 1)
            whole = _read(subject, slot, carry)
            kept = slot.select(carry, rows)
            found = _read(subject, slot, kept)
            _hold(f"after stage {stage}", whole, rows, kept=kept, found=found, facts=facts)
            facts["selections"] += 1
            facts["rows"] += len(rows)
    for stage in limit.cases(carrying):
        _check_survivors(subject, stage, facts)
    facts["left_out"] = limit.left_out
    return facts


def check_merge(subject: CheckSubject, limit: TimeLimit) -> Facts:
    """Buffer rows of two slots and merge some of them: the merged batch must have all, in order.

    Buffered rows must stay valid after the next upload to their slot, and after the slot is closed.
    """
    facts: Facts = {"merges": 0, "rows": 0}
    count = subject.max_rows
    for stage in limit.cases(_carrying(subject)):
        parts, wholes = [], []
        with subject.slot() as merging:
            with subject.slot() as other:
                for slot, shift in ((merging, 0), (other, 1), (merging, 2)):
                    rows = np.arange(count) + shift
                    inputs = take(subject.samples, rows % subject.sample_count)
                    carry = subject.before(slot, inputs, stage + 1)
                    whole = _read(subject, slot, carry)
                    chosen = np.arange(count) if shift == 1 else np.arange(shift // 2, count, 2)
                    if not len(chosen):
                        continue
                    buffered = slot.buffer(carry, chosen)
                    _overwrite(subject, slot)
                    wholes.append({name: array[chosen] for name, array in whole.items()})
                    parts.append(buffered)
            taken = [_some_of(len(part), index) for index, part in enumerate(parts)]
            expected = {
                name: np.concatenate([w[name][t] for w, t in zip(wholes, taken, strict=True)])
                for name in wholes[0]
            }
            total = sum(map(len, taken))
            fitting, rest = _fitting(parts, taken, count)
            merged = merging.merge(fitting)
            expected = {name: array[: total - rest] for name, array in expected.items()}
            where, rows = f"merged after stage {stage}", np.arange(total - rest)
            found = _read(subject, merging, merged)
            _hold(where, expected, rows, kept=merged, found=found, facts=facts)
            facts["merges"] += 1
            facts["rows"] += len(rows)
    facts["left_out"] = limit.left_out
    return facts


def _check_survivors(subject: CheckSubject, stage: int, facts: Facts) -> None:
    """Select the rows that stay after an exit, in the same way as serving does."""
    count = subject.max_rows
    with subject.slot() as slot:
        batch = subject.before(slot, take(subject.samples, slice(0, count)), stage)
        step = subject.some_exiting.step(slot, stage, batch)
        assert step.result.carry is not None
        (staying,) = (~step.exited).nonzero()
        if not 0 < len(staying) < count:
            return
        whole = _read(subject, slot, step.result.carry)
        kept = slot.select(step.result.carry, staying)
        found = _read(subject, slot, kept)
        where = f"staying at the exit of stage {stage}"
        _hold(where, whole, staying, kept=kept, found=found, facts=facts)
        facts["selections"] += 1
        facts["rows"] += len(staying)


def _carrying(subject: CheckSubject) -> list[int]:
    stages = [spec.index for spec in subject.plan.stages if not spec.final]
    if not stages:
        raise CheckSkippedError("the model is one stage: it passes no tensors on")
    return stages


def _row_sets(count: int) -> list[Rows]:
    """Return sets of row numbers: the first, the last, every other, all but the first, all."""
    every = np.arange(count)
    sets = [every[::2], every[1:], every[:1], every[-1:], every]
    return [rows for rows in sets if len(rows)]


def _some_of(count: int, index: int) -> Rows:
    """Return all rows of some parts (buffered batches), and some rows of other parts."""
    return np.arange(count) if index % 2 else np.arange(0, count, 2)


def _fitting(
    parts: list[TensorBatch], taken: list[Rows], most: int
) -> tuple[list[tuple[TensorBatch, Rows]], int]:
    """Return as many rows of the parts, in order, as fit a batch, and the number of rows left."""
    fitting, rest = [], 0
    for part, rows in zip(parts, taken, strict=True):
        kept = rows[:most]
        most, rest = most - len(kept), rest + len(rows) - len(kept)
        if len(kept):
            fitting.append((part, kept))
    return fitting, rest


def _overwrite(subject: CheckSubject, slot: Slot) -> None:
    """Run other inputs in a slot, so that its old content is overwritten."""
    for _ in subject.follow(slot, take(subject.samples, slice(-1, None))):
        pass


def _read(subject: CheckSubject, slot: Slot, batch: TensorBatch) -> _Tensors:
    tensors = read_tensors(subject.backend, slot, batch)
    if tensors is None:
        raise CheckSkippedError("this backend's tensors cannot be read")
    return tensors


def _hold(
    where: str,
    whole: _Tensors,
    rows: Rows,
    *,
    kept: TensorBatch,
    found: _Tensors,
    facts: Facts,
) -> None:
    """Compare kept rows with the same rows of the whole batch, bit for bit."""
    if len(kept) != len(rows):
        raise CheckFailedError(f"{where}: {len(rows)} rows requested, {len(kept)} returned", facts)
    for name, array in whole.items():
        wanted, given = array[rows], found[name]
        if given.shape != wanted.shape:
            raise CheckFailedError(
                f"{where}: {name} is {list(given.shape)}, expected {list(wanted.shape)}", facts
            )
        same = [a.tobytes() == b.tobytes() for a, b in zip(given, wanted, strict=True)]
        if not all(same):
            wrong = same.index(False)
            raise CheckFailedError(
                f"{where}: row {wrong} of {name} is not row {int(rows[wrong])} of the batch "
                f"({same.count(False)} of {len(same)} rows are wrong)",
                facts,
            )
