"""Time and quality of threshold tuning: search, greedy and path against plain loops.

    export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
    python -m benchmarks.thresholds [--json FILE]

Times are medians over ``--problems`` random problems with 10 exits and a bound of 1 %. The loss is
relative to the best known savings of the problem: the exact optimum at 512 samples, otherwise the
result of a beam search with 400 states. ``loops`` is Apparate's greedy algorithm, written as plain
loops over samples; the figure is how many times as fast our greedy algorithm is on the same
problems.
"""

from __future__ import annotations

import os
import statistics
from typing import TYPE_CHECKING, Any

from benchmarks.common import make_parser, time_ms
from tests.unit.certify.problems import greedy_loops, realistic, tree_optimum, unstructured

from offramp.baselines.thresholds import beam_search, tune
from offramp.certify import AgreementCurve, Records, common_path, evaluate, walk
from offramp.certify.binomial import count_allowed
from offramp.tools.bench.common.output import check_outputs, describe_environment, write_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.certify.problems import Problem

EXITS = 10
BOUND = 0.01
METHODS = ("search", "greedy", "path")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--samples", type=int, nargs="+", default=[512, 4096, 16384])
    parser.add_argument("--problems", type=int, default=10, help="problems of each kind")
    parser.add_argument(
        "--loops-up-to",
        type=int,
        default=4096,
        help="largest number of samples on which the loops run, since they are slow",
    )
    arguments = parser.parse_args()
    check_outputs(arguments.json)
    rows = []
    for samples in arguments.samples:
        for kind, draw in (("realistic", realistic), ("unstructured", unstructured)):
            count = arguments.problems if samples <= 512 else max(1, arguments.problems // 5)
            problems = [draw(seed, EXITS, samples) for seed in range(count)]
            rows += measure(kind, problems, loops=samples <= arguments.loops_up_to)
    report = {
        "rows": rows,
        "walk_20x10000x400_ms": time_ms(walk_largest()),
        "environment": describe_environment(
            exits=EXITS,
            max_disagreement=BOUND,
            seeds=f"0 to {arguments.problems - 1}",
            OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "unset"),
        ),
    }
    show(report)
    write_json(arguments.json, report)


def measure(kind: str, problems: list[Problem], *, loops: bool) -> list[dict[str, Any]]:
    """Return one row per method, over all problems."""
    samples = problems[0][0].shape[1]
    allowed = count_allowed(BOUND, samples)
    best = [best_known(problem, allowed) for problem in problems]
    rows = []
    for method in METHODS:
        tunings = [tune(*problem, BOUND, method) for problem in problems]
        times = [time_ms(lambda p=p, m=method: tune(*p, BOUND, m)) for p in problems]
        losses = [1 - t.savings / b for t, b in zip(tunings, best, strict=True)]
        rows.append(row(kind, samples, method, times, losses))
    if loops:
        few = problems[:3]
        times = [time_ms(lambda p=p: greedy_loops(p, allowed), repeat=1) for p in few]
        ours = [time_ms(lambda p=p: tune(*p, BOUND, "greedy")) for p in few]
        faster = statistics.median(t / o for t, o in zip(times, ours, strict=True))
        rows.append({**row(kind, samples, "loops", times, []), "greedy_times_as_fast": faster})
    return rows


def row(
    kind: str, samples: int, method: str, times: list[float], losses: list[float]
) -> dict[str, Any]:
    return {
        "kind": kind,
        "samples": samples,
        "method": method,
        "problems": len(times),
        "median_ms": statistics.median(times),
        "mean_loss": statistics.fmean(losses) if losses else None,
        "worst_loss": max(losses) if losses else None,
    }


def best_known(problem: Problem, allowed: int) -> float:
    found = tune(*problem, BOUND)
    if problem[0].shape[1] <= 512:
        return tree_optimum(problem, allowed)
    wide = beam_search(Records.of(*problem), allowed, found.thresholds, width=400)
    return max(found.savings, evaluate(*problem, wide).savings)


def walk_largest() -> Callable[[], object]:
    confidence, agrees, _ = realistic(0, exits=20, samples=10_000)
    path = common_path([AgreementCurve(slope=1.0, intercept=0.0)] * 20)
    return lambda: walk(path, confidence, agrees)


def show(report: dict[str, Any]) -> None:
    print(
        f"{'samples':>7}  {'kind':<13}{'method':<8}{'median ms':>10}{'mean loss':>11}{'worst':>8}"
    )
    for r in report["rows"]:
        if r["mean_loss"] is None:
            loss = f"  greedy: {r['greedy_times_as_fast']:.0f} times as fast"
        else:
            loss = f"{r['mean_loss']:>11.2%}{r['worst_loss']:>8.2%}"
        print(f"{r['samples']:>7}  {r['kind']:<13}{r['method']:<8}{r['median_ms']:>10.1f}{loss}")
    print(f"walk of 400 levels, 20 exits, 10,000 samples: {report['walk_20x10000x400_ms']:.1f} ms")


if __name__ == "__main__":
    main()
