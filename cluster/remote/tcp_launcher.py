"""A worker on another host as the router has it: reached over TCP, asked, and let go.

The worker is there already (``eeworker``), and serves one router at a time: what starts here is
its service of this one. It ends with the connection for orders; each slot has a connection of its
own, on which tensors travel inline.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import ssl
import threading
from dataclasses import dataclass, field
from typing import Final

from offramp.cluster.remote.handshake import HandshakeError, reach_worker
from offramp.cluster.remote.launching import ON_THE_CPU, WorkerRuntime
from offramp.cluster.remote.orders import Orders
from offramp.cluster.remote.process import ORDER_LIMIT_S, START_LIMIT_S
from offramp.cluster.remote.slot_tensors import InlineTensors, SlotLink
from offramp.cluster.remote.tcp import HostPort, TlsTrust, cut, has_ended, tune
from offramp.cluster.remote.transport import Connection
from offramp.cluster.remote.worker_messages import Hello, JoinSlot, Message, Ping, Ready, Refused
from offramp.engine.common.errors import BackendError, WorkerLostError
from offramp.engine.common.network import tls_reason

REACH_LIMIT_S: Final = 5.0
"""Limit of a connection's making."""
GREET_LIMIT_S: Final = 30.0
"""Limit of a handshake: a worker whose last router has just left starts anew before it answers."""
PING_S: Final = 10.0
"""Seconds between signs of life that are asked of a worker that has no order."""
PING_LIMIT_S: Final = 30.0
MOST_RESULT_BYTES: Final = 1 << 30
"""Of a run, with all that is carried on: a batch with more is better sent in smaller ones, and a
worker that is broken, or another's, takes no more of the router's memory for each slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAddress:
    """Where a worker listens, and what opens its door."""

    address: HostPort
    token: bytes = field(repr=False)
    context: ssl.SSLContext | None
    """What connections are encrypted with; ``None`` sends all in the clear."""
    remedy: str = ""
    """What to do where nobody listens; empty is to start ``eeworker`` there."""
    most_result_bytes: int = MOST_RESULT_BYTES
    """Most that is received of what a run there gave."""

    def reach(self) -> tuple[socket.socket, str]:
        """Connect, and show each other the token: the connection, and the session's name.

        WorkerLostError if nobody is there, BackendError if it is the wrong one or will not have us.
        """
        who = f"the worker at {self.address}"
        try:
            connected = socket.create_connection(self.address, REACH_LIMIT_S)
        except OSError as error:
            start = f"start it there: eeworker BUNDLE --listen {self.address} --token-file FILE"
            raise WorkerLostError(
                f"{who} cannot be reached: {tls_reason(error)}; {self.remedy or start}"
            ) from error
        try:
            tune(connected)
            connected.settimeout(GREET_LIMIT_S)
            if self.context is not None:
                connected = self.context.wrap_socket(connected, server_hostname=self.address.host)
            return connected, reach_worker(connected, self.token, who, GREET_LIMIT_S)
        except (HandshakeError, OSError) as error:
            connected.close()
            raise self._refused(who, error) from error
        except BaseException:
            connected.close()
            raise

    def _refused(self, who: str, error: Exception) -> BackendError:
        if isinstance(error, HandshakeError):
            return BackendError(str(error))
        if isinstance(error, ssl.SSLCertVerificationError):
            return BackendError(
                f"{who} is not trusted: {tls_reason(error)}; give the authority of its "
                "certificate, which has to be made for that host, as tls_ca"
            )
        if isinstance(error, ssl.SSLError):
            return BackendError(
                f"TLS with {who} failed: {tls_reason(error)}; it may have been started without "
                "--tls-cert, or ask for a certificate of this server (tls_cert, tls_key)"
            )
        if isinstance(error, TimeoutError):
            return WorkerLostError(f"{who} did not answer within {GREET_LIMIT_S:g} s")
        hint = "it may expect TLS (tls_ca); " if self.context is None else ""
        return WorkerLostError(
            f"{who} closed the connection: {tls_reason(error)}; {hint}its log says why"
        )


class TcpWorker:
    """One worker on another host; any thread may call any method.

    WorkerLostError if it cannot be reached, BackendError if it refuses to be what ``hello`` says.
    """

    def __init__(self, hello: Hello, address: WorkerAddress, *, ping_s: float = PING_S) -> None:
        self._address = address
        self._slots = itertools.count(1)
        self._why = ""
        self._cpu_s = 0.0
        self._lock = threading.Lock()
        """Of the list of connections."""
        self._slot_sockets: list[socket.socket] = []
        self.stages: set[int] = set()
        """Those that it has loaded."""
        self.lost = False
        self._over = threading.Event()
        self._socket, self._session = address.reach()
        self._orders = Orders(Connection(self._socket), self.lose)
        try:
            self._pid = self._greet(hello)
        except BaseException:
            self.end()
            raise
        threading.Thread(
            target=self._ask_for_life, args=(ping_s,), name=f"ping {address.address}", daemon=True
        ).start()

    def _greet(self, hello: Hello) -> int:
        answer = self._orders.ask(hello, START_LIMIT_S)
        if isinstance(answer, Refused):
            raise BackendError(f"{self.name}: {answer.reason}")
        return answer.pid

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"worker {self._address.address}"

    @property
    def pid(self) -> int:
        """The number of its process, on its host."""
        return self._pid

    @property
    def alive(self) -> bool:
        """Whether it can be asked, as far as is known."""
        if not self.lost and self._orders.lock.acquire(blocking=False):
            try:
                if has_ended(self._socket):
                    self.lose("")
            finally:
                self._orders.lock.release()
        return not self.lost

    def cpu_s(self) -> float:
        """Seconds of processor time that it has had on its host, as far as is known."""
        if not self.lost and not self._orders.lock.locked():
            with contextlib.suppress(BackendError):
                self._ping()
        return self._cpu_s

    def order(self, message: Message, body: bytes = b"") -> None:
        """Have an order carried out; BackendError if it cannot be, WorkerLostError."""
        self._orders.ask(message, ORDER_LIMIT_S, body)

    def open_slot(self) -> SlotLink:
        """Open a slot, with a connection of its own; errors as of :meth:`order`."""
        if self.lost:
            raise self.lose("")
        try:
            connected, _ = self._address.reach()
        except BackendError as error:
            raise self.lose(str(error)) from error
        with self._lock:
            self._slot_sockets = [s for s in self._slot_sockets if s.fileno() >= 0]
            self._slot_sockets.append(connected)
        connection = Connection(connected, most_body=self._address.most_result_bytes)
        try:
            self._join(connection)
        except BaseException:
            connection.close()
            raise
        return SlotLink(connection, InlineTensors())

    def _join(self, connection: Connection) -> None:
        join = JoinSlot(session=self._session, slot=next(self._slots))
        answer = Orders(connection, self.lose).ask(join, START_LIMIT_S)
        if isinstance(answer, Refused):
            raise self.lose(answer.reason)

    def lose(self, reason: str) -> WorkerLostError:
        """Give a worker up that does not answer, and give the error that says so.

        With its connections the worker's service ends, whatever it does.
        """
        self._why = self._why or reason or "its connection ended"
        self._let_go()
        return WorkerLostError(f"{self.name} was lost: {self._why}")

    def end(self) -> None:
        """Let it go at once; it has nothing to put in order."""
        self._let_go()
        self._orders.close()

    def _let_go(self) -> None:
        self.lost = True
        self._over.set()
        with self._lock:
            for connected in (self._socket, *self._slot_sockets):
                cut(connected)

    def _ask_for_life(self, every_s: float) -> None:
        """Ask for a sign of life while there is nothing else to ask: networks fail in silence."""
        while not self._over.wait(every_s):
            if not self._orders.lock.locked():
                with contextlib.suppress(BackendError):  # which has given it up
                    self._ping()

    def _ping(self) -> None:
        answer = self._orders.ask(Ping(), PING_LIMIT_S)
        if isinstance(answer, Ready):
            self._cpu_s = answer.cpu_s


class TcpLauncher:
    """Has one worker on another host serve this router."""

    def __init__(
        self,
        address: HostPort,
        token: bytes,
        tls: TlsTrust | None,
        device_type: str = "",
        *,
        ping_s: float = PING_S,
        most_result_bytes: int = MOST_RESULT_BYTES,
        runtime: WorkerRuntime = ON_THE_CPU,
    ) -> None:
        """NetworkError if certificates cannot be used."""
        context = None if tls is None else tls.context()
        self._address = WorkerAddress(
            address=address, token=token, context=context, most_result_bytes=most_result_bytes
        )
        self._device_type = device_type
        self._ping_s = ping_s
        self.runtime = runtime

    @property
    def device_type(self) -> str:
        """The name of its device among a cluster's ``[devices]``; empty if there is no cluster."""
        return self._device_type

    def describe(self) -> str:
        """Say where its worker is."""
        how = "in the clear" if self._address.context is None else "TLS"
        return f"another process at {self._address.address}, {how}{self.runtime.describe()}"

    def start(self, hello: Hello) -> TcpWorker:
        """Reach it, and have it be what ``hello`` says; BackendError if it cannot be."""
        return TcpWorker(hello, self._address, ping_s=self._ping_s)

    def close(self) -> None:
        """Hold nothing."""
