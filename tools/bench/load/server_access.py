"""Access of the load generator to a server with encryption or tokens."""

from __future__ import annotations

import argparse
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from offramp.client import Client, Tls
from offramp.engine.common.network import (
    NetworkError,
    is_loopback,
    load_authorities,
    load_certificate,
)
from offramp.tools.bench.load.load_settings import LoadError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAccess:
    """The trusted authority, and the credentials for the server."""

    ca: Path | None = None
    """Certificate of the authority that signed the server's certificate; ``None`` disables
    encryption."""
    certificate: Path | None = None
    """Our own certificate, for a server that requires one."""
    key: Path | None = None
    token: str | None = field(default=None, repr=False)
    """Token that is sent with every call."""

    @property
    def metadata(self) -> Sequence[tuple[str, str]]:
        """Return the metadata of every call."""
        return tuple(self.headers.items())

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of every call."""
        return {} if self.token is None else {"authorization": f"Bearer {self.token}"}

    def client(self, address: str, *, timeout_s: float) -> Client:
        """Return a client of the server; raise LoadError if it cannot be made."""
        return Client(address, timeout_s=timeout_s, tls=self.tls(), token=self.token)

    def context(self) -> ssl.SSLContext | None:
        """Return the TLS context for HTTP; LoadError if a file is invalid."""
        if self.ca is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            load_authorities(context, self.ca)
            if self.certificate is not None:
                load_certificate(context, self.certificate, self.key)
        except NetworkError as error:
            raise LoadError(str(error)) from error
        return context

    def tls(self) -> Tls | None:
        """Return the TLS settings for gRPC; LoadError if a file is invalid."""
        if self.context() is None or self.ca is None:  # the context raises for invalid files
            return None
        return Tls(
            root_certificates=self.ca.read_bytes(),
            certificate_chain=None if self.certificate is None else self.certificate.read_bytes(),
            private_key=None if self.key is None else self.key.read_bytes(),
        )


def add_access_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that :func:`read_access` reads."""
    group = parser.add_argument_group("security")
    texts = {
        "--tls-ca": "encrypt; the authority of the server's certificate, a PEM file",
        "--tls-certificate": "our certificate, for a server that asks for one, a PEM file",
        "--tls-key": "its key, a PEM file",
        "--token-file": "file that holds the token to send, and nothing else",
    }
    for flag, text in texts.items():
        group.add_argument(flag, metavar="FILE", type=Path, help=text)


def read_access(options: argparse.Namespace) -> ServerAccess:
    """Return the access that the options define; LoadError if they are invalid."""
    if (options.tls_certificate is None) != (options.tls_key is None):
        raise LoadError("--tls-certificate and --tls-key belong together; give both, or neither")
    token = None if options.token_file is None else _token_in(options.token_file)
    if token is not None and options.tls_ca is None:
        for address in filter(None, (options.address, options.metrics)):
            if not is_loopback(address.rpartition(":")[0].strip("[]")):
                raise LoadError(
                    f"the token would be sent to {address} in the clear; encrypt with --tls-ca"
                )
    return ServerAccess(
        ca=options.tls_ca, certificate=options.tls_certificate, key=options.tls_key, token=token
    )


def _token_in(path: Path) -> str:
    try:
        token = path.read_text().strip()
    except (OSError, ValueError) as error:
        raise LoadError(f"--token-file {path} cannot be read: {error}") from error
    if not (token.isascii() and token.isprintable() and token) or " " in token or ":" in token:
        raise LoadError(
            f"--token-file {path} has to hold one token alone, without the name that it has in the "
            "server's file"
        )
    return token
