"""The connection to a server, shared by the blocking and the asyncio client."""

from __future__ import annotations

import ipaddress
import json
import ssl
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from types import ModuleType
from typing import Any, ClassVar, Final

import grpc
import grpc.aio

from offramp.client.errors import DeadlineError, OfframpError, error_from_status
from offramp.proto import messages
from offramp.proto.descriptors import method_path

DEFAULT_TIMEOUT_S: Final = 30.0
DEFAULT_MAX_MESSAGE_MIB: Final = 64
DEFAULT_RETRIES: Final = 2
MOST_RETRIES: Final = 4
"""Largest number of retries, since gRPC makes at most five attempts."""
FIRST_BACKOFF_S: Final = 0.1
"""Longest wait before the first retry; each wait is drawn at random below its limit, which doubles
with each retry, up to :data:`LONGEST_BACKOFF_S`."""
LONGEST_BACKOFF_S: Final = 2.0

_MIB: Final = 1024 * 1024
_ERROR_METADATA_KEY: Final = "offramp-error"
"""Metadata on statuses that the server's own code sets (offramp.server.common.errors)."""

_PATIENCE: Final = (("offramp-deadline", "slo"),)
"""Metadata of calls whose timeout is only the client's wait: the server then schedules by the
model's SLO, not by this timeout (offramp.server.services.service)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Certificates for an encrypted connection to a server or proxy; all in PEM form."""

    root_certificates: bytes | None = None
    """Certificates of authorities that may certify the server; ``None`` uses the system's
    authorities."""
    private_key: bytes | None = None
    """Private key of ``certificate_chain``, for servers that require client certificates."""
    certificate_chain: bytes | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials in gRPC's form."""
        return grpc.ssl_channel_credentials(**asdict(self))

    def context(self) -> ssl.SSLContext:
        """Return the certificates as a context for HTTP."""
        roots = self.root_certificates
        context = ssl.create_default_context(cadata=None if roots is None else roots.decode())
        if self.certificate_chain is not None and self.private_key is not None:
            # ssl reads these from files only.
            with tempfile.NamedTemporaryFile() as file:
                file.write(self.certificate_chain + b"\n" + self.private_key)
                file.flush()
                context.load_cert_chain(file.name)
        return context


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    """The server that a client calls, and the limits of its calls."""

    address: str
    """``host:port`` of the server's gRPC port."""
    timeout_s: float | None = DEFAULT_TIMEOUT_S
    """Limit, in seconds, of calls that set none; ``None`` waits forever."""
    max_message_mib: int = DEFAULT_MAX_MESSAGE_MIB
    """Largest response that the client accepts, in MiB."""
    token: str | None = field(default=None, repr=False)
    """Token to send with every call."""
    encrypted: bool = False
    """True if the connection uses TLS."""
    insecure_token: bool = False
    """True if the token may be sent to another machine without encryption."""
    retries: int = DEFAULT_RETRIES
    """Number of retries of a call that ends with UNAVAILABLE."""

    def __post_init__(self) -> None:
        host, _, port = self.address.rpartition(":")
        scheme, separator, rest = self.address.partition("://")
        if separator and scheme in ("http", "https", "grpc", "grpcs"):
            raise ValueError(
                f"address {self.address!r} has a scheme; expected host:port of the server's gRPC "
                f"side, for instance {rest.partition(':')[0].rstrip('/') or '127.0.0.1'}:8001"
            )
        if not host or not port.isdecimal():
            raise ValueError(
                f"address {self.address!r} is not host:port, for instance 127.0.0.1:8001"
            )
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"timeout_s {self.timeout_s} is not above 0; None waits for ever")
        if self.max_message_mib < 1:
            raise ValueError(f"max_message_mib {self.max_message_mib} is below 1")
        if not 0 <= self.retries <= MOST_RETRIES:
            raise ValueError(f"retries {self.retries} is not in 0 to {MOST_RETRIES}")
        self._check_token(host)

    def _check_token(self, host: str) -> None:
        """Raise ValueError for an invalid token, or one that would be sent without encryption."""
        if self.token is None:
            return
        token = self.token.strip()  # from a file, it ends with a line break
        if not (token and token.isascii() and token.isprintable()):
            raise ValueError("token is empty, or has characters that a token may not have")
        if not (self.encrypted or self.insecure_token or is_loopback(host)):
            raise ValueError(
                f"the token would be sent to {self.address} in the clear; pass tls=Tls(...), or "
                "insecure_token=True where the network is trusted"
            )

    def channel_options(self) -> list[tuple[str, Any]]:
        """Return the limits as gRPC channel options; the server limits requests."""
        return [
            ("grpc.max_receive_message_length", self.max_message_mib * _MIB),
            ("grpc.max_send_message_length", -1),
            *self._retrying(),
        ]

    def _retrying(self) -> list[tuple[str, Any]]:
        """Return gRPC's retry options: only calls that no server has answered are retried."""
        if not self.retries:
            return [("grpc.enable_retries", 0)]
        policy = {
            "maxAttempts": 1 + self.retries,
            "initialBackoff": f"{FIRST_BACKOFF_S}s",
            "maxBackoff": f"{LONGEST_BACKOFF_S}s",
            "backoffMultiplier": 2,
            "retryableStatusCodes": ["UNAVAILABLE"],
        }
        config = {"methodConfig": [{"name": [{}], "retryPolicy": policy}]}
        return [("grpc.service_config", json.dumps(config))]

    def limit(self, timeout_s: float | None) -> dict[str, Any]:
        """Return the time limit of a call as gRPC arguments; ``None`` uses the client's limit."""
        if timeout_s is None:
            return {"timeout": self.timeout_s, "metadata": (*_PATIENCE, *self.metadata())}
        return {"timeout": timeout_s, "metadata": self.metadata()}

    def metadata(self) -> Sequence[tuple[str, str]]:
        """Return the metadata of every call and stream."""
        return () if self.token is None else (("authorization", f"Bearer {self.token.strip()}"),)

    def stream_timeout_s(self, timeout_s: float | None) -> float | None:
        """Return the limit of a stream whose first answer is due after ``timeout_s``.

        Later answers get, in addition, the client's limit for calls.
        """
        return None if self.timeout_s is None else self.timeout_s + (timeout_s or 0.0)

    def late(self, timeout_s: float) -> DeadlineError:
        """Return the error for a stream whose first answer was late."""
        if timeout_s <= 0:
            return DeadlineError(
                f"{self.address}: timeout_s {timeout_s:g} is not above 0, an answer takes some time"
            )
        return DeadlineError(f"{self.address}: no answer within {timeout_s:g} s")

    def error(self, error: grpc.RpcError) -> OfframpError:
        """Return the error for a failed call, to be raised from ``error``."""
        if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
            return OfframpError(f"{self.address}: {error!r}")
        metadata = error.trailing_metadata() or ()
        return error_from_status(
            error.code(),
            error.details() or "",
            address=self.address,
            from_server=any(key == _ERROR_METADATA_KEY for key, _ in metadata),
        )


