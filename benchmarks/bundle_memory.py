"""Savings of one weight file for all graphs of a bundle, in memory, on disk and in time.

    python -m benchmarks.bundle_memory [BUNDLE ...] [--layers 6] [--width 768] [--rounds 5]
        [--runs 20] [--json FILE]

Each bundle is measured as written (``named``: graphs refer to their weights in ``weights.bin``,
which ONNX Runtime maps) and in a form whose graphs contain their weights (``held``). In addition to
the given bundles a BERT of random weights is made (heads of 64, 30,522 words, 128 tokens, two
exits), which is not trained.

Memory and loading: each form in its own process, in turns, ``--rounds`` times. ``serve`` loads the
stages that the policy needs; ``both`` also the unmodified model as one graph, as a server does
while it compares or changes what it runs. Figures are the increase over the process before loading:
proportional set size, and its anonymous part, after a few runs (MiB are 2^20 bytes); ``peak`` is
the largest increase of resident memory. The files were read shortly before and come from the
system's cache. Speed: both forms in one process, batch after batch in turns, through all stages as
if no sample left, in processor time of the one computing thread; answers must be bit-identical.
Figures are medians of rounds, ratios of named to held, with minimum and maximum.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import in_a_process, make_parser, memory_mib
from numpy.typing import NDArray
from rich.table import Table

from offramp.bundle import Bundle, write_bundle
from offramp.bundle.graph_weights import WEIGHTS
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend, shrink_arena
from offramp.engine.stages.plan import Mode, make_plan
from offramp.tools.bench.common.output import (
    check_outputs,
    describe_environment,
    wide_console,
    write_json,
)

FORMS = ("held", "named")
CASES = ("serve", "both")
BATCH_SIZES = (1, 8)
_MEASURES = ("open_s", "load_s", "pss_mib", "anonymous_mib", "peak_mib")


def main() -> None:
    """Measure, print, and write if asked."""
    options = _parser().parse_args()
    if options.step is not None:
        steps = {"load": _load, "speed": _speed}
        print(json.dumps(steps[options.step](options)))
        return
    check_outputs(options.json)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        bundles = [Bundle.open(path) for path in options.bundles]
        if options.layers:
            bundles.append(_bert(Path(folder), options))
        found = {b.manifest.name: _measure(b, Path(folder), options) for b in bundles}
    for name, of_bundle in found.items():
        _print(name, of_bundle)
    environment = describe_environment(rounds=options.rounds, runs=options.runs, threads=1)
    write_json(options.json, {"measured": found, "environment": environment})


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument("bundles", type=Path, nargs="*")
    parser.add_argument(
        "--layers",
        type=int,
        default=6,
        metavar="N",
        help="number of BERT's layers, 3 or more; 0 measures no BERT",
    )
    parser.add_argument(
        "--width", type=int, default=768, metavar="N", help="width of BERT, a multiple of 64"
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument(
        "--runs", type=int, default=20, metavar="N", help="number of runs of each batch size"
    )
    parser.add_argument(
        "--folder", type=Path, help="folder for the bundles that are made and then removed"
    )
    parser.add_argument("--step", choices=["load", "speed"], help=argparse.SUPPRESS)
    parser.add_argument("--case", choices=CASES, default="serve", help=argparse.SUPPRESS)
    return parser


def _bert(folder: Path, options: argparse.Namespace) -> Bundle:
    from offramp.tools.gpu.berts import BertSize  # noqa: PLC0415
    from offramp.tools.gpu.models import bert_model  # noqa: PLC0415

    width = options.width
    size = BertSize(layers=options.layers, width=width, heads=width // 64, inner=4 * width)
    cuts = tuple(f"layer{options.layers * part // 3 - 1}.out" for part in (1, 2))
    return bert_model(f"bert-{options.layers}x{width}", size, cuts).bundle(folder, seed=0)


def _measure(named: Bundle, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    forms = {"held": _held(named, folder / f"{named.manifest.name}-held.ee"), "named": named}
    loaded: dict[str, dict[str, list[dict[str, float]]]] = {
        case: {form: [] for form in FORMS} for case in CASES
    }
    for number in range(options.rounds):
        for case in CASES:
            for form in FORMS if number % 2 == 0 else FORMS[::-1]:
                found = _child(["--step=load", f"--case={case}", str(forms[form].path)])
                loaded[case][form].append(found)
    speed = []
    for number in range(options.rounds):  # the first one gets other addresses
        order = FORMS if number % 2 == 0 else FORMS[::-1]
        paths = [str(forms[form].path) for form in order]
        speed.append(_child(["--step=speed", f"--runs={options.runs}", *paths]))
    return {
        "disk_mib": {form: _size(bundle) for form, bundle in forms.items()},
        "weights_mib": next(
            (e.size_bytes / 2**20 for e in named.manifest.files if e.path == WEIGHTS), 0.0
        ),
        "loaded": {case: _summary(loaded[case], _MEASURES) for case in CASES},
        "equal": all(one["equal"] for one in speed),
        "speed": _summary(
            {form: [one[form] for one in speed] for form in FORMS},
            [f"batch_{size}_ms" for size in BATCH_SIZES],
        ),
    }


def _held(named: Bundle, path: Path) -> Bundle:
    """Write a copy of the bundle whose graphs contain their weights."""
    names = [e.path for e in named.manifest.files if e.path not in (WEIGHTS, "policy.json")]
    files = {name: map(named.read, [name]) for name in names}
    return write_bundle(path, named.manifest, named.policy, files)


def _size(bundle: Bundle) -> float:
    return sum(entry.size_bytes for entry in bundle.manifest.files) / 2**20


def _child(arguments: Sequence[str]) -> Any:
    return in_a_process("benchmarks.bundle_memory", *arguments)


def _summary(
    rounds: Mapping[str, Sequence[Mapping[str, float]]], measures: Sequence[str]
) -> dict[str, Any]:
    """Return medians by measure and form, and median, minimum and maximum of the rounds' ratios."""
    found: dict[str, Any] = {}
    for measure in measures:
        by_form = {form: [one[measure] for one in rounds[form]] for form in FORMS}
        ratios = [b / a for a, b in zip(by_form["held"], by_form["named"], strict=True)]
        found[measure] = {
            **{form: statistics.median(values) for form, values in by_form.items()},
            "ratio": [statistics.median(ratios), min(ratios), max(ratios)],
        }
    return found


