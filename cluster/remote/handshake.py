"""The handshake: router and worker prove that they have the same token, before other messages.

Each end sends this protocol's number and 32 random bytes. Then the router sends an HMAC (RFC 2104,
with SHA-256) of both ends' random bytes, keyed with the token, and the worker answers with another
HMAC. So the token is never sent, recorded messages cannot be replayed, and the two proofs differ.
The router proves first: a stranger who connects receives no data from which a token could be
guessed. Messages have a fixed size, and the whole handshake has one time limit.

The messages after it are neither authenticated nor encrypted by it; TLS does that (:mod:`.tcp`).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from pathlib import Path
from typing import Final, NamedTuple

from offramp.bundle.files import read_limited
from offramp.engine.common.errors import EngineError

PROTOCOL: Final = 1
"""Version of the messages on network connections."""
LEAST_TOKEN_BYTES: Final = 16
MOST_TOKEN_BYTES: Final = 4096
NONCE_BYTES: Final = 32
_MAGIC: Final = b"EEWORKER"
_GREETING: Final = struct.Struct(f"<8sH{NONCE_BYTES}s")
GREETING_BYTES: Final = _GREETING.size
_PROOF_BYTES: Final = hashlib.sha256().digest_size
_VERDICT: Final = struct.Struct(f"<B{_PROOF_BYTES}s")
_TLS_RECORDS: Final = (b"\x15\x03", b"\x16\x03")
"""First bytes of a TLS alert, and of a TLS hello."""
_COMMAND: Final = 'python -c "import secrets; print(secrets.token_hex(32))"'


class HandshakeError(EngineError):
    """The other end is not the expected router or worker; the message is one line with a remedy."""


class Nonces(NamedTuple):
    """Random bytes of both ends."""

    router: bytes
    worker: bytes


def read_token(path: Path) -> bytes:
    """Return the token of a file, without surrounding space; raise OSError or HandshakeError."""
    content = read_limited(path, 2 * MOST_TOKEN_BYTES)
    token, words = content.strip(), len(content.split())
    if not LEAST_TOKEN_BYTES <= len(token) <= MOST_TOKEN_BYTES or words != 1:
        what = f"a token of {len(token)} bytes" if words == 1 else "no token"
        raise HandshakeError(
            f"{path} holds {what if words < 2 else 'several words'}, expected one word of "
            f"{LEAST_TOKEN_BYTES} to {MOST_TOKEN_BYTES} bytes; make one: {_COMMAND} > {path}"
        )
    return token


def greet(nonce: bytes) -> bytes:
    """Return the first message of either end."""
    return _GREETING.pack(_MAGIC, PROTOCOL, nonce)


def read_greeting(message: bytes, who: str) -> bytes:
    """Return the other end's random bytes; HandshakeError if it does not use this protocol."""
    magic, protocol, nonce = _GREETING.unpack(message)
    if message[:2] in _TLS_RECORDS:
        raise HandshakeError(
            f"{who} speaks TLS, and this end does not; give both ends certificates, or neither "
            "(docs/operations.md)"
        )
    if magic != _MAGIC:
        raise HandshakeError(
            f"{who} does not run Offramp: it begins with {message[:16]!r}, expected {_MAGIC!r}; "
            "check address and port"
        )
    if protocol != PROTOCOL:
        raise HandshakeError(
            f"{who} uses version {protocol} of the workers' protocol, this end {PROTOCOL}; "
            "install the same Offramp on both"
        )
    found: bytes = nonce
    return found


def prove(token: bytes, role: bytes, nonces: Nonces) -> bytes:
    """Return the proof that ``router`` or ``worker`` has the token."""
    return hmac.digest(token, b"offramp " + role + b"\0" + nonces.router + nonces.worker, "sha256")


def session_of(token: bytes, nonces: Nonces) -> str:
    """Return the session's name, which only owners of the token can compute."""
    return prove(token, b"session", nonces).hex()


def reach_worker(connected: socket.socket, token: bytes, who: str, limit_s: float) -> str:
    """Perform the router's part, and return the session's name.

    Raises HandshakeError, OSError if the connection ends, or TimeoutError after ``limit_s``.
    """
    until_s = time.monotonic() + limit_s
    ours = secrets.token_bytes(NONCE_BYTES)
    _send(connected, greet(ours), until_s)
    theirs = read_greeting(_greeting_from(connected, until_s), who)
    nonces = Nonces(ours, theirs)
    _send(connected, prove(token, b"router", nonces), until_s)
    accepted, proof = _VERDICT.unpack(_exactly(connected, _VERDICT.size, until_s))
    if not accepted:
        raise HandshakeError(f"{who} has another token; give both ends the same token file")
    if not hmac.compare_digest(proof, prove(token, b"worker", nonces)):
        raise HandshakeError(
            f"{who} cannot prove that it has the token: it is not yours; check the address"
        )
    return session_of(token, nonces)


def admit_router(connected: socket.socket, token: bytes, who: str, limit_s: float) -> str:
    """Perform the worker's part, and return the session's name; errors as :func:`reach_worker`."""
    until_s = time.monotonic() + limit_s
    ours = secrets.token_bytes(NONCE_BYTES)
    greeting = _greeting_from(connected, until_s)
    _send(connected, greet(ours), until_s)  # sent to wrong clients, too: they can then report it
    nonces = Nonces(read_greeting(greeting, who), ours)
    proof = _exactly(connected, _PROOF_BYTES, until_s)
    if not hmac.compare_digest(proof, prove(token, b"router", nonces)):
        _send(connected, _VERDICT.pack(0, bytes(_PROOF_BYTES)), until_s)
        raise HandshakeError(f"{who} has another token; give both ends the same token file")
    _send(connected, _VERDICT.pack(1, prove(token, b"worker", nonces)), until_s)
    return session_of(token, nonces)


def _send(connected: socket.socket, message: bytes, until_s: float) -> None:
    connected.settimeout(_left_s(until_s))
    connected.sendall(message)


def _greeting_from(connected: socket.socket, until_s: float) -> bytes:
    """Receive a greeting of :data:`GREETING_BYTES`, in the time until ``until_s``.

    If the other end sends something else, the bytes received so far are returned, followed by
    zeros.
    """
    found = b""
    while len(found) < GREETING_BYTES and found[: len(_MAGIC)] == _MAGIC[: len(found)]:
        connected.settimeout(_left_s(until_s))
        some = connected.recv(GREETING_BYTES - len(found))
        if not some:
            raise ConnectionResetError("the other end closed the connection")
        found += some
    return found.ljust(GREETING_BYTES, b"\0")


def _exactly(connected: socket.socket, size: int, until_s: float) -> bytes:
    found = b""
    while len(found) < size:
        connected.settimeout(_left_s(until_s))
        some = connected.recv(size - len(found))
        if not some:
            raise ConnectionResetError("the other end closed the connection")
        found += some
    return found


def _left_s(until_s: float) -> float:
    left_s = until_s - time.monotonic()
    if left_s <= 0.0:
        raise TimeoutError("timed out")
    return left_s
