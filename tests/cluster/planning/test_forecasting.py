"""Forecasters on series that can be worked out by hand."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from offramp.cluster.planning.arima import Arima
from offramp.cluster.planning.batch_profile import BatchProfile, ProfileWindow
from offramp.cluster.planning.cluster_plan import PlanError
from offramp.cluster.planning.forecasting import (
    Autoregressive,
    Ewma,
    Forecaster,
    LastValue,
    forecast_continue_shares,
    forecast_share,
    log_odds,
)

ALL: tuple[Forecaster, ...] = (LastValue(), Ewma(), Autoregressive())


@pytest.mark.parametrize("method", ALL, ids=lambda method: method.name)
def test_a_prediction_knows_nothing_of_what_comes_after(method: Forecaster) -> None:
    series = np.cumsum(np.random.default_rng(0).normal(size=40))
    predicted = method.predict(series)
    assert predicted.shape == (41,)
    for end in range(1, 40):
        assert predicted[end] == method.predict(series[:end])[-1]


def test_a_moving_average_by_hand() -> None:
    predicted = Ewma(weight=0.5).predict(np.array([0.0, 1.0, 1.0]))
    assert predicted.tolist() == [0.0, 0.0, 0.5, 0.75]


def test_least_squares_finds_a_recursion() -> None:
    """x(t) = 1.6 x(t - 1) - 0.9 x(t - 2): an oscillation, which no average follows."""
    series = [1.0, 1.2]
    for _ in range(30):
        series.append(1.6 * series[-1] - 0.9 * series[-2])
    predicted = Autoregressive(order=2).predict(np.array(series[:-1]))
    assert predicted[-1] == pytest.approx(series[-1], abs=1e-9)
    assert abs(Ewma().predict(np.array(series[:-1]))[-1] - series[-1]) > 0.01


@pytest.mark.parametrize("method", ALL, ids=lambda method: method.name)
def test_a_constant_share_stays_and_quantiles_close_in_on_it(method: Forecaster) -> None:
    found = [forecast_share(np.full(n, 0.3), method, 0.9) for n in (1, 3, 20)]
    assert found[0] > found[1] > found[2] == pytest.approx(0.3)


def test_a_higher_quantile_expects_more_rows() -> None:
    shares = np.random.default_rng(1).uniform(0.2, 0.6, 50)
    found = [forecast_share(shares, LastValue(), q) for q in (0.1, 0.5, 0.9)]
    assert found == sorted(found)
    # The last value, and the quantile of what it was wrong by, in log-odds.
    series = log_odds(shares)
    expected = series[-1] + np.quantile(np.diff(series), 0.9)
    assert found[2] == pytest.approx(1 / (1 + np.exp(-expected)))


@pytest.mark.parametrize(("windows", "own"), [(5, False), (6, True)])
def test_five_errors_are_enough_for_a_quantile_of_their_own(windows: int, own: bool) -> None:
    """The last value of an alternating series has the same error each time."""
    shares = np.array([0.4, 0.6] * 3)[:windows]
    series = log_odds(shares)
    found = log_odds(np.array([forecast_share(shares, LastValue(), 0.75)]))[0] - series[-1]
    step = series[1] - series[0]
    spread = np.sqrt(((windows - 1) * step**2 + 0.3**2) / windows)
    assert found == pytest.approx(step if own else spread * 0.6744897501960817)


def test_exits_that_were_off_are_bounded_by_those_before() -> None:
    windows = [ProfileWindow(start_s=float(k), decided=(10, 0), went_on=(5, 0)) for k in range(9)]
    profile = BatchProfile(window_s=1.0, exits=2, windows=tuple(windows))
    assert forecast_continue_shares(profile, LastValue(), 0.5) == pytest.approx((0.5, 0.5))
    assert forecast_continue_shares(BatchProfile(window_s=1.0, exits=2), Ewma()) == (1.0, 1.0)


@pytest.mark.parametrize("quantile", [0.0, 1.0, 1.5])
def test_a_quantile_is_between_0_and_1(quantile: float) -> None:
    with pytest.raises(ValueError, match="expected one between 0 and 1"):
        forecast_share(np.array([0.5]), LastValue(), quantile)


def test_without_statsmodels_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "statsmodels", None)
    monkeypatch.setitem(sys.modules, "statsmodels.tsa.arima.model", None)
    with pytest.raises(PlanError, match=r"is not installed: pip install '\.\[forecast\]'"):
        Arima()


def test_what_statsmodels_fits_is_what_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of that name which says what it was asked."""
    asked = []

    class Fitted:
        def __init__(self, series: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
            self.fittedvalues = series + 1

        def forecast(self, steps: int) -> list[float]:
            return [42.0] * steps

    def arima(series: np.ndarray[tuple[int], np.dtype[np.float64]], order: object) -> object:
        asked.append(order)
        return SimpleNamespace(fit=lambda: Fitted(series))

    name = "statsmodels.tsa.arima.model"
    monkeypatch.setitem(sys.modules, "statsmodels", SimpleNamespace())
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(ARIMA=arima))
    series = np.arange(12.0)
    predicted = Arima(order=(2, 0, 1)).predict(series)
    assert asked == [(2, 0, 1)]
    assert predicted.tolist() == [0.0, *(series[1:] + 1), 42.0]
    assert Arima().predict(series[:5]).tolist() == [0.0, *range(5)]  # too few to fit
