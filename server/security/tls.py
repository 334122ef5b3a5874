"""TLS of both ports, with certificates that can be replaced while the server runs."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from offramp.engine.common.network import NetworkError, TlsIdentity
from offramp.server.arguments.options import SecurityOptions
from offramp.server.security.watched_files import WatchedFiles


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Certificates:
    """Certificate, key and authorities in the forms that the two ports need."""

    http: ssl.SSLContext
    grpc: grpc.ServerCertificateConfiguration


class ServerTls:
    """The certificates of a server; new connections use the present content of the files."""

    def __init__(self, identity: TlsIdentity) -> None:
        """Read the files, or raise StartError."""
        paths = [identity.certificate, identity.key, *filter(None, (identity.ca,))]
        self._files = WatchedFiles("TLS certificates", paths, lambda: _read(identity))
        self._requires_client_certificates: Final = identity.ca is not None
        self._in_grpc = self._files.current()
        """Certificates that gRPC received last."""

    def context(self) -> ssl.SSLContext:
        """Return asyncio's context for encryption."""
        first = self._files.current().http

        def choose(connection: ssl.SSLObject, _name: str | None, _first: ssl.SSLContext) -> None:
            connection.context = self._files.current().http

        first.sni_callback = choose  # called in every handshake, with or without a name
        return first

    def credentials(self) -> grpc.ServerCredentials:
        """Return gRPC's credentials for encryption; call once."""
        return grpc.dynamic_ssl_server_credentials(
            self._in_grpc.grpc,
            self._changed,  # type: ignore[arg-type] # its stub does not allow None
            require_client_authentication=self._requires_client_certificates,
        )

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return new certificates; gRPC calls this in every handshake, on its own thread."""
        current = self._files.current()
        if current is self._in_grpc:
            return None
        self._in_grpc = current
        return current.grpc


def open_tls(options: SecurityOptions) -> ServerTls | None:
    """Return the certificates of the options, or ``None``; StartError if one is invalid."""
    if options.tls_certificate is None or options.tls_key is None:
        return None
    return ServerTls(
        TlsIdentity(
            certificate=options.tls_certificate, key=options.tls_key, ca=options.tls_client_ca
        )
    )


def _read(identity: TlsIdentity) -> Certificates:
    certificate, key = _bytes_of(identity.certificate), _bytes_of(identity.key)
    authorities = None if identity.ca is None else _bytes_of(identity.ca)
    return Certificates(
        http=identity.context(),  # first, because its errors name the cause
        grpc=grpc.ssl_server_certificate_configuration([(key, certificate)], authorities),
    )


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise NetworkError(
            f"TLS file {path} cannot be read: {error.strerror}; expected a PEM file that the "
            "server's user may read"
        ) from error
