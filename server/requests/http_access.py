"""Token checks of HTTP requests, for all routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import grpc
from aiohttp import web
from aiohttp.typedefs import Middleware

from offramp.engine.common.errors import EngineError
from offramp.server.common.errors import ERROR_METADATA_KEY, wire_name
from offramp.server.requests.admission import RequestAdmission
from offramp.server.security.tokens import Principal

OPEN_PATHS: Final = frozenset(
    {"/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready"}
)
"""Routes that need no token."""

PRINCIPAL: Final = web.RequestKey("principal", Principal)
"""Principal of the token that came with a request."""


def token_check(admission: RequestAdmission) -> Middleware:
    """Return a middleware that refuses requests without a valid token, except for open routes.

    The routes of the protocol (``/v2``) check whether the token covers their method and model. All
    other routes concern all models.
    """

    @web.middleware
    async def check(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        resource = request.match_info.route.resource
        path = "" if resource is None else resource.canonical
        if path in OPEN_PATHS:
            return await handler(request)
        try:
            principal = admission.access.identify(request.headers.getall("Authorization", []))
            if not path.startswith("/v2"):
                admission.access.check_all_models(principal, request.path[:80])
        except EngineError as error:
            return _refused(admission, request, error)
        if principal is not None:
            request[PRINCIPAL] = principal
        return await handler(request)

    return check


def http_peer(request: web.Request) -> str:
    """Return the client's address in gRPC's notation."""
    name = request.transport.get_extra_info("peername") if request.transport else None
    if not name:
        return ""
    host, port = name[:2]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def _refused(admission: RequestAdmission, request: web.Request, error: EngineError) -> web.Response:
    state = admission.enter("http", http_peer(request))
    code, message = admission.refuse(state, error)
    admission.leave(state)
    unknown = code is grpc.StatusCode.UNAUTHENTICATED
    headers = {ERROR_METADATA_KEY: wire_name(error), "Cache-Control": "no-store"}
    if unknown:
        headers["WWW-Authenticate"] = "Bearer"
    return web.json_response({"error": message}, status=401 if unknown else 403, headers=headers)
