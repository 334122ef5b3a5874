"""The command line of ``eeserve``: its options, and what they are checked for."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from offramp import __version__
from offramp.engine.backends.factory import BACKENDS
from offramp.engine.core import EngineOptions
from offramp.engine.plan import Mode
from offramp.server.logging_setup import FORMATS, LEVELS
from offramp.server.options import MAX_MESSAGE_MIB, ServerOptions
from offramp.server.values import integer, named_path, number, port

BUNDLE_SUFFIX: Final = ".ee"

_DESCRIPTION: Final = """\
Serve bundles over gRPC (Open Inference Protocol, as Triton's clients speak it), with a
status page, health probes and Prometheus metrics over HTTP.
"""

_EPILOG: Final = """\
examples:
  eeserve resnet.ee
  eeserve --model resnet=/models/resnet-2026-11.ee --host 0.0.0.0
  eeserve resnet.ee --mode off            the unmodified model, to compare with
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """A command line that was understood."""

    models: Mapping[str, Path]
    """Bundle folders by the name that they are served under."""
    engine: EngineOptions
    server: ServerOptions
    log_level: str
    log_format: str


def parse_arguments(argv: Sequence[str] | None = None) -> Arguments:
    """Read ``argv``, the process's own by default.

    Raises:
        SystemExit: With code 2 and the reason on stderr, or with 0 after ``--help``.
    """
    parser = make_parser()
    given = parser.parse_args(argv)
    try:
        return Arguments(
            models=name_models(given.bundles, given.model),
            engine=_engine_options(given),
            server=_server_options(given),
            log_level=given.log_level,
            log_format=given.log_format,
        )
    except ValueError as error:
        parser.error(str(error))


def name_models(bundles: Sequence[Path], named: Sequence[tuple[str, Path]]) -> dict[str, Path]:
    """Bundle folders by name: as given with ``--model``, or the folder's name without ``.ee``.

    Raises:
        ValueError: There is none, or two have the same name.
    """
    unnamed = [(bundle.resolve().name.removesuffix(BUNDLE_SUFFIX), bundle) for bundle in bundles]
    models: dict[str, Path] = {}
    for name, path in (*unnamed, *named):
        if name in models:
            raise ValueError(
                f"two models are named {name!r}: {models[name]} and {path}; "
                f"give one another name, for instance --model {name}-2={path}"
            )
        models[name] = path
    if not models:
        raise ValueError("no model to serve; name a bundle that eecompile wrote: eeserve model.ee")
    return models


def make_parser() -> argparse.ArgumentParser:
    """The parser of ``eeserve``."""
    parser = argparse.ArgumentParser(
        prog="eeserve",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"offramp {__version__}")
    _add_models(parser)
    _add_network(parser)
    _add_execution(parser)
    _add_logging(parser)
    return parser


def _add_models(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("models")
    group.add_argument(
        "bundles",
        metavar="BUNDLE",
        nargs="*",
        type=Path,
        help="folder that eecompile wrote; served under its name without .ee",
    )
    group.add_argument(
        "--model",
        metavar="NAME=PATH",
        action="append",
        default=[],
        type=named_path,
        help="a bundle and the name to serve it under; may be repeated",
    )


def _add_network(parser: argparse.ArgumentParser) -> None:
    defaults = ServerOptions()
    group = parser.add_argument_group("network")
    add = _adder(group)
    add("--host", "ADDRESS", str, defaults.host, "interface to listen on; 0.0.0.0 is all of them")
    add("--grpc-port", "PORT", port, defaults.grpc_port, "port of gRPC; 0 takes any free one")
    add("--http-port", "PORT", port, defaults.http_port, "port of HTTP; 0 takes any free one")
    add(
        "--max-message-mib",
        "MIB",
        integer(1, MAX_MESSAGE_MIB),
        defaults.max_message_mib,
        "largest request; gRPC refuses a larger one with RESOURCE_EXHAUSTED",
    )
    add(
        "--shutdown-timeout-s",
        "S",
        number(0.0),
        defaults.shutdown_timeout_s,
        "after SIGTERM, how long requests in flight may take to end",
    )


def _add_execution(parser: argparse.ArgumentParser) -> None:
    defaults = EngineOptions()
    group = parser.add_argument_group("execution")
    add = _adder(group)
    group.add_argument(
        "--mode",
        choices=[mode.value for mode in Mode],
        default=defaults.mode.value,
        help="leave: a sample that is sure enough leaves at an exit; "
        "off: the unmodified model (default: %(default)s)",
    )
    group.add_argument(
        "--backend",
        choices=BACKENDS,
        default=defaults.backend,
        help="what executes the stages; auto takes the fastest one here (default: %(default)s)",
    )
    add(
        "--max-batch-size",
        "N",
        integer(1),
        defaults.max_batch_size,
        "most samples that run together; larger requests are split",
    )
    add(
        "--max-queue-delay-ms",
        "MS",
        number(0.0),
        defaults.max_queue_delay_ms,
        "longest wait for batch mates while a stream idles",
    )
    add(
        "--max-queue-samples",
        "N",
        integer(1),
        defaults.max_queue_samples,
        "most samples that wait, per model; more are refused",
    )
    add(
        "--default-timeout-ms",
        "MS",
        number(0.0, above=True),
        defaults.default_timeout_ms,
        "deadline of requests that bring none (default: none)",
    )
    add("--streams", "N", integer(1), defaults.streams, "batches that run side by side, per model")
    add(
        "--parallel-below",
        "N",
        integer(1),
        defaults.parallel_below,
        "a new batch starts beside running ones once each has fewer samples than this (PAME's "
        "tau_b); not given: on any idle stream",
    )
    add(
        "--threads",
        "N",
        integer(1),
        defaults.threads,
        "threads of each stream (default: the cores, shared among the streams)",
    )


def _add_logging(parser: argparse.ArgumentParser) -> None:
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


_Adder = Callable[[str, str, Callable[[str], object], object, str], None]


def _adder(group: argparse._ArgumentGroup) -> _Adder:
    """Add an option of one value; its default is told unless there is none."""

    def add(
        flag: str, metavar: str, kind: Callable[[str], object], default: object, text: str
    ) -> None:
        text = text if default is None else f"{text} (default: %(default)s)"
        group.add_argument(flag, metavar=metavar, type=kind, default=default, help=text)

    return add


def _engine_options(given: argparse.Namespace) -> EngineOptions:
    return EngineOptions(
        mode=Mode(given.mode),
        backend=given.backend,
        max_batch_size=given.max_batch_size,
        max_queue_delay_ms=given.max_queue_delay_ms,
        max_queue_samples=given.max_queue_samples,
        default_timeout_ms=given.default_timeout_ms,
        streams=given.streams,
        parallel_below=given.parallel_below,
        threads=given.threads,
    )


def _server_options(given: argparse.Namespace) -> ServerOptions:
    return ServerOptions(
        host=given.host,
        grpc_port=given.grpc_port,
        http_port=given.http_port,
        max_message_mib=given.max_message_mib,
        shutdown_timeout_s=given.shutdown_timeout_s,
    )
