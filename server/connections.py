"""Limits of the connections of both ports, and the connections of the HTTP port."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from offramp.server.arguments.errors import StartError
from offramp.server.grpc_sockets import DESCRIPTORS

logger = logging.getLogger(__name__)

SPARE_DESCRIPTORS: Final = 32
"""Kept free for files, pipes and threads that come and go, and connections about to be refused."""

LEAST_CONNECTIONS: Final = 16
"""A server that may have fewer of a kind is not started."""

MAX_HTTP_CONNECTIONS: Final = 64
"""Probes, scrapers and people; one more takes the place of the one that idles longest."""

HTTP_IDLE_S: Final = 20.0
"""An HTTP connection on which no request begins for so long is closed: no head of a request, and
no reader of a page, is as slow."""


_LOOK_S: Final = 1.0
"""Between two looks for idle connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """The most connections that each port has open at once."""

    grpc: int
    http: int


def fit_limits(wanted: int) -> ConnectionLimits:
    """Limits for ``wanted`` gRPC connections that the file descriptors of the process suffice for.

    The soft limit of descriptors is raised as far as the hard one allows. To be called when
    everything else is open. Raises StartError if hardly a connection is left.
    """
    in_use = len(list(DESCRIPTORS.iterdir())) + SPARE_DESCRIPTORS
    needed = in_use + 2 * MAX_HTTP_CONNECTIONS + wanted  # as many again may wait for room
    allowed = raise_descriptors(needed)
    if allowed >= needed:
        return ConnectionLimits(grpc=wanted, http=MAX_HTTP_CONNECTIONS)
    left = allowed - in_use
    if left < 3 * LEAST_CONNECTIONS:
        raise StartError(
            f"the limit of open files is {allowed}, which leaves {max(left, 0)} for connections, "
            f"and {3 * LEAST_CONNECTIONS} are the least; raise it: ulimit -n {needed}"
        )
    http = min(MAX_HTTP_CONNECTIONS, max(LEAST_CONNECTIONS, left // 8))
    grpc = min(wanted, left - 2 * http)
    logger.warning(
        "the limit of open files is %d: gRPC takes %d connections at once, not %d as "
        "--max-connections asks; for all of them: ulimit -n %d",
        allowed, grpc, wanted, needed,
    )  # fmt: skip
    return ConnectionLimits(grpc=grpc, http=http)


def raise_descriptors(needed: int) -> int:
    """Raise the soft limit of file descriptors towards ``needed``; return what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= needed or soft == resource.RLIM_INFINITY:
        return max(soft, needed)
    goal = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with suppress(OSError, ValueError):  # some systems have lower bounds of their own
        resource.setrlimit(resource.RLIMIT_NOFILE, (goal, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class HttpConnections:
    """Keeps the connections of an aiohttp server few, and closes those that idle.

    aiohttp itself waits for the first request of a connection, and for the rest of a request's
    head, without limit. To be used on the event loop's thread.
    """

    def __init__(self, server: Callable[[], web.Server], *, most: int) -> None:
        self._server = server
        self._most = most
        self._used_s: dict[web.RequestHandler, float] = {}
        """When the last request of each began, or when it was accepted; in that order."""

    def accept(self) -> web.RequestHandler:
        """The protocol of a new connection; where there is no room, the idlest one is closed."""
        if len(self._used_s) >= self._most:
            self._forget_closed()
        while len(self._used_s) >= self._most:
            idlest = next(iter(self._used_s))
            del self._used_s[idlest]
            _abort(idlest)
        new = self._server()()
        self._used_s[new] = asyncio.get_running_loop().time()
        return new

    @web.middleware
    async def note_use(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """A middleware by which connections with requests count as used."""
        if self._used_s.pop(request.protocol, None) is not None:
            self._used_s[request.protocol] = asyncio.get_running_loop().time()
        return await handler(request)

    async def close_idle(self) -> None:
        """Close what idles for too long, as long as nobody cancels this."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self._forget_closed()
            idle_since_s = asyncio.get_running_loop().time() - HTTP_IDLE_S
            for one, used_s in self._used_s.items():
                if used_s < idle_since_s:
                    _abort(one)

    def transports(self) -> list[asyncio.Transport]:
        """Those of all connections that are open."""
        return [one.transport for one in self._used_s if one.transport is not None]

    def _forget_closed(self) -> None:
        """What was accepted only now is not connected yet either."""
        recent_s = asyncio.get_running_loop().time() - _LOOK_S
        self._used_s = {
            one: used_s
            for one, used_s in self._used_s.items()
            if one.connected or used_s >= recent_s
        }


def _abort(one: web.RequestHandler) -> None:
    """Close a connection now: to close it only would wait for its peer to read what is written."""
    transport = one.transport  # force_close() forgets it
    one.force_close()
    if transport is not None:
        transport.abort()
