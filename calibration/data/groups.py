"""Groups of rows that count as one sample each, and the arithmetic of joining them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offramp.calibration.data.row_values import IntArray, RowValues

_MOST_IGNORED: Final = 0.01
"""Largest share of joined rows that is ignored. Each sample then counts as one row, since a few
coincidences must not make a certificate much more expensive."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Overlaps:
    """Values of windows over a series, from which overlaps are found."""

    window: IntArray
    """[rows]: index of the window that each row is, or that it (nearly) equals."""
    values: RowValues
    """Values that identify windows, to find windows that overlap."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups:
    """A partition of the rows of a data set, with one representative row of each group."""

    number: IntArray
    """[rows]: the group of each row; groups are numbered in the order of their representatives."""
    representative: IntArray
    """[groups]: the row that counts for each group, rising."""
    overlaps: Overlaps | None = None
    """Values that rows of neighbouring groups share, if the rows are windows over a series."""
    found: tuple[str, ...] = ()
    """Reasons why rows were joined, each with the number of rows, as phrases for messages."""

    @classmethod
    def singletons(cls, rows: int) -> Groups:
        """Return a partition in which every row is a separate group."""
        return cls(number=np.arange(rows), representative=np.arange(rows))

    def __len__(self) -> int:
        return len(self.representative)

    @property
    def rows(self) -> int:
        """Number of rows that are partitioned."""
        return len(self.number)

    @property
    def joins(self) -> bool:
        """True if any group has more than one row."""
        return len(self) < self.rows

    @property
    def represents(self) -> NDArray[np.bool_]:
        """bool[rows]: true for the representative of each group."""
        found = np.zeros(self.rows, np.bool_)
        found[self.representative] = True
        return found

    def shuffled(self, seed: int) -> NDArray[np.intp]:
        """Return the representatives in a random order.

        All rows are ordered first, so that a few equal rows do not change the order of the other
        rows.
        """
        order = np.random.default_rng(seed).permutation(self.rows)
        chosen: NDArray[np.intp] = order[self.represents[order]]
        return chosen

    @property
    def repeats(self) -> bool:
        """True if so many rows are joined that counting errors by rows makes a difference."""
        return self.rows - len(self) > _MOST_IGNORED * self.rows

    def copies(self, rows: NDArray[np.intp]) -> IntArray | None:
        """Return the size of the group of each row; ``None`` if :attr:`repeats` is false."""
        return np.bincount(self.number)[self.number[rows]] if self.repeats else None

    def members(self, chosen: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return all rows of some groups, rising."""
        wanted = np.zeros(len(self), np.bool_)
        wanted[chosen] = True
        return np.flatnonzero(wanted[self.number])

    def apart(self, rows: NDArray[np.intp], others: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the rows that do not overlap with ``others`` in neighbouring groups."""
        if self.overlaps is None:
            return rows
        window = self.overlaps.window
        named = np.zeros(int(window.max()) + 1, np.bool_)
        named[window[others]] = True
        return rows[~self.overlaps.values.overlapping(named)[window[rows]]]

    def joined(
        self, label: IntArray, reason: str, *, shared: NDArray[np.float64] | None = None
    ) -> Groups:
        """Join the groups that have equal labels, int64[groups].

        The representative that remains is the one in the middle, in the order of the file: in a
        series it is farthest from the neighbouring groups. With ``shared``, float64[groups], it is
        instead the representative of the group with the smallest value. ``reason`` has a
        placeholder for the number of rows that no longer count separately.
        """
        count = len(label)
        keys = (np.arange(count), label) if shared is None else (np.arange(count), shared, label)
        order = np.lexsort(keys)
        starts = np.flatnonzero(np.diff(label[order], prepend=label[order[0]] - 1))
        if len(starts) == count:
            return self
        sizes = np.diff(starts, append=count)
        kept = order[starts + (0 if shared is not None else (sizes - 1) // 2)]
        group = np.empty(count, np.int64)
        group[order] = np.repeat(np.arange(len(starts)), sizes)
        by_row = np.argsort(self.representative[kept], kind="stable")
        place = np.empty(len(kept), np.int64)
        place[by_row] = np.arange(len(kept))
        return replace(
            self,
            number=place[group][self.number],
            representative=self.representative[kept][by_row],
            found=(*self.found, reason.format(count - len(kept))),
        )


def components(count: int, first: IntArray, second: IntArray) -> IntArray:
    """Return the connected component of each of ``count`` nodes, named by its smallest node.

    ``first`` and ``second`` are the ends of the links.
    """
    label = np.arange(count)
    while True:
        before = label
        low = np.minimum(label[first], label[second])
        label = label.copy()
        # update both ends and the nodes that their labels name, so that long chains take few rounds
        for ends in (first, second, before[first], before[second]):
            np.minimum.at(label, ends, low)
        label = label[label]
        if np.array_equal(label, before):
            return label