# ---------------------------------------------------------------------------------------------
# In a process of its own


def _load(options: argparse.Namespace) -> dict[str, float]:
    """Load a bundle's stages, run them, and return memory and times."""
    backend = OnnxRuntimeBackend(threads=1)
    shrink_arena()  # makes the arena, and its session
    start = time.perf_counter()
    bundle = Bundle.open(options.bundles[0])
    opened = time.perf_counter()
    inputs = _inputs(bundle, 1)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far, which a parent may have left
    before = memory_mib()
    begun = time.perf_counter()
    run = _runner(bundle, backend, options.case)
    loaded = time.perf_counter()
    for _ in range(3):
        run(inputs)
    gc.collect()
    after = memory_mib()
    return {
        "open_s": opened - start,
        "load_s": loaded - begun,
        **{f"{name}_mib": after[name] - before[name] for name in ("pss", "anonymous")},
        "peak_mib": after["peak"] - before["rss"],
    }


def _speed(options: argparse.Namespace) -> dict[str, Any]:
    """Run both forms in turns, and count the time of the thread that computes."""
    bundles = [Bundle.open(path) for path in options.bundles]
    forms = ["held" if bundle.weight_folder() is None else "named" for bundle in bundles]
    backend = OnnxRuntimeBackend(threads=1)
    runs = [_runner(bundle, backend, "serve") for bundle in bundles]
    found: dict[str, Any] = {"equal": True, **{form: {} for form in FORMS}}
    for size in BATCH_SIZES:
        inputs = _inputs(bundles[0], size)
        answers = [run(inputs) for run in runs]
        found["equal"] &= all(
            np.array_equal(a, b, equal_nan=True) for a, b in zip(*answers, strict=True)
        )
        times: dict[str, list[float]] = {form: [] for form in FORMS}
        for number in range(options.runs):
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                start = time.thread_time()
                runs[which](inputs)
                times[forms[which]].append(1e3 * (time.thread_time() - start))
        for form, taken in times.items():
            found[form][f"batch_{size}_ms"] = statistics.median(taken)
    return found


_Arrays = Mapping[str, NDArray[Any]]


def _runner(
    bundle: Bundle, backend: OnnxRuntimeBackend, case: str
) -> Callable[[_Arrays], list[NDArray[Any]]]:
    """Load stages; return a function that runs a batch through all of them."""
    plans = [make_plan(bundle)]
    if case == "both":
        plans.append(make_plan(bundle, mode=Mode.OFF))
    prepared = [[backend.prepare(spec) for spec in plan.stages] for plan in plans]
    slot = backend.open_slot()

    def run(inputs: _Arrays) -> list[NDArray[Any]]:
        given = []
        for stages in prepared:
            batch = slot.upload(inputs)
            for stage in stages:
                answer, _, carry = slot.run(stage, batch)
                if answer is not None:
                    given.append(answer)
                batch = carry or batch  # type: ignore[assignment]
        return given

    return run


def _inputs(bundle: Bundle, rows: int) -> dict[str, NDArray[Any]]:
    """Make up samples of the shapes that the bundle was calibrated on."""
    rng = np.random.default_rng(0)
    shapes = bundle.manifest.calibration.sample_shapes
    made: dict[str, NDArray[Any]] = {}
    for tensor in bundle.manifest.inputs:
        shape, dtype = (rows, *shapes[tensor.name]), np.dtype(tensor.dtype)
        if "mask" in tensor.name:
            made[tensor.name] = np.ones(shape, dtype)
        elif dtype.kind == "f":
            made[tensor.name] = rng.random(shape).astype(dtype)
        else:
            made[tensor.name] = rng.integers(0, 200, shape).astype(dtype)
    return made


# ---------------------------------------------------------------------------------------------
# For people


def _print(name: str, found: Mapping[str, Any]) -> None:
    disk = found["disk_mib"]
    equal = "equal to the bit" if found["equal"] else "NOT EQUAL"
    title = (
        f"{name}: {disk['held']:,.1f} MiB on the disk with weights in every graph, "
        f"{disk['named']:,.1f} with {WEIGHTS}; answers are {equal}; MEASURED"
    )
    table = Table("", "held", "named", "named / held", title=title)
    for case, measures in (*found["loaded"].items(), ("run", found["speed"])):
        for measure, of in measures.items():
            row = (f"{case}: {measure}", f"{of['held']:,.2f}", f"{of['named']:,.2f}")
            table.add_row(*row, _ratio(of["ratio"]))
    wide_console().print(table)


def _ratio(ratio: Sequence[float]) -> str:
    middle, least, most = ratio
    return f"{middle:.3f} ({least:.3f} to {most:.3f})"


if __name__ == "__main__":
    main()
