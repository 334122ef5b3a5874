"""Addresses and certificates, as servers and cluster workers use them."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from offramp.engine.common.errors import EngineError


class NetworkError(EngineError):
    """An address, a certificate or a key cannot be used; one line, with the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsIdentity:
    """A server's certificate, and the authorities of clients that it trusts."""

    certificate: Path
    key: Path
    ca: Path | None = None
    """Authorities that verify clients' certificates; ``None`` requires none."""

    def context(self) -> ssl.SSLContext:
        """Make the TLS context of connections; NetworkError if a file cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        load_certificate(context, self.certificate, self.key)
        context.num_tickets = 0  # no client resumes sessions; the first answer must not be a ticket
        if self.ca is not None:
            load_authorities(context, self.ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def is_loopback(host: str) -> bool:
    """Return whether a host is certainly this machine; the only such name is ``localhost``."""
    try:
        return ipaddress.ip_address(host.removeprefix("::ffff:")).is_loopback
    except ValueError:
        return host == "localhost"


def load_certificate(context: ssl.SSLContext, certificate: Path, key: Path | None) -> None:
    """Load a certificate and its key; NetworkError if they cannot be used."""
    try:
        context.load_cert_chain(certificate, key, password=lambda: "")  # never ask a terminal
    except (OSError, ValueError) as error:
        raise NetworkError(
            f"certificate {certificate} with key {key or certificate} cannot be used: "
            f"{tls_reason(error)}; expected PEM files that belong together, the key unencrypted"
        ) from error


def load_authorities(context: ssl.SSLContext, ca: Path) -> None:
    """Load certificates of authorities; NetworkError if they cannot be used."""
    try:
        context.load_verify_locations(ca)
    except (OSError, ValueError) as error:
        raise NetworkError(
            f"authorities {ca} cannot be used: {tls_reason(error)}; expected a PEM file of "
            "certificates"
        ) from error


def tls_reason(error: Exception) -> str:
    """Describe in words why TLS failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).replace("_", " ").lower()
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
