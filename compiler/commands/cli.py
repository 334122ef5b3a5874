"""``eecompile``: make a multi-exit bundle of an ONNX model."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from rich.console import Console
from rich.logging import RichHandler

from offramp.bundle import BundleError
from offramp.bundle.serde import to_plain
from offramp.calibration.dataset import DataError
from offramp.calibration.errors import UntrainableError
from offramp.calibration.scratch import ScratchError
from offramp.compiler.commands import arguments, engine_arguments
from offramp.compiler.data.arguments import source_of
from offramp.compiler.errors import CompileError, EngineOptionsError, ModelError
from offramp.compiler.interruption import Target, raising_signals, status_of
from offramp.compiler.plain.command import describe_wrapped, wrap_parser
from offramp.compiler.progress import FileProgress, Progress, TerminalProgress
from offramp.engine.criteria import CriterionError, known_criterion, load_criterion
from offramp.engine.errors import BackendError
from offramp.engine.options import available_cores

if TYPE_CHECKING:
    from offramp.compiler.build import BuildOptions

_Options = TypeVar("_Options")


class Command(NamedTuple):
    """A subcommand of ``eecompile``: its parser, and the function that runs it."""

    parser: Callable[[], argparse.ArgumentParser]
    run: Callable[[argparse.Namespace, Console], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``eecompile``; gives the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    named = COMMANDS.get(given[0]) if given else None
    command = named or COMPILE
    options = command.parser().parse_args(given[1:] if named else given)
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
    """Return what to install where a package is missing."""
    remedy = getattr(options, "missing", None)
    if remedy is not None:
        return f"{options.model}: {remedy} ({error})"
    remedy = "compiling needs the extra `compile`: pip install '.[compile]'"
    return f"{error}; {remedy} (for the dot: Offramp's source folder or wheel)"


def _libraries(paths: Sequence[Path]) -> AbstractContextManager[None]:
    """Give the libraries of ``--custom-ops`` to whatever loads a graph meanwhile."""
    if not paths:
        return nullcontext()
    from offramp.engine.backends.custom_ops import using_libraries  # noqa: PLC0415

    return using_libraries(paths)


def _target_of(options: argparse.Namespace) -> Path:
    """What a command writes, if it writes anything."""
    output: Path | None = getattr(options, "output", None)
    bundle: Path | None = getattr(options, "bundle", None)
    return output or bundle or _beside(options.model)


def _beside(model: Path) -> Path:
    """Where the bundle of a model goes by default."""
    if not model.name:
        raise ModelError(f"{str(model)!r} names no file, expected an ONNX file, such as model.onnx")
    return model.with_suffix(".ee")


def _read(kind: type[_Options], options: argparse.Namespace, **given: Any) -> _Options:
    """Make the options of a run: each field is the argument of its name, unless it is given."""
    named = {field.name for field in dataclasses.fields(kind)} & vars(options).keys()  # type: ignore[arg-type]
    return kind(**{**{name: getattr(options, name) for name in named}, **given})


def _compile(options: argparse.Namespace, console: Console) -> int:
    from offramp.calibration.scratch import ScratchSpace  # noqa: PLC0415
    from offramp.calibration.training_options import TrainingOptions  # noqa: PLC0415
    from offramp.compiler.compile import compile_model  # noqa: PLC0415
    from offramp.compiler.options import CompileOptions  # noqa: PLC0415
    from offramp.compiler.printing import print_bundle, print_use  # noqa: PLC0415

    known_criterion(options.criterion)  # or an error, before anything takes time
    output = options.output or _beside(options.model)
    engines = _engines_to_build(options, output)
    threads = available_cores()
    asked = _read(
        CompileOptions,
        options,
        output=output,
        exits=tuple(options.exits.split(",")) if options.exits else (),
        simplify=not options.no_simplify,
        precision=engine_arguments.bundle_precision(options),
        training=TrainingOptions(epochs=options.epochs, threads=threads, seed=options.seed),
    )
    scratch = ScratchSpace(asked.scratch)
    with TerminalProgress(console) as shown, _reporting(options.progress_file, shown) as progress:
        bundle = compile_model(asked, progress, scratch=scratch)
    print_bundle(bundle, Console())
    print_use(scratch, Console())
    if engines is None:
        return 0
    return _build_and_print(engines, console, chooses=engine_arguments.chooses_precision(options))


def _reporting(path: Path | None, progress: Progress) -> AbstractContextManager[Progress]:
    """Report progress to a file too, if one is named."""
    return nullcontext(progress) if path is None else closing(FileProgress(path, progress))


def _engines_to_build(options: argparse.Namespace, output: Path) -> BuildOptions | None:
    """Read what ``--backend tensorrt`` asks for; CompileError if it cannot be done here."""
    from offramp.compiler.build import BuildOptions, check_device, check_options  # noqa: PLC0415
    from offramp.compiler.choosing import check_choice  # noqa: PLC0415

    if options.backend != "tensorrt":
        given = engine_arguments.given_engine_options(options)
        if given:
            raise EngineOptionsError(f"{', '.join(given)} is for engines: add --backend tensorrt")
        return None
    if known_criterion(options.criterion).on_host:
        raise EngineOptionsError(
            f"--criterion {options.criterion}: criteria that the host computes are for CPUs; leave "
            "--backend tensorrt out"
        )
    if options.train == "joint":
        raise EngineOptionsError(
            "--train joint: a bundle with a copy of the model is for ONNX Runtime; leave --backend "
            "tensorrt out"
        )
    if options.custom_ops:
        raise EngineOptionsError(
            f"--custom-ops {options.custom_ops[0]}: TensorRT's engines cannot hold operators of a "
            "library; leave --backend tensorrt out, and serve with --backend onnxruntime"
        )
    engines = engine_arguments.engine_options(options)
    build = BuildOptions(bundle=output, engines=engines, data=options.data, seed=options.seed)
    check_options(build)
    if engine_arguments.chooses_precision(options):
        check_choice(build)
    check_device(engines.device)
    return build


def _inspect(options: argparse.Namespace, console: Console) -> int:
    from offramp.compiler.inspection import describe_bundle, describe_model  # noqa: PLC0415

    if options.model.is_dir():
        from offramp.bundle import Bundle  # noqa: PLC0415
        from offramp.compiler.printing import print_bundle  # noqa: PLC0415

        bundle = Bundle.open(options.model)
        print_bundle(bundle, Console())
        _write_json(options.json, describe_bundle(bundle))
        return 0
    from offramp.compiler.asked_task import AskedTask  # noqa: PLC0415
    from offramp.compiler.cuts import find_cuts  # noqa: PLC0415
    from offramp.compiler.model import read_model  # noqa: PLC0415
    from offramp.compiler.printing import print_inspection  # noqa: PLC0415

    with console.status("reading and simplifying the model"):
        model = read_model(
            options.model,
            answer=options.answer,
            task=AskedTask(kind=options.task, class_map=options.class_map),
            answer_tokens=options.answer_tokens,
            simplify=not options.no_simplify,
            simplify_limit=options.simplify_limit,
            max_cut_tensors=options.max_cut_tensors,
        )
        analysis = find_cuts(model, max_tensors=options.max_cut_tensors)
    print_inspection(model, analysis, Console())
    _write_json(options.json, describe_model(model, analysis))
    return 0


def _verify(options: argparse.Namespace, console: Console) -> int:
    from offramp.compiler.bundle_check import VerifyOptions, verify_bundle  # noqa: PLC0415
    from offramp.compiler.printing_check import print_check  # noqa: PLC0415

    with TerminalProgress(console) as progress:
        check = verify_bundle(_read(VerifyOptions, options), progress)
    print_check(check, options.bundle, Console())
    _write_json(options.json, to_plain(check))
    return 1 if check.verdict == "contradicted" else 0


def _write_json(path: Path | None, document: object) -> None:
    if path is not None:
        path.write_text(json.dumps(document, indent=1) + "\n")


def _rehearse(options: argparse.Namespace, console: Console) -> int:
    from offramp.compiler.options import RehearseOptions  # noqa: PLC0415
    from offramp.compiler.printing import print_rehearsing  # noqa: PLC0415
    from offramp.compiler.rehearse import rehearse_bundle  # noqa: PLC0415

    with TerminalProgress(console) as progress:
        done = rehearse_bundle(_read(RehearseOptions, options), progress)
    print_rehearsing(done, Console())
    return 0


def _profile(options: argparse.Namespace, console: Console) -> int:
    from offramp.compiler.options import ProfileOptions  # noqa: PLC0415
    from offramp.compiler.printing import print_profiled  # noqa: PLC0415
    from offramp.compiler.profile import profile_bundle  # noqa: PLC0415

    with TerminalProgress(console) as progress:
        done = profile_bundle(_read(ProfileOptions, options), progress)
    print_profiled(done, Console())
    return 0


def _wrap(options: argparse.Namespace, console: Console) -> int:
    from offramp.compiler.plain.wrap import WrapOptions, wrap_model  # noqa: PLC0415

    output = options.output or _beside(options.model)
    with TerminalProgress(console) as progress:
        bundle = wrap_model(_read(WrapOptions, options, output=output), progress)
    print(describe_wrapped(bundle))
    return 0


def _export(options: argparse.Namespace, console: Console) -> int:
    from offramp.compiler.export.export import ExportOptions, export_bundle  # noqa: PLC0415
    from offramp.compiler.printing import print_exported  # noqa: PLC0415

    with TerminalProgress(console) as progress:
        done = export_bundle(_read(ExportOptions, options), progress)
    print_exported(done, options.data, Console())
    return 0


def _plan(options: argparse.Namespace, console: Console) -> int:
    from offramp.compiler.planning import PlanOptions, plan_bundle  # noqa: PLC0415
    from offramp.compiler.printing_plan import print_plan, render_page  # noqa: PLC0415
    from offramp.engine.planning.cluster_plan import PlanError  # noqa: PLC0415

    try:
        with console.status("planning"):
            planned = plan_bundle(_read(PlanOptions, options))
    except PlanError as error:
        print(f"eecompile: {error}", file=sys.stderr)
        return 1
    if options.report is not None:
        options.report.write_text(render_page(planned, options.bundle.name), encoding="utf-8")
    print_plan(planned, Console(width=max(Console().width, 100)))
    return 0


def _build(options: argparse.Namespace, console: Console) -> int:
    from offramp.compiler.build import BuildOptions  # noqa: PLC0415

    engines = engine_arguments.engine_options(options)
    asked = _read(BuildOptions, options, engines=engines)
    return _build_and_print(asked, console, chooses=engine_arguments.chooses_precision(options))


def _build_and_print(options: BuildOptions, console: Console, *, chooses: bool) -> int:
    from offramp.compiler.build import Reports, build_bundle  # noqa: PLC0415
    from offramp.compiler.choosing import build_best  # noqa: PLC0415
    from offramp.compiler.printing_engines import print_building  # noqa: PLC0415

    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    try:
        with TerminalProgress(console) as progress:
            build = build_best if chooses else build_bundle
            building = build(options, Reports(progress=progress, say=say))
        print_building(building, Console())
    except KeyboardInterrupt as error:
        why = str(error) or "interrupted"
        say(f"eecompile: {why}; the engines built so far are kept, the same command goes on")
        return status_of(error)
    for result in building.failed:
        say(f"eecompile: {result.problem}")
    return 1 if building.failed else 0


COMPILE = Command(arguments.compile_parser, _compile)
COMMANDS = {
    "supernet": Command(arguments.supernet_parser, _compile),
    "inspect": Command(arguments.inspect_parser, _inspect),
    "verify": Command(arguments.verify_parser, _verify),
    "rehearse": Command(arguments.rehearse_parser, _rehearse),
    "profile": Command(arguments.profile_parser, _profile),
    "build": Command(arguments.build_parser, _build),
    "export": Command(arguments.export_parser, _export),
    "wrap": Command(wrap_parser, _wrap),
    "plan": Command(arguments.plan_parser, _plan),
}
"""By name; anything else compiles a model. A model file called like one is given as ./NAME."""


if __name__ == "__main__":
    sys.exit(main())
