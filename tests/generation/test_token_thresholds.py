"""Thresholds by stage and token (CALM 3.4)."""

from __future__ import annotations

import math

import pytest

from offramp.generation.scheduling import TokenThresholds


def test_without_decay_the_threshold_is_that_of_the_stage() -> None:
    thresholds = TokenThresholds(version=3, by_stage=(0.5, 0.25))
    assert thresholds.stages == 3
    assert [thresholds.at(0, t) for t in (0, 5, 500)] == [0.5, 0.5, 0.5]
    assert thresholds.table(2).tolist() == [[0.5, 0.5], [0.25, 0.25]]
    assert thresholds.leaves(0, 0, 0.5)
    assert not thresholds.leaves(0, 0, 0.4999)
    assert not thresholds.leaves(1, 0, math.nan)
    assert thresholds.leaves(2, 0, math.nan)  # the model's end


def test_thresholds_decay_as_in_the_paper() -> None:
    thresholds = TokenThresholds(version=0, by_stage=(0.5,), decay=4.0, most_tokens=100)
    assert thresholds.at(0, 0) == pytest.approx(0.55)  # 0.9 * 0.5 + 0.1
    assert thresholds.at(0, 25) == pytest.approx(0.45 + 0.1 * math.exp(-1.0))
    table = thresholds.table(200)[0]
    assert (table[1:] < table[:-1]).all()
    assert thresholds.at(0, 1000) == pytest.approx(0.45)


def test_a_decaying_threshold_stays_within_one() -> None:
    thresholds = TokenThresholds(version=0, by_stage=(1.0,), decay=0.0)
    assert thresholds.at(0, 7) == 1.0


def test_an_exit_that_is_off_stays_off() -> None:
    assert not TokenThresholds.off(2).leaves(0, 0, 1.0)
    decaying = TokenThresholds(version=0, by_stage=(2.0,), decay=1.0, most_tokens=8)
    assert not decaying.leaves(0, 7, 1.0)


def test_one_stage_has_no_thresholds() -> None:
    only = TokenThresholds.off(1)
    assert only.leaves(0, 0, 0.0)
    assert only.table(3).shape == (0, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"by_stage": (-0.1,)}, "thresholds must be numbers from 0"),
        ({"by_stage": (math.nan,)}, "thresholds must be numbers from 0"),
        ({"decay": -1.0}, "decay must be a number from 0, got -1.0"),
        ({"decay": math.inf}, "decay must be a number from 0"),
        ({"most_tokens": 0}, "most_tokens must be at least 1, got 0"),
    ],
)
def test_what_is_no_threshold_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenThresholds(**{"version": 0, "by_stage": (0.5,), **changes})  # type: ignore[arg-type]
