"""The command line of ``eeserve``, joined with the configuration file that it may name."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from offramp import __version__
from offramp.engine.errors import BackendError
from offramp.engine.onnx_files.wrapping import SUFFIX, is_onnx_file
from offramp.engine.options import EngineOptions, ModelOptions
from offramp.engine.planning.cluster_plan import PlanError
from offramp.server.arguments.learning import add_learning, learning_in
from offramp.server.arguments.settings import (
    add_control,
    add_execution,
    add_scheduling,
    option_adder,
    refuse_ignored,
    settings_in,
)
from offramp.server.arguments.values import integer, named_path, number, port
from offramp.server.configuration import Configuration, ConfigurationError, read_configuration
from offramp.server.logging_setup import FORMATS, LEVELS
from offramp.server.options import MAX_COUNT, MAX_MESSAGE_MIB, KeepaliveOptions, ServerOptions


def add_logging(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    group = parser.add_argument_group("logging")
    group.add_argument(
        "--log-level", choices=LEVELS, default="info", help="least level (default: %(default)s)"
    )
    group.add_argument(
        "--log-format",
        choices=FORMATS,
        default="human",
        help="lines for people, or a JSON object a line (default: %(default)s)",
    )
    group.add_argument(
        "--access-log",
        action="store_true",
        default=argparse.SUPPRESS,
        help="a line for every request: peer, method, model, status code, milliseconds, rows",
    )


def add_models(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    group = parser.add_argument_group("models")
    group.add_argument(
        "bundles",
        metavar="MODEL",
        nargs="*",
        type=Path,
        help="folder that eecompile wrote, or an ONNX file, which is served as it is, without "
        "exits; served under its name without .ee or .onnx",
    )
    group.add_argument(
        "--model",
        metavar="NAME=PATH",
        action="append",
        default=[],
        type=named_path,
        help="a bundle or ONNX file, and the name to serve it under; may be repeated",
    )
    group.add_argument(
        "--answer",
        metavar="OUTPUT",
        default=argparse.SUPPRESS,
        help="the output to serve of ONNX files that have several",
    )
    group.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        help="TOML file with models and their own settings; they are served besides those named "
        "here. What a model's table says goes before the command line, which goes before the "
        "tables [engine] and [defaults]",
    )
    group.add_argument(
        "--custom-ops",
        metavar="LIB.so",
        action="append",
        default=[],
        type=Path,
        help="library with operators that ONNX Runtime does not have, for --backend onnxruntime; "
        "may be repeated. It is code: nothing is loaded that is not named here",
    )
    group.add_argument(
        "--criterion-module",
        metavar="FILE.py:NAME",
        action="append",
        default=[],
        help="the criterion of your own that a bundle was compiled with; on the CPU; may be "
        "repeated. It is code, as --custom-ops is",
    )


def name_models(bundles: Sequence[Path], named: Sequence[tuple[str, Path]]) -> dict[str, Path]:
    """Return paths of models by name: as given, or the path's name without ``.ee`` or ``.onnx``.

    Raises ValueError if there is none, or two have the same name.
    """
    unnamed = [(_name_of(path), path) for path in bundles]
    models: dict[str, Path] = {}
    for name, path in (*unnamed, *named):
        if name in models:
            raise ValueError(
                f"two models are named {name!r}: {models[name]} and {path}; "
                f"give one another name, for instance --model {name}-2={path}"
            )
        models[name] = path
    if not models:
        raise ValueError(
            "no model to serve; name a bundle that eecompile wrote, or an ONNX file: eeserve "
            "model.ee, eeserve model.onnx"
        )
    return models


def _name_of(path: Path) -> str:
    name = path.resolve().name
    return name.removesuffix(SUFFIX) if is_onnx_file(path) else name.removesuffix(".ee")


def add_network(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = option_adder(parser.add_argument_group("network"), ServerOptions())
    add(
        "--host",
        "interface that both ports listen on; 0.0.0.0 and :: are all of them, by IPv4 and IPv6",
        metavar="ADDRESS",
    )
    add("--grpc-port", "port of gRPC; 0 takes any free one", metavar="PORT", type=port)
    add("--http-port", "port of HTTP; 0 takes any free one", metavar="PORT", type=port)
    add(
        "--max-message-mib",
        "largest request; gRPC refuses a larger one with RESOURCE_EXHAUSTED",
        metavar="MIB",
        type=integer(1, MAX_MESSAGE_MIB),
    )
    add(
        "--max-queue-mib",
        "memory for the messages of requests being answered; more are refused with "
        "RESOURCE_EXHAUSTED",
        metavar="MIB",
        type=integer(1, MAX_COUNT),
    )
    add(
        "--max-concurrent-requests",
        "most requests being answered; more are refused with RESOURCE_EXHAUSTED",
        metavar="N",
        type=integer(1, MAX_COUNT),
    )
    add(
        "--max-connections",
        "connections of gRPC at once; further ones are closed as they come",
        metavar="N",
        type=integer(1, MAX_COUNT),
    )
    add(
        "--drain-delay-s",
        "after SIGTERM or SIGHUP, how long new requests are still answered while readiness is "
        "gone, so that load balancers can notice; after SIGINT they are refused at once",
        metavar="S",
        type=number(0.0),
    )
    add(
        "--shutdown-timeout-s",
        "after that, how long requests in flight may take to end",
        metavar="S",
        type=number(0.0),
    )


def add_keepalive(parser: argparse.ArgumentParser) -> None:
    """Add the options; all are fields of :class:`KeepaliveOptions`."""
    group = parser.add_argument_group(
        "keepalive", "HTTP/2 pings on the gRPC port; the names are those of Triton."
    )
    add = option_adder(group, KeepaliveOptions())
    milliseconds = {"metavar": "MS", "type": integer(1, MAX_COUNT)}
    count = {"metavar": "N", "type": integer(0, MAX_COUNT)}
    add(
        "--grpc-keepalive-time-ms",
        "how long a connection may be silent until the server pings it",
        **milliseconds,
    )
    add(
        "--grpc-keepalive-timeout-ms",
        "how long the server then waits for an answer until it closes the connection",
        **milliseconds,
    )
    add(
        "--grpc-keepalive-permit-without-calls",
        "send and take pings on connections without a call as well",
        action=argparse.BooleanOptionalAction,
    )
    add(
        "--grpc-http2-max-pings-without-data",
        "pings that the server sends while it has no data to send; 0: no limit",
        **count,
    )
    add(
        "--grpc-http2-min-recv-ping-interval-without-data-ms",
        "least time between two pings of a client while the server sends it no data",
        metavar="MS",
        type=integer(0, MAX_COUNT),
    )
    add(
        "--grpc-http2-max-ping-strikes",
        "pings that may come sooner, until the client gets GOAWAY (too_many_pings); 0: no limit",
        **count,
    )


def add_checking(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    group = parser.add_argument_group(
        "checking",
        "Whether all is well on this machine, above all on a GPU, before anything is served.",
    )
    group.add_argument(
        "--self-check",
        action="store_true",
        help="serve nothing: run the bundles' stages on the backend for about a minute and hold "
        "them against ONNX Runtime, the kernels against numpy, graphs against plain launches, and "
        "memory against what it was; a line a check, exit status 0 if none failed, else 1",
    )
    group.add_argument(
        "--json",
        metavar="FILE",
        type=Path,
        help="where to write all that the self-check measured, and on what",
    )


def _check_report(given: argparse.Namespace) -> None:
    """Refuse, by a ValueError, a report that nobody writes, or that cannot be written."""
    path = given.json
    if path is None:
        return
    if not given.self_check:
        raise ValueError("--json does nothing without --self-check; leave it out, or add that")
    if path.is_dir() or not path.absolute().parent.is_dir():
        what = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ValueError(f"--json {path} cannot be written: {what}; name a file in one that exists")


_DESCRIPTION: Final = """\
Serve bundles over gRPC (Open Inference Protocol, as Triton's clients speak it), with a
status page, health probes and Prometheus metrics over HTTP.
"""

_EPILOG: Final = """\
examples:
  eeserve resnet.ee
  eeserve --model resnet=/models/resnet-2026-11.ee --host 0.0.0.0
  eeserve resnet.ee --policy slackfit --slo-ms 20
  eeserve --config serve.toml             several models, each with settings of its own
  eeserve resnet.ee --max-disagreement 0.005
  eeserve resnet.onnx                     an ONNX file as it is, without exits
  eeserve resnet.ee --mode off            the unmodified model, to compare with
  eeserve resnet.ee --self-check          whether all is well on this machine, in a minute
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """A command line that was understood."""

    models: Mapping[str, Path]
    """Bundle folders and ONNX files by the name that they are served under."""
    engine: EngineOptions
    server: ServerOptions
    log_level: str
    log_format: str
    self_check: bool = False
    """Whether to check, and serve nothing."""
    json: Path | None = None
    """Where the report of the check goes."""
    custom_ops: tuple[Path, ...] = ()
    """Libraries of operators, which the process loads."""
    criterion_modules: tuple[str, ...] = ()
    """``FILE.py:NAME`` of users' criteria, which the process runs."""


def parse_arguments(argv: Sequence[str] | None = None) -> Arguments:
    """Read ``argv``, the process's own by default, and the file that ``--config`` names.

    Raises:
        SystemExit: With code 2 and the reason on stderr, or with 0 after ``--help``.
    """
    parser = make_parser()
    given = parser.parse_args(argv)
    try:
        return _understand(given)
    except (BackendError, ConfigurationError, PlanError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")  # the usage says nothing about a file
    except ValueError as error:
        parser.error(str(error))


def make_parser() -> argparse.ArgumentParser:
    """The parser of ``eeserve``."""
    parser = argparse.ArgumentParser(
        prog="eeserve",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"offramp {__version__}")
    add_models(parser)
    add_learning(parser)
    add_network(parser)
    add_keepalive(parser)
    add_control(parser)
    add_execution(parser)
    add_scheduling(parser)
    add_logging(parser)
    add_checking(parser)
    return parser


def _understand(given: argparse.Namespace) -> Arguments:
    file = Configuration() if given.config is None else read_configuration(given.config)
    configured = [(name, model.path) for name, model in file.models.items()]
    engine, defaults = settings_in(given, EngineOptions), settings_in(given, ModelOptions)
    options = file.options(
        engine=engine,
        defaults=defaults,
        learning=learning_in(given),
        ray_address=given.ray_address,
    )
    refuse_ignored({**engine, **defaults}, options.mode)
    _check_report(given)
    return Arguments(
        models=name_models(given.bundles, [*given.model, *configured]),
        engine=options,
        server=_server_options(given),
        log_level=given.log_level,
        log_format=given.log_format,
        self_check=given.self_check,
        json=given.json,
        custom_ops=tuple(given.custom_ops),
        criterion_modules=tuple(given.criterion_module),
    )


def _server_options(given: argparse.Namespace) -> ServerOptions:
    keepalive = KeepaliveOptions(**settings_in(given, KeepaliveOptions))
    return ServerOptions(**settings_in(given, ServerOptions), keepalive=keepalive)
