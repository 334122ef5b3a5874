"""Which cut points get an exit built: the candidates."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from offramp.compiler.errors import NoCutPointError, UnknownCutPointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offramp.compiler.cuts import CutAnalysis, CutPoint

DEFAULT_LIMIT = 12
"""Exits to build at most; PAME 5.2 finds eleven blocks to be enough."""
_SHOWN = 5
_DENSITY = 1.5
"""Exponent of the marks; 1 spaces candidates evenly."""


def choose_candidates(
    analysis: CutAnalysis,
    *,
    limit: int = DEFAULT_LIMIT,
    exits: Sequence[str | int] | None = None,
) -> tuple[CutPoint, ...]:
    """Choose the cut points to build exits at.

    Args:
        analysis: The model's cut points.
        limit: At most so many are kept, spread over the cost (PAME 5.2).
        exits: The user's own list, of tensor names or indices; it wins over ``limit``.

    Returns:
        The candidates in the order of the data flow, at least one.

    Raises:
        NoCutPointError: The model has no cut point.
        UnknownCutPointError: ``exits`` names something that is no cut point.
        ValueError: ``limit`` is not positive, or ``exits`` is empty.
    """
    if limit < 1:
        raise ValueError(f"limit is {limit}, expected at least 1")
    if not analysis.cuts:
        raise NoCutPointError(_why_none(analysis))
    if exits is not None:
        if not exits:
            raise ValueError("exits is empty, expected at least one cut point")
        wanted = {_find(analysis, item).index for item in exits}
        return tuple(cut for cut in analysis.cuts if cut.index in wanted)
    return _thinned(analysis.cuts, limit)


def _thinned(cuts: Sequence[CutPoint], limit: int) -> tuple[CutPoint, ...]:
    """Keep the cut points nearest to some shares of the cost, denser towards the start, none twice.

    The marks are (i/(limit+1))^1.5: neither a mark at the start nor one at the end saves anything.
    PAME spaces them evenly; but most samples leave at the first exits, and what those leave
    behind is where time is saved: on the Fashion-MNIST example a first exit at 4 % of the model
    instead of 8 % still answers 61 % of the samples.
    """
    if len(cuts) <= limit:
        return tuple(cuts)
    chosen: list[CutPoint] = []
    start = 0
    for i in range(limit):
        mark = ((i + 1) / (limit + 1)) ** _DENSITY
        reserve = limit - i - 1
        window = cuts[start : len(cuts) - reserve]
        best = min(window, key=lambda cut: abs(cut.flops_share_before - mark))
        start = best.index + 1
        chosen.append(best)
    return tuple(chosen)


def _find(analysis: CutAnalysis, item: str | int) -> CutPoint:
    """Look up one entry of the user's list; digits are an index, unless they are a name."""
    names = [cut.tensor for cut in analysis.cuts]
    if item in names:
        return analysis.cuts[names.index(str(item))]
    if str(item).isdecimal() and int(item) < len(names):
        return analysis.cuts[int(item)]
    near = difflib.get_close_matches(str(item), names, n=_SHOWN, cutoff=0.0)
    places = {cut.tensor: cut.index for cut in analysis.cuts}
    raise UnknownCutPointError(
        f"no cut point {item!r}; indices run from 0 to {len(names) - 1}, the nearest names are "
        + ", ".join(f"{name!r} ({places[name]})" for name in near)
        + _rejected_as(analysis, item)
    )


def _rejected_as(analysis: CutAnalysis, item: str | int) -> str:
    reasons = [r.reason for r in analysis.rejected if r.tensor == item]
    return f"; {item!r} was rejected: {reasons[0]}" if reasons else ""


def _why_none(analysis: CutAnalysis) -> str:
    reasons = [f"`{r.tensor}` ({r.operator}): {r.reason}" for r in analysis.rejected[:_SHOWN]]
    return (
        "the model has no cut point, a place where one tensor carries everything onward, with "
        "work before and after it. " + ("Rejected: " + "; ".join(reasons) if reasons else "")
    ).strip()
