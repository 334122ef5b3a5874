"""Receiving of gRPC messages without blocking the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Generator
from functools import partial
from types import coroutine
from typing import Any, Final, TypeAlias, TypeVar

import grpc.aio

from offramp.engine.common.errors import DeadlineExceededError
from offramp.server.common.errors import UndecodableError

_T = TypeVar("_T")
_Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

ARRIVAL_S: Final = 60.0
"""Longest time, in seconds, from the start of a call to the arrival of its message."""

LONG_S: Final = 0.002
"""If a step of the event loop takes longer than this, in seconds, a pause of the same length
follows."""

_CANCELLATION_S: Final = 0.05
"""Seconds in which gRPC cancels a call that ended without a message, if it does."""


class MessageReceiver:
    """Receives the messages of methods with large messages."""

    def __init__(self) -> None:
        self._throttle = MessageThrottle()
        self._late_at_s: dict[asyncio.Task[Any], float] = {}
        """Deadline of the message of each waiting call, earliest first."""
        self._looking: asyncio.TimerHandle | None = None

    async def only(self, context: _Context) -> bytes:
        """Return the only message of a call.

        Raises:
            DeadlineExceededError: The message does not arrive in time.
            UndecodableError: The call has no message.
        """
        task = asyncio.current_task()
        assert task is not None, "gRPC's methods run in tasks"
        self._expect(task)
        try:
            data = await self._throttle.take(context.read())
        except asyncio.CancelledError:
            if task in self._late_at_s or task.uncancel():
                raise
            raise DeadlineExceededError(
                f"the call's message did not arrive within {ARRIVAL_S:g} s; "
                "send it as soon as the call is open, or a smaller one"
            ) from None
        finally:
            self._late_at_s.pop(task, None)
        if data is grpc.aio.EOF:
            # A call also ends like this if its client left, or if gRPC refused its message as too
            # large: gRPC then cancels it a moment later.
            await asyncio.sleep(_CANCELLATION_S)
            raise UndecodableError("the call has no message; send one ModelInferRequest")
        message: bytes = data
        return message

    def _expect(self, task: asyncio.Task[Any]) -> None:
        """Cancel a task once its message is late; one timer serves all tasks, which is cheaper."""
        loop = asyncio.get_running_loop()
        self._late_at_s[task] = loop.time() + ARRIVAL_S
        if self._looking is None:
            self._looking = loop.call_later(ARRIVAL_S, self._look)

    def _look(self) -> None:
        self._looking, loop = None, asyncio.get_running_loop()
        for task, late_at_s in list(self._late_at_s.items()):
            if late_at_s > loop.time():
                self._looking = loop.call_at(late_at_s, self._look)
                return
            del self._late_at_s[task]
            task.cancel()

    async def all(self, context: _Context) -> AsyncIterator[bytes]:
        """Yield the messages of a stream until the client ends it."""
        while (data := await self._throttle.take(context.read())) is not grpc.aio.EOF:
            held = [data]
            del data
            yield held.pop()  # a generator's locals would live until the next message


class MessageThrottle:
    """Runs coroutines that receive messages so that two long steps never follow each other.

    gRPC copies a message for Python in the step in which the waiting coroutine resumes: about 15 ms
    of the event loop for 57 MiB, and ten times that with newly mapped memory. Many messages that
    arrive together would all be copied before the loop does anything else.

    Only steps that resume after a wait count; such a step then waits for this lock as well.
    """

    def __init__(self) -> None:
        self._free = asyncio.Lock()

    @coroutine
    def take(self, work: Coroutine[Any, Any, _T]) -> Generator[Any, Any, _T]:
        """Return the result of ``work``; cancelling this cancels ``work``."""
        try:
            awaited = work.send(None)
            while True:
                try:
                    yield awaited
                    yield from self._free.acquire().__await__()
                except BaseException as error:
                    awaited = work.throw(error)
                else:
                    awaited = self._step(partial(work.send, None))
        except StopIteration as end:
            result: _T = end.value
            return result

    def _step(self, step: partial[Any]) -> Any:
        began_s = time.monotonic()
        try:
            return step()
        finally:
            took_s = time.monotonic() - began_s
            if took_s < LONG_S:
                self._free.release()
            else:
                asyncio.get_running_loop().call_later(took_s, self._free.release)
