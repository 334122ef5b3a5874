"""Values that rows have in common at different positions, which shows windows over a series."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

LEAST_VALUES: Final = 8
"""Two rows overlap only if they share at least this number of values."""
LEAST_SHARE: Final = 0.3
"""Two rows overlap only if they share at least this part of the values of the shorter row."""


class RowValues(NamedTuple):
    """Values of rows, or of groups of rows: sorted by row, then by value, each once per row."""

    row: IntArray
    value: NDArray[np.uint64]
    place: IntArray
    """Position of the value in its row; in windows over a series it differs from row to row."""

    def renamed(self, row: IntArray) -> RowValues:
        """Renumber rows; the values of rows with the same new number are united."""
        found = row[self.row]
        order = np.lexsort((self.value, found))
        found, value, place = found[order], self.value[order], self.place[order]
        new = np.append(True, (np.diff(found) != 0) | (value[1:] != value[:-1]))
        return RowValues(found[new], value[new], place[new])

    def some(self, kept: NDArray[np.bool_]) -> RowValues:
        """Return the values that ``kept``, bool[values], marks."""
        return RowValues(self.row[kept], self.value[kept], self.place[kept])

    def shares(
        self, first: IntArray, second: IntArray, count: int, *, least: int = LEAST_VALUES
    ) -> NDArray[np.float64]:
        """Return the share of common values at different positions of two rows: float64[pairs].

        The share is 0 if the two rows have fewer than ``least`` such values. ``count`` is the
        number of all rows. Common values at the same position do not show a series: for example,
        the columns of one user in a table of purchases.
        """
        starts = np.searchsorted(self.row, np.arange(count + 1))
        sizes = np.diff(starts)
        pair, value, where = [], [], []
        for side in (first, second):
            size = sizes[side]
            place = np.repeat(starts[side] - np.cumsum(size) + size, size) + np.arange(size.sum())
            pair.append(np.repeat(np.arange(len(side)), size))
            value.append(self.value[place])
            where.append(self.place[place])
        pairs, values, places = (np.concatenate(parts) for parts in (pair, value, where))
        order = np.lexsort((values, pairs))
        pairs, values, places = pairs[order], values[order], places[order]
        twice = (pairs[1:] == pairs[:-1]) & (values[1:] == values[:-1])
        twice &= places[1:] != places[:-1]
        common = np.bincount(pairs[1:][twice], minlength=len(first))
        smaller = np.maximum(np.minimum(sizes[first], sizes[second]), 1)
        return np.where(common >= least, common / smaller, 0.0)

    def overlapping(self, others: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return whether each row overlaps with any of ``others``.

        ``others`` and the result are bool[rows].
        """
        of_others = np.unique(self.value[others[self.row]])
        place = np.minimum(np.searchsorted(of_others, self.value), max(len(of_others) - 1, 0))
        common = of_others[place] == self.value if len(of_others) else np.zeros(len(place), bool)
        count = len(others)
        many = np.bincount(self.row, weights=common, minlength=count)
        all_ = np.bincount(self.row, minlength=count)
        found: NDArray[np.bool_] = (many >= LEAST_VALUES) & (many >= LEAST_SHARE * all_)
        return found
