"""The receiving of messages from gRPC without holding up the event loop."""

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
"""How long a call's message may take to arrive, once the call is here."""

LONG_S: Final = 0.002
"""A step that takes longer is followed by a pause as long as itself."""

_CANCELLATION_S: Final = 0.05
"""By then a call that has ended without a message is cancelled, if it is to be."""


class MessageReceiver:
    """Receives the messages of calls that have large ones."""

    def __init__(self) -> None:
        self._turns = Turns()
        self._late_at_s: dict[asyncio.Task[Any], float] = {}
        """When the message of each waiting call is late, the first that is late first."""
        self._looking: asyncio.TimerHandle | None = None

    async def only(self, context: _Context) -> bytes:
        """Return the message of a call that has one.

        Raises:
            DeadlineExceededError: It does not arrive.
            UndecodableError: There is none.
        """
        task = asyncio.current_task()
        assert task is not None, "gRPC's methods run in tasks"
        self._expect(task)
        try:
            data = await self._turns.take(context.read())
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
            # So ends a call as well whose client has left, or whose message gRPC has refused as too
            # large: it is cancelled a moment later.
            await asyncio.sleep(_CANCELLATION_S)
            raise UndecodableError("the call has no message; send one ModelInferRequest")
        message: bytes = data
        return message

    def _expect(self, task: asyncio.Task[Any]) -> None:
        """Cancel a task once its message is late: one timer for all takes less time than each's."""
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
        """Yield the messages of a stream, until its client has no more."""
        while (data := await self._turns.take(context.read())) is not grpc.aio.EOF:
            held = [data]
            del data
            yield held.pop()  # what a generator holds stays until the next one is here


class Turns:
    """Runs coroutines that receive messages so that long steps of theirs never follow each other.

    gRPC copies a message for Python in the very step in which a coroutine goes on that waited for
    it: some 15 ms of a turn of the loop for 57 MiB, and ten times that where memory is new. Many
    that arrive together would be copied within one turn, before anything else is seen to.

    Only steps that something was waited for count: what has waited then waits for its turn as well.
    """

    def __init__(self) -> None:
        self._free = asyncio.Lock()

    @coroutine
    def take(self, work: Coroutine[Any, Any, _T]) -> Generator[Any, Any, _T]:
        """Give what ``work`` gives; cancelled, it is cancelled as well."""
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
