"""The handlers of the gRPC port by full method name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import grpc

Handler: TypeAlias = Any
"""A ``grpc.RpcMethodHandler``, whose type stubs do not cover asyncio."""


class MethodTable(grpc.GenericRpcHandler):
    """Table of handlers by full method name, in the form that gRPC takes."""

    def __init__(self, methods: Mapping[str, Handler]) -> None:
        self.methods: Final = methods

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """Return the handler of a call's method; ``None`` if there is no such method."""
        return self.methods.get(handler_call_details.method)
