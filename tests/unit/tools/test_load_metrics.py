from __future__ import annotations

import math
import socket

import numpy as np
import pytest
from tests.facts import facts

from offramp.server.pages.metrics import render_metrics
from offramp.testing.engine import FakeEngine
from offramp.tools.bench.load.load_settings import LoadError
from offramp.tools.bench.load.metrics_poll import (
    MetricsPoll,
    Reading,
    first_batch_size,
    mean_batch_size,
    read_metrics,
    series,
)

TEXT = """\
# TYPE offramp_queued_samples gauge
offramp_queued_samples{model="m"} 7.0
offramp_queued_samples{model="other"} 1.0
# TYPE offramp_batch_size histogram
offramp_batch_size_bucket{exit="exit 0",le="+Inf",model="m"} 10.0
offramp_batch_size_count{exit="exit 0",model="m"} 10.0
offramp_batch_size_sum{exit="exit 0",model="m"} 40.0
offramp_batch_size_count{exit="final",model="m"} 5.0
offramp_batch_size_sum{exit="final",model="m"} 8.0
offramp_batch_size_count{exit="final",model="other"} 99.0
offramp_batch_size_sum{exit="final",model="other"} 99.0
"""


def reading(at_s: float, rows: float, runs: float, queued: float = 0.0) -> Reading:
    deep = {"final": rows / 2}
    return Reading(
        at_s=at_s,
        rows={"exit 0": rows, **deep},
        runs={"exit 0": runs, "final": runs},
        queued=queued,
    )


def test_the_text_of_a_server_is_read() -> None:
    found = read_metrics(TEXT, model="m", at_s=1.5)
    assert found == Reading(
        at_s=1.5,
        rows={"exit 0": 40.0, "final": 8.0},
        runs={"exit 0": 10.0, "final": 5.0},
        queued=7.0,
    )
    assert read_metrics(TEXT, model="absent", at_s=0.0) is None


def test_versions_of_a_model_in_a_repository_are_added_up() -> None:
    text = TEXT.replace('"m"', '"m:1"') + TEXT.replace('"m"', '"m:2"')
    once, twice = (read_metrics(t, model="m", at_s=0.0) for t in (TEXT, text))
    assert once is not None
    assert twice is not None
    assert twice.queued == 2 * once.queued
    assert twice.rows == {exit_: 2 * rows for exit_, rows in once.rows.items()}
    assert twice.runs == {exit_: 2 * runs for exit_, runs in once.runs.items()}


def test_names_are_those_that_the_server_writes() -> None:
    text = render_metrics(FakeEngine()).decode()
    found = read_metrics(text, model="fake", at_s=0.0)
    assert found is not None
    assert found.rows == {"exit 0": 0.0, "final": 0.0}


def test_the_batch_size_is_that_of_the_stage_with_most_rows() -> None:
    assert first_batch_size(reading(0, 10, 10), reading(1, 50, 20)) == 4.0
    assert math.isnan(first_batch_size(reading(0, 10, 10), reading(1, 10, 10)))


def test_a_stage_that_came_with_a_new_policy_counts_from_nothing() -> None:
    before = Reading(at_s=0, rows={"final": 90.0}, runs={"final": 30.0}, queued=0)
    after = Reading(
        at_s=1,
        rows={"final": 92.0, "exit 1": 12.0},
        runs={"final": 31.0, "exit 1": 6.0},
        queued=0,
    )
    assert first_batch_size(before, after) == 2.0


def test_a_series_is_looked_up_by_time() -> None:
    found = series([reading(0.5, 0, 0), reading(1.0, 8, 4, 3), reading(2.0, 8, 4, 1)])
    assert found.queued.tolist() == [3, 1]
    sizes = found.batch_size_at(np.array([0.25, 0.5, 0.75, 1.5, 2.5]))
    np.testing.assert_array_equal(sizes, [np.nan, 2.0, 2.0, np.nan, np.nan])
    assert found.to_json() == {
        "edges_s": [0.5, 1.0, 2.0],
        "batch_size": [2.0, None],
        "queued_samples": [3.0, 1.0],
    }


def test_a_series_of_one_reading_knows_nothing() -> None:
    assert np.isnan(series([reading(0.5, 0, 0)]).batch_size_at(np.array([0.5]))).all()


def test_the_mean_is_over_the_measured_time() -> None:
    readings = [reading(0, 0, 0), reading(1, 100, 1), reading(2, 106, 3), reading(9, 999, 4)]
    assert mean_batch_size(readings, 1.0, 3.0) == 3.0
    assert mean_batch_size(readings, 1.5, 3.0) is None


def test_a_server_without_metrics_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and never listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(LoadError, match=facts("--metrics", "HOST:PORT")):
            MetricsPoll(address, "m", every_s=1.0)
