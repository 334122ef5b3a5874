"""Assignment at the least cost: each row gets a column of its own (Hungarian method).

By shortest augmenting paths, as Jonker and Volgenant have it, O(rows² · columns); written here as
scipy is no dependency. Sixty-four workers take some milliseconds.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def assign(costs: NDArray[np.float64]) -> tuple[int, ...] | None:
    """[rows]: the column of each row, at the least sum of ``costs`` [rows, columns], at least 0.

    Infinity rules a pair out; ``None`` if that leaves no assignment.
    """
    rows, columns = costs.shape
    if rows > columns:
        return None
    row_of = np.full(columns + 1, -1)  # the last column stands for the row that is being placed
    row_price, column_price = np.zeros(rows), np.zeros(columns)
    for row in range(rows):
        row_of[columns] = row
        came_from = np.full(columns, columns)
        least, used = np.full(columns, math.inf), np.zeros(columns, np.bool_)
        column = columns
        while row_of[column] >= 0:
            if column < columns:
                used[column] = True
            here = row_of[column]
            reduced = costs[here] - row_price[here] - column_price
            better = ~used & (reduced < least)
            least[better], came_from[better] = reduced[better], column
            open_ = np.where(used, math.inf, least)
            nearest = int(np.argmin(open_))
            step = float(open_[nearest])
            if math.isinf(step):
                return None
            row_price[row] += step
            row_price[row_of[:columns][used]] += step
            column_price[used] -= step
            least[~used] -= step
            column = nearest
        while column != columns:  # shift each row of the path to its next column
            before = int(came_from[column])
            row_of[column] = row_of[before]
            column = before
    found = [-1] * rows
    for column, row in enumerate(row_of[:columns].tolist()):
        if row >= 0:
            found[row] = column
    return tuple(found)
