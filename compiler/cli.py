"""``eecompile``: make a multi-exit bundle of an ONNX model."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape

from offramp.bundle import Bundle, BundleError, Promise
from offramp.bundle.bundle import REPORT
from offramp.calibration.errors import DataError
from offramp.compiler.build_command import (
    add_engine_arguments,
    build_and_print,
    build_parser,
    engine_options,
    given_engine_options,
    run_build,
    seed,
)
from offramp.compiler.export.command import export_parser, run_export

if TYPE_CHECKING:
    from offramp.compiler.build import BuildOptions

_DESCRIPTION = """\
Make a multi-exit bundle of an ONNX classifier: slice it at its cut points, train exits on
calibration data, and certify a policy under which disagreement with the unmodified model stays
within --max-disagreement.

  eecompile model.onnx --data calibration.npz     writes model.ee
  eecompile inspect model.onnx                    lists the cut points
  eecompile rehearse model.ee --data new.npz      adapts a bundle to a load that has changed
  eecompile profile model.ee                      measures its profile anew on this machine
  eecompile build model.ee --device cuda:0        builds its TensorRT engines, where the GPU is
  eecompile export model.ee --data calibration.npz --output fast.onnx
                                                  makes one ONNX file of it, for any ONNX Runtime
"""


class Command(NamedTuple):
    """What ``eecompile NAME …`` does."""

    parser: Callable[[], argparse.ArgumentParser]
    run: Callable[[argparse.Namespace, Console], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``eecompile``; gives the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    named = COMMANDS.get(arguments[0]) if arguments else None
    command = named or _COMPILE
    options = command.parser().parse_args(arguments[1:] if named else arguments)
    try:
        from offramp.compiler.errors import CompileError  # noqa: PLC0415
    except ImportError as error:
        return _missing(error)
    console = Console(stderr=True)
    logging.basicConfig(
        level=logging.WARNING,
        format="%(message)s",
        handlers=[RichHandler(console=console, show_path=False, show_time=False)],
    )
    try:
        return command.run(options, console)
    except ImportError as error:
        return _missing(error)
    except (CompileError, DataError, BundleError, OSError) as error:
        print(f"eecompile: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("eecompile: interrupted; nothing was written", file=sys.stderr)
        return 130


def _missing(error: ImportError) -> int:
    print(
        f"eecompile: {error}; compiling needs the extra `compile`: "
        "pip install '.[compile]' (for the dot: Offramp's source folder or wheel)",
        file=sys.stderr,
    )
    return 1


def _compile(options: argparse.Namespace, console: Console) -> int:
    from offramp.calibration.training import TrainingOptions  # noqa: PLC0415
    from offramp.compiler.compile import compile_model  # noqa: PLC0415
    from offramp.compiler.options import CompileOptions  # noqa: PLC0415
    from offramp.compiler.progress import TerminalProgress  # noqa: PLC0415
    from offramp.engine.options import available_cores  # noqa: PLC0415

    output = options.output or options.model.with_suffix(".ee")
    engines = _engines_to_build(options, output)
    with TerminalProgress(console) as progress:
        bundle = compile_model(
            CompileOptions(
                model=options.model,
                data=options.data,
                output=output,
                overwrite=options.overwrite,
                answer=options.answer,
                mask=options.mask,
                exits=tuple(options.exits.split(",")) if options.exits else (),
                candidates=options.candidates,
                max_disagreement=options.max_disagreement,
                confidence=options.confidence,
                max_overhead=options.max_overhead,
                selection=options.selection,
                rehearsal_batch=options.rehearsal_batch,
                max_violations=options.max_violations,
                tolerance=options.tolerance,
                reference_batch_size=options.reference_batch_size,
                threads=options.threads,
                simplify=not options.no_simplify,
                augment=options.augment,
                training=TrainingOptions(
                    epochs=options.epochs, threads=available_cores(), seed=options.seed
                ),
                seed=options.seed,
            ),
            progress,
        )
    summarise(bundle, Console())
    return 0 if engines is None else build_and_print(engines, console)


def _engines_to_build(options: argparse.Namespace, output: Path) -> BuildOptions | None:
    """What ``--backend tensorrt`` asks for, checked before any long work.

    Raises:
        CompileError: It makes no sense, or this machine cannot build it.
    """
    from offramp.compiler.build import BuildOptions, check_device, check_options  # noqa: PLC0415
    from offramp.compiler.errors import EngineOptionsError  # noqa: PLC0415

    if options.backend != "tensorrt":
        given = given_engine_options(options)
        if given:
            raise EngineOptionsError(f"{', '.join(given)} is for engines: add --backend tensorrt")
        return None
    engines = BuildOptions(
        bundle=output, engines=engine_options(options), data=options.data, seed=options.seed
    )
    check_options(engines)
    check_device(engines.engines.device)
    return engines


def summarise(bundle: Bundle, console: Console) -> None:
    """Print what was made, in words."""
    policy, manifest = bundle.policy, bundle.manifest
    say = partial(console.print, highlight=False, soft_wrap=True)
    path = escape(str(bundle.path))
    built = f"[bold]{path}[/bold]: {len(manifest.exits)} exits built"
    if not policy.active or policy.promise is None:
        say(f"{built}, [bold red]none active[/bold red]: serves the unmodified model")
    else:
        promise = policy.promise
        say(f"{built}, {len(policy.active)} active")
        for active in policy.active:
            exit_ = manifest.exits[active.exit]
            say(
                f"  exit {exit_.index} after segment {exit_.after_segment}: "
                f"{exit_.head.describe()}; leaves at confidence ≥ {active.threshold:.3f}"
            )
        say(
            f"Disagreement with the unmodified model ≤ {100 * promise.max_disagreement:g}% on "
            f"unseen data like the calibration set, with {100 * promise.confidence:g}% confidence "
            f"({promise.certify_errors} of {promise.certify_samples} certify samples disagreed)."
        )
        for line in _brought(bundle, promise):
            say(line)
    for note in bundle.profile().disturbed:
        say(f"[yellow]Disturbed while profiling[/yellow]: {escape(note)}")
    say(f"Report: {path}/{REPORT}")
    say(f"Serve:  eeserve {path}")


def _brought(bundle: Bundle, promise: Promise) -> Iterator[str]:
    """What the exits bring: as it was measured, or as it is predicted where it was not."""
    from offramp.compiler.report import measured as words  # noqa: PLC0415
    from offramp.engine.profile_check import predicted_savings  # noqa: PLC0415

    measured, profile = bundle.measured(), bundle.profile()
    if measured is None:
        yield (
            f"Predicted savings of time: {promise.predicted_savings:.1%} (from profiled times; "
            "measure with eebench compare)."
        )
        yield f"Where nothing exits, an answer comes later by {_added(bundle)} (profiled)."
        return
    at = measured.nearest(bundle.manifest.calibration.reference_batch_size)
    saved = predicted_savings(bundle, profile, at.batch_size)
    judged = words.Judged(measured=measured, at=at, predicted_savings=saved, profile=profile)
    yield words.figures(measured)
    yield words.savings(judged)
    if differs := words.difference(judged):
        yield f"[yellow]{differs}[/yellow]"
    for note in measured.disturbed:
        yield f"[yellow]Disturbed while measuring[/yellow]: {escape(note)}"
    if nothing := words.warning(judged):
        yield f"[bold red]THE EXITS IN USE SAVE NOTHING HERE[/bold red]: {nothing}"


def _added(bundle: Bundle) -> str:
    """What the exits in use add where none is taken, at batch 1 and at the reference size."""
    from offramp.engine.control.costs import CostModel  # noqa: PLC0415

    profile, active = bundle.profile(), [a.exit for a in bundle.policy.active]
    sizes = sorted({profile.batch_sizes[0], bundle.manifest.calibration.reference_batch_size})
    costs = [CostModel.of(bundle.manifest, profile, size) for size in sizes]
    shares = [f"{cost.overhead(active):.1%} at batch {size}"
              for size, cost in zip(sizes, costs, strict=True)]  # fmt: skip
    return ", ".join(shares)


def _inspect(options: argparse.Namespace, console: Console) -> int:
    from offramp.compiler.cuts import find_cuts  # noqa: PLC0415
    from offramp.compiler.inspection import print_inspection  # noqa: PLC0415
    from offramp.compiler.model import read_model  # noqa: PLC0415

    with console.status("reading and simplifying the model"):
        model = read_model(options.model, answer=options.answer, simplify=not options.no_simplify)
        analysis = find_cuts(model)
    print_inspection(model, analysis)
    return 0


def _rehearse(options: argparse.Namespace, console: Console) -> int:
    from offramp.compiler.progress import TerminalProgress  # noqa: PLC0415
    from offramp.compiler.rehearse import RehearseOptions, rehearse_bundle  # noqa: PLC0415
    from offramp.compiler.rehearse_table import print_rehearsing  # noqa: PLC0415

    with TerminalProgress(console) as progress:
        done = rehearse_bundle(
            RehearseOptions(
                bundle=options.bundle,
                data=options.data,
                output=options.output,
                overwrite=options.overwrite,
                dry_run=options.dry_run,
                anew=options.anew,
                max_disagreement=options.max_disagreement,
                confidence=options.confidence,
                rehearsal_batch=options.rehearsal_batch,
                max_violations=options.max_violations,
                seed=options.seed,
            ),
            progress,
        )
    print_rehearsing(done, Console())
    return 0


def _profile(options: argparse.Namespace, console: Console) -> int:
    from offramp.compiler.profile import (  # noqa: PLC0415
        ProfileOptions,
        print_profiled,
        profile_bundle,
    )
    from offramp.compiler.progress import TerminalProgress  # noqa: PLC0415

    with TerminalProgress(console) as progress:
        done = profile_bundle(
            ProfileOptions(
                bundle=options.bundle,
                output=options.output,
                overwrite=options.overwrite,
                dry_run=options.dry_run,
                threads=options.threads,
            ),
            progress,
        )
    print_profiled(done, Console())
    return 0


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL.onnx", help="the model to slice")
    parser.add_argument(
        "--answer", metavar="NAME", help="the output that exits imitate, if several"
    )
    parser.add_argument(
        "--no-simplify", action="store_true", help="do not run onnxslim on the model"
    )


def _inspect_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eecompile inspect",
        description="List where a model can be cut, and why it cannot be cut elsewhere.",
    )
    _common(parser)
    return parser


def _rehearse_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eecompile rehearse",
        description="Adapt a bundle to a load that has changed: exits that would make batches "
        "late move towards the model's end, thresholds are raised as far as the promise asks for "
        "on the new data, and certified on a part of it. Graphs and profile stay. What is not "
        "given is as the bundle was made.",
    )
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="the bundle to adapt")
    parser.add_argument(
        "--data", type=Path, required=True, metavar="NPZ",
        help="samples of the new load: an array per input; labels (optional) only for the report",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="DIR",
                        help="write there; BUNDLE is replaced if not given")  # fmt: skip
    parser.add_argument("--overwrite", action="store_true",
                        help="replace a bundle that is at --output")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true",
                        help="only print what would change")  # fmt: skip
    parser.add_argument("--anew", action="store_true",
                        help="search the exits from scratch by rehearsal, instead of moving those "
                        "in use; thresholds may fall too")  # fmt: skip
    promise = parser.add_argument_group("the promise")
    promise.add_argument("--max-disagreement", type=_share, metavar="SHARE",
                         help="largest share of answers unlike the model's")  # fmt: skip
    promise.add_argument("--confidence", type=_share, metavar="SHARE",
                         help="that this holds on unseen data")  # fmt: skip
    _add_rehearsing(parser.add_argument_group("rehearsing"), None, None)
    parser.add_argument("--seed", type=seed, default=0, metavar="N",
                        help="of split and batches")  # fmt: skip
    return parser


def _profile_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eecompile profile",
        description="Measure a bundle's profile anew on this machine, say what its policy is "
        "predicted to save here, and write it. Graphs, policy and promise stay.",
    )
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="the bundle to measure")
    parser.add_argument("--output", type=Path, metavar="DIR",
                        help="write there; BUNDLE is replaced if not given")  # fmt: skip
    parser.add_argument("--overwrite", action="store_true",
                        help="replace a bundle that is at --output")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true",
                        help="only print what was measured")  # fmt: skip
    parser.add_argument("--threads", type=_positive, metavar="N",
                        help="of each graph; as the bundle was profiled if not given")  # fmt: skip
    return parser


def _add_rehearsing(
    group: argparse._ArgumentGroup, batch: int | None, violations: float | None
) -> None:
    group.add_argument("--rehearsal-batch", type=_positive, default=batch, metavar="N",
                       help="rows of a batch that is rehearsed")  # fmt: skip
    group.add_argument("--max-violations", type=_tolerance, default=violations, metavar="SHARE",
                       help="largest share of such batches that an exit may make later than the "
                       "unmodified model would")  # fmt: skip


def _compile_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eecompile", description=_DESCRIPTION, formatter_class=_Formatter
    )
    _common(parser)
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="NPZ",
        help="calibration data: an array per input; labels (optional) only for the report",
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="MODEL.ee if not given")
    parser.add_argument("--overwrite", action="store_true", help="replace a bundle that is there")
    promise = parser.add_argument_group("the promise")
    promise.add_argument("--max-disagreement", type=_share, default=0.01, metavar="SHARE",
                         help="largest share of answers unlike the model's")  # fmt: skip
    promise.add_argument("--confidence", type=_share, default=0.95, metavar="SHARE",
                         help="that this holds on unseen data")  # fmt: skip
    exits = parser.add_argument_group("exits")
    exits.add_argument("--exits", metavar="A,B,…",
                       help="cut points to build exits at, as inspect lists them")  # fmt: skip
    exits.add_argument("--candidates", type=_positive, default=12, metavar="N",
                       help="most exits that are built, if --exits is not given")  # fmt: skip
    exits.add_argument("--max-overhead", type=_share, metavar="SHARE",
                       help="hard limit on the time that exits may add where none is taken, at the "
                       "reference batch size; not given, that time is a price in the savings "
                       "(with --selection savings)")  # fmt: skip
    exits.add_argument("--mask", metavar="NAME", help="input that says which tokens count")
    exits.add_argument("--epochs", type=_positive, default=8, metavar="N", help="of training")
    exits.add_argument("--augment", choices=["auto", "off"], default="auto",
                       help="auto: heads train on samples made from the data too, labelled by the "
                       "model: mixed images and vectors, spliced texts")  # fmt: skip
    rehearsal = parser.add_argument_group("choosing the exits in use")
    rehearsal.add_argument("--selection", choices=["savings", "pame"], default="savings",
                           help="savings: those that save most time together; pame: one by one, "
                           "by rehearsing batches, such that batches do not become late. "
                           "Thresholds are certified alike")  # fmt: skip
    _add_rehearsing(rehearsal, 32, 0.02)
    engines = parser.add_argument_group("engines", "With --backend tensorrt only.")
    engines.add_argument("--backend", choices=["onnxruntime", "tensorrt"], default="onnxruntime",
                         help="tensorrt: build the bundle's engines too, as eecompile build "
                         "does")  # fmt: skip
    add_engine_arguments(engines)
    tuning = parser.add_argument_group("measuring")
    tuning.add_argument("--reference-batch-size", type=_positive, default=8, metavar="N",
                        help="savings are predicted at this size")  # fmt: skip
    tuning.add_argument("--threads", type=_positive, default=1, metavar="N",
                        help="of each graph while profiling")  # fmt: skip
    tuning.add_argument("--tolerance", type=_share, default=1e-5, metavar="X",
                        help="relative difference allowed between slices and model")  # fmt: skip
    tuning.add_argument("--seed", type=seed, default=0, metavar="N", help="of splits and training")
    return parser


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the description's lines and shows defaults."""


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _tolerance(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or between 0 and 1")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


_COMPILE = Command(_compile_parser, _compile)
COMMANDS = {
    "inspect": Command(_inspect_parser, _inspect),
    "rehearse": Command(_rehearse_parser, _rehearse),
    "profile": Command(_profile_parser, _profile),
    "build": Command(build_parser, run_build),
    "export": Command(export_parser, run_export),
}
"""By name; anything else compiles a model. A model file called like one is given as ./NAME."""


if __name__ == "__main__":
    sys.exit(main())
