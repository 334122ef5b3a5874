"""E3's batch-shrink experiment (5.1.1), simulated: goodput with run-through, refill and no exits.

    python -m benchmarks.e3_halves [--json FILE]

From the paper: 16 devices, batch 8, SLO 100 ms, half of the inputs easy; goodput is the rate that
can be sustained without violating the SLO. Assumed: a model of two equal halves, where easy inputs
leave after the first; a half takes L(b) = 5 ms · (8 + b) / 16, so that a batch of 8 costs less than
twice as much as one of 1 (devices are not saturated at batch 8); exits and moving data are free.
Requests are evenly spaced, as the paper's uniform arrivals; a rate is sustained if 99.9 % of the
second half of the requests of 60 SLOs (6 s) are in time: the first half may fill a backlog. E3
dedicates devices to each half; here every device serves both: benchmarks/e3_plans.py predicts the
result of dedicated ones.
"""

from __future__ import annotations

import numpy as np
from benchmarks.common import make_parser

from offramp.certify.decision import MODEL_END
from offramp.engine.scheduling import Latencies, OperatingPoint, OperatingPoints
from offramp.engine.scheduling.policies import PolicyName, make_scheduler
from offramp.tools.bench.common.outcomes import Summary, summarise
from offramp.tools.bench.common.output import describe_environment, write_json
from offramp.tools.bench.common.traces import constant
from offramp.tools.bench.simulated_model import Behaviour
from offramp.tools.bench.simulation import draw_load, simulate

DEVICES, SLO_MS = 16, 100.0
EASY = (0.8, 0.5)
BATCH_SIZES = (1, 4, 8)
SYSTEMS = ("source", "run-through", "refill", "rebatch")
DURATION_S, RECORDS = 60 * SLO_MS / 1e3, 4_096
PUBLISHED = (
    "published (figure 7, 5.1.1): E3 up to 1.30 × BERT-BASE and up to 1.44 × DeeBERT in goodput, "
    "more with larger batches; at batch 1 a small penalty against DeeBERT"
)


def main() -> None:
    """Simulate, print, and write if asked."""
    parser = make_parser(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    goodput = {
        f"{easy:.0%} easy": {
            f"batch {size}": {
                system: round(sustained(system, easy, size, options.seed)) for system in SYSTEMS
            }
            for size in BATCH_SIZES
        }
        for easy in EASY
    }
    print("SIMULATED goodput, requests/s, and ratio to the source model:")
    for easy, sizes in goodput.items():
        for size, found in sizes.items():
            ratios = "  ".join(f"{s} {r:>6} ×{r / found['source']:.2f}" for s, r in found.items())
            print(f"  {easy:9} {size:9} {ratios}")
    print(PUBLISHED)
    if options.json is not None:
        document = {
            "simulated": True,
            "assumptions": " ".join((__doc__ or "").split("From the paper:")[1].split()),
            "published": PUBLISHED,
            "goodput_rps": goodput,
            "environment": describe_environment(seed=options.seed),
        }
        write_json(options.json, document)


def sustained(system: str, easy: float, size: int, seed: int) -> float:
    """Return the highest rate at which 99.9 % of requests are in time, to 1 %."""
    low, high = 0.3, 1.01
    while high / low > 1.01:
        share = (low * high) ** 0.5
        rate = share * device_limit(system, easy, size)
        if (run(system, easy, size, rate=rate, seed=seed).attainment or 0.0) >= 0.999:
            low = share
        else:
            high = share
    return low * device_limit(system, easy, size)


def device_limit(system: str, easy: float, size: int) -> float:
    """Return the requests per second of all devices if every batch is full at every stage."""
    halves = 2.0 if system == "source" else 2.0 - easy
    return DEVICES * size / (halves * half_s(size))


def run(system: str, easy: float, size: int, *, rate: float, seed: int) -> Summary:
    """Simulate one system at one rate."""
    row = [0.0, *(half_s(n) for n in range(1, size + 1))]
    table = [[2 * time_s for time_s in row]] if system == "source" else [row, row]
    last = len(table) - 1
    hard = np.random.default_rng(seed).random(RECORDS) >= easy
    behaviour = Behaviour(
        exits=(MODEL_END,) if not last else (0, MODEL_END),
        leaves_at=np.where(hard, last, 0),
        agrees=np.ones((last + 1, RECORDS), np.bool_),
    )
    points = OperatingPoints(
        points=(OperatingPoint(deepest=last, exit=MODEL_END, agreement=1.0),),
        latencies=Latencies(table),
    )
    policy = "delay" if system == "source" else system
    scheduler = make_scheduler(
        PolicyName.parse(policy), points, max_batch_size=size, streams=DEVICES, max_queue=10**6
    )
    trace = constant(rate, DURATION_S)
    load = draw_load(trace.arrivals_s, trace.duration_s, RECORDS, slo_s=SLO_MS / 1e3, seed=seed)
    outcomes = simulate(behaviour, scheduler, table, load, streams=DEVICES)
    return summarise(outcomes.drop_warm_up(DURATION_S / 2), slo_ms=SLO_MS)


def half_s(size: int) -> float:
    """Return the seconds of half the model for a batch."""
    return 5e-3 * (8 + size) / 16


if __name__ == "__main__":
    main()
