"""ARIMA, the paper's forecast (E3 3.1), by statsmodels (extra ``forecast``).

It is not the default, see :data:`.forecasting.LAST`.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offramp.bundle.optional_imports import optional_import
from offramp.cluster.planning.cluster_plan import PlanError

_SHORT: Final = 12
"""Smallest number of windows to fit; with fewer, the last value is the forecast."""


_INSTALL = (
    "pip install '.[forecast]' (for the dot: Offramp's source folder or wheel), or use "
    "another method"
)


class Arima:
    """ARIMA of a given order.

    It is fitted once to the whole series. So its past errors are smaller than those of real
    forecasts, which do not know later values.
    """

    name = "ARIMA"

    def __init__(self, order: tuple[int, int, int] = (1, 1, 1)) -> None:
        with optional_import("statsmodels", install=_INSTALL, raises=PlanError):
            self._models = importlib.import_module("statsmodels.tsa.arima.model")
        self._order = order

    def predict(self, series: NDArray[np.float64]) -> NDArray[np.float64]:
        """Predict every value of a series and the next one, as every :class:`.Forecaster`."""
        found = np.concatenate([series[:1], series])
        if len(series) < _SHORT or np.ptp(series) == 0:
            return found
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about starting values and convergence
            fitted = self._models.ARIMA(series, order=self._order).fit()
        found[1:-1] = fitted.fittedvalues[1:]
        found[-1] = float(fitted.forecast(1)[0])
        return found
