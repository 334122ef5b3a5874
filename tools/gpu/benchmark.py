"""Measurements of kernels, engines and the runtime on a GPU, written as JSON after every step.

    python -m offramp.tools.gpu.benchmark [--only PART] [--output FILE]

Parts:
    kernels   exit check and compaction, compared with a plain copy
    engines   of ResNet-50 and of the example: built, checked, loaded, timed
    models    bundles of --models, with the files that the backend needs
    pame      stages against the source model: latencies (figure 9), time by part (figure 17)
    parallel  throughput over tau_b with two streams (figure 18), with CUDA graphs and without
    soak      five minutes of load in audit mode: growth of memory, lost requests

An interrupted run resumes: existing engines are not rebuilt, requested parts are measured again,
and other parts in the file stay. All times in the file are measured, none predicted; exits are
replayed, since random weights have no meaningful confidence.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from offramp.bundle.engines import Precision
from offramp.compiler.common.errors import CompileError
from offramp.engine.common.errors import BackendError
from offramp.engine.tensorrt import probe
from offramp.tools.gpu.environment import hardware
from offramp.tools.gpu.machine import GpuMachine, Machine
from offramp.tools.gpu.models import MODELS
from offramp.tools.gpu.runtime import RuntimeBench, RuntimeOptions, held

RUNTIME = ("models", "pame", "parallel", "soak")
PARTS = ("kernels", "engines", *RUNTIME)
_PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "fp16")
_REPOSITORY = Path(__file__).resolve().parents[2]
SHARE_GOAL, BANDWIDTH_GOAL = 0.02, 0.7


class Document:
    """The JSON file, rewritten after every part."""

    def __init__(self, path: Path) -> None:
        """Continue an existing file, if there is one."""
        self._path = path
        self.content: dict[str, Any] = {}
        if path.is_file():
            self.content = json.loads(path.read_text())

    def save(self, **parts: Any) -> None:
        """Add parts to the document, and write the file."""
        self.content.update(parts)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self._path.with_name(self._path.name + ".part")
        scratch.write_text(json.dumps(self.content, indent=1) + "\n")
        scratch.replace(self._path)


def measure_kernels(options: argparse.Namespace, document: Document) -> None:
    """Measure stage ends and compaction."""
    from offramp.tools.gpu.device import open_gpu  # noqa: PLC0415
    from offramp.tools.gpu.stage_ends import measure  # noqa: PLC0415

    with open_gpu() as gpu:
        found = measure(gpu, rounds=options.rounds, seed=options.seed)
    document.save(kernels={**_circumstances(options), **found})


def measure_engines(options: argparse.Namespace, document: Document) -> None:
    """Build, check, load and time engines of ResNet-50 and of the example."""
    from offramp.compiler.common.errors import EngineBuildError  # noqa: PLC0415
    from offramp.compiler.engines.tensorrt_builder import TensorRTBuilder  # noqa: PLC0415
    from offramp.tools.gpu.engines import EngineBench  # noqa: PLC0415

    began = time.monotonic()
    builder = TensorRTBuilder("cuda:0")
    kept = document.content.get("engines", {}).get("units", {})
    units: dict[str, Any] = dict(kept)
    for precision in options.precisions:
        bench = EngineBench(
            precision=precision,
            batches=options.batches,
            rounds=options.rounds,
            plans=options.plans,
            optimization_level=options.optimization_level,
        )
        ready = []
        for subject in _subjects(options, precision, builder.version):
            key = f"{subject.model}/{subject.name}/{precision}"
            if not bench.plan_path(subject).is_file() and _spent(began) > options.build_limit_s:
                print(f"{key}: not built, {options.build_limit_s} s are over; run it again")
                continue
            try:
                units[key] = bench.build(subject, builder)
            except EngineBuildError as error:  # the other engines are still useful
                units[key] = {"failed": str(error)}
                print(f"{key}: {error}", flush=True)
            else:
                print(f"{key}: built in {units[key]['measured_build_s']:.1f} s", flush=True)
                ready.append(subject)
            document.save(engines={**_circumstances(options), "units": units})
        for name, times in bench.measure(ready).items():
            units[f"{name}/{precision}"].update(times)
        document.save(engines={**_circumstances(options), "units": units})
    builder.close()


def measure_runtime(
    part: str, options: argparse.Namespace, document: Document, machine: Machine
) -> None:
    """Measure one part of :data:`RUNTIME`, into the document's entry for part and backend."""
    entry = f"{part}_{_variant(options)}"
    bench = RuntimeBench(machine, _runtime_options(options), MODELS)
    measure = {
        "models": bench.build,
        "pame": bench.compare,
        "parallel": bench.parallel,
        "soak": bench.soak,
    }[part]
    circumstances = _circumstances(options)

    def save(found: Mapping[str, Any]) -> None:
        document.save(**{entry: {**circumstances, "models": found}})

    measure(save, document.content.get(entry, {}).get("models", {}))


def _variant(options: argparse.Namespace) -> str:
    """Return the measured variant of a GPU: ``tensorrt_fp32``, ``cuda_fp32``."""
    return f"{options.backend}_{_runtime_precision(options)}"


