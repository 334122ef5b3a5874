"""Checks of slots: in parallel, with graphs, after a failure, and restarted."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.engine.backends import Slot
from offramp.engine.common.errors import BackendError
from offramp.engine.cuda.cuda_backend import CudaBackend
from offramp.engine.cuda.slot import CudaSlot
from offramp.engine.self_check.check_results import (
    CheckFailedError,
    CheckSkippedError,
    Facts,
    TimeLimit,
)
from offramp.engine.self_check.subject import (
    CheckSubject,
    Inputs,
    StageAnswer,
    confidence_scale,
    difference,
    fail_beyond,
    take,
)
from offramp.engine.stages.pipeline import Departure

SLOTS = 2
THREAD_NAME = "slot-side-by-side"
"""Prefix of the names of threads that run parallel slots."""
_BATCHES = 6
_STARTS = 3
_NO_SUCH_INPUT = "there is no such input"


def check_slots(subject: CheckSubject, limit: TimeLimit) -> Facts:
    """Compare the results of two slots in parallel with those of one slot after the other."""
    facts: Facts = {"slots": SLOTS, "rounds": 0, "allowed": subject.tolerance}
    worst = 0.0
    work = [_work(subject, number) for number in range(SLOTS)]
    alone = [_run_all(subject, batches) for batches in work]
    for _ in limit.cases(range(3)):
        found = _run_at_once(subject, work)
        facts["rounds"] += 1
        for number, (mine, wanted) in enumerate(zip(found, alone, strict=True)):
            for index, (a, b) in enumerate(zip(mine, wanted, strict=True)):
                where = f"batch {index} of slot {number}, in parallel,"
                worst = max(worst, _departures_differ(where, a, b, facts))
        facts["largest_difference"] = worst
        fail_beyond(subject.tolerance, worst, "an answer of parallel slots", facts)
    return facts


def check_graphs(subject: CheckSubject, limit: TimeLimit) -> Facts:
    """Run a batch size until its graph is launched, on other inputs than it was captured with.

    The results are compared with plain launches in a slot that is new to the batch size.
    """
    backend = subject.backend
    if not isinstance(backend, CudaBackend):
        raise CheckSkippedError("this backend has no CUDA graphs")
    if not backend.graphs:
        raise CheckSkippedError("CUDA graphs are switched off (--no-cuda-graphs)")
    facts: Facts = {"allowed": subject.tolerance, "graphs": 0, "bit_for_bit": True}
    worst = 0.0
    for size in limit.cases(reversed(subject.sizes)):
        first, second = _two_batches(subject, size)
        with subject.slot() as slot:
            plain = subject.answers(slot, second)
        with subject.slot() as slot:
            captured_with = subject.answers(slot, first)
            subject.answers(slot, first)  # the second run, after which the graph is captured
            launched = subject.answers(slot, second)
            assert isinstance(slot, CudaSlot)
            facts["graphs"] += slot.graphs
        _tell_apart(plain, captured_with, subject, facts)
        for a, b in zip(launched, plain, strict=True):
            found = difference(a.answer, b.answer)
            scale = confidence_scale(b.answer)
            found = max(found, difference(a.confidence, b.confidence, scale))
            facts["bit_for_bit"] &= a.answer.tobytes() == b.answer.tobytes()
            worst = max(worst, found)
            facts["largest_difference"] = worst
            where = f"stage {a.spec.index}'s answer to {size} rows by a graph"
            fail_beyond(subject.tolerance, found, where, facts)
    if not facts["graphs"]:
        raise CheckSkippedError("no stage could be captured; see the log")
    facts["left_out"] = limit.left_out
    return facts


def check_restart(subject: CheckSubject, limit: TimeLimit) -> Facts:
    """Fail a batch, close the slot, open another: valid batches must get the same answers."""
    facts: Facts = {"allowed": subject.tolerance, "starts": 0}
    inputs = take(subject.samples, slice(0, min(2, subject.max_rows)))
    broken = {_NO_SUCH_INPUT: np.zeros((1, 1), np.float32)}
    with subject.slot() as slot:
        before = subject.answers(slot, inputs)
    worst = 0.0
    for _ in limit.cases(range(_STARTS)):
        with subject.slot() as slot:
            facts["starts"] += 1
            for what in ("in a restarted slot", "after a batch that failed"):
                after = subject.answers(slot, inputs)
                for a, b in zip(after, before, strict=True):
                    worst = max(worst, difference(a.answer, b.answer))
                facts["largest_difference"] = worst
                fail_beyond(subject.tolerance, worst, f"an answer {what}", facts)
                _fail_on_purpose(subject, slot, broken, facts)
    return facts


def _fail_on_purpose(
    subject: CheckSubject, slot: Slot, broken: Mapping[str, NDArray[Any]], facts: Facts
) -> None:
    try:
        slot.run(subject.stages[0], slot.upload(broken))
    except BackendError:
        return
    raise CheckFailedError("a batch without the model's inputs was run, but did not fail", facts)


def _work(subject: CheckSubject, number: int) -> list[Inputs]:
    """Return batches with different samples for a slot; sizes repeat, so graphs are launched."""
    sizes = [subject.max_rows, max(1, subject.max_rows // 2)]
    batches = []
    for index in range(_BATCHES):
        rows = np.arange(sizes[(index + number) % 2]) + 3 * index + 5 * number
        batches.append(take(subject.samples, rows % subject.sample_count))
    return batches


def _run_all(
    subject: CheckSubject, batches: list[Inputs], step: threading.Barrier | None = None
) -> list[list[Departure]]:
    """Run batches in a slot; with a barrier, each begins together with those of other slots."""
    found = []
    with subject.slot() as slot:
        for inputs in batches:
            if step is not None:
                step.wait()
            found.append(list(subject.some_exiting.run(slot, inputs)))
    return found


def _run_at_once(subject: CheckSubject, work: list[list[Inputs]]) -> list[list[list[Departure]]]:
    found: list[list[list[Departure]]] = [[] for _ in work]
    errors: list[Exception] = []
    step = threading.Barrier(len(work))

    def run(number: int) -> None:
        try:
            found[number] = _run_all(subject, work[number], step)
        except threading.BrokenBarrierError:
            return  # the other one has the reason
        except Exception as error:  # raised again on the check's own thread
            errors.append(error)
            step.abort()

    threads = [
        threading.Thread(target=run, args=(number,), name=f"{THREAD_NAME}-{number}", daemon=True)
        for number in range(len(work))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found


def _departures_differ(
    where: str, found: list[Departure], wanted: list[Departure], facts: Facts
) -> float:
    """Return the largest difference of answers; CheckFailedError if the leaving rows differ."""
    exits = [[(d.stage, d.rows.tolist()) for d in each] for each in (found, wanted)]
    if exits[0] != exits[1]:
        raise CheckFailedError(
            f"{where} leaves by stage and rows as {exits[0]}, alone as {exits[1]}"[:400], facts
        )
    return max(difference(a.answer, b.answer) for a, b in zip(found, wanted, strict=True))


def _two_batches(subject: CheckSubject, size: int) -> tuple[Inputs, Inputs]:
    """Return two batches in which no row has the same sample in both."""
    rows = np.arange(size)
    shift = max(1, subject.sample_count // 2)
    return (
        take(subject.samples, rows % subject.sample_count),
        take(subject.samples, (rows + shift) % subject.sample_count),
    )


def _tell_apart(
    second: list[StageAnswer], first: list[StageAnswer], subject: CheckSubject, facts: Facts
) -> None:
    """Skip the check if both batches have similar answers: old inputs would not be noticed."""
    apart = max(difference(a.answer, b.answer) for a, b in zip(second, first, strict=True))
    facts["apart"] = max(apart, facts.get("apart", 0.0))
    if apart <= 10 * subject.tolerance:
        raise CheckSkippedError(
            f"answers to different samples differ by only {apart:.1e}: too little to notice an "
            "answer that belongs to another batch"
        )
