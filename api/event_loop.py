"""An event loop in its own thread, for callers without one."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from offramp.api.errors import ForkedError

_T = TypeVar("_T")


class LoopThread:
    """Runs coroutines on its own event loop, for any thread of the process."""

    def __init__(self, name: str) -> None:
        """Start the thread; ``name`` is for debuggers and messages."""
        self._name = name
        self._process = os.getpid()
        self._started: Future[asyncio.AbstractEventLoop] = Future()
        # A daemon, so that a program that forgets to close a model can end.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._loop = self._started.result()

    def _run(self) -> None:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        self._started.set_result(loop)
        try:
            loop.run_forever()
        finally:
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

    @property
    def is_inherited(self) -> bool:
        """True if this process is a fork of the process that has the thread."""
        return os.getpid() != self._process

    def call(self, function: Callable[..., Coroutine[Any, Any, _T]], *arguments: Any) -> _T:
        """Run a coroutine function on the loop, and return its result.

        An interrupt of the waiting thread cancels the coroutine. Raise ForkedError in a forked
        process.
        """
        if self.is_inherited:
            raise ForkedError(
                f"{self._name} was opened by process {self._process}; this process, {os.getpid()}, "
                "is a fork without its threads; open it in each process, after the fork"
            )
        future = asyncio.run_coroutine_threadsafe(function(*arguments), self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # no effect if the coroutine is done

    def stop(self) -> None:
        """End the thread after its current step; harmless if the thread has already ended."""
        if not self.is_inherited and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
