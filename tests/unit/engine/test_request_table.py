"""Every accepted sample is accounted for once, by the right cause."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from tests.facts import Told, tells

from offramp.engine.common.errors import BackendError, DeadlineExceededError, EngineError
from offramp.engine.requests.request_table import CompletionQueue, Request, RequestTable
from offramp.engine.requests.statistics import Counters, StageCounters
from offramp.engine.scheduling import DropCause, Dropped


def table() -> RequestTable:
    return RequestTable("m", Counters(), CompletionQueue(lambda: 2.0), lambda: 2.0)


def request(count: int) -> Request:
    loop = asyncio.new_event_loop()
    future: asyncio.Future[Request] = loop.create_future()
    loop.close()
    return Request(
        number=1,
        inputs={},
        count=count,
        batch_key=None,
        submitted_s=1.0,
        deadline_s=1.5,
        priority=0,
        future=future,
    )


def answer(book: RequestTable, *rows: int) -> None:
    n = len(rows)
    stage(book)
    book.answer(
        1,
        np.array(rows),
        np.full((n, 2), 0.5),
        np.full(n, 0.5, np.float32),
        exit_index=3,
        forced=np.array([row % 2 == 1 for row in rows]),
        policy_version=7,
    )


def stage(book: RequestTable) -> StageCounters:
    """Return the counters of exit 3."""
    book.counters.activate({(0, 3): 0.9})
    return book.counters.stages[0, 3]


def test_answers_are_gathered_from_batches_in_any_order() -> None:
    book, asked = table(), request(3)
    book.accept(asked)
    answer(book, 2)
    assert (len(book), asked.remaining) == (1, 2)
    answer(book, 0, 1)
    assert (len(book), asked.remaining, asked.error) == (0, 0, None)
    assert asked.exits.tolist() == [3, 3, 3]
    assert asked.forced.tolist() == [False, True, False]
    assert (stage(book).answered, stage(book).forced) == (3, 1)
    assert book.counters.latency_s.snapshot().total == 1.0


@pytest.mark.parametrize(
    ("cause", "counted", "error", "message"),
    [
        (DropCause.EXPIRED, "expired", DeadlineExceededError, ("m: no answer", "500.0 ms")),
        (DropCause.INFEASIBLE, "expired", DeadlineExceededError, ("m: given up early",)),
        (DropCause.FAILED, "backend_error", BackendError, ("m: execution failed",)),
    ],
)
def test_an_answer_that_comes_after_its_request_was_given_up_is_counted_as_that(
    cause: DropCause, counted: str, error: type[EngineError], message: Told
) -> None:
    book, asked = table(), request(5)
    book.accept(asked)
    book.drop([Dropped(1, 2, cause)])
    answer(book, 0, 1, 2)
    assert isinstance(asked.error, error)
    tells(str(asked.error), *message)
    assert len(book) == 0
    expected = {cause.value: 2}
    expected[counted] = expected.get(counted, 0) + 3
    assert book.counters.failed == expected
    assert stage(book).answered == 0
    assert book.counters.latency_s.snapshot().count == 0


def test_a_withdrawn_request_is_counted_as_cancelled() -> None:
    book, asked = table(), request(2)
    book.accept(asked)
    assert book.withdraw(1)
    book.drop([Dropped(1, 1, DropCause.CANCELLED)])
    answer(book, 1)
    assert not book.withdraw(1)
    assert book.counters.failed == {"cancelled": 2}
    assert book.counters.failed_requests == 1
    assert (len(book), asked.error) == (0, None)


def test_the_first_reason_counts() -> None:
    book, asked = table(), request(2)
    book.accept(asked)
    book.drop([Dropped(1, 1, DropCause.FAILED)], BackendError("device lost"))
    book.drop([Dropped(1, 1, DropCause.EXPIRED)])
    assert str(asked.error) == "device lost"
    assert book.counters.failed == {"backend_error": 1, "expired": 1}
    assert book.counters.failed_requests == 1


def test_failing_all_closes_every_request() -> None:
    book, asked = table(), request(3)
    book.accept(asked)
    answer(book, 0)
    assert book.fail_all(BackendError("out of service"), "backend_error") == [1]
    answer(book, 1, 2)
    assert (len(book), str(asked.error)) == (0, "out of service")
    assert book.counters.failed == {"backend_error": 2}
    assert book.counters.failed_requests == 1
    assert stage(book).answered == 1


def test_a_caller_who_no_longer_waits_for_final_answers_gets_none() -> None:
    book, asked = table(), request(1)
    loop = asyncio.new_event_loop()
    asked.followup = loop.create_future()
    loop.close()
    book.accept(asked)
    rows, values, sure = np.array([0]), np.full((1, 2), 0.5), np.full(1, 0.5, np.float32)
    stage(book)
    forced = np.zeros(1, np.bool_)
    book.answer(1, rows, values, sure, exit_index=3, forced=forced, policy_version=0, following=1)
    assert (len(book), book.awaited) == (0, 1)
    book.forget(1)
    assert book.awaited == 0
    book.confirm(1, rows, values, sure)
    assert asked.final is not None
    assert not asked.final.filled.any()


@pytest.mark.parametrize("cause", [DropCause.EXPIRED, DropCause.INFEASIBLE])
@pytest.mark.parametrize("late_s", [0.0, 0.0001, 1.0])
def test_a_deadline_that_had_passed_is_told_as_that(cause: DropCause, late_s: float) -> None:
    book, asked = table(), request(1)
    asked.deadline_s = asked.submitted_s - late_s
    book.accept(asked)
    book.drop([Dropped(1, 1, cause)])
    passed = f"m: the deadline had passed {late_s * 1e3:.1f} ms before the request came"
    assert str(asked.error) == passed
