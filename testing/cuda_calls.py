"""Checks of every call to the fake driver, and failures that tests request."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from offramp.engine.common.errors import BackendError
from offramp.engine.cuda.driver import DeviceLostError
from offramp.testing.cuda_handles import FakeStream
from offramp.testing.cuda_memory import MisuseError
from offramp.testing.cuda_queues import Work

_IN_CAPTURE: Final = frozenset(
    {"copy_in", "copy_out", "copy_within", "clear", "launch", "call", "launch_graph", "memory"}
)
"""Calls that are allowed while the thread captures."""
_RELEASES: Final = frozenset({"free", "free_pinned", "close_stream", "close_event", "close_graph"})
"""Calls that still work after the context is lost."""


class CheckedCalls:
    """Checks each call: the context is current and not lost, and no capture forbids the call."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        """Number of calls by method, also in captures: ``allocate``, ``launch_graph``, …"""
        self.misuses: list[Exception] = []
        """All :class:`MisuseError` so far, and all other errors except BackendError that driver
        calls, or functions that a stream runs, have raised."""
        self._lock = threading.RLock()
        self._current: Counter[int] = Counter()
        """Nesting depth of :meth:`current`, by thread."""
        self._capturing: dict[int, tuple[FakeStream, list[Work]]] = {}
        """Stream and captured work by thread."""
        self._failures: dict[str, dict[int, BackendError]] = {}
        """Requested errors by method and by number of the call that fails."""
        self._lost = ""
        """Reason why the context is lost; empty while it is not."""
        self._closed = False

    def fail_next(self, call: str, *, after: int = 0, error: BackendError | None = None) -> None:
        """Make one call fail, after ``after`` calls that succeed; all count in :attr:`calls`."""
        error = error or BackendError(f"{call} failed, as the test requests")
        self._failures.setdefault(call, {})[self.calls[call] + after + 1] = error

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the context current on the calling thread."""
        thread = threading.get_ident()
        with self._lock, self._noting():
            if self._closed:
                raise MisuseError("the driver is closed")
            self._current[thread] += 1
        try:
            yield
        finally:
            with self._lock:
                self._current[thread] -= 1

    @contextmanager
    def _called(self, call: str) -> Iterator[None]:
        """Check the rules for every call, under the lock."""
        thread = threading.get_ident()
        with self._lock, self._noting():
            self.calls[call] += 1
            if not self._current[thread]:
                raise MisuseError(f"{call}: the context is not current on this thread")
            if thread in self._capturing and call not in _IN_CAPTURE:
                raise MisuseError(f"{call} is not allowed while a graph is captured")
            if self._lost and call not in _RELEASES:
                raise DeviceLostError(self._lost)
            error = self._failures.get(call, {}).pop(self.calls[call], None)
            if error is not None:
                raise error
            yield

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Record all errors except BackendError as misuse, because callers may hide them."""
        try:
            yield
        except BackendError:
            raise
        except Exception as error:
            if all(error is not noted for noted in self.misuses):
                self.misuses.append(error)
            raise
