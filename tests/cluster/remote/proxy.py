"""A network between router and worker that a test breaks: it drops, or swallows what it has."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.unit.engine.serving import LIMIT_S

from offramp.cluster.remote.tcp import HostPort, cut


class Proxy:
    """Forwards connections to an address until it is stopped."""

    def __init__(self, to: HostPort) -> None:
        self._to = to
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = HostPort(*self._listening.getsockname())
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._silent: set[socket.socket] = set()
        self.taken = 0
        """Connections so far."""
        self._threads: list[threading.Thread] = []
        self._start(self._take)

    def drop(self) -> None:
        """End all connections; new ones are forwarded."""
        with self._lock:
            for each in self._sockets:
                cut(each)

    def swallow(self) -> None:
        """Forward nothing more on the connections that there are, and end none: half open."""
        with self._lock:
            self._silent.update(self._sockets)

    def close(self) -> None:
        cut(self._listening)
        self._listening.close()
        self.drop()
        for thread in self._threads:
            thread.join(LIMIT_S)
        for each in self._sockets:
            each.close()

    def _start(self, target: Callable[..., None], *given: socket.socket) -> None:
        thread = threading.Thread(target=target, args=given, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _take(self) -> None:
        while True:
            try:
                ours, _ = self._listening.accept()
            except OSError:
                return
            theirs = socket.create_connection(self._to)
            with self._lock:
                self.taken += 1
                self._sockets += [ours, theirs]
            for pair in ((ours, theirs), (theirs, ours)):
                self._start(self._forward, *pair)

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                with self._lock:
                    silent = source in self._silent
                if not silent:
                    sink.sendall(data)
        except OSError:
            pass
        with self._lock:
            silent = source in self._silent
        if not silent:
            cut(sink)


@contextmanager
def proxy(to: HostPort) -> Iterator[Proxy]:
    """A network to one worker."""
    between = Proxy(to)
    try:
        yield between
    finally:
        between.close()
