"""The front ends of a server: started, watched, restarted, and ended with it."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from offramp.engine.common.job_runner import environment_of_child
from offramp.server.arguments.options import SecurityOptions, ServerOptions
from offramp.server.common.errors import StartError
from offramp.server.common.methods import Handler
from offramp.server.frontends.frames import FrameKind, FrameLink, Payload
from offramp.server.frontends.process import FrontendSettings
from offramp.server.frontends.relay import MethodShape
from offramp.server.frontends.relayed_calls import RelayedCalls
from offramp.server.ports.grpc_listener import ListenerOptions
from offramp.server.ports.sockets import bind
from offramp.server.requests.admission import RequestAdmission

logger = logging.getLogger(__name__)

AGAIN_S: Final = 1.0
"""Seconds from the end of a front end to the start of its replacement."""

_PATIENCE_S: Final = 5.0
"""Seconds that an order may take in addition to its own limit, for a busy machine."""

_SOCKET_BYTES: Final = 4 * 1024 * 1024
_MODULE: Final = "offramp.server.frontends.process"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendOptions:
    """Number of front ends, and their settings in addition to the listener's options."""

    count: int
    max_queue_mib: int
    """Limit on messages in the engine's process, in MiB."""
    security: SecurityOptions
    """Security options, which name the certificates."""

    @classmethod
    def of(cls, options: ServerOptions) -> Self | None:
        """Return the front end options of a server; ``None`` without front ends."""
        if not options.frontends:
            return None
        return cls(
            count=options.frontends,
            max_queue_mib=options.max_queue_mib,
            security=options.security,
        )


class Frontends:
    """The gRPC port; other processes hold its connections; used on the event loop's thread.

    If a front end ends, its connections are lost and their requests withdrawn; the other front ends
    continue.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        admission: RequestAdmission,
        listener: ListenerOptions,
        options: FrontendOptions,
    ) -> None:
        """``handlers`` answer the calls, by full method name."""
        self._admission = admission
        self._handlers = handlers
        self._options = options
        most = -(-listener.max_connections // options.count)
        self._listener = replace(listener, shared_port=True, max_connections=most)
        self._ends: set[Frontend] = set()
        self._watching: list[asyncio.Task[None]] = []
        self._placeholders = ExitStack()
        """Sockets that reserve the port, even while no front end is running."""

    async def start(self, host: str, port: int) -> int:
        """Start all front ends, or raise StartError; return the port (0: any free port)."""
        if not hasattr(os, "memfd_create"):
            raise StartError("--frontends needs Linux; leave it out")
        bound = bind(host, port, option="--grpc-port", shared=True)
        for one in bound:
            self._placeholders.enter_context(one)
        port = int(bound[0].getsockname()[1])
        settings = self._settings(host, port)
        new = [Frontend(self._handlers, self._admission) for _ in range(self._options.count)]
        self._ends.update(new)
        starting = (end.start(settings) for end in new)
        failures = [e for e in await asyncio.gather(*starting, return_exceptions=True) if e]
        if failures:
            await self._end_all()
            lost = isinstance(failures[0], FrontendLostError)
            raise StartError("a front end ended while it started") if lost else failures[0]
        self._watching = [asyncio.create_task(self._watch(end, settings)) for end in new]
        return port

    async def send_goaway(self, limit_s: float) -> None:
        """Send GOAWAY to the clients of all front ends (:meth:`GrpcListener.send_goaway`)."""
        await self._order_all("send_goaway", limit_s, within_s=limit_s)

    async def stop(self, grace_s: float) -> None:
        """Stop all front ends after their calls (:meth:`GrpcListener.stop`)."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await self._order_all("stop", grace_s, within_s=grace_s)
        await self._end_all()

    async def _end_all(self) -> None:
        await asyncio.gather(*(end.end() for end in self._ends))
        self._ends.clear()
        self._placeholders.close()

    async def _order_all(self, name: str, argument: object, *, within_s: float) -> None:
        """Send an order to all front ends; wait for each at most ``within_s`` plus a margin."""
        orders = (end.order(name, argument) for end in self._ends)
        limited = (asyncio.wait_for(order, within_s + _PATIENCE_S) for order in orders)
        await asyncio.gather(*limited, return_exceptions=True)  # ended ones have no link

    async def _watch(self, end: Frontend, settings: FrontendSettings) -> None:
        while True:
            await end.lost.wait()
            logger.error(
                "a front end ended (%s); its connections are lost; a new one replaces it",
                await end.end(),
            )
            self._ends.discard(end)
            await asyncio.sleep(AGAIN_S)
            end = Frontend(self._handlers, self._admission)
            self._ends.add(end)
            try:
                await end.start(settings)
            except (StartError, OSError) as error:
                logger.warning("a front end cannot be started: %s", error)
                end.give_up()
            except FrontendLostError:
                pass  # the loop above handles it

    def _settings(self, host: str, port: int) -> FrontendSettings:
        certificates = replace(self._options.security, token_file=None, admin_token_file=None)
        return FrontendSettings(
            host=host,
            port=port,
            listener=self._listener,
            security=certificates,
            max_queue_mib=self._options.max_queue_mib,
            methods={
                name: MethodShape(handler.request_streaming, handler.response_streaming)
                for name, handler in self._handlers.items()
            },
            log_level=logging.getLogger("offramp").getEffectiveLevel(),
        )


