"""What frames say of a call beside its messages."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Self

import grpc

from offramp.server.frontends.frames import Payload

_SIZE: Final = struct.Struct("<I")
_CODES: Final[Mapping[int, grpc.StatusCode]] = {code.value[0]: code for code in grpc.StatusCode}

Metadata = Sequence[tuple[str, str]]


class CallHead(NamedTuple):
    """A call as its front end knows it."""

    method: str
    """For instance ``/inference.GRPCInferenceService/ModelInfer``."""
    peer: str
    """As gRPC names it."""
    remaining_s: float | None
    """Until its deadline."""
    metadata: Metadata = ()
    """Those that are text."""

    def encode(self) -> bytes:
        """Return the head's bytes, before which is their number."""
        data = json.dumps(self).encode()
        return _SIZE.pack(len(data)) + data

    @classmethod
    def split(cls, payload: Payload) -> tuple[Self, Payload]:
        """Return the head and the message behind it."""
        (size,) = _SIZE.unpack_from(payload)
        end = _SIZE.size + size
        method, peer, remaining_s, metadata = json.loads(bytes(payload[_SIZE.size : end]))
        return cls(method, peer, remaining_s, _pairs(metadata)), payload[end:]


class CallStatus(NamedTuple):
    """How a call ends that is not answered."""

    code: grpc.StatusCode
    details: str = ""
    metadata: Metadata = ()

    def encode(self) -> bytes:
        """Return its bytes."""
        return json.dumps((self.code.value[0], self.details, self.metadata)).encode()

    @classmethod
    def decode(cls, payload: Payload) -> Self:
        """Read its bytes."""
        code, details, metadata = json.loads(bytes(payload))
        return cls(_CODES[code], details, _pairs(metadata))


def _pairs(lists: Sequence[Sequence[str]]) -> Metadata:
    """Return metadata as gRPC has them: they are compared with tuples."""
    return tuple((key, value) for key, value in lists)
