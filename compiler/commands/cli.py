"""``eecompile``: makes a bundle with exits from an ONNX model."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

from offramp.bundle import BundleError
from offramp.bundle.bundle import bundle_name
from offramp.bundle.schema.serde import to_plain
from offramp.calibration.data.dataset import DataError
from offramp.calibration.data.errors import UntrainableError
from offramp.calibration.data.scratch import ScratchError
from offramp.commands.completion import complete
from offramp.compiler.commands import arguments
from offramp.compiler.commands.arguments import (
    SUMMARIES,
    Command,
    command_of,
    commands_of_extensions,
    compile_parser,
)
from offramp.compiler.commands.compiling import (
    build_and_print,
    output_of,
    read_options,
    run_compile,
)
from offramp.compiler.commands.interruption import Target, raising_signals, status_of
from offramp.compiler.common.errors import CompileError
from offramp.compiler.common.progress import TerminalProgress
from offramp.compiler.data.data_flags import source_of
from offramp.engine.answers.criteria import CriterionError, load_criterion
from offramp.engine.common.errors import BackendError


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``eecompile``; return the exit status."""
    complete(COMPILE.parser, {name: command.parser for name, command in COMMANDS.items()})
    given = list(sys.argv[1:] if argv is None else argv)
    named, words = command_of(given, COMMANDS)
    command = named or COMPILE
    options = command.parser().parse_args(words)
    console = Console(stderr=True)
    logging.basicConfig(
        level=logging.WARNING,
        format="%(message)s",
        handlers=[RichHandler(console=console, show_path=False, show_time=False)],
    )
    try:
        target = Target(_target_of(options))
    except CompileError as error:
        print(f"eecompile: {error}", file=sys.stderr)
        return 1
    try:
        for text in options.criterion_module:
            load_criterion(text)
        if getattr(options, "data", None) is not None:
            options.data = source_of(options.data, options)
        with raising_signals(), _libraries(options.custom_ops):
            return command.run(options, console)
    except ImportError as error:
        print(f"eecompile: {_without(error, options)}", file=sys.stderr)
        return 1
    except (
        CompileError,
        DataError,
        UntrainableError,
        ScratchError,
        BundleError,
        BackendError,
        CriterionError,
        OSError,
    ) as error:
        print(f"eecompile: {error}", file=sys.stderr)
        return 1
    except MemoryError as error:
        print(f"eecompile: not enough memory: {error}; free some", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        print(f"eecompile: {target.describe(error)}", file=sys.stderr)
        return status_of(error)


def _without(error: ImportError, options: argparse.Namespace) -> str:
    """Return the message for a missing package, with the command that installs it."""
    remedy = getattr(options, "missing", None)
    if remedy is not None:
        return f"{options.model}: {remedy} ({error})"
    remedy = "compiling needs the extra `compile`: pip install '.[compile]'"
    return f"{error}; {remedy} (for the dot: Offramp's source folder or wheel)"


def _libraries(paths: Sequence[Path]) -> AbstractContextManager[None]:
    """Load the libraries of ``--custom-ops`` into all sessions of ONNX Runtime in the context."""
    if not paths:
        return nullcontext()
    from offramp.engine.backends.custom_ops import using_libraries  # noqa: PLC0415

    return using_libraries(paths)


def _target_of(options: argparse.Namespace) -> Path:
    """Return the path that a command may write to, for messages about interruptions."""
    output: Path | None = getattr(options, "output", None)
    repository = getattr(options, "triton", None) or getattr(options, "ovms", None)
    if output is None and repository is not None:
        name = options.name or bundle_name(options.bundle.resolve())
        return Path(repository, name)
    bundle: Path | None = getattr(options, "bundle", None)
    return output or bundle or output_of(options.model)


def _inspect(options: argparse.Namespace, console: Console) -> int:
    from offramp.compiler.commands.looking import inspect  # noqa: PLC0415

    _write_json(options.json, inspect(options, console))
    return 0


def _verify(options: argparse.Namespace, console: Console) -> int:
    from offramp.compiler.commands.printing import print_check  # noqa: PLC0415
    from offramp.compiler.steps.bundle_check import VerifyOptions, verify_bundle  # noqa: PLC0415

    with TerminalProgress(console) as progress:
        check = verify_bundle(read_options(VerifyOptions, options), progress)
    print_check(check, options.bundle, Console())
    _write_json(options.json, to_plain(check))
    return 1 if check.verdict == "contradicted" else 0


def _write_json(path: Path | None, document: object) -> None:
    if path is not None:
        path.write_text(json.dumps(document, indent=1) + "\n")


def _rehearse(options: argparse.Namespace, console: Console) -> int:
    from offramp.compiler.commands.printing import print_rehearsing  # noqa: PLC0415
    from offramp.compiler.common.options import RehearseOptions  # noqa: PLC0415
    from offramp.compiler.steps.rehearse import rehearse_bundle  # noqa: PLC0415

    with TerminalProgress(console) as progress:
        done = rehearse_bundle(read_options(RehearseOptions, options), progress)
    print_rehearsing(done, Console())
    return 0


def _profile(options: argparse.Namespace, console: Console) -> int:
    from offramp.compiler.commands.printing import print_profiled  # noqa: PLC0415
    from offramp.compiler.common.options import ProfileOptions  # noqa: PLC0415
    from offramp.compiler.steps.profile import profile_bundle  # noqa: PLC0415

    with TerminalProgress(console) as progress:
        done = profile_bundle(read_options(ProfileOptions, options), progress)
    print_profiled(done, Console())
    return 0


def _wrap(options: argparse.Namespace, console: Console) -> int:
    from offramp.compiler.plain.wrap import WrapOptions, wrap_model  # noqa: PLC0415
    from offramp.engine.onnx_files.wrapping import NOTE  # noqa: PLC0415

    output, notes = options.output or output_of(options.model), list[str]()
    with TerminalProgress(console) as progress:
        asked = read_options(WrapOptions, options, output=output)
        bundle = wrap_model(asked, progress, note=notes.append)
    for text in notes:
        print(f"{NOTE}{text}")
    alone, name = bundle.manifest.no_batching, bundle.manifest.source.original_name
    batches = f"every sample by itself: {alone}" if alone else "in batches"
    print(f"{bundle.path}: {name} as it is, without exits; served {batches}")
    return 0


def _export(options: argparse.Namespace, console: Console) -> int:
    from offramp.compiler.commands.printing import print_exported  # noqa: PLC0415
    from offramp.compiler.export.export import ExportOptions, export_bundle  # noqa: PLC0415
    from offramp.compiler.export.repositories import RepositoryOptions  # noqa: PLC0415

    with TerminalProgress(console) as progress:
        places = read_options(RepositoryOptions, options)
        done = export_bundle(read_options(ExportOptions, options, repositories=places), progress)
    print_exported(done, options.data, Console())
    return 0


def _build(options: argparse.Namespace, console: Console) -> int:
    from offramp.compiler.engines.build import BuildOptions  # noqa: PLC0415

    engines = arguments.engine_options(options)
    asked = read_options(BuildOptions, options, engines=engines)
    return build_and_print(asked, console, chooses=arguments.chooses_precision(options))


_RUN = {
    "inspect": (arguments.inspect_parser, _inspect),
    "verify": (arguments.verify_parser, _verify),
    "rehearse": (arguments.rehearse_parser, _rehearse),
    "profile": (arguments.profile_parser, _profile),
    "build": (arguments.build_parser, _build),
    "export": (arguments.export_parser, _export),
    "wrap": (arguments.wrap_parser, _wrap),
}
COMPILE = Command(compile_parser, run_compile, "")
COMMANDS = {
    **{name: Command(*found, SUMMARIES[name]) for name, found in _RUN.items()},
    **commands_of_extensions(),
}
"""Subcommands by name. Any other first argument is a model to compile; ``./NAME`` is always a
model."""


if __name__ == "__main__":
    sys.exit(main())
