"""Forecasts, for the next window, of the share of rows that continue after each exit.

Methods forecast the log-odds of the share. A quantile of the forecast is derived from the method's
own past errors. A conservative forecast is a higher share than is likely, because a plan that
expects too few rows overloads its last splits. The paper uses ARIMA (3.1), without stating the
order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from offramp.cluster.planning.arima import Arima
from offramp.cluster.planning.batch_profile import BatchProfile

CONSERVATIVE: Final = 0.8
"""Quantile of the forecasts that plans use."""
_LEAST: Final = 1e-4
"""Shares are clipped to at least this distance from 0 and 1, where log-odds are infinite."""
_FEW_ERRORS: Final = 5
"""Number of past errors below which a normal distribution around 0 is assumed."""
_UNKNOWN_SPREAD: Final = 0.3
"""Assumed deviation of log-odds without past errors: a share of 0.5 is then 0.43 to 0.57."""


class Forecaster(Protocol):
    """A method of forecasting a series one step ahead."""

    @property
    def name(self) -> str:
        """Name in plans and benchmarks."""

    def predict(self, series: NDArray[np.float64]) -> NDArray[np.float64]:
        """Predict every value of a series [n] from the earlier values, and the next value.

        float64[n + 1]; the first prediction is the first value of the series.
        """


class LastValue:
    """Forecast that the next window equals the last."""

    name = "last value"

    def predict(self, series: NDArray[np.float64]) -> NDArray[np.float64]:
        """Predict that each value of a series equals the value before."""
        return np.concatenate([series[:1], series])


class Ewma:
    """Exponentially weighted moving average of the past windows."""

    name = "EWMA"

    def __init__(self, weight: float = 0.4) -> None:
        if not 0 < weight <= 1:
            raise ValueError(f"weight {weight}: expected more than 0 and at most 1")
        self._weight = weight

    def predict(self, series: NDArray[np.float64]) -> NDArray[np.float64]:
        """Predict each value of a series by the moving average of earlier values."""
        found = np.concatenate([series[:1], series])
        for i in range(1, len(found)):
            found[i] = found[i - 1] + self._weight * (series[i - 1] - found[i - 1])
        return found


class Autoregressive:
    """AR(p), fitted by least squares at every step; short series are forecast by the last value."""

    name = "AR"

    def __init__(self, order: int = 2, history: int = 60) -> None:
        if not 1 <= order < history:
            raise ValueError(f"order {order}: expected at least 1, and less than {history}")
        self._order, self._history = order, history

    def predict(self, series: NDArray[np.float64]) -> NDArray[np.float64]:
        """Predict each value of a series by a regression on the values before."""
        found = np.concatenate([series[:1], series])
        for end in range(3 * self._order + 2, len(series) + 1):
            found[end] = self._next(series[max(0, end - self._history) : end])
        return found

    def _next(self, past: NDArray[np.float64]) -> float:
        order = self._order
        rows = np.lib.stride_tricks.sliding_window_view(past, order + 1)
        before = np.column_stack([rows[:, :order], np.ones(len(rows))])
        weights, *_ = np.linalg.lstsq(before, rows[:, order], rcond=None)
        value = float(np.append(past[-order:], 1.0) @ weights)
        return min(max(value, float(past.min())), float(past.max()))  # within the observed range


def log_odds(share: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the log-odds of shares, which are first clipped away from 0 and 1."""
    held = np.clip(share, _LEAST, 1 - _LEAST)
    found: NDArray[np.float64] = np.log(held / (1 - held))
    return found


def forecast_share(
    shares: NDArray[np.float64],
    forecaster: Forecaster,
    quantile: float = CONSERVATIVE,
) -> float:
    """Forecast the next share of a series [n], so that ``quantile`` of outcomes are below it.

    NaN values are omitted. Without any other value, the share is 1.
    """
    series = log_odds(shares[np.isfinite(shares)])
    if not len(series):
        return 1.0
    predicted = forecaster.predict(series)
    errors = series[1:] - predicted[1:-1]
    value = float(predicted[-1]) + _quantile_of(errors, quantile)
    return float(1 / (1 + np.exp(-value)))


def forecast_continue_shares(
    profile: BatchProfile, forecaster: Forecaster, quantile: float = CONSERVATIVE
) -> tuple[float, ...]:
    """Forecast the share of rows that continue after each exit in the next window.

    The shares never rise with depth.
    """
    shares = profile.going_on()
    found = [
        forecast_share(shares[:, exit_], forecaster, quantile) for exit_ in range(profile.exits)
    ]
    # For an exit that was never on, assume that all rows continue. Shares may not rise with depth.
    return tuple(np.minimum.accumulate(found).tolist()) if found else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareForecast:
    """A conservative forecast for the next window, for planning."""

    method: str
    going_on: tuple[float, ...]
    """[exits]: see :func:`forecast_continue_shares`."""


LAST: Final = "last"
"""The method with the least loss in ``benchmarks/forecasts.py``. ARIMA is better by 7 % on smooth
series, and worse by 42 % on series of served models whose thresholds the controller changes when
the data shift. In the latter series only the last window is informative."""

METHODS: Final[Mapping[str, Callable[[], Forecaster]]] = {
    LAST: LastValue,
    "arima": Arima,
    "ewma": partial(Ewma, 0.7),
    "ar": Autoregressive,
}
"""Methods by option value; PlanError if a method's library is not installed."""


def forecast_next(profile: BatchProfile, forecaster: Forecaster | None = None) -> ShareForecast:
    """Forecast the next window, by default with the last value."""
    forecaster = forecaster or LastValue()
    return ShareForecast(
        method=forecaster.name, going_on=forecast_continue_shares(profile, forecaster)
    )


def _quantile_of(errors: NDArray[np.float64], quantile: float) -> float:
    if not 0 < quantile < 1:
        raise ValueError(f"quantile {quantile}: expected one between 0 and 1")
    if len(errors) >= _FEW_ERRORS:
        return float(np.quantile(errors, quantile))
    spread = np.sqrt((np.square(errors).sum() + _UNKNOWN_SPREAD**2) / (len(errors) + 1))
    return float(spread * NormalDist().inv_cdf(quantile))
