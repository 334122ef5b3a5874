"""Hosts that the two ports listen on: how they are written, and the sockets that they stand for."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

from offramp.server.arguments.errors import StartError

_LONGEST_HOST: Final = 253
"""Characters of the longest name that DNS has."""

_WILDCARDS: Final = ("0.0.0.0", "::")  # noqa: S104 - only if the operator asks for it
_ANY: Final = "*"
"""A host that other servers take for all interfaces."""

_ABSENT: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""Errors of an address that is not one of this machine."""


def parse_host(text: str) -> str:
    """Return a host without the brackets that an IPv6 address may have; ``*`` is ``0.0.0.0``.

    Raises:
        ValueError: The text is neither a name nor an address.
    """
    if text == _ANY:
        return _WILDCARDS[0]
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        if text.startswith("[") or ":" in host:
            address = ipaddress.IPv6Address(host)
            return str(address.ipv4_mapped or address)
        named = host.encode("idna")  # raises UnicodeError, which is a ValueError
    except ValueError:
        named = b""
    if not 0 < len(named) <= _LONGEST_HOST or not host.isprintable() or " " in host:
        raise ValueError(
            f"{text!r:.80} is no host; expected a name or an address without a port, for instance "
            "127.0.0.1, ::1, 0.0.0.0, :: or *"
        )
    return host


def join_address(host: str, port: int) -> str:
    """Return for instance ``127.0.0.1:8001`` or ``[::1]:8001``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind(host: str, port: int, *, option: str) -> tuple[socket.socket, ...]:
    """Return TCP sockets that are bound to all addresses of a host, at one port.

    A name may have addresses that are not this machine's, such as ``::1`` where IPv6 is switched
    off: they are left out if there is another.

    ``0.0.0.0`` and ``::`` both mean every interface, by IPv4 and, where there is IPv6, by that as
    well: gRPC takes them so. Port 0 is any free one. ``option`` is the command line's option of the
    port, for the message of the StartError.
    """
    try:
        return _bind(host, port)
    except OSError as error:
        raise StartError(_reason(error, host, port, option)) from error


def check_free(host: str, port: int, *, option: str) -> None:
    """Raise StartError if a port cannot be listened on, before models are loaded for nothing.

    gRPC reports a taken port in lines of its own on stderr, and without the reason in the
    exception.
    """
    for bound in bind(host, port, option=option):
        bound.close()


def _bind(host: str, port: int) -> tuple[socket.socket, ...]:
    bound: list[socket.socket] = []
    absent: OSError | None = None
    with ExitStack() as stack:
        for family, address in _addresses(host, port):
            chosen = bound[0].getsockname()[1] if bound else port
            try:
                one = _bound(family, (address[0], chosen, *address[2:]), dual=host in _WILDCARDS)
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise
                absent = error
            else:
                bound.append(stack.enter_context(one))
        if absent is not None and not bound:
            raise absent
        stack.pop_all()
    return tuple(bound)


def _bound(
    family: socket.AddressFamily, address: tuple[object, ...], *, dual: bool
) -> socket.socket:
    with ExitStack() as stack:
        one = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not dual)
        one.bind(address)
        stack.pop_all()
    return one


def _addresses(host: str, port: int) -> Sequence[tuple[socket.AddressFamily, tuple[object, ...]]]:
    if host in _WILDCARDS:
        if socket.has_dualstack_ipv6():
            return [(socket.AF_INET6, ("::", port))]
        return [(socket.AF_INET, ("0.0.0.0", port))]  # noqa: S104
    flags = socket.AI_PASSIVE
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _reason(error: OSError, host: str, port: int, option: str) -> str:
    where = join_address(host, port)
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} is in use on {host}; stop the process that listens there, "
            f"or choose another port with {option} (0 takes any free one)"
        )
    if error.errno == errno.EACCES:
        return f"no permission to listen on {where}; choose a port from 1024 on with {option}"
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return (
            f"{host!r} is no address of this machine ({error.strerror}); choose one with --host, "
            "or 0.0.0.0 or :: for all of them"
        )
    return f"cannot listen on {where}: {error.strerror}"
