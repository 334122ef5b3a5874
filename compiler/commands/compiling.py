"""``eecompile MODEL.onnx``: compile a model, and build its engines where possible."""

from __future__ import annotations

import argparse
import dataclasses
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from rich.console import Console

from offramp.commands.combinations import Illegal
from offramp.compiler.commands.arguments import compile_parser
from offramp.compiler.commands.interruption import status_of
from offramp.compiler.common.errors import CompileError, EnginesUnavailableError, ModelError
from offramp.compiler.common.options import NO_ENGINES
from offramp.compiler.common.progress import FileProgress, Progress, TerminalProgress
from offramp.compiler.engines.build_options import EngineBuildOptions
from offramp.engine.answers.criteria import known_criterion
from offramp.engine.common.environment import available_cores
from offramp.engine.common.errors import BackendError

if TYPE_CHECKING:
    from offramp.compiler.engines.build import BuildOptions

_Options = TypeVar("_Options")


def output_of(model: Path) -> Path:
    """Return the default path of a model's bundle."""
    if not model.name:
        raise ModelError(f"{str(model)!r} names no file, expected an ONNX file, such as model.onnx")
    return model.with_suffix(".ee")


def read_options(kind: type[_Options], options: argparse.Namespace, **given: Any) -> _Options:
    """Create the options of a run. A field is taken from ``given``, else from the command line."""
    named = {field.name for field in dataclasses.fields(kind)} & vars(options).keys()  # type: ignore[arg-type]
    return kind(**{**{name: getattr(options, name) for name in named}, **given})


def run_compile(options: argparse.Namespace, console: Console) -> int:
    """Compile a model, or describe it if no data is given."""
    output = options.output or output_of(options.model)
    if options.data is None:
        from offramp.compiler.commands.looking import show_first_look  # noqa: PLC0415

        return show_first_look(options, console)
    from offramp.calibration.data.scratch import ScratchSpace  # noqa: PLC0415
    from offramp.calibration.data.training_options import TrainingOptions  # noqa: PLC0415
    from offramp.compiler.commands.printing import print_bundle, print_use  # noqa: PLC0415
    from offramp.compiler.common.options import CompileOptions  # noqa: PLC0415
    from offramp.compiler.steps.compile import compile_model  # noqa: PLC0415

    known_criterion(options.criterion)  # raises for unknown criteria, before long work
    engines = _plan_engines(options, output)
    if engines.note and engines.build:
        console.print(engines.note, highlight=False, markup=False, soft_wrap=True)
    named = {name: getattr(options, name) for name in CompileOptions.names() & vars(options).keys()}
    named |= {
        "output": output,
        "exits": tuple(options.exits.split(",")) if options.exits else (),
        "simplify": not options.no_simplify,
        "training": TrainingOptions(
            epochs=options.epochs, threads=available_cores(), seed=options.seed
        ),
    }
    asked = CompileOptions.of(**named)
    scratch = ScratchSpace(asked.scratch)
    with TerminalProgress(console) as shown, _reporting(options.progress_file, shown) as progress:
        bundle = compile_model(asked, progress, scratch=scratch)
    print_bundle(bundle, Console())
    print_use(scratch, Console())
    if engines.build is None:
        if engines.note:
            Console().print(engines.note, highlight=False, markup=False, soft_wrap=True)
        return 0
    if engines.demanded:
        return build_and_print(engines.build, console, chooses=False)
    try:
        build_and_print(engines.build, console, chooses=False)
    except (CompileError, BackendError) as error:
        console.print(
            f"No engines were built: {error}; the bundle is complete without them",
            highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip
    return 0


def _reporting(path: Path | None, progress: Progress) -> AbstractContextManager[Progress]:
    """Report progress also to a file, if ``path`` names one."""
    return nullcontext(progress) if path is None else closing(FileProgress(path, progress))


class _Engines(NamedTuple):
    """Decision about building engines, which follows from ``--backend``."""

    build: BuildOptions | None = None
    """Engines to build once the bundle is written."""
    note: str = ""
    """Line that tells the user about this decision."""
    demanded: bool = False
    """True if the user demanded engines, so that failing to build them is an error."""


def _plan_engines(options: argparse.Namespace, output: Path) -> _Engines:
    """Decide whether engines are built here; CompileError if they are demanded but impossible."""
    if options.backend == "onnxruntime":
        return _Engines()
    from offramp.compiler.engines.build import BuildOptions, check_device  # noqa: PLC0415

    demanded = options.backend == "tensorrt"
    engines = EngineBuildOptions()
    build = BuildOptions(bundle=output, engines=engines, data=options.data, seed=options.seed)
    obstacle = _obstacle(options)
    try:
        check_device(engines.device)
    except EnginesUnavailableError:
        if demanded:
            raise
        if obstacle is not None:
            return _Engines()
        line = (
            f"GPU:    eecompile build {output} builds TensorRT engines on the machine with the GPU"
        )
        return _Engines(note=line)
    if obstacle is not None:
        reason = obstacle.why.partition(";")[0]
        option = obstacle.option.partition(" ")[0]
        return _Engines(note=f"GPU:    no TensorRT engines with {option}: {reason}")
    line = f"TensorRT is here: engines for {engines.device} are built too"
    note = "" if demanded else f"{line} (--backend onnxruntime leaves them out)"
    return _Engines(build=build, note=note, demanded=demanded)


def _obstacle(options: argparse.Namespace) -> Illegal | None:
    """Return the first given option that excludes engines, if any."""
    values = {**compile_parser().values(options), "--backend": "tensorrt"}
    given = {flag for flag, value in values.items() if value}
    return next((row for row in NO_ENGINES if row.matches(values, given)), None)


def build_and_print(options: BuildOptions, console: Console, *, chooses: bool) -> int:
    """Build engines, print the result, and return the exit status."""
    from offramp.compiler.commands.printing import print_building  # noqa: PLC0415
    from offramp.compiler.engines.build import Reports, build_bundle  # noqa: PLC0415
    from offramp.compiler.engines.choosing import build_best  # noqa: PLC0415

    print_line = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    try:
        with TerminalProgress(console) as progress:
            build = build_best if chooses else build_bundle
            building = build(options, Reports(progress=progress, print_line=print_line))
        print_building(building, Console())
    except KeyboardInterrupt as error:
        why = str(error) or "interrupted"
        print_line(
            f"eecompile: {why}; the engines built so far are kept; the same command continues"
        )
        return status_of(error)
    for result in building.failed:
        print_line(f"eecompile: {result.problem}")
    return 1 if building.failed else 0
