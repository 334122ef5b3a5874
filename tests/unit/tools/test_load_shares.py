from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp.tools.bench.load.shares import deal, deal_concurrency, used_samples


def test_arrivals_are_dealt_out_in_turn() -> None:
    first, second = deal(np.array([0.0, 0.1, 0.2, 0.3, 0.4]), samples=3, processes=2)
    assert first.arrivals_s is not None
    assert second.arrivals_s is not None
    assert first.arrivals_s.tolist() == [0.0, 0.2, 0.4]
    assert first.samples.tolist() == [0, 2, 1]
    assert second.arrivals_s.tolist() == [0.1, 0.3]
    assert second.samples.tolist() == [1, 0]
    assert first.concurrency is None


def test_a_process_without_arrivals_is_left_out() -> None:
    shares = list(deal(np.array([0.0, 0.1]), samples=3, processes=5))
    assert [share.arrivals_s.tolist() for share in shares if share.arrivals_s is not None] == [
        [0.0],
        [0.1],
    ]
    assert [share.samples.tolist() for share in shares] == [[0], [1]]


@given(
    gaps=st.lists(st.floats(0, 1), min_size=1, max_size=50),
    samples=st.integers(1, 20),
    processes=st.integers(1, 8),
)
def test_every_arrival_is_sent_once_whatever_the_processes(
    gaps: list[float], samples: int, processes: int
) -> None:
    arrivals = np.cumsum(gaps)
    shares = list(deal(arrivals, samples, processes))
    sent = sorted(
        (at, sample)
        for share in shares
        if share.arrivals_s is not None
        for at, sample in zip(share.arrivals_s.tolist(), share.samples.tolist(), strict=True)
    )
    expected = sorted((at, k % samples) for k, at in enumerate(arrivals.tolist()))
    assert sent == expected
    assert used_samples(shares).tolist() == list(range(min(samples, len(gaps))))


@pytest.mark.parametrize(
    ("concurrency", "processes", "places"), [(7, 3, [3, 2, 2]), (4, 4, [1, 1, 1, 1]), (5, 1, [5])]
)
def test_places_of_a_closed_loop_are_dealt_out_evenly(
    concurrency: int, processes: int, places: list[int]
) -> None:
    shares = list(deal_concurrency(concurrency, 10, processes))
    assert [share.concurrency for share in shares] == places
    assert used_samples(shares).tolist() == list(range(10))


def test_with_fewer_samples_than_processes_some_send_the_same() -> None:
    shares = list(deal_concurrency(3, samples=2, processes=3))
    assert [share.samples.tolist() for share in shares] == [[0], [1], [0]]
