"""Clients of every sort: each sends a request or a few, and closes their tickets."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

import grpc
import grpc.aio
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from offramp.client import (
    AnswerKind,
    AsyncClient,
    ConnectionFailedError,
    DeadlineError,
    InferResult,
    InvalidInputError,
    MessageTooLargeError,
    OfframpError,
    ServerBusyError,
    ServerUnavailableError,
    StreamedResult,
    UnknownModelError,
)
from offramp.client.conversion import build_request
from offramp.client.errors import BROKEN_OFF
from offramp.proto import messages
from offramp.proto.descriptors import method_path
from tests.chaos.account import Account, Ticket
from tests.chaos.server import FAULT
from tests.chaos.truth import Truth

LIMIT_S: Final = 30.0
"""Time after which a waiting client counts as forgotten."""
MAX_ROWS: Final = 4
"""Most rows of a request."""
_PROMPT: Final = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 300),
    ("grpc.max_send_message_length", -1),
)
_TRITONS: Final = 3
_numbers: Final = itertools.count(1)
"""Numbers of connections: gRPC shares those of equal settings."""


@dataclass(slots=True)
class Clients:
    """Connections to the server, of all sorts; and what all clients share."""

    account: Account
    truth: Truth
    address: str
    model: str
    random: Random
    sdk: AsyncClient | None = None
    channel: grpc.aio.Channel | None = None
    tritons: asyncio.Queue[TritonStream] = field(default_factory=asyncio.Queue)
    renewed: int = 0
    _closing: set[asyncio.Task[None]] = field(default_factory=set)

    def renew(self) -> None:
        """Connect to a server that has just started, as clients of a load balancer do."""
        old = (self.sdk, self.channel)
        self.renewed += 1
        self.sdk = self.new_sdk()
        self.channel = grpc.aio.insecure_channel(
            self.address, [*_PROMPT, ("chaos.renewed", self.renewed)]
        )
        if old[0] is not None:
            closing = asyncio.create_task(self._retire(old, set(self.account.open)))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        while self.tritons.qsize() + 1 <= _TRITONS and self.renewed == 1:
            self.tritons.put_nowait(TritonStream(self.address))

    def new_sdk(self) -> AsyncClient:
        """Return a client with its own connection.

        Clients of equal settings would share one in gRPC, including its delay before reconnecting.
        """
        own = 64 + next(_numbers) % 1900  # below gRPC's limit
        return AsyncClient(self.address, timeout_s=LIMIT_S, max_message_mib=own)

    async def _retire(self, old: tuple[Any, ...], waiting: set[Ticket]) -> None:
        """Close connections once all is closed that was asked on them, and its calls have ended."""
        until_s = time.monotonic() + 2 * LIMIT_S
        while waiting & self.account.open and time.monotonic() < until_s:  # noqa: ASYNC110 - rare
            await asyncio.sleep(0.5)
        await asyncio.sleep(2.0)
        await _close(old)

    async def close(self) -> None:
        await asyncio.gather(*self._closing)
        await _close((self.sdk, self.channel))
        while not self.tritons.empty():
            await asyncio.to_thread(self.tritons.get_nowait().close)

    def draw(self) -> list[int]:
        """Rows of the pool, for a request."""
        return [self.random.randrange(len(self.truth)) for _ in range(self._size())]

    def _size(self) -> int:
        return self.random.randint(1, MAX_ROWS)

    def send(self, kind: str) -> Ticket:
        return self.account.send(kind, time.monotonic())

    def judge(self, ticket: Ticket, rows: Sequence[int], result: InferResult) -> None:
        """Close a request with its answer, right or wrong."""
        self.judge_parts(
            ticket,
            rows,
            result.exits.tolist(),
            result.outputs[self.truth.output],
            result.confidences.tolist(),
        )

    def judge_parts(
        self,
        ticket: Ticket,
        rows: Sequence[int],
        exits: Sequence[int],
        answers: Any,
        confidences: Sequence[float],
    ) -> None:
        wrong = self.truth.wrong(rows, exits, answers, confidences)
        if wrong is not None:
            self.account.wrong.append(f"{ticket.kind}: {wrong}")
        else:
            self.account.samples += len(rows)
            self.account.disagreed += self.truth.disagreements(rows, answers)
        self.account.answered(ticket, len(rows))

    def failed(self, ticket: Ticket, error: Exception, samples: int) -> None:
        """Close a request with the status of an error."""
        status, by_server = status_of(error)
        detail = _detail(error)
        unsent = isinstance(error, StreamEndedError) or _UNSENT in detail
        self.account.ended_with(
            ticket,
            status=status,
            by_server=by_server,
            now_s=error.at_s if isinstance(error, StreamEndedError) else time.monotonic(),
            samples=0 if unsent else samples,
            detail=detail,
        )


_UNSENT: Final = "failed to connect to all addresses"
"""gRPC's message if no connection existed to send the request."""


