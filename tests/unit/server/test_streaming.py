"""Streams over real sockets, called by our clients."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import socket
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.facts import facts

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
from offramp.engine.common import errors as engine_errors
from offramp.engine.stages.plan import Mode
from offramp.proto import messages
from offramp.proto.descriptors import method_path
from offramp.server.common.errors import UndecodableError
from offramp.server.requests.admission import RequestAdmission
from offramp.server.requests.streaming import MAX_IN_FLIGHT, RequestStream
from offramp.testing.engine import FakeEngine, fake_model
from offramp.testing.server import FakeServer

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


def logged(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return the log without grpcio's messages about several event loops in a process.

    Its poller wakes all of them, including those of clients whose ``asyncio.run`` has ended.
    """
    return [record for record in caplog.records if "PollerCompletionQueue" not in record.message]


@both
def test_where_nothing_runs_on_there_is_one_answer(served: Any, ask: Ask) -> None:
    (result,) = ask(served.address, priority=1)
    assert result.kind is AnswerKind.ANSWER
    assert result.exits.tolist() == [0, -1, 0, 0]
    assert result.final.tolist() == [False, True, False, False]
    assert not result.corrected.any()
    assert result.policy_version == 7
    np.testing.assert_array_equal(result.outputs["logits"], X[:, :3])
    assert (served.engine.calls[0].priority, served.engine.calls[0].source) == (4, "ipv4:127.0.0.1")


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
    with pytest.raises(ServerError, match=facts("internal error", "log")):
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


def request(
    id_: str, x: Any = X, model: str = "fake", **parameters: bool
) -> messages.ModelInferRequest:
    message = messages.ModelInferRequest(model_name=model, id=id_)
    for name, value in parameters.items():
        message.parameters[name].bool_param = value
    message.inputs.add(name="x", datatype="FP32", shape=x.shape)
    message.raw_input_contents.append(x.tobytes())
    return message


