"""SlackFit over variants under whole loads, simulated: in time where the smallest variant is."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.unit.scheduling.variants import front_of, latencies_of

from offramp.certify.decision import MODEL_END
from offramp.engine.scheduling.policies import PolicyName, make_scheduler
from offramp.tools.bench.common.outcomes import summarise
from offramp.tools.bench.common.traces import Trace, gamma, poisson
from offramp.tools.bench.simulated_model import Behaviour, SimulatedVariant
from offramp.tools.bench.simulation import SimulatedOutcomes, draw_load, simulate

SIZE, RECORDS, SLO_MS = 16, 512, 20.0
SPEEDUPS = (1.0, 2.0, 4.0)
AGREEMENTS = (1.0, 0.95, 0.85)
SECONDS = [
    [[0.0, *((0.5e-3 + 0.5e-3 * n) / speedup for n in range(1, SIZE + 1))]] for speedup in SPEEDUPS
]
"""[variants][1][SIZE + 1]"""
CAPACITY = [SIZE / table[0][SIZE] for table in SECONDS]
"""Rows a second of each variant, in the largest batch."""


def behaviour(variant: int) -> Behaviour:
    drawn = np.random.default_rng(variant).random((1, RECORDS)) < AGREEMENTS[variant]
    return Behaviour(exits=(MODEL_END,), leaves_at=np.zeros(RECORDS, np.int64), agrees=drawn)


def simulated(policy: str, trace: Trace, streams: int) -> SimulatedOutcomes:
    points = front_of(latencies_of(SECONDS), AGREEMENTS)
    scheduler = make_scheduler(
        PolicyName.parse(policy), points, max_batch_size=SIZE, streams=streams
    )
    load = draw_load(trace.arrivals_s, trace.duration_s, RECORDS, slo_s=SLO_MS / 1e3, seed=0)
    full, *others = [
        SimulatedVariant(behaviour=behaviour(variant), seconds=table)
        for variant, table in enumerate(SECONDS)
    ]
    return simulate(full.behaviour, scheduler, full.seconds, load, streams=streams, smaller=others)


@settings(max_examples=25)
@given(
    share=st.sampled_from([0.1, 0.5, 0.9, 1.5, 2.5, 3.5]),
    cv2=st.sampled_from([1.0, 4.0]),
    streams=st.integers(1, 2),
    seed=st.integers(0, 1000),
)
def test_slackfit_is_in_time_where_the_smallest_variant_is_and_agrees_at_least_as_often(
    share: float, cv2: float, streams: int, seed: int
) -> None:
    """``share`` is of what the full model carries; the smallest carries four times that."""
    rate = share * CAPACITY[0] * streams
    trace = poisson(rate, 0.3, seed) if cv2 == 1.0 else gamma(rate, cv2, 0.3, seed)
    ours, smallest = (
        summarise(simulated(policy, trace, streams), slo_ms=SLO_MS)
        for policy in ("slackfit", "cheapest")
    )
    assume(smallest.attainment == 1.0)
    assert ours.attainment is not None
    assert ours.attainment >= 0.999
    assert ours.agreement is not None
    assert smallest.agreement is not None
    assert ours.agreement >= smallest.agreement - 0.02, "records are drawn: nearly"


def test_the_busier_it_is_the_smaller_the_variants() -> None:
    rates = [share * CAPACITY[0] for share in (0.1, 1.5, 3.9)]
    means, agreements = [], []
    for rate in rates:
        found = simulated("slackfit", poisson(rate, 0.5, 1), 1)
        means.append(float(found.variant[found.answered].mean()))
        agreements.append(float(found.agrees[found.answered].mean()))
    assert means[0] < 0.2 < 0.5 < means[1] < 1.7 < means[2]
    assert agreements == sorted(agreements, reverse=True)
    assert found.forced.tolist() == (found.answered & (found.variant > 0)).tolist()
