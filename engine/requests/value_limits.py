"""Check of a request's values against the limits of the model, before it joins a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import ValueBound
from offramp.bundle.schema.inputs import plain


class ValueLimits:
    """The legal values of a model's inputs, as found by the compiler."""

    def __init__(self, bounds: Sequence[ValueBound] = ()) -> None:
        self._bounds = tuple(
            (bound, _or(bound.lowest, -np.inf), _or(bound.highest, np.inf)) for bound in bounds
        )

    def wrong(self, inputs: Mapping[str, NDArray[Any]]) -> str | None:
        """Return which value is outside the model's limits; ``None`` if none is.

        Inputs are [n, …], with shapes and types already checked.
        """
        for bound, lowest, highest in self._bounds:
            values = inputs[bound.input]
            if bound.places:
                values = values.take(bound.places, bound.axis)
            # A NaN, which selects nothing, fails both comparisons.
            if values.size and not (values.min() >= lowest and values.max() <= highest):
                return _describe(bound, values, lowest, highest)
        return None


def _or(value: float | None, otherwise: float) -> float:
    """Return a bound, as an int if possible: Python compares it faster with integers."""
    if value is None:
        return otherwise
    return int(value) if float(value).is_integer() else value


def _describe(bound: ValueBound, values: NDArray[Any], lowest: float, highest: float) -> str:
    legal = (values >= lowest) & (values <= highest)
    place = [int(index) for index in np.unravel_index(int(np.argmin(legal)), values.shape)]
    value = values[tuple(place)]
    if bound.places:
        place[bound.axis] = bound.places[place[bound.axis]]
    where = ", ".join(map(str, place))
    return (
        f"input {bound.input!r} has {plain(value.item())} at [{where}], and the model takes "
        f"{bound.legal()} there ({bound.operator} fails on other values); check how the values "
        "are made, for instance that the tokenizer is the model's own"
    )
