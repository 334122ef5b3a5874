"""A front end's side of calls: gRPC handlers that forward calls and return their answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import grpc
import grpc.aio

from offramp.server.frontends.frames import FrameKind, FrameLink, Payload
from offramp.server.frontends.heads import CallHead, CallStatus
from offramp.server.requests.admission import (
    CallKind,
    CallState,
    RequestAdmission,
    answering_errors,
)
from offramp.server.requests.receiving import MessageReceiver

_Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
_Outcome: TypeAlias = Payload | CallStatus


class MethodShape(NamedTuple):
    """Directions of a method that carry a stream of messages."""

    request_streaming: bool
    response_streaming: bool


class Relay:
    """Forwards calls to the engine's process; used on the event loop's thread."""

    def __init__(
        self, link: FrameLink, admission: RequestAdmission, methods: Mapping[str, MethodShape]
    ) -> None:
        """``methods`` are keyed by full name."""
        self._link = link
        self._admission = admission
        self._receiver = MessageReceiver()
        self._numbers = itertools.count(1)
        self._calls: dict[int, Callable[[FrameKind, Payload], None]] = {}
        self.handlers: Final = {name: self._handler(name, shape) for name, shape in methods.items()}
        """Handlers by full method name."""

    def receive(
        self, kind: FrameKind, number: int, payload: Payload, message: Payload | None = None
    ) -> None:
        """Handle a frame of a call; its message is separate if it came through shared memory.

        Frames of calls that have ended are ignored.
        """
        if (take := self._calls.get(number)) is not None:
            take(kind, payload if message is None else message)

    def _handler(self, name: str, shape: MethodShape) -> grpc.RpcMethodHandler[Any, Any]:
        method = name.rpartition("/")[2]
        if shape.response_streaming:
            stream = answering_errors(
                self._admission, method, partial(self._stream, name), kind=CallKind.STREAM
            )
            return grpc.stream_stream_rpc_method_handler(stream)
        if shape.request_streaming:
            received = partial(self._receive_and_ask, name)
            answered = answering_errors(self._admission, method, received, serialize=bytes)
            return grpc.stream_unary_rpc_method_handler(answered)
        asked = partial(self._ask, name)
        answered = answering_errors(self._admission, method, asked, serialize=bytes)
        return grpc.unary_unary_rpc_method_handler(answered)

    async def _receive_and_ask(
        self, name: str, state: CallState, _requests: object, context: _Context
    ) -> Payload:
        """Wait until the link can take a large message; then receive a call's only message."""
        await self._link.writable()
        self._admission.check_capacity()
        data = await self._receiver.only(context)
        self._admission.hold(state, len(data))
        asking = self._ask(name, state, data, context)
        del data
        return await asking

    async def _ask(self, name: str, _state: CallState, data: bytes, context: _Context) -> Payload:
        number, head = self._begin(name, context)
        outcome: asyncio.Future[_Outcome] = asyncio.get_running_loop().create_future()

        def take(kind: FrameKind, payload: Payload) -> None:
            if not outcome.done():
                status = kind is FrameKind.STATUS
                outcome.set_result(CallStatus.decode(payload) if status else payload)

        self._calls[number] = take
        try:
            await self._link.send_message(FrameKind.CALL, number, data, head=head)
            del data
            answer = await outcome
        except BaseException:
            self._end(number)
            raise
        if isinstance(answer, CallStatus):
            await context.abort(*answer)
        return answer

    async def _stream(
        self, name: str, state: CallState, _requests: object, context: _Context
    ) -> None:
        number, head = self._begin(name, context)
        outcomes: asyncio.Queue[_Outcome | BaseException] = asyncio.Queue()
        taken = asyncio.Semaphore(1)

        def take(kind: FrameKind, payload: Payload) -> None:
            if kind is FrameKind.TAKEN:
                taken.release()
            else:
                status = kind is FrameKind.STATUS
                outcomes.put_nowait(CallStatus.decode(payload) if status else payload)

        async def received() -> _Outcome:
            if isinstance(outcome := await outcomes.get(), BaseException):
                raise outcome
            return outcome

        def forwarded(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (failure := task.exception()) is not None:
                outcomes.put_nowait(failure)

        async def forward() -> None:
            async for data in self._receiver.all(context):
                await taken.acquire()
                await self._link.writable()
                await self._link.send_message(FrameKind.MESSAGE, number, data)
                del data
            self._link.send(FrameKind.END, number)

        self._calls[number] = take
        self._link.send(FrameKind.OPEN, number, head)
        forwarding = asyncio.create_task(forward())
        forwarding.add_done_callback(forwarded)
        try:
            while not isinstance(outcome := await received(), CallStatus):
                async with self._admission.streaming(state.peer, len(outcome)):
                    await context.write(bytes(outcome))
                self._link.send(FrameKind.TAKEN, number)
        except BaseException:
            self._end(number)
            raise
        finally:
            forwarding.cancel()
        if outcome.code is not grpc.StatusCode.OK:
            await context.abort(*outcome)

    def _begin(self, name: str, context: _Context) -> tuple[int, bytes]:
        """Return a new call number and the bytes of the call's head."""
        number = next(self._numbers) % 2**32
        metadata = context.invocation_metadata() or ()
        head = CallHead(
            method=name,
            peer=context.peer(),
            remaining_s=context.time_remaining(),
            metadata=tuple((key, value) for key, value in metadata if isinstance(value, str)),
        )

        done: Any = lambda _: self._end(number)  # noqa: E731 - the stubs keep its type private
        context.add_done_callback(done)
        return number, head.encode()

    def _end(self, number: int) -> None:
        """Report, once, that gRPC has finished a call, or is about to finish it."""
        if self._calls.pop(number, None) is not None:
            self._link.send(FrameKind.DONE, number)
