"""Hosts and ports: how they are written, and whether they are free."""

from __future__ import annotations

import errno
import socket

from offramp.server.errors import StartError


def join_address(host: str, port: int) -> str:
    """``127.0.0.1:8001``, ``[::1]:8001``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_free(host: str, port: int, *, option: str) -> None:
    """Make sure that a port can be listened on, before models are loaded for nothing.

    grpc reports a taken port in lines of its own on stderr, and without the reason in the
    exception; so it is asked for here first.

    Args:
        host: Name or address of an interface.
        port: 0 is always free.
        option: The command line option that sets it, for the message.

    Raises:
        StartError: It is taken, or cannot be bound for another reason.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise StartError(_reason(error, host, port, option)) from error


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
            f"{host!r} is no address of this machine ({error.strerror}); "
            "choose one with --host, 0.0.0.0 is all of them"
        )
    return f"cannot listen on {where}: {error.strerror}"
