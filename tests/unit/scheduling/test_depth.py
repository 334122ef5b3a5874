"""Depth of slackfit under whole loads, simulated, compared with the best depth in hindsight."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.depth import best_in_hindsight, run, under
from tests.unit.scheduling.helpers import points_of

from offramp.certify.decision import MODEL_END
from offramp.engine.scheduling import Latencies
from offramp.tools.bench.common.traces import Trace, constant, gamma, poisson
from offramp.tools.bench.simulated_model import Behaviour, SimulatedModel

SLO_MS = 20.0
SIZE, RECORDS = 16, 512
BESIDE = ("slackfit-bare", "cheapest")
FIRST_S, MORE_S = (
    np.array([[0.25e-3], [1.0e-3], [1.0e-3]]),
    np.array([[0.1e-3], [0.5e-3], [0.5e-3]]),
)
"""Seconds of one row, and of each further one, in three stages."""
AGREEMENTS = (0.9, 0.96, 0.995)


def synthetic() -> SimulatedModel:
    """Return a model where half of the samples leave at each exit, with given agreements of
    stages.
    """
    seconds = np.hstack([np.zeros((3, 1)), FIRST_S + MORE_S * np.arange(SIZE)])
    random = np.random.default_rng(7)
    leaves_at = random.choice(3, RECORDS, p=(0.5, 0.25, 0.25))
    # Those that leave on their own agree; a forced answer does so as often as the stage's all do.
    drawn = random.random((3, RECORDS)) < np.array(AGREEMENTS)[:, None]
    agrees = drawn | (leaves_at <= np.arange(3)[:, None])
    return SimulatedModel(
        behaviour=Behaviour(exits=(0, 1, MODEL_END), leaves_at=leaves_at, agrees=agrees),
        points=points_of(Latencies(seconds.tolist(), [0.5, 0.5, 0.0]), AGREEMENTS),
        seconds=tuple(tuple(row) for row in seconds.tolist()),
    )


CAPACITY = SIZE / synthetic().points.latencies.shrinking.busy_s[-1][SIZE]
"""Rows a second to the end, in the largest batch."""
LOADS = [
    constant(20.0, 2.0),
    *(poisson(share * CAPACITY, 0.4, 1) for share in (0.5, 0.95, 2.0)),
    *(gamma(share * CAPACITY, 8.0, 0.4, 1) for share in (0.9, 1.2)),
]


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("trace", LOADS, ids=lambda trace: f"{trace.name} {trace.rate:.0f}")
def test_slackfit_agrees_no_less_than_the_best_single_depth_in_hindsight(
    trace: Trace, streams: int
) -> None:
    rows = under(synthetic(), trace, slo_ms=SLO_MS, streams=streams)
    ours, (_, oracle) = rows["slackfit"], best_in_hindsight(rows)
    assert ours.agreement is not None
    assert oracle.agreement is not None
    assert ours.agreement >= oracle.agreement
    assert ours.attainment is not None
    assert ours.attainment >= (rows["slackfit-bare"].attainment or 0.0)
    assert ours.attainment == 1.0


def test_beyond_what_any_depth_carries_slackfit_stays_with_the_shallowest() -> None:
    model = synthetic()
    trace = poisson(1.2 * SIZE / model.points.latencies.until_s(0)[SIZE], 0.5, 1)
    rows = {p: run(p, model, trace, slo_ms=SLO_MS, streams=1) for p in ("slackfit", *BESIDE)}
    ours, bare, cheapest = (row.attainment or 0.0 for row in rows.values())
    assert 0.5 < cheapest < 0.99
    assert ours >= bare
    assert ours > cheapest - 0.03
