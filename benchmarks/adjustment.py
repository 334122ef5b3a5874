"""Time of one ramp adjustment: the decision, without the round of tuning.

    export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
    python -m benchmarks.adjustment [--json FILE]

Situations have thirteen exits, of which about half are in use, so that every rule has candidates.
They are drawn at random (seeded) until each kind has the requested number. The kinds are: some
exits lose time; no exit loses time and one is added; no exit loses time and one is shifted. Each
situation is decided several times. A figure is the median, over the situations of a kind, of a
situation's median time. ``all in use`` is the most expensive to evaluate. Apparate reports 0.5 ms
per round (5.4).
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import numpy as np
from benchmarks.common import make_parser, time_ms

from offramp.bundle.schema.policy import NEVER
from offramp.engine.control.adjustment import Reason, adjust
from offramp.engine.control.costs import CostModel
from offramp.tools.bench.common.output import check_outputs, describe_environment, write_json

EXITS = 13
SEED = 0
KINDS = {
    Reason.HARMFUL: "some lose",
    Reason.PROBED_BEFORE_BEST: "one added",
    Reason.SHIFTED_WORST: "one shifted",
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--samples", type=int, nargs="+", default=[128, 512])
    parser.add_argument(
        "--situations", type=int, default=50, help="number of situations of each kind"
    )
    parser.add_argument(
        "--repeat", type=int, default=21, help="number of decisions of each situation"
    )
    arguments = parser.parse_args()
    check_outputs(arguments.json)
    rows = []
    for samples in arguments.samples:
        for kind, situations in draw(samples, arguments.situations).items():
            times = [
                time_ms(partial(adjust, **situation), arguments.repeat) for situation in situations
            ]
            rows.append(
                {
                    "samples": samples,
                    "kind": kind,
                    "situations": len(times),
                    "median_ms": statistics.median(times),
                    "slowest_ms": max(times),
                }
            )
            print(
                "{samples:>5}  {kind:<13}{median_ms:>8.3f} ms, slowest {slowest_ms:.3f}".format(
                    **rows[-1]
                )
            )
    environment = describe_environment(seed=SEED, exits=EXITS, repeat=arguments.repeat)
    write_json(arguments.json, {"rows": rows, "environment": environment})


def draw(samples: int, count: int) -> dict[str, list[dict[str, Any]]]:
    """Draw random situations; return them by kind."""
    rng = np.random.default_rng(SEED)
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS.values()}
    while any(len(situations) < count for situations in found.values()):
        situation = situation_of(rng, samples, sorted(rng.choice(EXITS, 6, replace=False).tolist()))
        kind = KINDS.get(adjust(**situation).reason)
        if kind is not None and len(found[kind]) < count:
            found[kind].append(situation)
    everything = list(range(EXITS))
    found["all in use"] = [situation_of(rng, samples, everything) for _ in range(count)]
    return found


def situation_of(rng: np.random.Generator, samples: int, active: list[int]) -> dict[str, Any]:
    """Return a random situation: confidence rises with depth; its rise and the exits' costs
    vary.
    """
    surer = np.array(active)[:, None] / EXITS * rng.uniform(0.1, 0.6)
    confidence = rng.random((len(active), samples)) * (1 - surer) + surer
    costs = CostModel(
        source_ms=float(EXITS + 1),
        segments_ms=(1.0,) * (EXITS + 1),
        stages_ms=(0.01,) * EXITS,
        after_segment=tuple(range(EXITS)),
        exits_ms=tuple(rng.uniform(0.001, 0.3, EXITS).tolist()),
    )
    thresholds = rng.uniform(0.6, 1.0, len(active))
    thresholds[rng.random(len(active)) < 0.1 * rng.random()] = NEVER
    slack = rng.choice([1.001, 1.5])
    return {
        "confidence": confidence.astype(np.float32),
        "active": active,
        "thresholds": thresholds.tolist(),
        "costs": costs,
        "max_overhead": costs.overhead(active) * slack,
    }


if __name__ == "__main__":
    main()
