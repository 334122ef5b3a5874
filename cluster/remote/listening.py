"""A worker that listens: it serves the first router with the token, until that router is gone.

Every connection begins with TLS, if configured, and the handshake. Its first message then states
whether it is for a router's orders or for a slot. A second router is refused; the refusal names the
served router. Other clients are refused within :data:`ADMIT_LIMIT_S`, with a log line. The number
of connections that have not proved the token is limited; beyond it, the oldest is closed.
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
from offramp.cluster.remote.tcp import HostPort, close_gracefully, cut, tune
from offramp.cluster.remote.transport import Connection, ConnectionLostError, TransportTimeoutError
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
"""Time limit, in seconds, for a connection to prove that it comes from a router."""
SILENCE_S: Final = 60.0
"""Longest silence of a router, in seconds; routers send signs of life six times as often."""
MOST_UNKNOWN: Final = 64
"""Largest number of connections that have not proved the token."""
_PAUSE_S: Final = 0.1
"""Pause between attempts to accept a connection when the system lacks resources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Requirements that a router must meet to be served, and what it may then run."""

    token: bytes
    context: ssl.SSLContext | None
    """TLS context of connections; ``None`` accepts unencrypted connections."""
    make: MakeBackend
    find: FindBundle
    """Function that returns a bundle to serve, by the name of a stage."""
    any_graph: bool = False
    """``True`` if a router may send graphs that are not in a bundle; only tests do so."""
    admit_s: float = ADMIT_LIMIT_S
    silence_s: float = SILENCE_S


class Listener:
    """Serves one of the routers that connect to a listening socket."""

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
        """Guards the served router, and the unknown connections."""
        self._served: str | None = None
        """Address of the served router."""
        self._session = ""
        self._worker: Worker | None = None
        self._numbers = itertools.count()
        self._unknown: dict[int, socket.socket] = {}
        """Connections that have not proved the token, the oldest first."""
        self._over = threading.Event()
        self._lines = LineLimit()

    def serve(self) -> None:
        """Accept connections until the served router is gone."""
        threading.Thread(target=self._take_connections, name="accept", daemon=True).start()
        self._over.wait()

    def _take_connections(self) -> None:
        while not self._over.is_set():
            try:
                connected, address = self._listening.accept()
            except OSError as error:
                if self._listening.fileno() < 0 or error.errno == errno.EINVAL:
                    return  # the socket no longer listens
                self._tell("accept", f"a connection cannot be accepted: {tls_reason(error)}")
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
        """Add a connection to those without a token; if there are too many, close the oldest."""
        with self._lock:
            self._unknown[number] = connected
            oldest = min(self._unknown) if len(self._unknown) > MOST_UNKNOWN else None
            if oldest is not None:
                cut(self._unknown.pop(oldest))

    def _welcome(self, connected: socket.socket, peer: str, number: int) -> None:
        """Serve a connection, or refuse it with a log line."""
        try:
            self.attend(connected, peer, number)
        except HandshakeError as error:
            self._tell("handshake", str(error))
        except (OSError, ConnectionLostError, TransportTimeoutError, EngineError) as error:
            self._tell("refused", f"{peer}: {self._reason(error)}")
        except Exception:
            _log.exception("a connection of %s cannot be served", peer)

    def attend(self, connected: socket.socket, peer: str, number: int = -1) -> None:
        """Serve a connection until it ends: orders or a slot, as its first message states.

        Raises HandshakeError, OSError, ConnectionLostError, TransportTimeoutError or FrameError if
        there is no valid first message.
        """
        with self._encrypted(connected, number) as encrypted:
            session = self._admit(encrypted, peer, number)
            connection = Connection(encrypted)
            message = decode(connection.receive(self._admission.admit_s).header)
            self._dispatch(message, connection, session, peer)

    def _encrypted(self, connected: socket.socket, number: int) -> socket.socket:
        """Return the socket to use for a connection; with TLS, this is a new socket."""
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
        """Verify that the client has the token, and return the session's name."""
        limit_s = self._admission.admit_s
        try:
            if isinstance(connected, ssl.SSLSocket):
                connected.settimeout(limit_s)
                connected.do_handshake()  # the limit is for the whole handshake
            return admit_router(connected, self._admission.token, peer, limit_s)
        except (HandshakeError, OSError):
            close_gracefully(connected)
            raise
        finally:
            self._forget(number)

    def _forget(self, number: int) -> None:
        """Remove a connection from those that have not proved the token."""
        with self._lock:
            self._unknown.pop(number, None)

    def _reason(self, error: Exception) -> str:
        if isinstance(error, ssl.SSLError):
            return f"TLS failed: {tls_reason(error)}; check the certificates of both ends"
        if isinstance(error, TimeoutError):
            return f"it did not prove a token within {self._admission.admit_s:g} s"
        return tls_reason(error)

    def _dispatch(self, message: Message, connection: Connection, session: str, peer: str) -> None:
        if isinstance(message, Hello):
            self._serve_router(message, connection, session, peer)
        elif isinstance(message, JoinSlot):
            self._serve_slot(message, connection)
        else:
            raise ConnectionLostError(f"its first message is {type(message).__name__}")

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
        except BaseException:  # runtimes raise any exception, and are unusable then
            _log.exception("%s cannot be served; this process ends, and a new one starts", peer)
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
        """Serve a router until it is gone; return the refusal if it cannot be served."""
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
            _log.info("the router at %s is gone: %s", peer, error)
        except TransportTimeoutError:
            _log.warning(
                "the router at %s sent nothing for %g s; its state here is dropped",
                peer,
                wanted.silence_s,
            )
        else:
            self._leave(peer)
        return None

    def _leave(self, peer: str) -> None:
        """End this process because its router is gone, with one log line."""
        with self._lock:
            if not self._over.is_set():
                _log.info("the router at %s is gone; its state here is dropped", peer)
            self._over.set()

    def _serve_slot(self, message: JoinSlot, connection: Connection) -> None:
        worker = self._worker
        ours = hmac.compare_digest(message.session.encode(errors="replace"), self._session.encode())
        if worker is None or not ours or self._over.is_set():
            connection.send(encode(Refused(reason="its session is over")))
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
        """Log a line about an event that clients cause; lines per second are limited."""
        suffix = self._lines.admit(kind)
        if suffix is not None:
            _log.warning("%s%s", one_line(line), suffix)
