"""Token files: one token a line, as ``NAME:TOKEN`` or ``NAME:TOKEN:MODEL,MODEL``.

Only digests are kept. No message contains a token, or a part of a line that may be one.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from offramp.server.security.watched_files import WatchedFiles

_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")
"""Form of a bearer token (RFC 6750, 2.1) that is too long to be guessed."""
_MOST_BYTES: Final = 1024 * 1024
_OTHERS: Final = stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH
_LINE: Final = "expected NAME:TOKEN or NAME:TOKEN:MODEL,MODEL"
_COMMAND: Final = 'python -c "import secrets; print(secrets.token_hex(32))"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """A valid token, identified by its name."""

    name: str
    digest: bytes = field(repr=False)
    """SHA-256 of the token."""
    models: frozenset[str] | None = None
    """Models that it may use; ``None`` means all."""
    admin: bool = False
    """True if it may change the server."""


class TokenFile:
    """The tokens of a file, read again when it changes."""

    def __init__(self, path: Path, *, admin: bool = False) -> None:
        """Read the file, or raise StartError."""
        self._files = WatchedFiles("tokens", [path], lambda: _read(path, admin=admin))

    def find(self, token: str) -> Principal | None:
        """Return a token's principal; the time taken is independent of all tokens."""
        digest = digest_of(token)
        found = None
        for each in self._files.current():  # no early exit, for constant time
            if hmac.compare_digest(each.digest, digest):
                found = each
        return found

    def has(self, principal: Principal) -> bool:
        """Return whether a principal's token is still valid."""
        return principal in self._files.current()


def digest_of(token: str) -> bytes:
    """Return the digest by which tokens are compared."""
    return hashlib.sha256(token.encode()).digest()


def _read(path: Path, *, admin: bool) -> tuple[Principal, ...]:
    found: dict[bytes, Principal] = {}
    for number, line in _lines(path):
        principal = _parse(line, f"{path}, line {number}", admin=admin)
        if principal.digest in found:
            raise ValueError(f"{path}, line {number}: the token appears twice; make another one")
        found[principal.digest] = principal
    if not found:
        raise ValueError(f"{path} has no token; {_LINE} in a line")
    return tuple(found.values())


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield lines that are not comments, with their numbers."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ValueError(
            f"token file {path} cannot be read: {error.strerror}; expected a file that the "
            "server's user may read"
        ) from error
    if _open_to_others(status):
        raise ValueError(
            f"token file {path} may be read or written by users other than its owner (mode "
            f"{stat.S_IMODE(status.st_mode):04o}); run: chmod 600 {path}"
        )
    if len(content) > _MOST_BYTES:
        raise ValueError(f"token file {path} has over {_MOST_BYTES} bytes; {_LINE} in a line")
    for number, line in enumerate(content.decode(errors="replace").splitlines(), 1):
        text = line.strip()
        if text and not text.startswith("#"):
            yield number, text


def _open_to_others(status: os.stat_result) -> bool:
    """Return whether others may read or write a file.

    The group may read another user's file, as Kubernetes mounts secrets.
    """
    own = status.st_uid == os.geteuid()
    return bool(status.st_mode & _OTHERS or (own and status.st_mode & stat.S_IRGRP))


def _parse(line: str, where: str, *, admin: bool) -> Principal:
    name, token, models = (*(part.strip() for part in line.split(":", 2)), "", "")[:3]
    if not name or not name.isprintable() or ":" not in line:
        raise ValueError(f"{where}: {_LINE}")
    if not _TOKEN.fullmatch(token):
        raise ValueError(
            f"{where}: the token is invalid, expected 16 to 512 letters, digits and ._~+/=-; make "
            f"one: {_COMMAND}"
        )
    named = frozenset(model.strip() for model in models.split(",") if model.strip())
    if line.count(":") > 1 and not named:
        raise ValueError(
            f"{where}: no model follows the second colon; leave out the colon for all models"
        )
    return Principal(name=name, digest=digest_of(token), models=named or None, admin=admin)
