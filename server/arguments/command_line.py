"""The command line of ``eeserve``, merged with the configuration file."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from offramp.bundle.schema.answers import TASK_KINDS
from offramp.commands.parser import LayeredParser
from offramp.engine.common.extensions import extensions_for
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.onnx_files.wrapping import SUFFIX, is_onnx_file
from offramp.server.arguments.combinations import refuse_illegal_settings
from offramp.server.arguments.configuration import (
    SERVER_PARTS,
    Configuration,
    ConfigurationError,
    read_configuration,
)
from offramp.server.arguments.extension import SettingError
from offramp.server.arguments.logging_setup import FORMATS, LEVELS, LoggingOptions
from offramp.server.arguments.option_groups import (
    OptionGroup,
    add_control,
    add_execution,
    add_learning,
    add_scheduling,
    learning_in,
    model_path,
    named_path,
    settings_in,
)
from offramp.server.arguments.options import ServerOptions
from offramp.server.arguments.server_groups import (
    add_keepalive,
    add_network,
    add_repository,
    add_security,
)


def add_logging(parser: argparse.ArgumentParser) -> None:
    """Add ``--log-level`` and ``--log-format``."""
    options = OptionGroup(parser, "logging", None, LoggingOptions(), ServerOptions())
    levels = f"{', '.join(LEVELS[:-1])} or {LEVELS[-1]}"
    options.add("--log-level", levels, metavar="LEVEL", choices=LEVELS)
    options.add(
        "--log-format",
        "human: readable lines; json: one JSON object a line",
        metavar="FORMAT",
        choices=FORMATS,
    )
    options.switch(
        "--access-log",
        "log one line for each request: peer, method, model, status code, milliseconds, rows",
    )


def add_models(parser: argparse.ArgumentParser) -> None:
    """Add the options that name models, and settings of them."""
    group = parser.add_argument_group(
        "models",
        "A model's table [models.NAME] of --config overrules the command line, which\n"
        "overrules the tables [engine] and [defaults] of that file.",
    )
    group.add_argument(
        "bundles",
        metavar="MODEL",
        nargs="*",
        type=model_path,
        help="ONNX file, or bundle written by eecompile;\n"
        "served under its name without .onnx or .ee; an ONNX file is served as it is, without "
        "exits",
    )
    group.add_argument(
        "--model",
        metavar="NAME=PATH",
        action="append",
        default=[],
        type=named_path,
        help="a model and the name to serve it under; may be repeated",
    )
    group.add_argument(
        "--answer",
        metavar="OUTPUT",
        default=argparse.SUPPRESS,
        help="output to serve, for ONNX files with several outputs",
    )
    group.add_argument(
        "--task",
        metavar="TASK",
        choices=TASK_KINDS,
        default=argparse.SUPPRESS,
        help="kind of answer of ONNX files, which decides when two answers agree: "
        f"{', '.join(TASK_KINDS)} (default: by the output's shape)",
    )
    group.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        help="TOML file with models and their settings",
    )
    group.add_argument(
        "--custom-ops",
        metavar="LIB.so",
        action="append",
        default=[],
        type=Path,
        help="library of operators that ONNX Runtime lacks, for --backend onnxruntime; "
        "may be repeated. It contains code: only the libraries named here are loaded",
    )
    group.add_argument(
        "--criterion-module",
        metavar="FILE.py:NAME",
        action="append",
        default=[],
        help="your own criterion that a bundle was compiled with, for the CPU; may be repeated. "
        "It contains code, as --custom-ops does",
    )


def name_models(
    bundles: Sequence[Path], named: Sequence[tuple[str, Path]], *, may_be_none: bool = False
) -> dict[str, Path]:
    """Return model paths by name: the given name, or the file name without ``.ee`` or ``.onnx``.

    Raise ValueError if two have the same name, or if there is none and ``may_be_none`` is false.
    """
    unnamed = [(_name_of(path), path) for path in bundles]
    models: dict[str, Path] = {}
    for name, path in (*unnamed, *named):
        if name in models:
            raise ValueError(
                f"two models are named {name!r}: {models[name]} and {path}; "
                f"rename one of them, for instance --model {name}-2={path}"
            )
        models[name] = path
    if not models and not may_be_none:
        raise ValueError(
            "no model to serve; name a bundle that eecompile wrote, or an ONNX file: eeserve "
            "model.ee, eeserve model.onnx"
        )
    return models


def _name_of(path: Path) -> str:
    name = path.resolve().name
    return name.removesuffix(SUFFIX) if is_onnx_file(path) else name.removesuffix(".ee")


def add_checking(parser: argparse.ArgumentParser) -> None:
    """Add ``--self-check`` and its options."""
    group = parser.add_argument_group(
        "checking", "Check the machine, mainly its GPU, before you serve."
    )
    group.add_argument(
        "--self-check",
        action="store_true",
        help="serve nothing; for about a minute, compare stages with ONNX Runtime, kernels with "
        "numpy, CUDA graphs with plain launches, and memory before and after; exit status 0 if no "
        "check failed, else 1",
    )
    group.add_argument(
        "--json",
        metavar="FILE",
        type=Path,
        help="write the self-check's measurements to this file",
    )


def _check_report(path: Path | None) -> None:
    """Raise ValueError if the report cannot be written."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        what = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ValueError(
            f"--json {path} cannot be written: {what}; name a file in a folder that exists"
        )


_DESCRIPTION: Final = """\
Serve models over gRPC (Open Inference Protocol, for Triton's clients too), with
status page, health probes and Prometheus metrics over HTTP.
"""

