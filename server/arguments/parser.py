"""The whole command line, joined with the configuration file that it may name."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from offramp import __version__
from offramp.engine.options import EngineOptions, ModelOptions
from offramp.server.arguments.control import add_control, refuse_ignored
from offramp.server.arguments.execution import add_execution
from offramp.server.arguments.groups import settings_in
from offramp.server.arguments.log import add_logging
from offramp.server.arguments.models import add_models, name_models
from offramp.server.arguments.network import add_network, server_options
from offramp.server.arguments.scheduling import add_scheduling
from offramp.server.configuration import Configuration, ConfigurationError, read_configuration
from offramp.server.options import ServerOptions

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
    """Read ``argv``, the process's own by default, and the file that ``--config`` names.

    Raises:
        SystemExit: With code 2 and the reason on stderr, or with 0 after ``--help``.
    """
    parser = make_parser()
    given = parser.parse_args(argv)
    try:
        return _understand(given)
    except ConfigurationError as error:
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
    add_network(parser)
    add_control(parser)
    add_execution(parser)
    add_scheduling(parser)
    add_logging(parser)
    return parser


def _understand(given: argparse.Namespace) -> Arguments:
    file = Configuration() if given.config is None else read_configuration(given.config)
    configured = [(name, model.path) for name, model in file.models.items()]
    engine, defaults = settings_in(given, EngineOptions), settings_in(given, ModelOptions)
    options = file.options(engine=engine, defaults=defaults)
    refuse_ignored({**engine, **defaults}, options.mode)
    return Arguments(
        models=name_models(given.bundles, [*given.model, *configured]),
        engine=options,
        server=server_options(given),
        log_level=given.log_level,
        log_format=given.log_format,
    )