def _detail(error: BaseException) -> str:
    """Return an error's message in one line."""
    cause = error if isinstance(error, grpc.RpcError) else error.__cause__
    text = cause.details() if isinstance(cause, grpc.aio.AioRpcError) else str(error)
    return " ".join((text or "").split())[:300]


async def _close(old: tuple[Any, ...]) -> None:
    for one in old:
        if one is not None:
            await one.close()


_STATUSES: Final[Mapping[type[OfframpError], str]] = {
    UnknownModelError: "NOT_FOUND",
    InvalidInputError: "INVALID_ARGUMENT",
    MessageTooLargeError: "RESOURCE_EXHAUSTED",
    ServerBusyError: "RESOURCE_EXHAUSTED",
    DeadlineError: "DEADLINE_EXCEEDED",
    ServerUnavailableError: "UNAVAILABLE",
}
"""Statuses of errors that are sent as messages of a stream instead of a call's status."""


def status_of(error: BaseException) -> tuple[str, bool]:
    """Return gRPC's name of an error's status, and whether the server set it."""
    cause = error if isinstance(error, grpc.RpcError) else error.__cause__
    if isinstance(cause, grpc.aio.AioRpcError):
        metadata = cause.trailing_metadata() or ()
        if cause.details() and cause.details().endswith(BROKEN_OFF):
            return "UNAVAILABLE", False
        return cause.code().name, any(key == "offramp-error" for key, _ in metadata)
    if isinstance(error, InferenceServerException):
        name = str(error.status() or "").removeprefix("StatusCode.")
        lost = _of_connection(str(error))
        return name or ("UNAVAILABLE" if lost else _named(str(error))), not lost
    by_server = not isinstance(error, ConnectionFailedError | MessageTooLargeError)
    return _STATUSES.get(type(error), "INTERNAL" if by_server else "UNKNOWN"), by_server


_LOST: Final = (
    *("connect", "no longer in valid state", "Socket closed", "GOAWAY"),
    *("Stream removed", "RST_STREAM", "reset by peer"),
)


def _named(text: str) -> str:
    """The status of an error on a stream, which tritonclient gives the text of alone."""
    words = {FAULT: "INTERNAL", "queue is full": "RESOURCE_EXHAUSTED", "shutting": "UNAVAILABLE"}
    return next((status for word, status in words.items() if word in text), "STREAM_ERROR")


def _of_connection(text: str) -> bool:
    """Return True if the text of tritonclient's error is gRPC's own; it has no metadata."""
    return any(word in text for word in _LOST)


async def unary(clients: Clients) -> None:
    """The SDK, one request."""
    await _ask(clients, "unary", timeout_s=None)


async def hurried(clients: Clients) -> None:
    """The SDK, with hardly any time."""
    await _ask(clients, "hurried", timeout_s=clients.random.uniform(0.002, 0.03))


async def _ask(clients: Clients, kind: str, *, timeout_s: float | None) -> None:
    rows, ticket = clients.draw(), clients.send(kind)
    assert clients.sdk is not None
    try:
        result = await clients.sdk.infer(
            clients.model, clients.truth.take(rows), timeout_s=timeout_s
        )
    except OfframpError as error:
        clients.failed(ticket, error, len(rows))
    else:
        clients.judge(ticket, rows, result)


