"""Option groups of ``eeserve`` for the server itself: network, model repository, keepalive."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offramp.server.arguments.option_groups import OptionGroup, integer, number, port
from offramp.server.arguments.options import (
    MAX_COUNT,
    MAX_FRONTENDS,
    MAX_MESSAGE_MIB,
    KeepaliveOptions,
    ModelRepositoryOptions,
    RepositoryControl,
    SecurityOptions,
    ServerOptions,
    VersionChoice,
)


def add_network(parser: argparse.ArgumentParser) -> None:
    """Add the network options, all fields of :class:`ServerOptions`."""
    options = OptionGroup(
        parser,
        "network",
        "Both ports listen on one interface; *, 0.0.0.0 and :: are all interfaces, by IPv4\n"
        "and IPv6. Port 0 is any free port.",
        ServerOptions(),
    )
    options.add("--host", "interface, or * for all", metavar="ADDRESS")
    options.add("--grpc-port", "port of gRPC", metavar="PORT", type=port)
    options.add("--http-port", "port of the status page and metrics", metavar="PORT", type=port)
    options.add(
        "--frontends",
        "number of further processes that hold the gRPC connections: for many small requests, or "
        "large requests among small ones; 0: the engine's process holds the connections",
        metavar="N",
        type=integer(0, MAX_FRONTENDS),
    )
    options.add(
        "--max-message-mib",
        "largest request; a larger request gets RESOURCE_EXHAUSTED",
        metavar="MIB",
        type=integer(1, MAX_MESSAGE_MIB),
    )
    options.add(
        "--max-queue-mib",
        "memory for the messages of requests in progress; further requests get RESOURCE_EXHAUSTED",
        metavar="MIB",
        type=integer(1, MAX_COUNT),
    )
    options.add(
        "--max-concurrent-requests",
        "largest number of requests in progress; further requests get RESOURCE_EXHAUSTED",
        metavar="N",
        type=integer(1, MAX_COUNT),
    )
    options.add(
        "--max-connections",
        "largest number of open gRPC connections; a further connection is closed immediately",
        metavar="N",
        type=integer(1, MAX_COUNT),
    )
    options.add(
        "--trace-endpoint",
        "send traces of requests to this OpenTelemetry collector, by OTLP over gRPC, for instance "
        "http://localhost:4317 (default: nothing is traced)",
        metavar="URL",
    )
    options.add(
        "--trace-rate",
        "trace one request in this many, in addition to those that the caller traces (traceparent)",
        metavar="N",
        type=integer(1, MAX_COUNT),
    )
    options.add(
        "--drain-delay-s",
        "time after SIGTERM in which new requests are still answered, until load balancers have "
        "noticed that the server is not ready (after SIGINT: none)",
        metavar="S",
        type=number(0.0),
    )
    options.add(
        "--shutdown-timeout-s",
        "after --drain-delay-s, longest wait for requests in flight",
        metavar="S",
        type=number(0.0),
    )


def add_security(parser: argparse.ArgumentParser) -> None:
    """Add the security options, all fields of :class:`SecurityOptions`."""
    options = OptionGroup(
        parser,
        "security",
        "Encryption and tokens for both ports. Each file is read again when it changes.",
        SecurityOptions(),
    )
    texts = {
        "--tls-certificate": "certificate of the server, a PEM file (default: no encryption)",
        "--tls-key": "key of the certificate, a PEM file",
        "--tls-client-ca": "clients must present a certificate of one of these authorities, a PEM "
        "file (mTLS)",
        "--token-file": "clients must send a token of this file; one a line: NAME:TOKEN or "
        "NAME:TOKEN:MODEL,MODEL",
        "--admin-token-file": "calls that load or unload models, register shared memory or change "
        "settings must have a token of this file (default: accepted from this machine only)",
    }
    for flag, text in texts.items():
        options.add(flag, text, metavar="FILE", type=Path)


def model_versions(text: str) -> VersionChoice:
    """Parse the versions of a model to serve."""
    try:
        return VersionChoice.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_repository(parser: argparse.ArgumentParser) -> None:
    """Add the repository options, all fields of :class:`ModelRepositoryOptions`."""
    options = OptionGroup(
        parser,
        "model repository",
        "A folder with one folder a model, which holds the model's versions: NAME/1.ee,\n"
        "NAME/1.onnx, or Triton's NAME/1/model.onnx.",
        ModelRepositoryOptions(),
    )
    options.add(
        "--model-repository",
        "serve the models in this folder, in addition to those that are named",
        metavar="DIR",
        type=Path,
    )
    options.add(
        "--model-control",
        "source of loads and unloads while the server runs: none; explicit: clients; or poll: "
        "changes in the folder",
        metavar="MODE",
        type=RepositoryControl,
        choices=tuple(RepositoryControl),
    )
    options.add(
        "--load-model",
        "model to load at the start, with --model-control explicit; may be repeated (default: "
        "no model)",
        metavar="NAME",
        action="append",
    )
    options.add(
        "--model-versions",
        "versions of each model to serve: latest:N, all, or numbers such as 1,3 (default: "
        "latest:1)",
        metavar="WHICH",
        type=model_versions,
    )
    options.add(
        "--repository-poll-s",
        "time between two checks of the folder, with --model-control poll (default: 15)",
        metavar="S",
        type=number(0.0, above=True),
    )


def add_keepalive(parser: argparse.ArgumentParser) -> None:
    """Add the keepalive options, all fields of :class:`KeepaliveOptions`."""
    options = OptionGroup(
        parser,
        "keepalive",
        "HTTP/2 pings on the gRPC port; the options have Triton's names.",
        KeepaliveOptions(),
    )
    milliseconds: Mapping[str, Any] = {"metavar": "MS", "type": integer(1, MAX_COUNT)}
    count: Mapping[str, Any] = {"metavar": "N", "type": integer(0, MAX_COUNT)}
    options.add(
        "--grpc-keepalive-time-ms",
        "the server pings a connection that had no traffic for this time",
        **milliseconds,
    )
    options.add(
        "--grpc-keepalive-timeout-ms",
        "the server closes a connection that does not answer a ping within this time",
        **milliseconds,
    )
    options.add(
        "--grpc-keepalive-permit-without-calls",
        "send and accept pings on connections without a call too",
        action=argparse.BooleanOptionalAction,
    )
    options.add(
        "--grpc-http2-max-pings-without-data",
        "pings that the server sends while it has no data to send; 0: no limit",
        **count,
    )
    options.add(
        "--grpc-http2-min-recv-ping-interval-without-data-ms",
        "shortest time between two pings from a client to which the server sends no data",
        metavar="MS",
        type=integer(0, MAX_COUNT),
    )
    options.add(
        "--grpc-http2-max-ping-strikes",
        "number of pings sent too early after which the client gets GOAWAY (too_many_pings); "
        "0: no limit",
        **count,
    )
