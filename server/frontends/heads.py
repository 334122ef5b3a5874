"""Data about a call that frames carry in addition to its messages."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple, Self, TypeAlias

import grpc

from offramp.server.frontends.frames import Payload

_BEGIN: Final = struct.Struct("<Id")
"""Number of bytes of the following text, and seconds to the deadline (NaN: no deadline)."""
_REMEMBERED: Final = 4096
"""Number of head texts that are cached; most calls of a connection have the same text."""
_CODES: Final[Mapping[int, grpc.StatusCode]] = {code.value[0]: code for code in grpc.StatusCode}

Metadata: TypeAlias = tuple[tuple[str, str], ...]


class CallHead(NamedTuple):
    """A call's data from its front end."""

    method: str
    """Full method name, for instance ``/inference.GRPCInferenceService/ModelInfer``."""
    peer: str
    """Client address in gRPC's notation."""
    remaining_s: float | None
    """Seconds until the call's deadline."""
    metadata: Metadata = ()
    """Text metadata only; binary metadata are dropped."""

    def encode(self) -> bytes:
        """Return the head's bytes."""
        text = _text_of(self.method, self.peer, self.metadata)
        remaining_s = math.nan if self.remaining_s is None else self.remaining_s
        return _BEGIN.pack(len(text), remaining_s) + text

    @classmethod
    def split(cls, payload: Payload) -> tuple[Self, Payload]:
        """Return the head and the message that follows it."""
        size, remaining_s = _BEGIN.unpack_from(payload)
        end = _BEGIN.size + size
        method, peer, metadata = _read_text(bytes(payload[_BEGIN.size : end]))
        limit_s = None if math.isnan(remaining_s) else remaining_s
        return cls(method, peer, limit_s, metadata), payload[end:]


class CallStatus(NamedTuple):
    """Final status of a call that has no answer."""

    code: grpc.StatusCode
    details: str = ""
    metadata: Metadata = ()

    def encode(self) -> bytes:
        """Return the status as bytes of JSON."""
        return json.dumps((self.code.value[0], self.details, self.metadata)).encode()

    @classmethod
    def decode(cls, payload: Payload) -> Self:
        """Parse the bytes of a status."""
        code, details, metadata = json.loads(bytes(payload))
        return cls(_CODES[code], details, _pairs(metadata))


@lru_cache(_REMEMBERED)
def _text_of(method: str, peer: str, metadata: Metadata) -> bytes:
    return json.dumps((method, peer, metadata)).encode()


@lru_cache(_REMEMBERED)
def _read_text(text: bytes) -> tuple[str, str, Metadata]:
    method, peer, metadata = json.loads(text)
    return method, peer, _pairs(metadata)


def _pairs(lists: Sequence[Sequence[str]]) -> Metadata:
    """Return metadata as tuples, as gRPC does: they are compared with tuples."""
    return tuple((key, value) for key, value in lists)
