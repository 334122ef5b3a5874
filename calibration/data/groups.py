"""Groups of rows that count as one sample each, and the arithmetic of joining them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offramp.calibration.data.row_values import IntArray, RowValues

_MOST_IGNORED: Final = 0.01
"""Share of joined rows up to which samples are tested once, as if each were one row: a certificate
must not become much dearer by a single coincidence."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Overlaps:
    """Values of windows over a series, by which windows overlap."""

    window: IntArray
    """[rows]: the window that each row is, or is a copy of."""
    values: RowValues
    """Values of the windows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups:
    """A partition of the rows of a data set, with one row of each part to stand for it."""

    number: IntArray
    """[rows]: the group of each row; groups are numbered as their representatives follow."""
    representative: IntArray
    """[groups]: the row that counts for each group, rising."""
    overlaps: Overlaps | None = None
    """What rows of neighbouring groups have in common, if they are windows over a series."""
    found: tuple[str, ...] = ()
    """Reasons to join rows that applied, each with the number of rows, as phrases for messages."""

    @classmethod
    def singletons(cls, rows: int) -> Groups:
        """Return a partition in which every row is a group of its own."""
        return cls(number=np.arange(rows), representative=np.arange(rows))

    def __len__(self) -> int:
        return len(self.representative)

    @property
    def rows(self) -> int:
        """The number of rows that are partitioned."""
        return len(self.number)

    @property
    def joins(self) -> bool:
        """Whether any group has more rows than one."""
        return len(self) < self.rows

    @property
    def represents(self) -> NDArray[np.bool_]:
        """Whether each row counts for its group, bool[rows]."""
        found = np.zeros(self.rows, np.bool_)
        found[self.representative] = True
        return found

    def shuffled(self, seed: int) -> NDArray[np.intp]:
        """Return the representatives in a random order.

        It is a part of an order of all rows: a few copies leave the other rows in their places.
        """
        order = np.random.default_rng(seed).permutation(self.rows)
        chosen: NDArray[np.intp] = order[self.represents[order]]
        return chosen

    @property
    def repeats(self) -> bool:
        """Whether so many rows are joined that it matters if errors are counted by rows."""
        return self.rows - len(self) > _MOST_IGNORED * self.rows

    def copies(self, rows: NDArray[np.intp]) -> IntArray | None:
        """Return how many rows the group of each row has; ``None`` where that does not matter."""
        return np.bincount(self.number)[self.number[rows]] if self.repeats else None

    def members(self, chosen: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return all rows of some groups, rising."""
        wanted = np.zeros(len(self), np.bool_)
        wanted[chosen] = True
        return np.flatnonzero(wanted[self.number])

    def apart(self, rows: NDArray[np.intp], others: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return those of some rows which do not overlap with others, in neighbouring groups."""
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

        The representative that stays is the one in the middle, in the order of the file: in a
        series it is farthest from the neighbouring groups. Where ``shared`` float64[groups] is
        given, it is the one with the smallest value. ``reason`` has a place for the number of rows
        that no longer count by themselves.
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
    """Return the connected component of each of ``count`` nodes: the least node in it.

    ``first`` and ``second`` are the ends of the links.
    """
    label = np.arange(count)
    while True:
        before = label
        low = np.minimum(label[first], label[second])
        label = label.copy()
        # both ends, and what their labels stand for: long chains take few rounds
        for ends in (first, second, before[first], before[second]):
            np.minimum.at(label, ends, low)
        label = label[label]
        if np.array_equal(label, before):
            return label