def serialized(message: messages.ModelInferRequest | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


@contextlib.asynccontextmanager
async def open_stream(address: str, timeout_s: float | None = None) -> AsyncIterator[Any]:
    """A stream that sends bytes as they are, so that they need not be a request."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream(
            method_path("ModelStreamInfer"),
            request_serializer=serialized,
            response_deserializer=messages.ModelStreamInferResponse.FromString,
        )(timeout=timeout_s)
        yield call


def talk(
    address: str, sent: list[messages.ModelInferRequest]
) -> list[messages.ModelStreamInferResponse]:
    """All responses to what is sent on one stream, in the order that they came in."""

    async def send_and_read() -> list[messages.ModelStreamInferResponse]:
        async with open_stream(address) as call:

            async def send() -> None:
                for message in sent:
                    await call.write(message)
                await call.done_writing()

            sending = asyncio.create_task(send())
            responses = []
            while (response := await call.read()) is not grpc.aio.EOF:
                responses.append(response)
            await sending
            return responses

    return asyncio.run(asyncio.wait_for(send_and_read(), 60))


def test_decoupled_answers_come_as_they_are_ready_and_errors_leave_the_stream_open(
    served: Any,
) -> None:
    served.engine.mode, served.engine.hold_final = Mode.RELEASE, asyncio.Event()

    async def talk() -> list[Any]:
        async with open_stream(served.address) as call:
            for id_, x, model in (("a", X[:1], "fake"), ("b", X, "no"), ("c", X[1:2], "fake")):
                await call.write(request(id_, x, model, offramp_decoupled=True))
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
    refused = "no model 'no' is served here; served: 'fake'"
    assert sorted(told[:3]) == [
        ("a", "", "early", False), ("b", refused, "", True), ("c", "", "answer", True),
    ]  # fmt: skip
    assert told[3:] == [("a", "", "confirmation", True)]
    (error,) = [r.infer_response for r in responses if r.error_message]
    assert error.parameters["offramp_status"].string_param == "NOT_FOUND"
    assert error.model_name == "no"
    assert not error.outputs


@pytest.mark.parametrize("asked", [True, False])
def test_who_asks_for_it_is_told_that_a_final_answer_was_lost(served: Any, asked: bool) -> None:
    served.engine.mode, served.engine.lost = Mode.RELEASE, True
    sent = request("a", offramp_decoupled=True, triton_enable_empty_final_response=asked)
    early, *ends = (r.infer_response for r in talk(served.address, [sent]))
    assert not early.parameters["triton_final_response"].bool_param
    assert [(end.id, len(end.outputs), "offramp_answer" in end.parameters) for end in ends] == (
        [("a", 0, False)] * asked
    )
    assert all(end.parameters["triton_final_response"].bool_param for end in ends)


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
    """Time is virtual: after enough turns of the loop all possible work is done."""
    engine, written, taken = FakeEngine(), [], []

    async def requests() -> AsyncIterator[bytes]:
        for number in range(100):
            taken.append(number)
            yield serialized(request(str(number)))

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

    async def requests() -> AsyncIterator[bytes]:
        yield serialized(request("refused", model="nobody"))
        for number in range(3):
            yield serialized(request(str(number)))
        await asyncio.Event().wait()

    async def write(_: messages.ModelStreamInferResponse) -> None:
        await until(lambda: engine.waiting >= 12)
        raise RuntimeError("connection reset")

    asyncio.run(asyncio.wait_for(RequestStream(engine, write).serve(requests()), 20))
    assert engine.cancelled == 12
    assert not logged(caplog)


def test_an_answer_that_cannot_be_sent_ends_the_stream(caplog: pytest.LogCaptureFixture) -> None:
    async def requests() -> AsyncIterator[bytes]:
        yield serialized(request("0"))
        await asyncio.Event().wait()

    async def write(_: messages.ModelStreamInferResponse) -> None:
        raise RuntimeError("connection reset")

    asyncio.run(asyncio.wait_for(RequestStream(FakeEngine(), write).serve(requests()), 20))
    assert not logged(caplog)


def test_a_request_is_withdrawn_before_its_stream_ends() -> None:
    """Even if somebody holds its iterator, so that it is not collected as garbage."""
    kept: list[Any] = []

    class Engine(FakeEngine):
        def infer_stream(self, *args: Any, **how: Any) -> Any:
            kept.append(FakeEngine.infer_stream(self, *args, **how))
            return kept[0]

    async def requests() -> AsyncIterator[bytes]:
        yield serialized(request("0", offramp_decoupled=True))

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
            await call.write(request("a", offramp_decoupled=True))
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


GARBAGE = (b"\xff", b"\x0a\x05ab", b"\x2a\x7fnot a request")


@pytest.mark.parametrize(
    ("before", "rows", "held"),
    [
        (0, 1, False),
        (1, 1, False),
        (3, 1, True),
        (1, 30_000, False),
        (12, 3000, False),
        (12, 3000, True),
    ],
    ids=["first", "answered", "in flight", "first unread", "unread", "unread, in flight"],
)
@pytest.mark.parametrize("decoupled", [False, True], ids=["one answer", "both"])
def test_a_message_that_is_no_request_ends_its_stream_at_once(
    served: Any,
    caplog: pytest.LogCaptureFixture,
    before: int,
    rows: int,
    held: bool,
    decoupled: bool,
) -> None:
    """Requests may be in flight or being written: also more than connections buffer."""
    engine, many = served.engine, np.repeat(X[:1], rows, axis=0)
    engine.mode = Mode.RELEASE
    if held and decoupled:
        engine.hold_final = asyncio.Event()
    elif held:
        engine.hold = asyncio.Event()

    async def status(number: int) -> grpc.StatusCode:
        async with open_stream(served.address, timeout_s=60.0) as call:
            for index in range(before):
                await call.write(request(str(index), many, offramp_decoupled=decoupled))
            if number % 2:  # all those of the streams before it as well
                await until(lambda: len(engine.calls) >= before * (number + 1) / 2)
            await call.write(GARBAGE[number % len(GARBAGE)])
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await call.read() is not grpc.aio.EOF:
                    pass
            code: grpc.StatusCode = await call.code()
            return code

    async def attack() -> list[grpc.StatusCode]:
        return await asyncio.gather(*(status(number) for number in range(16)))

    assert asyncio.run(attack()) == [grpc.StatusCode.INVALID_ARGUMENT] * 16
    wait_until(lambda: engine.waiting + engine.auditing == 0)
    engine.hold = engine.hold_final = None
    assert len(ask(served.address)) == 2
    assert not logged(caplog)


@pytest.mark.parametrize("decoupled", [False, True], ids=["one answer", "both"])
@pytest.mark.parametrize("broken", [b"\xff", ValueError("of the connection")], ids=str)
def test_a_stream_that_breaks_ends_once_the_write_under_way_has(
    broken: bytes | Exception, decoupled: bool
) -> None:
    """gRPC finishes a write whose task is cancelled, and cannot end the call during it."""
    engine = FakeEngine(mode=Mode.RELEASE)
    asked = [request(str(n), offramp_decoupled=decoupled).SerializeToString() for n in range(9)]

    async def requests() -> AsyncIterator[bytes]:
        for raw in asked[:5]:
            yield raw
        await turns()
        engine.hold = asyncio.Event()
        for raw in asked[5:]:
            yield raw
        await turns()
        if isinstance(broken, Exception):
            raise broken
        yield broken

    async def run() -> None:
        begun, ended, taken = [], [], asyncio.Event()

        async def write(response: messages.ModelStreamInferResponse) -> None:
            begun.append(response)
            await taken.wait()
            ended.append(response)

        serving = asyncio.create_task(RequestStream(engine, write).serve(requests()))
        await turns(3000)
        assert (len(engine.calls), engine.waiting, len(begun), len(ended)) == (9, 16, 1, 0)
        assert not serving.done()
        taken.set()
        with pytest.raises(UndecodableError if isinstance(broken, bytes) else ValueError):
            await serving
        assert begun == ended
        assert (engine.waiting, engine.auditing) == (0, 0)

    asyncio.run(asyncio.wait_for(run(), 20))


async def turns(count: int = 500) -> None:
    """Let all runnable tasks proceed."""
    for _ in range(count):
        await asyncio.sleep(0)


class Shuffling(FakeEngine):
    """Answers in another order than it is asked in."""

    async def infer(self, *args: Any, **how: Any) -> Any:
        await turns(len(self.calls) * 37 % 50)
        return await FakeEngine.infer(self, *args, **how)


@pytest.mark.parametrize("max_in_flight", [1, 3, 64])
def test_a_request_is_answered_once_and_in_turn_unless_it_is_decoupled(max_in_flight: int) -> None:
    engine = Shuffling(mode=Mode.AUDIT)
    written: list[messages.ModelInferResponse] = []

    async def requests() -> AsyncIterator[bytes]:
        for number in range(200):
            model = "nobody" if number % 7 == 3 else "fake"
            both = {"offramp_decoupled": True} if number % 5 == 2 else {}
            yield request(str(number), X[:1], model, **both).SerializeToString()

    async def write(response: messages.ModelStreamInferResponse) -> None:
        await asyncio.sleep(0)
        written.append(response.infer_response)

    stream = RequestStream(engine, write, max_in_flight=max_in_flight)
    asyncio.run(asyncio.wait_for(stream.serve(requests()), 60))
    ids = [int(response.id) for response in written]
    assert [n for n in ids if n % 5 != 2] == [n for n in range(200) if n % 5 != 2]
    assert Counter(ids) == {n: 2 if n % 5 == 2 and n % 7 != 3 else 1 for n in range(200)}
    for response in written:
        last = response.parameters["triton_final_response"].bool_param
        early = response.parameters["offramp_answer"].string_param == "early"
        assert last is not early
        assert "offramp_corrected" not in response.parameters


def test_a_decoupled_request_does_not_wait_for_those_before(served: Any) -> None:
    served.hold()

    async def talk() -> list[str]:
        async with open_stream(served.address) as call:
            await call.write(request("held"))
            await until(lambda: served.engine.waiting == 4)
            held, served.engine.hold = served.engine.hold, None
            await call.write(request("in turn"))
            await call.write(request("decoupled", offramp_decoupled=True))
            first = await call.read()
            served.loop.call_soon_threadsafe(held.set)
            return [r.infer_response.id for r in (first, await call.read(), await call.read())]

    assert asyncio.run(asyncio.wait_for(talk(), 20)) == ["decoupled", "held", "in turn"]


def test_a_response_that_waits_for_earlier_ones_keeps_no_request_alive() -> None:
    alive: set[int] = set()
    arrays: list[weakref.ref[Any]] = []

    class Raw(bytes):
        number: int

        def __del__(self) -> None:
            alive.remove(self.number)

    def raw(number: int) -> Raw:
        large = np.repeat(X, 500, axis=0)  # enough that it is not decoded whole
        message = Raw(request(str(number), large).SerializeToString())
        message.number = number
        alive.add(number)
        return message

    class Forgetful(FakeEngine):
        async def infer(self, model: str, inputs: Any, **how: Any) -> Any:
            arrays.append(weakref.ref(inputs["x"]))
            result = await FakeEngine.infer(self, model, inputs, **how)
            self.calls.clear()
            return result

    async def run() -> None:
        held, written = asyncio.Event(), []
        engine = Forgetful(hold=held)

        async def requests() -> AsyncIterator[bytes]:
            for number in range(5):
                yield raw(number)
                await turns(20)
                engine.hold = None
            assert alive <= {0}  # arrays are views of the message where it is aligned
            assert [array() is None for array in arrays] == [False, True, True, True, True]
            held.set()

        async def write(response: messages.ModelStreamInferResponse) -> None:
            written.append(response.infer_response.id)

        await RequestStream(engine, write).serve(requests())
        assert written == list("01234")

    asyncio.run(asyncio.wait_for(run(), 20))


@pytest.mark.parametrize("mode", [Mode.LEAVE, Mode.RELEASE], ids=["one answer", "both"])
def test_a_decoupled_response_that_waits_for_its_client_holds_no_request(mode: Mode) -> None:
    engine, admission = FakeEngine(mode=mode), RequestAdmission()

    async def run() -> None:
        reads, written = asyncio.Event(), []

        async def requests() -> AsyncIterator[bytes]:
            for number in range(5):
                yield serialized(request(str(number), offramp_decoupled=True))
            await until(lambda: len(engine.calls) == 5)
            await until(lambda: admission.requests == admission.held_bytes == 0)
            assert written == []
            reads.set()

        async def write(response: messages.ModelStreamInferResponse) -> None:
            await reads.wait()
            written.append(response.infer_response.parameters["offramp_answer"].string_param)

        await RequestStream(engine, write, admission=admission).serve(requests())
        assert len(written) == (10 if mode is Mode.RELEASE else 5)

    asyncio.run(asyncio.wait_for(run(), 20))


def test_who_leaves_early_withdraws_what_runs_on() -> None:
    """Even before it has been asked for the answer that it will not give."""
    engine = FakeEngine(mode=Mode.RELEASE, hold_final=asyncio.Event())

    async def run() -> None:
        async with contextlib.aclosing(engine.infer_stream("fake", {"x": X})) as results:
            await anext(results)
            assert engine.auditing == 3
        assert (engine.auditing, engine.cancelled) == (0, 3)

    asyncio.run(run())


def test_all_requests_to_a_decoupled_model_are() -> None:
    model = replace(fake_model(), decoupled=True)
    with FakeServer(FakeEngine(served=(model,), mode=Mode.RELEASE)) as server:
        arrived: queue.Queue[Any] = queue.Queue()
        tensor = triton.InferInput("x", list(X.shape), "FP32")
        tensor.set_data_from_numpy(X)
        with triton.InferenceServerClient(server.address) as client:
            client.start_stream(lambda result, error: arrived.put((result, error)))
            client.async_stream_infer("fake", [tensor])
            answers = [arrived.get(timeout=20) for _ in range(2)]
            client.stop_stream()
            assert client.get_model_config("fake").config.model_transaction_policy.decoupled
        parameters = [result.get_response().parameters for result, error in answers]
        assert [p["offramp_answer"].string_param for p in parameters] == ["early", "confirmation"]
        assert [p["triton_final_response"].bool_param for p in parameters] == [False, True]
