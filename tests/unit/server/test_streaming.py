"""Streams over real sockets, called by our clients."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import numpy as np
import pytest

from offramp.client import (
    AnswerKind,
    AsyncClient,
    Client,
    DeadlineError,
    InvalidInputError,
    ServerBusyError,
    ServerError,
    ServerUnavailableError,
    StreamedResult,
    UnknownModelError,
)
from offramp.engine import errors as engine_errors
from offramp.engine.plan import Mode
from offramp.proto import messages
from offramp.proto.descriptors import method_path
from offramp.server.service import MAX_IN_FLIGHT, RequestStream
from offramp.testing.engine import FakeEngine

X = np.array([[1, 2, 3, 0.95], [4, 5, 6, 0.25], [7, 8, 9, 0.99], [3, 2, 1, 0.92]], np.float32)

Ask = Callable[..., list[StreamedResult]]


def ask(address: str, x: Any = X, model: str = "fake", **how: Any) -> list[StreamedResult]:
    with Client(address) as client:
        return list(client.infer_stream(model, {"x": x}, **how))


def ask_async(address: str, x: Any = X, model: str = "fake", **how: Any) -> list[StreamedResult]:
    async def gather() -> list[StreamedResult]:
        async with AsyncClient(address) as client:
            return [result async for result in client.infer_stream(model, {"x": x}, **how)]

    return asyncio.run(gather())


both = pytest.mark.parametrize("ask", [ask, ask_async], ids=["sync", "async"])


def wait_until(condition: Callable[[], Any], limit_s: float = 20.0) -> Any:
    deadline_s = time.monotonic() + limit_s
    while not (met := condition()):
        assert time.monotonic() < deadline_s, "the condition was not met in time"
        time.sleep(0.002)
    return met


async def until(condition: Callable[[], Any]) -> None:
    await asyncio.to_thread(wait_until, condition)


@both
def test_where_nothing_runs_on_there_is_one_answer(served: Any, ask: Ask) -> None:
    (result,) = ask(served.address, priority=1)
    assert result.kind is AnswerKind.ANSWER
    assert result.exits.tolist() == [0, -1, 0, 0]
    assert result.final.tolist() == [False, True, False, False]
    assert not result.corrected.any()
    assert result.policy_version == 7
    np.testing.assert_array_equal(result.outputs["logits"], X[:, :3])
    assert served.engine.calls[0].priority == 4


@both
def test_an_early_answer_is_confirmed(served: Any, ask: Ask) -> None:
    served.engine.mode = Mode.RELEASE
    early, final = ask(served.address, outputs=["logits"])
    assert (early.kind, final.kind) == (AnswerKind.EARLY, AnswerKind.CONFIRMATION)
    assert early.final.tolist() == [False, True, False, False]
    assert final.final.tolist() == [True] * 4
    assert not final.corrected.any()
    np.testing.assert_array_equal(early.outputs["logits"], X[:, :3])
    np.testing.assert_array_equal(final.outputs["logits"], X[:, :3])


@both
def test_an_early_answer_is_corrected(served: Any, ask: Ask) -> None:
    served.engine.mode, served.engine.mistaken = Mode.RELEASE, True
    early, final = ask(served.address)
    assert (early.kind, final.kind) == (AnswerKind.EARLY, AnswerKind.CORRECTION)
    assert final.corrected.tolist() == [True, False, True, True]
    assert final.corrected.dtype == np.bool_
    np.testing.assert_array_equal(early.outputs["logits"], X[:, :3])
    np.testing.assert_array_equal(final.outputs["logits"][[0, 2, 3]], X[[0, 2, 3], 2::-1])
    np.testing.assert_array_equal(final.outputs["logits"][1], X[1, :3])


@both
def test_an_audit_speaks_of_the_samples_drawn_alone(served: Any, ask: Ask) -> None:
    served.engine.mode, served.engine.mistaken = Mode.AUDIT, True
    _, final = ask(served.address)
    assert final.final.tolist() == [True, True, True, False]
    assert final.corrected.tolist() == [True, False, True, False]
    np.testing.assert_array_equal(final.outputs["logits"][3], X[3, :3])
    (only,) = ask(served.address, X[1:2])
    assert only.kind is AnswerKind.ANSWER


@both
def test_the_iterator_ends_where_the_final_answer_is_lost(served: Any, ask: Ask) -> None:
    served.engine.mode, served.engine.lost = Mode.RELEASE, True
    (early,) = ask(served.address)
    assert early.kind is AnswerKind.EARLY


def test_an_early_answer_does_not_wait_for_the_final_one(served: Any) -> None:
    served.engine.mode, served.engine.hold_final = Mode.RELEASE, asyncio.Event()
    with Client(served.address) as client:
        results = client.infer_stream("fake", {"x": X})
        assert next(results).kind is AnswerKind.EARLY
        assert wait_until(lambda: served.engine.auditing == 3)
        served.loop.call_soon_threadsafe(served.engine.hold_final.set)
        assert [result.kind for result in results] == [AnswerKind.CONFIRMATION]


def test_closing_the_iterator_withdraws_the_request(served: Any) -> None:
    served.engine.mode, served.engine.hold_final = Mode.RELEASE, asyncio.Event()
    with Client(served.address) as client:
        results = client.infer_stream("fake", {"x": X})
        next(results)
        results.close()
        assert wait_until(lambda: served.engine.cancelled == 3)

    async def leave() -> None:
        async with AsyncClient(served.address) as client:
            async with contextlib.aclosing(client.infer_stream("fake", {"x": X})) as results:
                await anext(results)
            await until(lambda: served.engine.cancelled >= 6)

    asyncio.run(asyncio.wait_for(leave(), 20))


@both
@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (engine_errors.QueueFullError("4096 samples wait"), ServerBusyError),
        (engine_errors.DrainingError("shutting down"), ServerUnavailableError),
        (engine_errors.DeadlineExceededError("too late"), DeadlineError),
        (engine_errors.BackendError("stage 2 failed"), ServerError),
    ],
)
def test_errors_have_the_class_and_the_words_of_unary_calls(
    served: Any, ask: Ask, failure: Exception, expected: type[Exception]
) -> None:
    served.engine.failure = failure
    with pytest.raises(expected, match=f"^{failure}$"):
        ask(served.address)


@both
def test_wrong_requests_are_refused(served: Any, ask: Ask) -> None:
    with pytest.raises(UnknownModelError, match="no model 'nobody'"):
        ask(served.address, model="nobody")
    with pytest.raises(InvalidInputError, match="fake"):
        ask(served.address, X[:, :2])
    with pytest.raises(InvalidInputError, match="priority -1"):
        ask(served.address, priority=-1)


@both
def test_what_nobody_expected_keeps_its_details_to_the_log(
    served: Any, ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    served.engine.failure = RuntimeError("secret")
    with pytest.raises(ServerError, match="internal error of the server; its log has"):
        ask(served.address)
    assert "secret" in caplog.text


@both
def test_the_first_answers_limit_is_the_servers_deadline_and_ours(served: Any, ask: Ask) -> None:
    before_s = time.monotonic()
    ask(served.address, timeout_s=20.0)
    after_s = time.monotonic()
    assert before_s + 20.0 <= served.engine.calls[0].deadline_s <= after_s + 20.0
    ask(served.address)
    assert served.engine.calls[1].deadline_s is None

    served.hold()
    with pytest.raises(DeadlineError):  # the server's or ours, whichever is first
        ask(served.address, timeout_s=0.05)


@both
def test_a_server_that_does_not_answer_at_all_is_left_in_time(ask: Ask) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as mute,
        pytest.raises(DeadlineError, match=r"no answer within 0\.05 s"),
    ):
        ask(f"127.0.0.1:{mute.getsockname()[1]}", timeout_s=0.05)


@both
def test_the_final_answer_may_come_after_the_firsts_limit(served: Any, ask: Ask) -> None:
    served.engine.mode, served.engine.hold_final = Mode.RELEASE, asyncio.Event()
    timeout_s = 0.5

    def release_later() -> None:
        served.loop.call_later(1.2 * timeout_s, served.engine.hold_final.set)

    served.loop.call_soon_threadsafe(release_later)
    assert [result.kind for result in ask(served.address, timeout_s=timeout_s)] == [
        AnswerKind.EARLY, AnswerKind.CONFIRMATION,
    ]  # fmt: skip


def request(id_: str, x: Any = X, model: str = "fake") -> messages.ModelInferRequest:
    message = messages.ModelInferRequest(model_name=model, id=id_)
    message.inputs.add(name="x", datatype="FP32", shape=x.shape)
    message.raw_input_contents.append(x.tobytes())
    return message


@contextlib.asynccontextmanager
async def open_stream(address: str) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream(
            method_path("ModelStreamInfer"),
            request_serializer=messages.ModelInferRequest.SerializeToString,
            response_deserializer=messages.ModelStreamInferResponse.FromString,
        )()
        yield call


def test_answers_come_as_they_are_ready_and_errors_leave_the_stream_open(served: Any) -> None:
    served.engine.mode, served.engine.hold_final = Mode.RELEASE, asyncio.Event()

    async def talk() -> list[Any]:
        async with open_stream(served.address) as call:
            for asked in (request("a", X[:1]), request("b", model="no"), request("c", X[1:2])):
                await call.write(asked)
            first = [await call.read() for _ in range(3)]
            served.loop.call_soon_threadsafe(served.engine.hold_final.set)
            await call.done_writing()
            return [*first, await call.read(), await call.read()]

    responses = asyncio.run(asyncio.wait_for(talk(), 20))
    *responses, end = responses
    assert end is grpc.aio.EOF
    told = [
        (
            response.infer_response.id,
            response.error_message,
            response.infer_response.parameters["offramp_answer"].string_param,
            response.infer_response.parameters["triton_final_response"].bool_param,
        )
        for response in responses
    ]
    refused = "no model 'no' is served; served: fake"
    assert sorted(told[:3]) == [
        ("a", "", "early", False), ("b", refused, "", True), ("c", "", "answer", True),
    ]  # fmt: skip
    assert told[3:] == [("a", "", "confirmation", True)]
    (error,) = [r.infer_response for r in responses if r.error_message]
    assert error.parameters["offramp_status"].string_param == "NOT_FOUND"
    assert error.model_name == "no"
    assert not error.outputs


def test_nobody_waits_for_a_final_answer_that_was_lost(served: Any) -> None:
    served.engine.mode, served.engine.lost = Mode.RELEASE, True

    async def talk() -> list[Any]:
        async with open_stream(served.address) as call:
            await call.write(request("a"))
            return [await call.read(), await call.read()]

    early, end = (r.infer_response for r in asyncio.run(asyncio.wait_for(talk(), 20)))
    assert not early.parameters["triton_final_response"].bool_param
    assert end.parameters["triton_final_response"].bool_param
    assert (end.id, len(end.outputs), "offramp_answer" in end.parameters) == ("a", 0, False)


def test_cancelling_a_stream_withdraws_all_its_requests(served: Any) -> None:
    served.hold()

    async def talk() -> None:
        async with open_stream(served.address) as call:
            for number in range(3):
                await call.write(request(str(number)))
            await until(lambda: served.engine.waiting >= 12)
            call.cancel()
            await until(lambda: served.engine.cancelled >= 12)

    asyncio.run(asyncio.wait_for(talk(), 20))
    assert served.engine.waiting == 0


def test_a_stream_that_is_read_late_loses_nothing(served: Any) -> None:
    total = MAX_IN_FLIGHT + 44
    many = np.zeros((2000, 4), np.float32)  # 24 KB of answers: more than connections buffer

    async def talk() -> list[str]:
        async with open_stream(served.address) as call:

            async def send() -> None:
                for number in range(total):
                    await call.write(request(str(number), many))
                await call.done_writing()

            sending = asyncio.create_task(send())
            await until(lambda: len(served.engine.calls) >= MAX_IN_FLIGHT)
            ids = []
            while (response := await call.read()) is not grpc.aio.EOF:
                ids.append(response.infer_response.id)
            await sending
            return ids

    ids = asyncio.run(asyncio.wait_for(talk(), 60))
    assert sorted(ids, key=int) == [str(number) for number in range(total)]


def test_a_client_that_does_not_read_is_not_read_from() -> None:
    """In virtual steps: all that can go on has, after so many turns of the loop."""
    engine, written, taken = FakeEngine(), [], []

    async def requests() -> AsyncIterator[messages.ModelInferRequest]:
        for number in range(100):
            taken.append(number)
            yield request(str(number))

    async def run() -> None:
        reads = asyncio.Semaphore(0)

        async def write(response: messages.ModelStreamInferResponse) -> None:
            await reads.acquire()
            written.append(response.infer_response.id)

        stream = RequestStream(engine, write, max_in_flight=8)
        serving = asyncio.create_task(stream.serve(requests()))
        for _ in range(1000):
            await asyncio.sleep(0)
        assert (len(taken), len(engine.calls), len(written)) == (8, 8, 0)
        for _ in range(5):
            reads.release()
        for _ in range(1000):
            await asyncio.sleep(0)
        assert (len(taken), len(engine.calls), len(written)) == (13, 13, 5)
        for _ in range(100):
            reads.release()
        await serving
        assert sorted(written, key=int) == [str(number) for number in range(100)]

    asyncio.run(run())


def test_a_connection_that_breaks_ends_the_stream_quietly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = FakeEngine(hold=asyncio.Event())

    async def requests() -> AsyncIterator[messages.ModelInferRequest]:
        yield request("refused", model="nobody")
        for number in range(3):
            yield request(str(number))
        await asyncio.Event().wait()

    async def write(_: messages.ModelStreamInferResponse) -> None:
        await until(lambda: engine.waiting >= 12)
        raise RuntimeError("connection reset")

    asyncio.run(asyncio.wait_for(RequestStream(engine, write).serve(requests()), 20))
    assert engine.cancelled == 12
    assert not caplog.records


def test_an_answer_that_cannot_be_sent_ends_the_stream(caplog: pytest.LogCaptureFixture) -> None:
    async def requests() -> AsyncIterator[messages.ModelInferRequest]:
        yield request("0")
        await asyncio.Event().wait()

    async def write(_: messages.ModelStreamInferResponse) -> None:
        raise RuntimeError("connection reset")

    asyncio.run(asyncio.wait_for(RequestStream(FakeEngine(), write).serve(requests()), 20))
    assert not caplog.records


def test_a_request_is_withdrawn_before_its_stream_ends() -> None:
    """Even if somebody holds its iterator, so that it is not collected as garbage."""
    kept: list[Any] = []

    class Engine(FakeEngine):
        def infer_stream(self, *args: Any, **how: Any) -> Any:
            kept.append(FakeEngine.infer_stream(self, *args, **how))
            return kept[0]

    async def requests() -> AsyncIterator[messages.ModelInferRequest]:
        yield request("0")

    async def run() -> None:
        writing = asyncio.Event()

        async def write(_: messages.ModelStreamInferResponse) -> None:
            writing.set()
            await asyncio.Event().wait()

        serving = asyncio.create_task(RequestStream(Engine(), write).serve(requests()))
        await writing.wait()
        serving.cancel()
        await asyncio.wait([serving])
        assert kept[0].ag_frame is None  # closed

    asyncio.run(run())


def test_a_server_that_leaves_finishes_what_is_on_a_stream(served: Any) -> None:
    served.engine.mode, served.engine.hold_final = Mode.RELEASE, asyncio.Event()

    async def talk() -> list[Any]:
        async with open_stream(served.address) as call:
            await call.write(request("a"))
            early = await call.read()
            await asyncio.wrap_future(
                asyncio.run_coroutine_threadsafe(served.engine.drain(20.0), served.loop)
            )
            final = await call.read()
            await call.write(request("b"))
            return [early, final, await call.read()]

    early, final, refused = asyncio.run(asyncio.wait_for(talk(), 20))
    assert early.infer_response.parameters["offramp_answer"].string_param == "early"
    assert final.infer_response.parameters["offramp_answer"].string_param == "confirmation"
    assert refused.error_message.startswith("the server is shutting down")
    assert refused.infer_response.id == "b"
