"""The router's side of a worker on another host, over TCP.

The worker (``eeworker``) is already running, and serves one router at a time. So "start" here means
that the worker begins to serve this router. It stops when the connection for orders ends. Each slot
has its own connection, with inline tensors.
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
"""Time limit to connect, in seconds."""
GREET_LIMIT_S: Final = 30.0
"""Time limit of a handshake, in seconds: after its previous router has left, a worker restarts
before it answers."""
PING_S: Final = 10.0
"""Seconds between pings to a worker that gets no orders."""
PING_LIMIT_S: Final = 30.0
MOST_RESULT_BYTES: Final = 1 << 30
"""Largest result of a run in bytes, including tensors for the next stage. Split larger batches. A
faulty or hostile worker cannot use more of the router's memory per slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAddress:
    """Address of a worker, and the credentials for it."""

    address: HostPort
    token: bytes = field(repr=False)
    context: ssl.SSLContext | None
    """TLS context of connections; ``None`` does not encrypt."""
    remedy: str = ""
    """Remedy in the error if the worker cannot be reached; if empty, the remedy is to start
    ``eeworker``."""
    most_result_bytes: int = MOST_RESULT_BYTES
    """Largest result of a run, in bytes, that is received from the worker."""

    def reach(self) -> tuple[socket.socket, str]:
        """Connect and perform the handshake: return the connection, and the session's name.

        WorkerLostError if the worker cannot be reached, BackendError if it is a wrong worker or
        refuses.
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
                f"{who} is not trusted: {tls_reason(error)}; set tls_ca to the authority of its "
                "certificate, which must be issued for that host"
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

    WorkerLostError if the worker cannot be reached, BackendError if it refuses the options of
    ``hello``.
    """

    def __init__(self, hello: Hello, address: WorkerAddress, *, ping_s: float = PING_S) -> None:
        self._address = address
        self._slots = itertools.count(1)
        self._why = ""
        self._cpu_s = 0.0
        self._lock = threading.Lock()
        """Guards the list of connections."""
        self._slot_sockets: list[socket.socket] = []
        self.stages: set[int] = set()
        """Numbers of the stages that the worker has loaded."""
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
            target=self._keep_alive, args=(ping_s,), name=f"ping {address.address}", daemon=True
        ).start()

    def _greet(self, hello: Hello) -> int:
        answer = self._orders.ask(hello, START_LIMIT_S)
        if isinstance(answer, Refused):
            raise BackendError(f"{self.name}: {answer.reason}")
        return answer.pid

    @property
    def name(self) -> str:
        """Name of the worker in messages, with its address."""
        return f"worker {self._address.address}"

    @property
    def pid(self) -> int:
        """Process id, on the worker's host."""
        return self._pid

    @property
    def alive(self) -> bool:
        """``True`` if the worker can take orders, as far as is known."""
        if not self.lost and self._orders.lock.acquire(blocking=False):
            try:
                if has_ended(self._socket):
                    self.lose("")
            finally:
                self._orders.lock.release()
        return not self.lost

    def cpu_s(self) -> float:
        """Return the CPU seconds that the worker has used on its host, as far as is known."""
        if not self.lost and not self._orders.lock.locked():
            with contextlib.suppress(BackendError):
                self._ping()
        return self._cpu_s

    def order(self, message: Message, body: bytes = b"") -> None:
        """Send an order and wait until it is done; BackendError or WorkerLostError if it fails."""
        self._orders.ask(message, ORDER_LIMIT_S, body)

    def open_slot(self) -> SlotLink:
        """Open a slot with its own connection; errors as :meth:`order`."""
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
        """Give up a worker that does not answer, and return the error to raise, with ``reason``.

        Closing its connections ends the worker's service in any case.
        """
        self._why = self._why or reason or "its connection ended"
        self._let_go()
        return WorkerLostError(f"{self.name} was lost: {self._why}")

    def end(self) -> None:
        """Disconnect immediately; the worker has nothing to clean up."""
        self._let_go()
        self._orders.close()

    def _let_go(self) -> None:
        self.lost = True
        self._over.set()
        with self._lock:
            for connected in (self._socket, *self._slot_sockets):
                cut(connected)

    def _keep_alive(self, every_s: float) -> None:
        """Send pings while there are no orders, because networks fail silently."""
        while not self._over.wait(every_s):
            if not self._orders.lock.locked():
                with contextlib.suppress(BackendError):  # the worker counts as lost then
                    self._ping()

    def _ping(self) -> None:
        answer = self._orders.ask(Ping(), PING_LIMIT_S)
        if isinstance(answer, Ready):
            self._cpu_s = answer.cpu_s


class TcpLauncher:
    """Makes one worker on another host serve this router."""

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
        """Keep the address; NetworkError if certificates cannot be used."""
        context = None if tls is None else tls.context()
        self._address = WorkerAddress(
            address=address, token=token, context=context, most_result_bytes=most_result_bytes
        )
        self._device_type = device_type
        self._ping_s = ping_s
        self.runtime = runtime

    @property
    def device_type(self) -> str:
        """Name of the worker's type in a cluster's ``[devices]``; empty without a cluster."""
        return self._device_type

    def describe(self) -> str:
        """Describe the location of the worker: its address."""
        how = "not encrypted" if self._address.context is None else "TLS"
        return f"another process at {self._address.address}, {how}{self.runtime.describe()}"

    def start(self, hello: Hello) -> TcpWorker:
        """Connect to the worker, with the options of ``hello``; BackendError if it refuses."""
        return TcpWorker(hello, self._address, ping_s=self._ping_s)

    def close(self) -> None:
        """Do nothing: no resources are reserved."""