def _runtime_precision(options: argparse.Namespace) -> Precision:
    """Return the first requested precision; with ONNX Runtime, models stay as they are."""
    first: Precision = options.precisions[0]
    return first if options.backend == "tensorrt" else "fp32"


def _runtime_options(options: argparse.Namespace) -> RuntimeOptions:
    names = (
        "models", "sizes", "served", "go_on", "recorded", "rounds", "seed", "graphs", "requests",
        "soak_s",
    )  # fmt: skip
    folder = options.plans / f"bundles-{_runtime_precision(options)}"
    return RuntimeOptions(folder=folder, **{name: getattr(options, name) for name in names})


def _subjects(options: argparse.Namespace, precision: Precision, tensorrt: str) -> Iterator[Any]:
    from offramp.tools.gpu.engines import bundle_subjects, resnet_subjects  # noqa: PLC0415

    if options.bundle.is_dir():
        yield from bundle_subjects(options.bundle, options.data, precision, tensorrt)
    else:
        print(f"there is no compiled example at {options.bundle}: left out")
    yield from resnet_subjects(precision, options.seed)


def shares(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cost of a stage end relative to its stage, if both were measured."""
    units = content.get("engines", {}).get("units", {})
    found = []
    for end in content.get("kernels", {}).get("stage_ends", ()):
        model, _, stage = end["stage"].partition(" ")
        for key, unit in units.items():
            stage_ms = unit.get("measured_ms_by_batch", {}).get(str(end["rows"]))
            if key.startswith(f"{model}/{stage}/") and stage_ms:
                found.append(
                    {
                        "stage": end["stage"],
                        "precision": unit["precision"],
                        "rows": end["rows"],
                        "survivors": end["survivors"],
                        "share_of_stage": end["measured_ms"] / stage_ms,
                    }
                )
    return found


def _circumstances(options: argparse.Namespace) -> dict[str, Any]:
    """Return the conditions that a figure depends on."""
    return {
        "hardware": hardware(),
        "command": "python -m offramp.tools.gpu.benchmark "
        + " ".join(map(_relative, sys.argv[1:])),
        "seed": options.seed,
        "rounds": options.rounds,
        "measured_utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _relative(argument: str) -> str:
    """Return an argument without the machine's own paths."""
    if not Path(argument).is_absolute():
        return argument
    inside = Path(argument).is_relative_to(_REPOSITORY)
    return str(Path(argument).relative_to(_REPOSITORY)) if inside else Path(argument).name


def _spent(began: float) -> float:
    return time.monotonic() - began


def table(content: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a short table of the figures."""
    for unit, facts in content.get("engines", {}).get("units", {}).items():
        if "failed" in facts:
            yield f"{unit:28} FAILED: {facts['failed']}"
            continue
        times = facts.get("measured_ms_by_batch", {})
        shown = "  ".join(f"{batch}: {ms:.3f}" for batch, ms in times.items())
        worst = max(facts["measured_difference_by_profile"])
        verdict = "agrees" if facts["agrees"] else "DIFFERS"
        yield (
            f"{unit:28} built {facts['measured_build_s']:6.1f} s, loaded "
            f"{facts.get('measured_load_s', float('nan')):5.2f} s, {verdict} ({worst:.0e}); "
            f"ms by batch {shown}"
        )
    for size in content.get("kernels", {}).get("compaction", ()):
        mib = size["rows"] * size["row_bytes"] / 2**20
        rates = ", ".join(f"{name} {rate:.0f}" for name, rate in size["gb_per_s"].items())
        yield f"compaction {size['rows']:6} rows, {mib:7.2f} MiB: GB/s {rates}"
    for share in content.get("share_of_stage", ()):
        if share["rows"] == 32 and share["survivors"] == 16:
            yield (
                f"stage end of {share['stage']} at 32, half go on, {share['precision']}: "
                f"{share['share_of_stage']:.2%} of the stage (goal: {SHARE_GOAL:.0%})"
            )
    large = [
        size["share_of_copy"]["stage_end"]
        for size in content.get("kernels", {}).get("compaction", ())
        if size["rows"] * size["row_bytes"] >= 1 << 26
    ]
    if large:
        yield (
            f"compaction of 64 MiB and more: {min(large):.0%} of a copy's rate at least "
            f"(goal: {BANDWIDTH_GOAL:.0%})"
        )


def _parser() -> argparse.ArgumentParser:
    place = Path(os.environ.get("OFFRAMP_GPU_PLACE", "/tmp/offramp-gpu"))
    parser = argparse.ArgumentParser(
        prog="benchmark", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--only", choices=PARTS, action="append",
        help="measure only this part; may be repeated (default: all)")  # fmt: skip
    add("--output", type=Path, default=Path("benchmarks/results/gpu.json"),
        help="JSON file (default: %(default)s)")  # fmt: skip
    add(
        "--rounds",
        type=int,
        default=7,
        help="number of rounds, whose median is reported (default: 7)",
    )
    add("--seed", type=int, default=0, help="seed of weights, inputs and scores (default: 0)")
    add("--batches", type=_batches, default=(1, 8, 32, 64, 128), metavar="N,N,…",
        help="largest batch sizes of the engines' optimisation profiles (default: "
        "1,8,32,64,128)")  # fmt: skip
    add("--precisions", type=_precisions, default=("fp32",), metavar="P,P,…",
        help="precisions, some of fp32, tf32 and fp16; the runtime is measured in the first one "
        "(default: fp32)")  # fmt: skip
    add("--optimization-level", type=int, default=3, choices=range(6),
        help="TensorRT's optimisation level (default: 3)")  # fmt: skip
    add("--build-limit-s", type=float, default=360,
        help="seconds after which no further engine is built (default: 360)")  # fmt: skip
    add("--bundle", type=Path, default=place / "bundles" / "fashion.ee",
        help="bundle of the compiled example (default: where setup.sh put it)")  # fmt: skip
    add("--data", type=Path, default=_REPOSITORY / "examples/fashion/calibration.npz",
        help="data of that bundle (default: the repository's)")  # fmt: skip
    add("--plans", type=Path, default=place / "plans",
        help="folder for built engines (default: next to the default bundle)")  # fmt: skip
    runtime = parser.add_argument_group("models, pame, parallel and soak")
    add = runtime.add_argument
    add(
        "--backend",
        choices=("tensorrt", "cuda"),
        default="tensorrt",
        help="backend to measure (default: tensorrt)",
    )
    add("--models", type=_models, default=tuple(MODELS), metavar="M,M,…",
        help=f"models to measure, some of {', '.join(MODELS)} (default: all)")  # fmt: skip
    add("--sizes", type=_batches, default=(1, 8, 16, 32, 64), metavar="N,N,…",
        help="largest batch sizes of the engines' profiles; latencies are measured at sizes of 16 "
        "and more, the parts of a batch's time at all sizes (default: 1,8,16,32,64)")  # fmt: skip
    add("--served", type=_batches, default=(8, 32), metavar="N,N,…",
        help="largest batch sizes that the part parallel serves with (default: 8,32)")  # fmt: skip
    add("--go-on", type=_shares, default=(0.2, 0.3, 0.5), metavar="S,S,…",
        help="shares of samples that continue after the first exit; parallel and soak take the "
        "middle one (default: 0.2,0.3,0.5)")  # fmt: skip
    add("--recorded", type=Path, metavar="NPZ",
        help="file with the confidence [n, exits] and thresholds [exits] of a trained model, used "
        "instead of --go-on")  # fmt: skip
    add("--no-graphs", dest="graphs", action="store_false", help="run without CUDA graphs")
    add("--requests", type=int, default=600,
        help="requests for each system and round of the part parallel (default: 600)")  # fmt: skip
    add("--soak-s", type=float, default=300.0, help="seconds of the part soak (default: 300)")
    return parser


def _models(text: str) -> tuple[str, ...]:
    unknown = [name for name in text.split(",") if name not in MODELS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{unknown[0]} is not a model; choose from {', '.join(MODELS)}"
        )
    return tuple(text.split(","))


def _shares(text: str) -> tuple[float, ...]:
    shares = tuple(float(share) for share in text.split(","))
    if not all(0 <= share <= 1 for share in shares):
        raise argparse.ArgumentTypeError(f"{text}: shares are from 0 to 1")
    return shares


def _batches(text: str) -> tuple[int, ...]:
    sizes = tuple(int(size) for size in text.split(","))
    if list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
        raise argparse.ArgumentTypeError(f"{text}: sizes must increase, and be 1 or more")
    return sizes


def _precisions(text: str) -> tuple[str, ...]:
    unknown = set(text.split(",")) - set(_PRECISIONS)
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{sorted(unknown)[0]} is not a precision; choose from {', '.join(_PRECISIONS)}"
        )
    return tuple(text.split(","))


def main() -> int:
    """Run the command line.

    Returns:
        1 if there is no GPU, if an engine differs from ONNX Runtime, or if a long run lost memory
        or requests; else 0.
    """
    options = _parser().parse_args()
    parts = options.only or list(PARTS)
    try:
        if "engines" in parts or (options.backend == "tensorrt" and set(parts) & set(RUNTIME)):
            probe.require("cuda:0")
        else:
            probe.find_device(0)
        document = Document(options.output)
        if "kernels" in parts:
            measure_kernels(options, document)
        if "engines" in parts:
            measure_engines(options, document)
        _measure_runtime(parts, options, document)
    except (BackendError, CompileError) as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 1
    document.save(share_of_stage=shares(document.content))
    print("\n".join(table(document.content)))
    units = document.content.get("engines", {}).get("units", {})
    soak = document.content.get(f"soak_{_variant(options)}", {}).get("models", {})
    return 0 if all(unit.get("agrees") for unit in units.values()) and held(soak) else 1


def _measure_runtime(parts: Sequence[str], options: argparse.Namespace, document: Document) -> None:
    machine = GpuMachine(
        options.backend,
        precision=_runtime_precision(options),
        optimization_level=options.optimization_level,
    )
    for part in RUNTIME:
        if part in parts:
            measure_runtime(part, options, document, machine)


if __name__ == "__main__":
    sys.exit(main())
