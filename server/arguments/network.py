"""Where the server listens, and the limits of what it takes."""

from __future__ import annotations

import argparse
from dataclasses import fields

from offramp.server.arguments.groups import option_adder
from offramp.server.arguments.values import integer, number, port
from offramp.server.options import MAX_MESSAGE_MIB, ServerOptions


def add_network(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = option_adder(parser.add_argument_group("network"), ServerOptions())
    add("--host", "interface to listen on; 0.0.0.0 is all of them", metavar="ADDRESS")
    add("--grpc-port", "port of gRPC; 0 takes any free one", metavar="PORT", type=port)
    add("--http-port", "port of HTTP; 0 takes any free one", metavar="PORT", type=port)
    add(
        "--max-message-mib",
        "largest request; gRPC refuses a larger one with RESOURCE_EXHAUSTED",
        metavar="MIB",
        type=integer(1, MAX_MESSAGE_MIB),
    )
    add(
        "--shutdown-timeout-s",
        "after SIGTERM, how long requests in flight may take to end",
        metavar="S",
        type=number(0.0),
    )


def server_options(given: argparse.Namespace) -> ServerOptions:
    """What they were given.

    Raises:
        ValueError: Both ports are the same.
    """
    return ServerOptions(**{f.name: getattr(given, f.name) for f in fields(ServerOptions)})
