"""The HTTP side of the server: status page, health probes and metrics."""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from aiohttp import web

from offramp.server.addresses import join_address
from offramp.server.errors import StartError
from offramp.server.metrics import CONTENT_TYPE, render_metrics
from offramp.server.served import ServedEngine
from offramp.server.status import render_status

SECURITY_HEADERS: Final[Mapping[str, str]] = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
}
"""On every response; the page needs nothing but its own style sheet."""


class HttpEndpoint:
    """An aiohttp server; made and used on the event loop's thread."""

    def __init__(self, engine: ServedEngine) -> None:
        self._runner = web.AppRunner(make_application(engine), access_log=None)

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port, which the system chooses for port 0.

        Raises:
            StartError: The address cannot be listened on.
        """
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port, reuse_address=True).start()
        except OSError as error:
            reason = "it is in use" if error.errno == errno.EADDRINUSE else error.strerror
            address = join_address(host, port)
            raise StartError(f"cannot listen for HTTP on {address}: {reason}") from error
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Close all connections; harmless if it never started."""
        await self._runner.cleanup()


def make_application(engine: ServedEngine) -> web.Application:
    """The routes over an engine."""
    application = web.Application()
    routes = {
        "/": lambda: _html(render_status(engine)),
        "/health/live": lambda: _text("live\n"),
        "/health/ready": lambda: _readiness(engine),
        "/metrics": lambda: web.Response(
            body=render_metrics(engine), headers={"Content-Type": CONTENT_TYPE}
        ),
    }
    for path, respond in routes.items():
        application.router.add_get(path, _handler(respond))
    return application


def _handler(
    respond: Callable[[], web.Response],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(_request: web.Request) -> web.Response:
        response = respond()
        response.headers.update(SECURITY_HEADERS)
        return response

    return handle


def _readiness(engine: ServedEngine) -> web.Response:
    waiting = [model.name for model in engine.models() if not engine.ready(model.name)]
    if waiting:
        reason = (
            f"not ready: {', '.join(waiting)} (shutting down, or out of service: see the log)\n"
        )
        return _text(reason, status=503)
    return _text("ready\n") if engine.ready() else _text("not ready: shutting down\n", status=503)


def _html(text: str) -> web.Response:
    return web.Response(text=text, content_type="text/html")


def _text(text: str, *, status: int = 200) -> web.Response:
    return web.Response(text=text, status=status)
