"""A worker that listens: serves the first router that shows the token, until that one is gone.

Every connection begins with TLS, if there is any, and the handshake; its first message says whether
it is for a router's orders or for one of its slots. Another router is told that this one is served.
What is no router is refused in a line of the log, within :data:`ADMIT_LIMIT_S`, and the connections
that have come no further are few: the oldest makes room.
"""

from __future__ import annotations

import errno
import hmac
import itertools
import logging
import os
import socket
import ssl
import threading
from dataclasses import dataclass
from typing import Final

from offramp.cluster.remote.handshake import HandshakeError, admit_router
from offramp.cluster.remote.served_slot import Reached
from offramp.cluster.remote.stage_orders import FindBundle
from offramp.cluster.remote.tcp import HostPort, cut, take_leave, tune
from offramp.cluster.remote.transport import Connection, ConnectionLostError, TooLateError
from offramp.cluster.remote.worker import MakeBackend, Worker
from offramp.cluster.remote.worker_messages import (
    Failed,
    Hello,
    JoinSlot,
    Message,
    Ready,
    Refused,
    decode,
    encode,
)
from offramp.engine.common.errors import EngineError
from offramp.engine.common.line_limit import LineLimit, one_line
from offramp.engine.common.network import tls_reason

_log = logging.getLogger(__name__)

ADMIT_LIMIT_S: Final = 10.0
"""Limit of all that comes before a connection is known to be a router's."""
SILENCE_S: Final = 60.0
"""Limit of a router's silence: it gives a sign of life six times as often."""
MOST_UNKNOWN: Final = 64
"""Connections that have not shown the token."""
_PAUSE_S: Final = 0.1
"""Between attempts to take a connection where the system has no room for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Who may be served, and with what."""

    token: bytes
    context: ssl.SSLContext | None
    """What connections are encrypted with; ``None`` takes all in the clear."""
    make: MakeBackend
    find: FindBundle
    """Gives the bundles that are served."""
    any_graph: bool = False
    """Whether a router may send graphs of its own, as only tests do."""
    admit_s: float = ADMIT_LIMIT_S
    silence_s: float = SILENCE_S


