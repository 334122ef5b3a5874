"""E3's systems as they are simulated: stages, who serves them, how rows leave, what holds."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.clusters import cluster_of, model_of
from benchmarks.e3 import alike, limit_rps
from benchmarks.e3_systems import (
    Search,
    behaviour_of,
    draw_depths,
    shared,
    spans_of,
)

from offramp.certify.decision import MODEL_END

MODEL = model_of((0.5, 0.5, 0.25))
"""Four layers: half of the rows leave after the first, a quarter after the third."""
CLUSTER = cluster_of({"V100": 2}, layers=4)


def test_stages_end_at_exits_that_are_on_and_at_borders() -> None:
    assert spans_of(MODEL, [0, 2]) == ((0, 0, 0), (1, 2, 2), (3, 3, MODEL_END))
    assert spans_of(MODEL, [0], [1, 3]) == ((0, 0, 0), (1, 1, None), (2, 3, MODEL_END))
    assert spans_of(MODEL, []) == ((0, 3, MODEL_END),)


def test_rows_leave_at_the_first_exit_that_is_on_and_deep_enough() -> None:
    depths = draw_depths(MODEL.going_on, 0)
    counts = np.bincount(depths, minlength=4) / len(depths)
    np.testing.assert_allclose(counts, [0.5, 0.0, 0.25, 0.25], atol=0.03)  # four deviations
    system = shared(MODEL, CLUSTER, 4, "refill", [1])
    leaves_at = behaviour_of(system, np.array([0, 1, 2, 3])).leaves_at
    assert leaves_at.tolist() == [0, 0, 1, 1]
    assert behaviour_of(shared(MODEL, CLUSTER, 4, "delay"), depths).leaves_at.max() == 0


def test_dedicated_devices_hold_their_split_and_stealing_ones_all() -> None:
    mix = alike(0.8, 8)
    assert len(mix.plan.splits) == 3
    streams = {name: mix.systems[name].placement.streams for name in ("dedicated", "stealing")}
    every = frozenset(range(mix.systems["stealing"].placement.stages))
    assert [len(found) for found in streams.values()] == [16, 16]
    assert all(stream.holds == stream.prefers < every for stream in streams["dedicated"])
    assert all(stream.holds == every > stream.prefers for stream in streams["stealing"])
    assert every - {0} > streams["stealing"][mix.systems["stealing"].last_split].prefers


def test_what_full_batches_would_give_is_sustained_by_the_source_model_and_no_more() -> None:
    """Batches of four through the whole model take 7.5 ms on each of two devices."""
    source = shared(MODEL, CLUSTER, 4, "delay")
    limit = limit_rps(source, MODEL.shares.tolist())
    assert limit == pytest.approx(8 / 7.5e-3)
    search = Search(slo_s=0.1, duration_s=1.0)
    found = search.sustained(source, np.zeros(64, np.int64), limit)
    assert 0.96 * limit < found <= 1.01 * limit
