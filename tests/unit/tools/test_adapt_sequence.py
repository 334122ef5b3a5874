"""Sequences: what is drawn how often, and what policies would disagree on in the long run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from benchmarks.adapt.sequence import ShiftSegment, answering_places, draw, thresholds_of
from tests.unit.tools.adapt_cases import FOUR, policy_of

from offramp.bundle import NEVER
from offramp.certify import MODEL_END


def segment(*weights: float, samples: int = 10, name: str = "some") -> ShiftSegment:
    return ShiftSegment(name=name, population=FOUR, weights=np.array(weights), samples=samples)


def test_risk_by_hand() -> None:
    both = policy_of(1, {0: 0.5, 1: 0.5})
    assert answering_places(FOUR.confidence, both).tolist() == [0, 1, 0, MODEL_END]
    assert segment(0.25, 0.25, 0.25, 0.25).risk(both) == pytest.approx(0.25)
    assert segment(0.1, 0.1, 0.7, 0.1).risk(both) == pytest.approx(0.7)
    assert segment(0.1, 0.1, 0.7, 0.1).risk(policy_of(1, {})) == 0
    # exit 0 answers all, wrongly but for the first
    assert segment(0.1, 0.1, 0.7, 0.1).risk(policy_of(1, {0: 0.0})) == pytest.approx(0.9)
    assert segment(0.1, 0.1, 0.7, 0.1).risk(policy_of(1, {0: NEVER, 1: 0.9})) == 0


def test_thresholds_are_rounded_up_as_the_engine_does() -> None:
    """0.9 as a float32 is below 0.9, so a sample of that confidence must not leave at 0.9."""
    below = np.float32(0.9)
    assert float(below) < 0.9
    thresholds = thresholds_of(policy_of(1, {1: 0.9}), 3)
    assert thresholds.tolist() == [NEVER, float(np.nextafter(below, np.float32(1))), NEVER]
    assert thresholds_of(policy_of(1, {0: float(below)}), 1).tolist() == [float(below)]


def test_drawing_follows_the_weights_and_the_seed() -> None:
    segments = [segment(0.0, 1.0, 0.0, 0.0, samples=5), segment(0.5, 0, 0, 0.5, samples=4000)]
    drawn = draw("a", "b", segments, np.random.default_rng(1))
    assert [(s.start, s.end) for s in drawn.spans] == [(0, 5), (5, 4005)]
    assert drawn.rows[:5].tolist() == [1] * 5
    counts = np.bincount(drawn.rows[5:], minlength=4)
    assert counts[1] == counts[2] == 0
    # 4,000 fair coins: 5 standard deviations are 158
    assert abs(int(counts[0]) - 2000) < 158
    np.testing.assert_array_equal(drawn.drawn.final, FOUR.final[drawn.rows])
    np.testing.assert_array_equal(drawn.drawn.confidence, FOUR.confidence[:, drawn.rows])
    np.testing.assert_array_equal(drawn.drawn.prediction, FOUR.prediction[:, drawn.rows])
    assert drawn.drawn.labels is not None
    again = draw("a", "b", segments, np.random.default_rng(1))
    np.testing.assert_array_equal(drawn.rows, again.rows)
    other = draw("a", "b", segments, np.random.default_rng(2))
    assert (drawn.rows != other.rows).any()


def test_labels_only_where_all_have_them() -> None:
    bare = replace(FOUR, labels=None)
    even = np.full(4, 0.25)
    unlabelled = ShiftSegment(name="bare", population=bare, weights=even, samples=3)
    drawn = draw("a", "b", [segment(*even), unlabelled], np.random.default_rng(0))
    assert drawn.drawn.labels is None
    assert len(drawn) == 13


@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.5, 0.5, 0.5, 0.5), (1.5, -0.5, 0.0, 0.0)])
def test_what_is_no_distribution_is_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="segment 'some': weights"):
        segment(*weights)
