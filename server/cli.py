"""``eeserve``: serves bundles until it is told to stop."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from offramp.bundle import BundleError
from offramp.commands.completion import complete
from offramp.engine.answers.criteria import load_criterion
from offramp.engine.common.errors import EngineError
from offramp.engine.core import Engine
from offramp.server.app import serve
from offramp.server.arguments import make_parser, parse_arguments
from offramp.server.arguments.errors import StartError
from offramp.server.arguments.logging_setup import flush_log, set_up_logging
from offramp.server.page.served import ServedEngine

EXIT_CANNOT_START = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``eeserve``; 1 if it could not start, left requests unanswered, or a check failed."""
    complete(make_parser)
    arguments = parse_arguments(argv)
    set_up_logging(level=arguments.log_level, log_format=arguments.log_format)

    async def open_engine() -> ServedEngine:
        return await Engine.open(arguments.models, arguments.engine)

    try:
        for text in arguments.criterion_modules:
            load_criterion(text)
        with _libraries(arguments.custom_ops):
            if arguments.self_check:
                from offramp.server.self_check import self_check  # noqa: PLC0415 - rarely asked for

                return self_check(arguments)
            return serve(open_engine, arguments.server)
    except (BundleError, EngineError, StartError) as error:
        flush_log()
        sys.stderr.write(f"eeserve: {error}\n")
        return EXIT_CANNOT_START


def _libraries(paths: Sequence[Path]) -> AbstractContextManager[None]:
    """Give the libraries of ``--custom-ops`` to whatever loads a graph meanwhile."""
    if not paths:
        return nullcontext()
    from offramp.engine.backends.custom_ops import using_libraries  # noqa: PLC0415 - heavy

    return using_libraries(paths)


if __name__ == "__main__":
    sys.exit(main())