async def stream(clients: Clients) -> None:
    """The SDK, with final answers; all results are checked.

    A final answer that follows an early one is left out should the server lose it.
    """
    rows, ticket = clients.draw(), clients.send("stream")
    assert clients.sdk is not None
    last: StreamedResult | None = None
    try:
        answers = clients.sdk.infer_stream(clients.model, clients.truth.take(rows))
        async with contextlib.aclosing(answers):
            async for result in answers:
                if last is not None:
                    _check_early(clients, rows, last)
                last = result
    except OfframpError as error:
        if last is not None:
            _check_early(clients, rows, last)
        clients.failed(ticket, error, len(rows))
        return
    if last is None:
        clients.account.faults.append("a stream ended without an answer and without an error")
        clients.account.answered(ticket, 0)
        return
    if last.kind is AnswerKind.EARLY:
        clients.account.unconfirmed(ticket, now_s=time.monotonic())
    clients.judge(ticket, rows, last)


def _check_early(clients: Clients, rows: Sequence[int], result: InferResult) -> None:
    wrong = clients.truth.wrong(
        rows,
        result.exits.tolist(),
        result.outputs[clients.truth.output],
        result.confidences.tolist(),
    )
    if wrong is not None:
        clients.account.wrong.append(f"stream, early: {wrong}")


async def departing(clients: Clients) -> None:
    """Leaves after some milliseconds, whether or not there is an answer: call or connection."""
    rows, ticket = clients.draw(), clients.send("departing")
    own = None
    client = clients.sdk
    if clients.random.random() < 0.3:
        own = client = clients.new_sdk()
    assert client is not None
    asking = asyncio.ensure_future(client.infer(clients.model, clients.truth.take(rows)))
    await asyncio.wait((asking,), timeout=clients.random.expovariate(1 / 0.01))
    left = not asking.done()
    if left:
        if own is not None:
            await own.close()
        asking.cancel()
    try:
        clients.judge(ticket, rows, await asking)
    except (asyncio.CancelledError, OfframpError) as error:
        withdrawn = isinstance(error, asyncio.CancelledError) or status_of(error)[0] == "CANCELLED"
        if left and withdrawn:
            clients.account.cancelled(ticket, len(rows))
        elif isinstance(error, OfframpError):
            clients.failed(ticket, error, len(rows))
        else:
            raise
    finally:
        if own is not None:
            await own.close()


def _method(channel: grpc.aio.Channel, name: str, *, streams: bool = False) -> Any:
    """A method that takes bytes as they are."""
    response = "ModelStreamInferResponse" if streams else "ModelInferResponse"
    make = channel.stream_stream if streams else channel.unary_unary
    return make(
        method_path(name),
        request_serializer=bytes,
        response_deserializer=getattr(messages, response).FromString,
    )


def request_of(clients: Clients, rows: Sequence[int], *, number: int = 0) -> Any:
    """The message that asks for some rows."""
    request = build_request(
        clients.model, clients.truth.take(rows), outputs=None, priority=0, deadline_s=None
    )
    request.id = str(number)
    return request


async def slow_reader(clients: Clients) -> None:
    """Sends a few dozen requests on a stream, and takes its time with the answers.

    It asks for nothing special: exactly one response a request, in their order.
    """
    assert clients.channel is not None
    many = clients.random.randint(10, 30)
    asked = [(clients.draw(), clients.send("slow reader")) for _ in range(many)]
    call = _method(clients.channel, "ModelStreamInfer", streams=True)(timeout=LIMIT_S)
    try:
        for number, (rows, _) in enumerate(asked):
            await call.write(request_of(clients, rows, number=number).SerializeToString())
        await call.done_writing()
        for number, (rows, ticket) in enumerate(asked):
            await asyncio.sleep(clients.random.expovariate(1 / 0.03))
            response = await call.read()
            if response is grpc.aio.EOF:
                await call.code()
                raise await _error_of(call)
            _take(clients, ticket, rows, response, number)
        if await call.read() is not grpc.aio.EOF:
            clients.account.faults.append("a stream had more responses than requests")
    except (grpc.RpcError, asyncio.InvalidStateError) as error:
        told = error if isinstance(error, grpc.RpcError) else await _error_of(call)
        for rows, ticket in asked:
            if ticket.outcome is None:
                clients.failed(ticket, told, len(rows))
    finally:
        call.cancel()


async def _error_of(call: Any) -> grpc.aio.AioRpcError:
    """The error of a call that ended before its answers were there; OK is one as well, here."""
    return grpc.aio.AioRpcError(
        await call.code(),
        await call.initial_metadata(),
        await call.trailing_metadata(),
        f"the stream ended early: {await call.details()}",
    )