def is_loopback(host: str) -> bool:
    """Return whether a host is the loopback interface of this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class ClientBase:
    """A channel to one server with its methods, from ``grpc`` or ``grpc.aio``."""

    _grpc: ClassVar[ModuleType]
    """Module that opens the channel; both modules have the same names."""

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        max_message_mib: int = DEFAULT_MAX_MESSAGE_MIB,
        tls: Tls | None = None,
        token: str | None = None,
        insecure_token: bool = False,
        retries: int = DEFAULT_RETRIES,
    ) -> None:
        self._settings: Final = ConnectionSettings(
            address=address,
            timeout_s=timeout_s,
            max_message_mib=max_message_mib,
            token=token,
            encrypted=tls is not None,
            insecure_token=insecure_token,
            retries=retries,
        )
        options = self._settings.channel_options()
        if tls is None:
            self._channel = self._grpc.insecure_channel(address, options)
        else:
            self._channel = self._grpc.secure_channel(address, tls.credentials(), options)
        self._infer = self._unary("ModelInfer")
        self._metadata = self._unary("ModelMetadata")
        self._config = self._unary("ModelConfig")
        self._server_ready = self._unary("ServerReady")
        self._model_ready = self._unary("ModelReady")
        self._register = self._unary("SystemSharedMemoryRegister")
        self._unregister = self._unary("SystemSharedMemoryUnregister")
        self._stream = self._channel.stream_stream(
            method_path("ModelStreamInfer"),
            request_serializer=messages.ModelInferRequest.SerializeToString,
            response_deserializer=messages.ModelStreamInferResponse.FromString,
        )

    def _unary(self, method: str) -> Any:
        return self._channel.unary_unary(
            method_path(method),
            request_serializer=getattr(messages, f"{method}Request").SerializeToString,
            response_deserializer=getattr(messages, f"{method}Response").FromString,
        )