class FrontendLostError(Exception):
    """A front end has ended."""


class Frontend:
    """One front end, as seen by the engine's process."""

    def __init__(self, handlers: Mapping[str, Handler], admission: RequestAdmission) -> None:
        self._admission = admission
        self.lost: Final = asyncio.Event()
        """Set when the front end's process has ended."""
        self._calls = RelayedCalls(handlers)
        self._link = FrameLink(self._receive, self._has_ended)
        self._process: subprocess.Popen[bytes] | None = None
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        """Replies to orders, by the order's number."""
        self._orders = itertools.count()

    async def start(self, settings: FrontendSettings) -> None:
        """Start the process and make it listen.

        Raises:
            StartError: The front end cannot start.
            FrontendLostError: The front end has ended.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            for one in (ours, theirs):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
            self._process = subprocess.Popen(  # noqa: S603, ASYNC220 - our own module
                [sys.executable, "-P", "-m", _MODULE, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=environment_of_child(),
                pass_fds=(theirs.fileno(),),
            )
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self._link, sock=ours)
        await self.order("listen", settings)

    async def order(self, name: str, argument: object) -> None:
        """Send an order and wait until it is done, or raise StartError or FrontendLostError."""
        if self.lost.is_set():
            raise FrontendLostError
        number = next(self._orders)
        waiting = self._replies[number] = asyncio.get_running_loop().create_future()
        self._link.send(FrameKind.ORDER, number, pickle.dumps((name, argument)))
        try:
            reply = await waiting
        finally:
            del self._replies[number]
        if "error" in reply:
            raise StartError(reply["error"])

    def give_up(self) -> None:
        """Treat the front end as lost, even if its process still runs."""
        self._link.close()
        self.lost.set()

    async def end(self) -> str:
        """End the process if it still runs; return how it ended."""
        self._link.close()
        if self._process is None:
            return "it was never started"
        self._process.kill()
        status = await asyncio.to_thread(self._process.wait)
        return f"exit status {status}" if status >= 0 else f"signal {-status}"

    def _receive(
        self, kind: FrameKind, number: int, payload: Payload, message: Payload | None
    ) -> None:
        if kind is FrameKind.REPLY:
            if (waiting := self._replies.get(number)) is not None and not waiting.done():
                waiting.set_result(json.loads(bytes(payload)))
        elif kind is FrameKind.REFUSED:
            self._admission.count_refused(*json.loads(bytes(payload)))
        elif kind is FrameKind.LOG:
            level, name, text = json.loads(bytes(payload))
            logging.getLogger(name).log(level, "%s", text)
        else:
            self._calls.receive(self._link, kind, number, payload, message)

    def _has_ended(self) -> None:
        self.lost.set()
        self._calls.withdraw()
        for waiting in self._replies.values():
            if not waiting.done():
                waiting.set_exception(FrontendLostError())
