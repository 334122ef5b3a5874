"""Options of ``eeserve`` about its two ports: addresses, limits, stopping, pings."""

from __future__ import annotations

import argparse

from offramp.server.arguments.options import (
    MAX_COUNT,
    MAX_MESSAGE_MIB,
    KeepaliveOptions,
    ServerOptions,
)
from offramp.server.arguments.settings import option_adder
from offramp.server.arguments.values import integer, number, port


def add_network(parser: argparse.ArgumentParser) -> None:
    """Add the options; all are fields of :class:`ServerOptions`."""
    group = parser.add_argument_group(
        "network",
        "Both ports listen on one interface; *, 0.0.0.0 and :: are all of them, by IPv4\n"
        "and IPv6. Port 0 is any free one.",
    )
    add = option_adder(group, ServerOptions())
    add("--host", "interface, or * for all", metavar="ADDRESS")
    add("--grpc-port", "port of gRPC", metavar="PORT", type=port)
    add("--http-port", "port of status page and metrics", metavar="PORT", type=port)
    add(
        "--max-message-mib",
        "largest request; a larger one gets RESOURCE_EXHAUSTED",
        metavar="MIB",
        type=integer(1, MAX_MESSAGE_MIB),
    )
    add(
        "--max-queue-mib",
        "memory for the messages of requests that are being answered; more requests get "
        "RESOURCE_EXHAUSTED",
        metavar="MIB",
        type=integer(1, MAX_COUNT),
    )
    add(
        "--max-concurrent-requests",
        "most requests that are being answered; more get RESOURCE_EXHAUSTED",
        metavar="N",
        type=integer(1, MAX_COUNT),
    )
    add(
        "--max-connections",
        "most connections of gRPC; a further one is closed at once",
        metavar="N",
        type=integer(1, MAX_COUNT),
    )
    add(
        "--drain-delay-s",
        "after SIGTERM or SIGHUP readiness ends at once; new requests are answered for so long, "
        "until load balancers have noticed (after SIGINT: not at all)",
        metavar="S",
        type=number(0.0),
    )
    add(
        "--shutdown-timeout-s",
        "after that, longest wait for requests in flight",
        metavar="S",
        type=number(0.0),
    )


def add_keepalive(parser: argparse.ArgumentParser) -> None:
    """Add the options; all are fields of :class:`KeepaliveOptions`."""
    group = parser.add_argument_group(
        "keepalive", "HTTP/2 pings on the gRPC port; the options have Triton's names."
    )
    add = option_adder(group, KeepaliveOptions())
    milliseconds = {"metavar": "MS", "type": integer(1, MAX_COUNT)}
    count = {"metavar": "N", "type": integer(0, MAX_COUNT)}
    add(
        "--grpc-keepalive-time-ms",
        "the server pings a connection that has been silent for so long",
        **milliseconds,
    )
    add(
        "--grpc-keepalive-timeout-ms",
        "the server closes a connection that does not answer a ping within this time",
        **milliseconds,
    )
    add(
        "--grpc-keepalive-permit-without-calls",
        "send and accept pings on connections without a call too",
        action=argparse.BooleanOptionalAction,
    )
    add(
        "--grpc-http2-max-pings-without-data",
        "pings that the server sends while it has no data to send; 0: no limit",
        **count,
    )
    add(
        "--grpc-http2-min-recv-ping-interval-without-data-ms",
        "shortest time between two pings of a client to which the server sends no data",
        metavar="MS",
        type=integer(0, MAX_COUNT),
    )
    add(
        "--grpc-http2-max-ping-strikes",
        "earlier pings than that until the client gets GOAWAY (too_many_pings); 0: no limit",
        **count,
    )
