"""The search for rows that are no independent samples, from the surest reason to the least sure."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from offramp.calibration.data.dataset import Dataset
from offramp.calibration.data.groups import Groups, Overlaps, components
from offramp.calibration.groups.copies import near_copies
from offramp.calibration.groups.films import film_blocks
from offramp.calibration.groups.sketch import RowSketch, sketch
from offramp.calibration.groups.windows import overlapping_windows

_LEAST_COPIES: Final = 0.001
"""Share of the rows that must be nearly the same as others, or no such rows are joined: so few
change no certificate, and large sets of pictures have some."""


def find_groups(dataset: Dataset, *, within: float) -> Groups:
    """Partition the rows of a data set into what counts as one sample each.

    In turn, each step on the representatives of the one before: rows of one number in
    ``dataset.group``, equal rows, nearly equal rows (:mod:`.copies`), overlapping windows
    (:mod:`.windows`), and consecutive rows that are alike (:mod:`.films`). The same data give the
    same groups. With ``within`` 0 only the first two steps are done: the user says that the others
    are independent.
    """
    groups = _named(dataset, Groups.singletons(len(dataset)))
    rows = sketch(dataset)
    groups = _equal(rows, groups)
    return groups if within == 0 else _in_series(rows, _near(rows, groups, within))


def _named(dataset: Dataset, groups: Groups) -> Groups:
    if dataset.group is None:
        return groups
    return groups.joined(dataset.group, "{:,} are in the group of another (--group)")


def _equal(rows: RowSketch, groups: Groups) -> Groups:
    """Join groups that have any two equal rows."""
    order = np.argsort(rows.whole, kind="stable")
    same = np.flatnonzero(rows.whole[order[1:]] == rows.whole[order[:-1]])
    number = groups.number[order]
    label = components(len(groups), number[same], number[same + 1])
    return groups.joined(label, "{:,} are duplicates of another")


def _near(rows: RowSketch, groups: Groups, within: float) -> Groups:
    chosen = groups.representative
    if not rows.position.shape[1]:
        return groups
    label = near_copies(rows.position[chosen], rows.fixed[chosen], within)
    joined = groups.joined(label, "{:,} are nearly the same as another")
    return joined if len(groups) - len(joined) >= _LEAST_COPIES * groups.rows else groups


def _in_series(rows: RowSketch, groups: Groups) -> Groups:
    windows = overlapping_windows(rows, groups.representative)
    if windows is not None:
        reason = "{:,} overlap with another, as windows do"
        overlaps = Overlaps(window=groups.number, values=windows.values)
        joined = groups.joined(windows.label, reason, shared=windows.shared)
        groups = groups if joined is groups else replace(joined, overlaps=overlaps)
    label = film_blocks(rows.position[groups.representative])
    return groups.joined(label, "{:,} resemble the row before or after them, as in a film")