SHORT: Final = (
    *("--learn", "--learn-samples"),
    *("--mode", "--max-disagreement", "--policy", "--slo-ms", "--max-batch-size"),
    *("--streams", "--threads", "--host", "--grpc-port", "--http-port", "--config", "--log-level"),
)
"""Options that ``--help`` shows."""

_EXAMPLES: Final = {
    "eeserve model.onnx": "the model as it is",
    "eeserve model.onnx --learn": "with exits, once made",
    "eeserve model.ee --slo-ms 20 --policy slackfit": "a bundle, within 20 ms",
}
_COMMANDS: Final = {
    "eecompile": "makes a bundle with exits of an ONNX model",
    "eebench load": "measures a server under load",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """A parsed and checked command line, with its configuration file."""

    models: Mapping[str, Path]
    """Bundle folders and ONNX files by their names in the server."""
    engine: EngineOptions
    server: ServerOptions
    log_level: str
    log_format: str
    file: Path | None = None
    """The configuration file that was read."""
    tables: tuple[str, ...] = ()
    """Names of its tables ``[models.NAME]`` without a path: models of the repository."""
    self_check: bool = False
    """True if the server only checks the machine and serves nothing."""
    json: Path | None = None
    """File for the report of the check."""
    custom_ops: tuple[Path, ...] = ()
    """Libraries of operators that the process loads."""
    criterion_modules: tuple[str, ...] = ()
    """``FILE.py:NAME`` of users' criteria, whose code the process runs."""


def parse_arguments(argv: Sequence[str] | None = None) -> Arguments:
    """Parse ``argv``, by default the process's own, and the file that ``--config`` names.

    Raises:
        SystemExit: Code 2, with the reason on stderr, or 0 after ``--help``.
    """
    parser = make_parser()
    try:
        return _understand(parser, argv)
    except (ConfigurationError, SettingError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")  # --help does not describe the file
    except ValueError as error:
        parser.error(str(error))


def read_arguments(argv: Sequence[str] | None = None) -> Arguments:
    """Parse ``argv``, which was valid before, and read its file again.

    Raises:
        ConfigurationError, SettingError, ValueError: The file is invalid now.
    """
    return _understand(make_parser(), argv)


def make_parser() -> LayeredParser:
    """Return the parser of ``eeserve``."""
    parser = LayeredParser(
        prog="eeserve",
        description=_DESCRIPTION,
        short=SHORT,
        examples=_EXAMPLES,
        commands=_COMMANDS,
    )
    add_models(parser)
    add_repository(parser)
    add_learning(parser)
    add_network(parser)
    add_security(parser)
    add_control(parser)
    add_scheduling(parser)
    add_execution(parser)
    for extension in extensions_for("server"):
        extension.add_options(parser)
    add_logging(parser)
    add_keepalive(parser)
    add_checking(parser)
    return parser


def _understand(parser: LayeredParser, argv: Sequence[str] | None) -> Arguments:
    given, flags = parser.parse_args(argv), parser.given(argv)
    file = Configuration() if given.config is None else read_configuration(given.config)
    server, log = _server_options(given, file)
    configured = [*_configured_models(file, server)]
    models = name_models(
        given.bundles,
        [*given.model, *configured],
        may_be_none=server.repository.model_repository is not None,
    )
    refuse_illegal_settings(parser, given, flags, file, models.values())
    engine, defaults = settings_in(given, EngineOptions), settings_in(given, ModelOptions)
    learns = engine.pop("learning", False)
    for extension in extensions_for("server"):
        engine |= settings_in(given, extension.settings)
    options = file.options(
        engine=engine,
        defaults=defaults,
        learning=learning_in(given) if learns or file.learning is not None else None,
    )
    _check_report(given.json)
    return Arguments(
        models=models,
        engine=options,
        server=server,
        log_level=log.log_level,
        log_format=log.log_format,
        file=given.config,
        tables=tuple(name for name, model in file.models.items() if model.path is None),
        self_check=given.self_check,
        json=given.json,
        custom_ops=tuple(given.custom_ops),
        criterion_modules=tuple(given.criterion_module),
    )


def _configured_models(file: Configuration, server: ServerOptions) -> Iterator[tuple[str, Path]]:
    """Yield name and path of the file's models; ConfigurationError if one has no path."""
    for name, model in file.models.items():
        if model.path is not None:
            yield name, model.path
        elif server.repository.model_repository is None:
            raise ConfigurationError(
                f"{file.source}: [models.{name}] has no path; expected the folder that eecompile "
                f'wrote, relative to this file, for instance path = "{name}.ee", or a '
                "--model-repository that has the model"
            )


def _server_options(
    given: argparse.Namespace, file: Configuration
) -> tuple[ServerOptions, LoggingOptions]:
    """Return the file's settings of server and logging, overridden by the command line."""

    def settings(kind: type[Any]) -> dict[str, Any]:
        names = {each.name for each in fields(kind)}
        ours = {name: value for name, value in file.server.items() if name in names}
        return ours | settings_in(given, kind)

    try:
        server = ServerOptions(
            **settings(ServerOptions),
            **{name: kind(**settings(kind)) for name, kind in SERVER_PARTS.items()},
        )
    except ValueError as error:
        if file.server.keys() <= vars(given).keys():
            raise
        raise ConfigurationError(f"{file.source}: [server]: {error}") from error
    return server, LoggingOptions(**settings(LoggingOptions))
