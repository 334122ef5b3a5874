"""Frames of HTTP/2, for clients that do what no library would (RFC 9113)."""

from __future__ import annotations

from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame; kinds are numbered as in section 6."""
    head = len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")
    return head + payload


def headers(stream: int, path: str) -> bytes:
    """Return HEADERS that open a call of gRPC, with no table and no compression."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "a",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    block = b"".join(
        b"\x00" + b"".join(bytes((len(text),)) + text.encode() for text in field)
        for field in fields.items()
    )
    return frame(1, 4, stream, block)


def data(stream: int, message: bytes, *, end: bool) -> bytes:
    """Return DATA with a message of gRPC, which may be the call's last."""
    return frame(0, int(end), stream, b"\x00" + len(message).to_bytes(4, "big") + message)
