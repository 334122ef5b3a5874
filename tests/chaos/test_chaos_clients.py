"""The chaos clients book what a server did to them, and not what they wish it had done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from offramp.certify.decision import MODEL_END
from offramp.client import AnswerKind, OfframpError, ServerUnavailableError, StreamedResult
from tests.chaos.account import (
    UNCONFIRMED,
    Account,
    Disturbance,
    Outcome,
    Trouble,
    unexpected,
)
from tests.chaos.clients import (
    Clients,
    StreamEndedError,
    TritonStream,
    departing,
    status_of,
    stream,
    unary,
)
from tests.chaos.truth import Truth

TRUTH = Truth(
    inputs={"x": np.zeros((1, 2))},
    output="logits",
    answers={0: np.array([[5.0, 1.0]]), MODEL_END: np.array([[7.0, 1.0]])},
    confidences={0: np.array([0.9], np.float32), MODEL_END: np.array([0.99], np.float32)},
    max_disagreement=0.01,
)
"""Confidences of one input, equal for every row of a request."""


def result(kind: AnswerKind, rows: int, exit_: int) -> StreamedResult:
    return StreamedResult(
        outputs={"logits": TRUTH.answers[exit_].repeat(rows, axis=0)},
        exits=np.full(rows, exit_, np.int32),
        confidences=TRUTH.confidences[exit_].repeat(rows),
        forced=np.zeros(rows, np.bool_),
        variants=np.zeros(rows, np.int16),
        policy_version=1,
        kind=kind,
        corrected=np.zeros(rows, np.bool_),
    )


def cancelled_by_the_server() -> OfframpError:
    metadata = grpc.aio.Metadata()
    error = OfframpError("the call was cancelled")
    error.__cause__ = grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, metadata, metadata, "no")
    return error


class Middling(Random):
    """Random generator by which ``departing`` uses the shared connection, and leaves after some
    ms.
    """

    def random(self) -> float:
        return 0.5


def booked(kind: Callable[[Clients], Awaitable[None]], **methods: Any) -> Account:
    """The account after one client of a kind, whose SDK does what is given."""
    account = Account()
    sdk: Any = SimpleNamespace(**methods)
    clients = Clients(account, TRUTH, "nowhere:1", "m", Middling(0), sdk=sdk)
    asyncio.run(kind(clients))  # type: ignore[arg-type]
    assert account.difference == 0
    return account


def streaming(*parts: Any) -> Callable[..., Any]:
    """A stream of some results, or of an exception at the end."""

    async def infer_stream(_model: str, inputs: Any) -> AsyncIterator[StreamedResult]:
        for part in parts:
            if isinstance(part, Exception):
                raise part
            yield result(part, len(inputs["x"]), 0 if part is AnswerKind.EARLY else MODEL_END)

    return infer_stream


def test_a_whole_stream_is_answered() -> None:
    account = booked(stream, infer_stream=streaming(AnswerKind.EARLY, AnswerKind.CONFIRMATION))
    assert account.total(Outcome.ANSWERED) == 1
    assert (account.faults, account.wrong) == ([], [])


@pytest.mark.parametrize("first", [[], [AnswerKind.EARLY], [AnswerKind.ANSWER]])
def test_a_stream_that_ends_with_an_error_is_not_answered(first: list[AnswerKind]) -> None:
    error = ServerUnavailableError("gone")
    account = booked(stream, infer_stream=streaming(*first, error))
    assert account.total(Outcome.ANSWERED) == 0
    assert [ending.status for ending in account.endings] == ["UNAVAILABLE"]


def test_an_early_answer_is_checked_though_an_error_follows() -> None:
    async def infer_stream(_model: str, inputs: Any) -> AsyncIterator[StreamedResult]:
        rows = len(inputs["x"])
        right = result(AnswerKind.EARLY, rows, 0)
        yield StreamedResult(
            **{name: getattr(right, name) for name in StreamedResult.__dataclass_fields__}
            | {"outputs": {"logits": np.full((rows, 2), 3.0)}}
        )
        raise ServerUnavailableError("gone")

    account = booked(stream, infer_stream=infer_stream)
    assert len(account.wrong) == 1
    assert account.wrong[0].startswith("stream, early: ")


def test_a_stream_without_an_answer_is_a_fault() -> None:
    account = booked(stream, infer_stream=streaming())
    assert account.faults == ["a stream ended without an answer and without an error"]


def test_a_final_answer_may_be_lost_while_the_backend_fails_and_only_then() -> None:
    account = booked(stream, infer_stream=streaming(AnswerKind.EARLY))
    assert account.total(Outcome.ANSWERED) == 1
    assert account.faults == []
    (ending,) = unexpected(account.endings, [])
    assert ending.status == UNCONFIRMED
    for trouble in Trouble:
        meanwhile = Disturbance(trouble=trouble, began_s=ending.began_s, ended_s=ending.ended_s)
        excused = trouble is Trouble.BACKEND
        assert unexpected(account.endings, [meanwhile]) == ([] if excused else [ending])


def test_a_client_that_leaves_has_withdrawn() -> None:
    async def infer(_model: str, _inputs: Any) -> None:
        await asyncio.Event().wait()

    account = booked(departing, infer=infer)
    assert account.total(Outcome.CANCELLED) == 1


def test_a_server_that_cancels_before_the_client_leaves_has_failed() -> None:
    async def infer(_model: str, _inputs: Any) -> None:
        raise cancelled_by_the_server()

    account = booked(departing, infer=infer)
    assert account.total(Outcome.CANCELLED) == 0
    assert account.total(Outcome.FAILED) == 1
    assert [ending.status for ending in account.endings] == ["CANCELLED"]


def test_an_error_that_crosses_a_leaving_client_is_withdrawn() -> None:
    async def infer(_model: str, _inputs: Any) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            error = cancelled_by_the_server()
            raise error from error.__cause__

    assert booked(departing, infer=infer).total(Outcome.CANCELLED) == 1


def test_a_request_that_never_left_is_not_in_doubt() -> None:
    def refused(text: str) -> OfframpError:
        error = OfframpError("no")
        metadata = grpc.aio.Metadata()
        status = grpc.StatusCode.UNAVAILABLE
        error.__cause__ = grpc.aio.AioRpcError(status, metadata, metadata, text)
        return error

    async def unsent(_model: str, _inputs: Any, **_how: Any) -> None:
        raise refused("failed to connect to all addresses; last error: refused")

    async def broken(_model: str, _inputs: Any, **_how: Any) -> None:
        raise refused("Socket closed")

    assert booked(unary, infer=unsent).life.doubtful == 0
    assert booked(unary, infer=broken).life.doubtful > 0


class EndedStream:
    """Fake tritonclient whose stream ends immediately, and which reports it at the next request."""

    def __init__(self, status: str) -> None:
        self._status = status

    def start_stream(self, callback: Callable[..., None]) -> None:
        callback(result=None, error=InferenceServerException("Socket closed", status=self._status))

    def async_stream_infer(self, *_request: Any, **_how: Any) -> None:
        raise InferenceServerException("The stream is no longer in valid state")

    def stop_stream(self, **_how: Any) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("status", ["UNAVAILABLE", "CANCELLED"])
def test_a_stream_that_had_ended_tells_when_and_why(
    status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lambda *_address, **_how: EndedStream(f"StatusCode.{status}")  # noqa: E731
    monkeypatch.setattr("tests.chaos.clients.triton.InferenceServerClient", made)
    one = TritonStream("nowhere:1")
    one._open()
    opened_s = time.monotonic()
    with pytest.raises(StreamEndedError) as caught:
        one.infer("m", {})
    assert caught.value.at_s <= opened_s
    assert status_of(caught.value) == (status, False)


def test_connections_are_closed_once_nobody_waits_for_their_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sleep, closed = asyncio.sleep, []

    async def at_once(_seconds: float) -> None:
        await sleep(0)

    class Connection:
        async def close(self) -> None:
            closed.append(self)

    monkeypatch.setattr(asyncio, "sleep", at_once)

    async def scenario() -> None:
        clients = Clients(Account(), TRUTH, "127.0.0.1:1", "m", Random(0))
        clients.tritons.put_nowait(TritonStream("127.0.0.1:1"))
        old: Any = Connection()
        clients.sdk = old
        ticket = clients.send("unary")
        clients.renew()
        for _ in range(20):
            await at_once(0.0)
        assert closed == []
        clients.account.answered(ticket, 1)
        await clients.close()
        assert closed == [old]

    asyncio.run(scenario())
