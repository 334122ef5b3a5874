"""The process of a front end: listens on the gRPC port and forwards calls.

It ends with the engine's process, to which its socket connects.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Any, Final

from offramp.server.arguments.logging_setup import quiet_libraries
from offramp.server.arguments.options import MAX_COUNT, MIB, SecurityOptions, ServerOptions
from offramp.server.common.errors import StartError
from offramp.server.common.event_loop import loop_factory
from offramp.server.common.methods import MethodTable
from offramp.server.frontends.frames import FrameKind, FrameLink, Payload
from offramp.server.frontends.relay import MethodShape, Relay
from offramp.server.ports.grpc_listener import GrpcListener, ListenerOptions
from offramp.server.requests.admission import RequestAdmission
from offramp.server.requests.message_memory import keep_large_blocks
from offramp.server.security.tls import open_tls

_MEMORY_FACTOR: Final = 2
"""Factor on the engine process's memory limit, so that the engine's limit is reached first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendSettings:
    """Settings that a front end starts with."""

    host: str
    port: int
    listener: ListenerOptions
    security: SecurityOptions
    """Certificates; the engine's process checks tokens."""
    max_queue_mib: int
    """Limit on messages in the engine's process, in MiB."""
    methods: dict[str, MethodShape]
    log_level: int

    def start(self, link: FrameLink) -> tuple[Relay, GrpcListener]:
        """Return the relay for calls and the listener to start, or raise StartError."""
        admission = _RelayedAdmission(
            link,
            ServerOptions(
                max_concurrent_requests=MAX_COUNT,
                max_queue_mib=min(_MEMORY_FACTOR * self.max_queue_mib, MAX_COUNT),
            ),
        )
        relay = Relay(link, admission, self.methods)
        tls = open_tls(self.security)
        return relay, GrpcListener(MethodTable(relay.handlers), admission, self.listener, tls)


class _RelayedAdmission(RequestAdmission):
    """Admission in a front end, which reports refusals to the engine's process for counting."""

    def __init__(self, link: FrameLink, options: ServerOptions) -> None:
        super().__init__(options)
        self._link = link

    def count_refused(self, code: str, reason: str) -> None:
        """Count a refused request in the engine's process (:class:`RequestAdmission`)."""
        self._link.send(FrameKind.REFUSED, 0, json.dumps((code, reason)).encode())


class _LinkHandler(logging.Handler):
    """Log handler that sends lines to the engine's process, which writes them."""

    def __init__(self, link: FrameLink) -> None:
        super().__init__()
        self._link = link
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        line = json.dumps((record.levelno, record.name, self.format(record))).encode()
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._link.send, FrameKind.LOG, 0, line)


class FrontendProcess:
    """Carries out the orders of the engine's process."""

    def __init__(self) -> None:
        self._link = FrameLink(self._receive, self._lost)
        self._ended = asyncio.Event()
        self._relay: Relay
        self._listener: GrpcListener
        self._orders = set[asyncio.Task[None]]()

    async def run(self, end: socket.socket) -> None:
        """Serve until the other end of the socket closes."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self._link, sock=end)
        await self._ended.wait()

    def _lost(self) -> None:
        self._ended.set()

    def _receive(
        self, kind: FrameKind, number: int, payload: Payload, message: Payload | None
    ) -> None:
        if kind is FrameKind.ORDER:
            name, argument = pickle.loads(payload)  # noqa: S301 - sent by our parent process
            order = asyncio.create_task(self._carry_out(number, name, argument))
            self._orders.add(order)
            order.add_done_callback(self._orders.discard)
        else:
            self._relay.receive(kind, number, payload, message)

    async def _carry_out(self, number: int, name: str, argument: Any) -> None:
        try:
            done = await getattr(self, f"_{name}")(argument)
        except StartError as error:
            reply: dict[str, Any] = {"error": str(error)}
        else:
            reply = {"done": done}
        self._link.send(FrameKind.REPLY, number, json.dumps(reply).encode())

    async def _listen(self, settings: FrontendSettings) -> int:
        logging.basicConfig(
            level=logging.WARNING, handlers=[_LinkHandler(self._link)], format="%(message)s"
        )
        logging.getLogger("offramp").setLevel(settings.log_level)
        quiet_libraries()
        keep_large_blocks(settings.listener.max_message_bytes + MIB)
        self._relay, self._listener = settings.start(self._link)
        return await self._listener.start(settings.host, settings.port)

    async def _send_goaway(self, limit_s: float) -> None:
        await self._listener.send_goaway(limit_s)

    async def _stop(self, grace_s: float) -> None:
        await self._listener.stop(grace_s)


def main() -> None:
    """Run a front end over the socket whose descriptor is the only argument."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the engine's process handles them
    end = socket.socket(fileno=int(sys.argv[1]))
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(FrontendProcess().run(end))
        os._exit(0)  # connections that are left end at once


if __name__ == "__main__":
    main()
