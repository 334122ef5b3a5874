"""Changed inputs are noticed, like ones are not."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from offramp.engine.control.shift import (
    LEAST_REFERENCE,
    ShiftDetector,
    chi_square,
    chi_square_quantile,
)


def confidences(
    rng: np.random.Generator, count: int, *, hardness: float = 0.0
) -> NDArray[np.float32]:
    """float32[2, count]: of an exit that all reach, and one that the unsure half reaches."""
    first = rng.beta(5 - hardness, 1.5, count)
    second = np.where(first < 0.8, rng.beta(4 - hardness, 1.5, count), np.nan)
    return np.stack([first, second]).astype(np.float32)


def rings_after(
    detector: ShiftDetector, samples: NDArray[np.float32], chunk: int = 50
) -> int | None:
    """Samples until it notices; ``None`` if it does not."""
    for first in range(0, samples.shape[1], chunk):
        if detector.add(samples[:, first : first + chunk]):
            return first + chunk
    return None


def test_samples_that_stay_alike_are_no_shift() -> None:
    rng = np.random.default_rng(0)
    for _ in range(10):
        detector = ShiftDetector()
        detector.reset(confidences(rng, 2000))
        assert rings_after(detector, confidences(rng, 20_000)) is None


@pytest.mark.parametrize(("hardness", "within"), [(2.0, 400), (1.0, 3200)])
def test_harder_samples_are_noticed(hardness: float, within: int) -> None:
    """The larger the step, the sooner; twice what it took in the slowest of 20 streams."""
    rng = np.random.default_rng(1)
    for _ in range(10):
        detector = ShiftDetector()
        detector.reset(confidences(rng, 4000))
        assert rings_after(detector, confidences(rng, 3000)) is None
        found = rings_after(detector, confidences(rng, 8000, hardness=hardness))
        assert found is not None
        assert found <= within


def test_without_a_reference_the_first_samples_are_one() -> None:
    rng = np.random.default_rng(2)
    detector = ShiftDetector()
    detector.reset(confidences(rng, LEAST_REFERENCE - 100))
    assert not detector.add(confidences(rng, 99, hardness=3.0))
    assert not detector.add(confidences(rng, 1))
    assert rings_after(detector, confidences(rng, 3000, hardness=3.0)) is not None


def test_an_exit_that_hardly_anybody_reached_is_left_out() -> None:
    rng = np.random.default_rng(3)
    reference = confidences(rng, 1000)
    reference[1, 100:] = np.nan
    detector = ShiftDetector()
    detector.reset(reference)
    changed = confidences(rng, 4000)
    changed[1] = np.where(np.isnan(changed[1]), np.nan, 0.1)
    assert rings_after(detector, changed) is None


def test_a_stream_whose_samples_follow_each_other_rings_more_rarely_in_time() -> None:
    """An autoregressive stream differs from window to window; its excess is learned."""
    rng = np.random.default_rng(4)
    noise, state, values = rng.standard_normal(60_000), 0.0, []
    for step in noise:
        state = 0.95 * state + np.sqrt(1 - 0.95**2) * step
        values.append(1 / (1 + np.exp(-state)))
    stream = np.array([values], np.float32)
    detector, rings, at = ShiftDetector(), [], 0
    while (after := rings_after(detector, stream[:, at:])) is not None:
        at += after
        rings.append(at)
        detector.reset()
    assert sum(ring <= 30_000 for ring in rings) > sum(ring > 30_000 for ring in rings) > 0


def test_the_statistic_is_pearsons() -> None:
    """[[10, 30], [20, 20]] against [[30, 10], [20, 20]] by hand: 4 · 10² / 20 = 20, and 0."""
    recent = np.array([[10.0, 30.0], [20.0, 20.0]])
    before = np.array([[30.0, 10.0], [20.0, 20.0]])
    assert chi_square(recent, before) == (pytest.approx(20.0), 2)
    empty = np.zeros((2, 2))
    assert chi_square(empty, before) == (0.0, 0)


@pytest.mark.parametrize(
    ("tail", "freedom", "exact"), [(0.05, 9, 16.919), (0.001, 9, 27.877), (0.001, 27, 55.476)]
)
def test_the_quantile_is_near_the_tables(tail: float, freedom: int, exact: float) -> None:
    assert chi_square_quantile(tail, freedom) == pytest.approx(exact, rel=1e-2)


@pytest.mark.parametrize("significance", [0.0, 1.0, -1.0])
def test_an_impossible_significance_is_refused(significance: float) -> None:
    with pytest.raises(ValueError, match="significance is"):
        ShiftDetector(significance=significance)
