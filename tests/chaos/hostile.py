"""Clients that send what no client should."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, Final

import grpc
import grpc.aio

from offramp.proto import messages
from tests.chaos.clients import LIMIT_S, Clients, _method, request_of

OVERSIZED_BYTES: Final = 5 * 2**20
"""More than the server of a run takes."""


async def hostile(clients: Clients) -> None:
    """Bytes that are no request, or a request for what is not there."""
    request = request_of(clients, clients.draw())
    await _send(clients, "hostile", _spoilt(clients, request))


async def oversized(clients: Clients) -> None:
    """A message above the limit."""
    await _send(clients, "oversized", bytes(OVERSIZED_BYTES))


async def wrong_dtype(clients: Clients) -> None:
    """A right request but for one thing."""
    request = request_of(clients, clients.draw())
    tensor = request.inputs[0]
    tensor.datatype = clients.random.choice(["FP64", "BOOL", "BYTES", "nonsense", ""])
    await _send(clients, "wrong dtype", request.SerializeToString())


def _spoilt(clients: Clients, request: Any) -> bytes:
    draw = clients.random
    match draw.randrange(6):
        case 0:
            return draw.randbytes(draw.randrange(1, 2000))
        case 1:
            content = request.SerializeToString()
            return bytes(content[: draw.randrange(1, len(content))])
        case 2:
            request.model_name = draw.choice(["", "absent", "x" * 5000, "../etc"])
        case 3:
            del request.inputs[0].shape[:]
            request.inputs[0].shape.extend(draw.choice([[2**40, 2**40, 0, 1], [-1], [1] * 65]))
        case 4:
            request.raw_input_contents.extend([b""] * 2000)
        case _:
            request.inputs.add(name=request.inputs[0].name)
    return bytes(request.SerializeToString())


async def _send(clients: Clients, kind: str, content: bytes) -> None:
    assert clients.channel is not None
    ticket = clients.send(kind)
    streams = clients.random.random() < 0.3 and kind != "oversized"
    try:
        if streams:
            response = await _on_a_stream(clients, content)
        else:
            call = _method(clients.channel, "ModelInfer")
            response = await call(content, timeout=LIMIT_S)
    except grpc.aio.AioRpcError as error:
        clients.failed(ticket, error, 0)
        return
    if isinstance(response, messages.ModelStreamInferResponse) and response.error_message:
        clients.account.ended_with(
            ticket,
            status=response.infer_response.parameters["offramp_status"].string_param,
            by_server=True,
            now_s=time.monotonic(),
            samples=0,
            detail=response.error_message[:300],
        )
    else:
        inner = getattr(response, "infer_response", response)
        exits = inner.parameters["offramp_exits"].string_param
        clients.account.answered(ticket, exits.count(",") + 1 if exits else 0)


async def _on_a_stream(clients: Clients, content: bytes) -> Any:
    """The one response, or the stream's status as an error."""
    call = _method(clients.channel, "ModelStreamInfer", streams=True)(timeout=LIMIT_S)
    try:
        await call.write(content)
        await call.done_writing()
        response = await call.read()
        if response is not grpc.aio.EOF:
            return response
    except asyncio.InvalidStateError:
        pass  # it has ended already, and says why
    finally:
        call.cancel()
    raise grpc.aio.AioRpcError(
        await call.code(),
        await call.initial_metadata(),
        await call.trailing_metadata(),
        f"stream: {await call.details()}",
    )


async def garbage(clients: Clients) -> None:
    """Bytes that are no HTTP/2, or the half of a greeting, held for a while; no request at all."""
    draw = clients.random
    host, _, port = clients.address.rpartition(":")
    content = draw.choice([b"PRI * HTTP/2.0\r\n", b"GET / HTTP/1.1\r\n", draw.randbytes(200), b""])
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(content)
            await asyncio.sleep(draw.uniform(0.0, 2.0))
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


__all__ = ["garbage", "hostile", "oversized", "wrong_dtype"]
