"""The engine's side of calls that front ends forward, answered by the gRPC handlers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NoReturn

import grpc
import grpc.aio

from offramp.server.common.methods import Handler
from offramp.server.frontends.frames import FrameKind, FrameLink, Payload
from offramp.server.frontends.heads import CallHead, CallStatus, Metadata

logger = logging.getLogger(__name__)


class RelayedCalls:
    """The calls of one front end; used on the event loop's thread."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = handlers
        self._calls: dict[int, RelayedCall] = {}

    def receive(
        self,
        link: FrameLink,
        kind: FrameKind,
        number: int,
        payload: Payload,
        message: Payload | None = None,
    ) -> None:
        """Handle a frame of a call; its message is separate if it came through shared memory."""
        if kind is FrameKind.CALL:
            head, rest = CallHead.split(payload)
            self._open(link, number, head, rest if message is None else message)
        elif kind is FrameKind.OPEN:
            self._open(link, number, CallHead.split(payload)[0])
        elif (call := self._calls.get(number)) is not None:
            if kind is FrameKind.DONE:
                del self._calls[number]
            call.receive(kind, payload if message is None else message)

    def withdraw(self) -> None:
        """Withdraw all calls, because their front end is gone."""
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.receive(FrameKind.DONE, b"")

    def _open(
        self, link: FrameLink, number: int, head: CallHead, message: Payload | None = None
    ) -> None:
        call = self._calls[number] = RelayedCall(link, number, head, message)
        call.start(self._handlers[head.method])


class RelayedCall:
    """A call and its handler's context: the parts of ``grpc.aio``'s context that handlers use."""

    def __init__(
        self, link: FrameLink, number: int, head: CallHead, message: Payload | None
    ) -> None:
        """``message`` is the only message of a call, or ``None`` if several follow."""
        self._link = link
        self._number = number
        self._head = head
        self._ends_s = None if head.remaining_s is None else time.monotonic() + head.remaining_s
        self._messages: deque[Payload] = deque(() if message is None else (message,))
        self._single = self._complete = message is not None
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()
        self._serialize: Callable[[Any], bytes] | None = None
        self._status: CallStatus | None = None
        self._task: asyncio.Task[None] | None = None
        self._callbacks: list[Callable[[Any], None]] = []

    def start(self, handler: Handler) -> None:
        """Start a task that answers the call with a handler."""
        self._task = asyncio.create_task(self._answer(handler))

    def receive(self, kind: FrameKind, payload: Payload) -> None:
        """Handle a frame from the front end."""
        if kind is FrameKind.MESSAGE:
            self._messages.append(payload)
        elif kind is FrameKind.END:
            self._complete = True
        elif kind is FrameKind.TAKEN:
            self._taken.set()
            return
        elif kind is FrameKind.DONE:
            assert self._task is not None, "it was started"
            self._task.cancel()
            for callback in self._callbacks:
                callback(self)
        self._changed.set()

    def peer(self) -> str:
        """Return the client's address."""
        return self._head.peer

    def invocation_metadata(self) -> Metadata:
        """Return the metadata that the client sent with the call."""
        return self._head.metadata

    def time_remaining(self) -> float | None:
        """Return the seconds until the deadline; ``None`` without one."""
        return None if self._ends_s is None else self._ends_s - time.monotonic()

    def code(self) -> grpc.StatusCode:
        """Return the status that was set."""
        return grpc.StatusCode.OK if self._status is None else self._status.code

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call ``callback`` once the front end has written the answer or lost its client."""
        self._callbacks.append(callback)

    async def read(self) -> Payload | Any:
        """Return the next message, ``grpc.aio.EOF`` after the last."""
        while not self._messages:
            if self._complete:
                return grpc.aio.EOF
            self._changed.clear()
            await self._changed.wait()
        if not self._single:
            self._link.send(FrameKind.TAKEN, self._number)
        return self._messages.popleft()

    async def write(self, message: Any) -> None:
        """Send a message of a stream; return once the front end has written it."""
        self._taken.clear()
        data = message if self._serialize is None else self._serialize(message)
        await self._link.send_message(FrameKind.MESSAGE, self._number, data)
        await self._taken.wait()

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()
    ) -> NoReturn:
        """End the call with a status."""
        self._status = CallStatus(code, details, trailing_metadata)
        raise grpc.aio.AbortError

    async def _answer(self, handler: Handler) -> None:
        self._serialize = handler.response_serializer
        try:
            answer = await self._handle(handler)
            if answer is not None:
                await self._link.send_message(FrameKind.ANSWER, self._number, answer)
                return
        except grpc.aio.AbortError:
            assert self._status is not None, "abort() has set it"
            status = self._status
        except asyncio.CancelledError:
            status = CallStatus(grpc.StatusCode.CANCELLED)
        except Exception:
            logger.exception("unexpected error in %s", self._head.method)
            status = CallStatus(grpc.StatusCode.UNKNOWN)
        else:
            status = CallStatus(grpc.StatusCode.OK)
        self._link.send(FrameKind.STATUS, self._number, status.encode())

    async def _handle(self, handler: Handler) -> bytes | None:
        answer: bytes | None
        if handler.request_streaming:
            method = handler.stream_stream if handler.response_streaming else handler.stream_unary
            answer = await method(self._requests(), self)
            return answer
        method = handler.unary_stream if handler.response_streaming else handler.unary_unary
        answer = await method(await self.read(), self)
        return answer

    async def _requests(self) -> AsyncIterator[Payload]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message
