"""Certificates that tests make: of authorities that only they know."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

from offramp.client import Tls
from offramp.server.arguments.options import SecurityOptions

YESTERDAY = datetime.now(UTC) - timedelta(days=1)


class Authority:
    """Makes certificates of 127.0.0.1, and files of them in a folder."""

    def __init__(self, folder: Path) -> None:
        self._authority = trustme.CA()
        self._folder = folder
        self.ca = folder / "ca.pem"
        folder.mkdir(exist_ok=True)
        self.ca.write_bytes(self.pem)

    @property
    def pem(self) -> bytes:
        """Certificate of the authority itself."""
        return self._authority.cert_pem.bytes()

    def issue(self, name: str = "server", *, expired: bool = False) -> tuple[Path, Path]:
        """Write a certificate and its key, by renames; return the files."""
        issued = self._authority.issue_cert("127.0.0.1", not_after=YESTERDAY if expired else None)
        certificate, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        contents = {
            certificate: b"".join(each.bytes() for each in issued.cert_chain_pems),
            key: issued.private_key_pem.bytes(),
        }
        for path, content in contents.items():
            new = path.with_suffix(".new")
            new.write_bytes(content)
            new.replace(path)
        return certificate, key

    def options(self, *, clients: Path | None = None, expired: bool = False) -> SecurityOptions:
        """Return options of a server with a certificate."""
        certificate, key = self.issue(expired=expired)
        return SecurityOptions(tls_certificate=certificate, tls_key=key, tls_client_ca=clients)

    def client(self, shown: tuple[Path, Path] | None = None) -> Tls:
        """Return what a client of ours trusts and shows."""
        certificate, key = shown or (None, None)
        return Tls(
            root_certificates=self.pem,
            certificate_chain=None if certificate is None else certificate.read_bytes(),
            private_key=None if key is None else key.read_bytes(),
        )

    def context(self, shown: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        """Return the same for HTTP."""
        context = ssl.create_default_context(cadata=self.pem.decode())
        if shown is not None:
            context.load_cert_chain(*shown)
        return context