def _take(
    clients: Clients, ticket: Ticket, rows: Sequence[int], response: Any, number: int
) -> None:
    """Close a ticket with the next response of its stream."""
    inner = response.infer_response
    if inner.id != str(number):
        clients.account.wrong.append(
            f"{ticket.kind}: request {number} has the response of request {inner.id}"
        )
        clients.account.answered(ticket, len(rows))
    elif response.error_message:
        clients.account.ended_with(
            ticket,
            status=inner.parameters["offramp_status"].string_param or "STREAM_ERROR",
            by_server=True,
            now_s=time.monotonic(),
            samples=len(rows),
            detail=response.error_message[:300],
        )
    else:
        _judge_message(clients, ticket, rows, inner)


def _judge_message(clients: Clients, ticket: Ticket, rows: Sequence[int], response: Any) -> None:
    from offramp.client.conversion import parse_response

    clients.judge(ticket, rows, parse_response(response))


class StreamEndedError(InferenceServerException):
    """A stream that had ended when the request came that was to be sent on it.

    The reason is that of the stream's end, and not of the time at which it is found out.
    """

    def __init__(self, error: InferenceServerException, at_s: float) -> None:
        super().__init__(msg=error.message(), status=error.status())
        self.at_s: Final = at_s
        """When it ended, monotonic."""


class TritonStream:
    """A stock tritonclient that sends one request and reads one response, on one stream."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._client: Any = None
        self._told: queue.SimpleQueue[tuple[Any, Any, float]] = queue.SimpleQueue()
        self._number = 0

    def infer(self, model: str, inputs: Mapping[str, Any]) -> tuple[str, Any]:
        """Ask on the stream; gives the id that was sent, and the response."""
        self._open()
        self._number += 1
        sent = str(self._number)
        sending = True
        try:
            self._client.async_stream_infer(model, _tensors(inputs), request_id=sent)
        except InferenceServerException:  # it has ended already, and says why
            sending = False
        try:
            result, error, at_s = self._told.get(timeout=LIMIT_S)
        except queue.Empty:
            self.close()
            raise InferenceServerException("no answer", status="StatusCode.UNKNOWN") from None
        if error is not None:
            self.close()
            raise error if sending else StreamEndedError(error, at_s)
        return sent, result.get_response()

    def infer_unary(self, model: str, inputs: Mapping[str, Any]) -> tuple[str, Any]:
        """Ask without the stream."""
        self._open()
        self._number += 1
        sent = str(self._number)
        result = self._client.infer(
            model, _tensors(inputs), request_id=sent, client_timeout=LIMIT_S
        )
        return sent, result.get_response()

    def _open(self) -> None:
        if self._client is None:
            self._told = told = queue.SimpleQueue()
            self._client = triton.InferenceServerClient(
                self._address, channel_args=[*_PROMPT, ("chaos.one", next(_numbers))]
            )
            self._client.start_stream(
                lambda result, error: told.put((result, error, time.monotonic()))
            )

    def close(self) -> None:
        """Close the connection; the next request opens another one."""
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(Exception):
                client.stop_stream(cancel_requests=True)
            client.close()


def _tensors(inputs: Mapping[str, Any]) -> list[Any]:
    tensors = []
    for name, array in inputs.items():
        tensor = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    return tensors


async def triton_stream(clients: Clients) -> None:
    """Stock tritonclient on a stream."""
    await _stock(clients, "triton stream", TritonStream.infer)


async def triton_unary(clients: Clients) -> None:
    """Stock tritonclient, call by call."""
    await _stock(clients, "triton unary", TritonStream.infer_unary)


async def _stock(
    clients: Clients, kind: str, ask: Callable[[TritonStream, str, Mapping[str, Any]], Any]
) -> None:
    one = await clients.tritons.get()
    rows, ticket = clients.draw(), clients.send(kind)
    try:
        sent, response = await asyncio.to_thread(ask, one, clients.model, clients.truth.take(rows))
        if response.id != sent:
            clients.account.wrong.append(
                f"{kind}: request {sent} has the response of request {response.id}"
            )
            clients.account.answered(ticket, len(rows))
            await asyncio.to_thread(one.close)
        else:
            _judge_message(clients, ticket, rows, response)
    except InferenceServerException as error:
        clients.failed(ticket, error, len(rows))
    finally:
        clients.tritons.put_nowait(one)


Kind = Callable[[Clients], Awaitable[None]]
