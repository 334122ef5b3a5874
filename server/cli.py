"""``eeserve``: serves models until it is stopped, or checks them (``--self-check``)."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from functools import partial

from offramp.bundle import BundleError
from offramp.commands.completion import complete
from offramp.engine.answers.criteria import load_criterion
from offramp.engine.backends.custom_ops import using_libraries
from offramp.engine.common.errors import EngineError
from offramp.engine.onnx_files import WrappedFiles
from offramp.engine.serving.opening import bundles_of
from offramp.server.app import ModelsToServe, serve
from offramp.server.arguments import Arguments, make_parser, parse_arguments, read_arguments
from offramp.server.arguments.configuration import ConfigurationError
from offramp.server.arguments.logging_setup import flush_log, set_up_logging
from offramp.server.common.errors import StartError
from offramp.server.common.served import ServedEngine
from offramp.server.opening import only_served, open_served
from offramp.server.repository.tables import check_tables

EXIT_CANNOT_START = 1
EXIT_PASSED = 0
EXIT_FAILED = 1
EXIT_WRONG_SETTINGS = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``eeserve``; return its exit status, as in ``docs/operations.md``."""
    complete(make_parser)
    arguments = parse_arguments(argv)
    set_up_logging(level=arguments.log_level, log_format=arguments.log_format)

    async def open_engine() -> ServedEngine:
        return await open_served(arguments.models, arguments.engine)

    try:
        for text in arguments.criterion_modules:
            load_criterion(text)
        with using_libraries(arguments.custom_ops):
            if arguments.self_check:
                return self_check(arguments)
            models = _models_of(arguments)
            read_again = partial(_read_again, argv) if arguments.file else None
            return serve(open_engine, arguments.server, models, read_again=read_again)
    except (BundleError, ConfigurationError, EngineError, StartError) as error:
        flush_log()
        sys.stderr.write(f"eeserve: {error}\n")
        wrong = isinstance(error, ConfigurationError)
        return EXIT_WRONG_SETTINGS if wrong else EXIT_CANNOT_START


def _read_again(argv: Sequence[str] | None) -> ModelsToServe:
    """Read the command line and the configuration file again; ValueError if they are invalid."""
    return _models_of(read_arguments(argv))


def _models_of(arguments: Arguments) -> ModelsToServe:
    """Return the models to serve; ConfigurationError if the file has a table without a model."""
    if arguments.file is not None:
        repository = arguments.server.repository
        check_tables(arguments.file, arguments.tables, repository, arguments.models)
    fixed = (arguments.server, arguments.log_level, arguments.log_format)
    return ModelsToServe(named=arguments.models, engine=arguments.engine, fixed=fixed)


def self_check(arguments: Arguments) -> int:
    """Run the self-check and serve nothing; return 0 if no check failed, else 1.

    Each result is one line on stdout, and ``--json`` names a file for the report. If a check hangs,
    this function ends the process, because a hung GPU kernel blocks a normal exit.

    Raises:
        BundleError, EngineError, StartError: Nothing could be checked.
    """
    if others := only_served(arguments.models.values()):
        raise StartError(
            f"--self-check only checks bundles and ONNX files, but {', '.join(map(str, others))} "
            "is a model of another kind: leave it out"
        )
    # Rarely needed, and slow to import.
    from offramp.engine.self_check import run_self_check  # noqa: PLC0415

    with closing(WrappedFiles()) as wrapped:  # ONNX files are wrapped as for serving
        bundles = asyncio.run(bundles_of(arguments.models, arguments.engine, wrapped))
        report = run_self_check(bundles, arguments.engine, print_line=_print_line)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report.document(), indent=1) + "\n")
        _print_line(f"the report is in {arguments.json}")
    elif not report.passed:
        _print_line(
            "with --json FILE everything that was measured is written: please send it to us"
        )
    status = EXIT_PASSED if report.passed else EXIT_FAILED
    if report.hangs:
        sys.stderr.flush()
        os._exit(status)
    return status


def _print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()  # the check takes a minute; each line is shown as it comes


if __name__ == "__main__":
    sys.exit(main())
