"""Large messages come in one at a time, and what else the event loop has to do comes between them.

gRPC copies a message for Python in the very step in which a coroutine goes on that waited for it:
some 15 ms of a turn of the loop for 57 MiB, and ten times that where memory is new. Many that
arrive together would be copied within one turn, before anything else is seen to.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Generator
from functools import partial
from types import coroutine
from typing import Any, Final, TypeVar

LONG_S: Final = 0.002
"""A step that takes longer is followed by a pause as long as itself."""

_T = TypeVar("_T")


class Turns:
    """Runs coroutines so that long steps of theirs never follow each other at once.

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
