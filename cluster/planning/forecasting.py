"""Forecasts of the batch profile: the share of rows that go on behind each exit, next window.

Whatever the method, the series is the log-odds of the share, and a quantile is that of its own past
errors: a conservative forecast says that more rows go on than is likely, since a plan that expects
too few starves its last splits. The paper uses ARIMA (3.1), of an order that it does not give.
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
"""The quantile that plans are made on."""
_LEAST: Final = 1e-4
"""Shares are held this far from 0 and 1, where log-odds end."""
_FEW_ERRORS: Final = 5
"""Past errors below which a quantile is that of a normal distribution around none."""
_UNKNOWN_SPREAD: Final = 0.3
"""Deviation of log-odds that is assumed with no past errors: 0.5 is then 0.43 to 0.57."""


class Forecaster(Protocol):
    """A method of forecasting a series one step ahead."""

    @property
    def name(self) -> str:
        """As plans and benchmarks call it."""

    def predict(self, series: NDArray[np.float64]) -> NDArray[np.float64]:
        """Predict every value of a series [n] from those before it, and the one to come.

        [n + 1]; the first, before which there is nothing, is the first of the series.
        """


class LastValue:
    """The next window is like the last."""

    name = "last value"

    def predict(self, series: NDArray[np.float64]) -> NDArray[np.float64]:
        """See :class:`Forecaster`."""
        return np.concatenate([series[:1], series])


class Ewma:
    """The next window is like those before, the later the more: a weighted moving average."""

    name = "EWMA"

    def __init__(self, weight: float = 0.4) -> None:
        if not 0 < weight <= 1:
            raise ValueError(f"weight {weight}: expected more than 0 and at most 1")
        self._weight = weight

    def predict(self, series: NDArray[np.float64]) -> NDArray[np.float64]:
        """See :class:`Forecaster`."""
        found = np.concatenate([series[:1], series])
        for i in range(1, len(found)):
            found[i] = found[i - 1] + self._weight * (series[i - 1] - found[i - 1])
        return found


class Autoregressive:
    """AR(p) by least squares on the last windows, anew for every step; short series: the last."""

    name = "AR"

    def __init__(self, order: int = 2, history: int = 60) -> None:
        if not 1 <= order < history:
            raise ValueError(f"order {order}: expected at least 1, and less than {history}")
        self._order, self._history = order, history

    def predict(self, series: NDArray[np.float64]) -> NDArray[np.float64]:
        """See :class:`Forecaster`."""
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
        return min(max(value, float(past.min())), float(past.max()))  # never beyond what was seen


def log_odds(share: NDArray[np.float64]) -> NDArray[np.float64]:
    """Give the log-odds of shares, which are held off 0 and 1."""
    held = np.clip(share, _LEAST, 1 - _LEAST)
    found: NDArray[np.float64] = np.log(held / (1 - held))
    return found


def forecast_share(
    shares: NDArray[np.float64],
    forecaster: Forecaster,
    quantile: float = CONSERVATIVE,
) -> float:
    """Forecast the next share of a series [n], so high that ``quantile`` of outcomes are below.

    Values that are NaN are left out. Without any, all rows go on.
    """
    series = log_odds(shares[np.isfinite(shares)])
    if not len(series):
        return 1.0
    predicted = forecaster.predict(series)
    errors = series[1:] - predicted[1:-1]
    value = float(predicted[-1]) + _quantile_of(errors, quantile)
    return float(1 / (1 + np.exp(-value)))


def forecast_going_on(
    profile: BatchProfile, forecaster: Forecaster, quantile: float = CONSERVATIVE
) -> tuple[float, ...]:
    """Forecast the share behind each exit for the window to come; it never rises with depth."""
    shares = profile.going_on()
    found = [
        forecast_share(shares[:, exit_], forecaster, quantile) for exit_ in range(profile.exits)
    ]
    # An exit that was never on keeps all that come to it; a deeper one cannot let more through.
    return tuple(np.minimum.accumulate(found).tolist()) if found else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareForecast:
    """A conservative forecast for the window to come, as plans are made on."""

    method: str
    going_on: tuple[float, ...]
    """[exits]: see :func:`forecast_going_on`."""


LAST: Final = "last"
"""The method that lost least in ``benchmarks/forecasts.py``. ARIMA is better by 7 % on series that
are smooth, and worse by 42 % on those of served models whose thresholds the controller moves when
the data shift: there, only the last window tells."""

METHODS: Final[Mapping[str, Callable[[], Forecaster]]] = {
    LAST: LastValue,
    "arima": Arima,
    "ewma": partial(Ewma, 0.7),
    "ar": Autoregressive,
}
"""By the names that options have; PlanError where the library of one is not installed."""


def forecast_next(profile: BatchProfile, forecaster: Forecaster | None = None) -> ShareForecast:
    """Forecast the window to come, by the last value unless another method is given."""
    forecaster = forecaster or LastValue()
    return ShareForecast(method=forecaster.name, going_on=forecast_going_on(profile, forecaster))


def _quantile_of(errors: NDArray[np.float64], quantile: float) -> float:
    if not 0 < quantile < 1:
        raise ValueError(f"quantile {quantile}: expected one between 0 and 1")
    if len(errors) >= _FEW_ERRORS:
        return float(np.quantile(errors, quantile))
    spread = np.sqrt((np.square(errors).sum() + _UNKNOWN_SPREAD**2) / (len(errors) + 1))
    return float(spread * NormalDist().inv_cdf(quantile))