class Listener:
    """Serves one router, of those that connect to a socket that listens."""

    def __init__(
        self,
        listening: socket.socket,
        admission: Admission,
        reached: Reached = lambda _point: None,
    ) -> None:
        self._listening = listening
        self._admission = admission
        self._reached = reached
        self._lock = threading.Lock()
        """Of who is served, and of the connections that are unknown."""
        self._served: str | None = None
        """The router that is served: its address."""
        self._session = ""
        self._worker: Worker | None = None
        self._numbers = itertools.count()
        self._unknown: dict[int, socket.socket] = {}
        """Connections that have not shown the token, the oldest first."""
        self._over = threading.Event()
        self._lines = LineLimit()

    def serve(self) -> None:
        """Take connections until the router that was served is gone."""
        threading.Thread(target=self._take_connections, name="accept", daemon=True).start()
        self._over.wait()

    def _take_connections(self) -> None:
        while not self._over.is_set():
            try:
                connected, address = self._listening.accept()
            except OSError as error:
                if self._listening.fileno() < 0 or error.errno == errno.EINVAL:
                    return  # it listens no more
                self._tell("accept", f"a connection cannot be taken: {tls_reason(error)}")
                self._over.wait(_PAUSE_S)
                continue
            peer, number = str(HostPort(*address[:2])), next(self._numbers)
            self._await_token(number, connected)
            try:
                threading.Thread(
                    target=self._welcome,
                    args=(connected, peer, number),
                    name=f"peer {peer}",
                    daemon=True,
                ).start()
            except (RuntimeError, MemoryError) as error:  # the system has no thread left
                self._forget(number)
                connected.close()
                self._tell("accept", f"{peer} cannot be served: {error}")
                self._over.wait(_PAUSE_S)

    def _await_token(self, number: int, connected: socket.socket) -> None:
        """Keep a connection among the unknown; where there are too many the oldest ends."""
        with self._lock:
            self._unknown[number] = connected
            oldest = min(self._unknown) if len(self._unknown) > MOST_UNKNOWN else None
            if oldest is not None:
                cut(self._unknown.pop(oldest))

    def _welcome(self, connected: socket.socket, peer: str, number: int) -> None:
        """Serve a connection, whatever it is for, or refuse it in a line."""
        try:
            self.attend(connected, peer, number)
        except HandshakeError as error:
            self._tell("handshake", str(error))
        except (OSError, ConnectionLostError, TooLateError, EngineError) as error:
            self._tell("refused", f"{peer}: {self._reason(error)}")
        except Exception:
            _log.exception("a connection of %s cannot be served", peer)

    def attend(self, connected: socket.socket, peer: str, number: int = -1) -> None:
        """Serve a connection until it ends, as what its first message says that it is for.

        HandshakeError, OSError, ConnectionLostError, TooLateError or FrameError if it is for
        nothing.
        """
        with self._encrypted(connected, number) as encrypted:
            session = self._admit(encrypted, peer, number)
            connection = Connection(encrypted)
            message = decode(connection.receive(self._admission.admit_s).header)
            self._dispatch(message, connection, session, peer)

    def _encrypted(self, connected: socket.socket, number: int) -> socket.socket:
        """Give what a connection is spoken on; with TLS that is another socket."""
        try:
            tune(connected)
            context = self._admission.context
            if context is not None:
                connected = context.wrap_socket(
                    connected, server_side=True, do_handshake_on_connect=False
                )
                self._await_token(number, connected)
        except BaseException:
            self._forget(number)
            connected.close()
            raise
        return connected

    def _admit(self, connected: socket.socket, peer: str, number: int) -> str:
        """Have it show that it has the token, and name its session."""
        limit_s = self._admission.admit_s
        try:
            if isinstance(connected, ssl.SSLSocket):
                connected.settimeout(limit_s)
                connected.do_handshake()  # the limit is of all of it
            return admit_router(connected, self._admission.token, peer, limit_s)
        except (HandshakeError, OSError):
            take_leave(connected)
            raise
        finally:
            self._forget(number)

    def _forget(self, number: int) -> None:
        """Take a connection from the unknown."""
        with self._lock:
            self._unknown.pop(number, None)

    def _reason(self, error: Exception) -> str:
        if isinstance(error, ssl.SSLError):
            return f"TLS failed: {tls_reason(error)}; compare the certificates of both ends"
        if isinstance(error, TimeoutError):
            return f"it did not show a token within {self._admission.admit_s:g} s"
        return tls_reason(error)

    def _dispatch(self, message: Message, connection: Connection, session: str, peer: str) -> None:
        if isinstance(message, Hello):
            self._serve_router(message, connection, session, peer)
        elif isinstance(message, JoinSlot):
            self._serve_slot(message, connection)
        else:
            raise ConnectionLostError(f"it begins with {type(message).__name__}")

    def _serve_router(self, hello: Hello, connection: Connection, session: str, peer: str) -> None:
        with self._lock:
            other = self._served
            self._served = other or peer
        if other is not None:
            refusal = f"it serves another router, {other}, until that one is gone"
            self._tell("hello", f"{peer} is refused: {refusal}")
            connection.send(encode(Refused(reason=refusal)))
            return
        refused: Refused | None = None
        try:
            with connection.watched(lambda: self._leave(peer)):
                refused = self._serve_until_gone(hello, connection, session, peer)
        except BaseException:  # runtimes raise what they like, and are broken then
            _log.exception("%s cannot be served; this process ends, for a new one", peer)
        finally:
            if refused is None:
                self._over.set()
        if refused is not None:
            with self._lock:
                self._served = None
            self._tell("hello", f"{peer} is refused: {refused.reason}")
            connection.send(encode(refused))

    def _serve_until_gone(
        self, hello: Hello, connection: Connection, session: str, peer: str
    ) -> Refused | None:
        """Be what a router asks for until it is gone; or say why not."""
        self._reached("before-hello")
        wanted = self._admission
        worker = Worker(
            connection,
            wanted.make,
            self._reached,
            find=wanted.find,
            any_graph=wanted.any_graph,
        )
        answer = worker.begin(hello)
        if isinstance(answer, Refused):
            return answer
        self._session = session
        self._worker = worker
        _log.info("serving %s", peer)
        try:
            connection.send(encode(answer))
            worker.serve(wanted.silence_s)
        except ConnectionLostError as error:
            _log.info("%s is gone: %s", peer, error)
        except TooLateError:
            _log.warning(
                "%s gave no sign of life for %g s; what it had here is dropped",
                peer,
                wanted.silence_s,
            )
        else:
            self._leave(peer)
        return None

    def _leave(self, peer: str) -> None:
        """Have this process end, as its router is gone; said once."""
        with self._lock:
            if not self._over.is_set():
                _log.info("%s is gone; what it had here is dropped", peer)
            self._over.set()

    def _serve_slot(self, message: JoinSlot, connection: Connection) -> None:
        worker = self._worker
        ours = hmac.compare_digest(message.session.encode(errors="replace"), self._session.encode())
        if worker is None or not ours or self._over.is_set():
            connection.send(encode(Refused(reason="the session that it names is over")))
            return
        self._reached("before-slot")
        try:
            worker.open_slot(message.slot, connection, None)
        except EngineError as error:
            connection.send(encode(Failed(message=str(error))))
            return
        connection.send(encode(Ready(pid=os.getpid())))
        worker.serve_slot(message.slot)

    def _tell(self, kind: str, line: str) -> None:
        """Write a line about what came from outside, and only so many a second."""
        suffix = self._lines.admit(kind)
        if suffix is not None:
            _log.warning("%s%s", one_line(line), suffix)
