"""Placement: choice of the cut points that get an exit (Apparate 3.1, PAME 5.2)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from offramp.compiler.common.errors import NoCutPointError, UnknownCutPointError

if TYPE_CHECKING:
    from offramp.compiler.cuts.cuts import CutAnalysis, CutPoint


DEFAULT_LIMIT = 12
"""Largest number of exits to build; PAME 5.2 finds eleven blocks to be enough."""
_SHOWN = 5
_DENSITY = 1.5
"""Exponent of the marks in :func:`_thinned`, which are denser near the model's start; 1 would space
them evenly."""


_SHARES = re.compile(r"(?P<first>\d+(?:\.\d+)?) ?%(?: ?- ?(?P<last>\d+(?:\.\d+)?) ?%)?")


@dataclass(frozen=True, slots=True)
class ExitRule:
    """Rule of the user for where exits are built, in one of five forms (Apparate 3.1, too).

    * ``/block3/Add``: the cut point of that tensor;
    * ``4``: the cut point of that number, as ``eecompile inspect`` counts them;
    * ``25%``: the cut point whose share of work before it is nearest to a quarter;
    * ``10%-60%``: every cut point with such a share of work before it;
    * ``*/Add*``: every cut point whose tensor's name matches, with ``*``, ``?`` and ``[abc]``.

    A text that is the name of a tensor is always read as that name.
    """

    text: str

    def select(self, analysis: CutAnalysis) -> tuple[CutPoint, ...]:
        """Return the selected cut points, in order; UnknownCutPointError if there are none."""
        cuts = analysis.cuts
        found = [cut for cut in cuts if cut.tensor == self.text]
        if not found and (shares := _SHARES.fullmatch(self.text)):
            found = _by_share(cuts, **shares.groupdict())
        elif not found and self.text.isdecimal():
            found = [cut for cut in cuts if cut.index == int(self.text)]
        elif not found and not set("*?[").isdisjoint(self.text):
            found = [cut for cut in cuts if fnmatchcase(cut.tensor, self.text)]
        if not found:
            raise UnknownCutPointError(self._unknown(analysis))
        return tuple(found)

    def _unknown(self, analysis: CutAnalysis) -> str:
        if not analysis.cuts:
            return f"no cut point {self.text!r}: the model has none"
        names = [cut.tensor for cut in analysis.cuts]
        near = difflib.get_close_matches(self.text, names, n=_SHOWN, cutoff=0.0)
        reasons = [r.reason for r in analysis.rejected if r.tensor == self.text]
        places = {cut.tensor: cut for cut in analysis.cuts}
        first, last = (analysis.cuts[i].flops_share_before for i in (0, -1))
        return (
            f"no cut point {self.text!r}; indices run from 0 to {len(names) - 1}, shares of work "
            f"from {first:.1%} to {last:.1%}, the nearest names are "
            + ", ".join(f"{name!r} ({places[name].index})" for name in near)
            + (f"; {self.text!r} was rejected: {reasons[0]}" if reasons else "")
        )


def _by_share(cuts: Sequence[CutPoint], first: str, last: str | None) -> list[CutPoint]:
    least = float(first) / 100
    if least > 1:
        return []
    if last is None:
        return [min(cuts, key=lambda cut: abs(cut.flops_share_before - least))]
    most = float(last) / 100
    return [cut for cut in cuts if least <= cut.flops_share_before <= most]


def choose_candidates(
    analysis: CutAnalysis,
    *,
    limit: int = DEFAULT_LIMIT,
    exits: Sequence[str | int | ExitRule] | None = None,
) -> tuple[CutPoint, ...]:
    """Choose at least one cut point to build exits at, in the order of the data flow.

    At most ``limit`` are kept, spread over the model's cost (PAME 5.2). ``exits`` are the user's
    rules, or values that are parsed as rules; they take precedence over ``limit``.

    Raises:
        NoCutPointError: The model has no cut point.
        UnknownCutPointError: One of ``exits`` names no cut point.
        ValueError: ``limit`` is not positive, or ``exits`` is empty.
    """
    if limit < 1:
        raise ValueError(f"limit is {limit}, expected at least 1")
    if not analysis.cuts:
        raise NoCutPointError(_why_none(analysis))
    if exits is not None:
        if not exits:
            raise ValueError("exits is empty, expected at least one cut point")
        rules = [e if isinstance(e, ExitRule) else ExitRule(str(e)) for e in exits]
        wanted = {cut.index for rule in rules for cut in rule.select(analysis)}
        return tuple(cut for cut in analysis.cuts if cut.index in wanted)
    return _thinned(analysis.cuts, limit)


def _thinned(cuts: Sequence[CutPoint], limit: int) -> tuple[CutPoint, ...]:
    """Keep the cut points nearest to ``limit`` marks, which are denser near the model's start.

    The marks are the shares (i/(limit+1))^1.5 of the model's cost: exits at the very start or end
    save nothing. PAME spaces marks evenly. But most samples leave at the first exits, which save
    most of the time: on the Fashion-MNIST example a first exit at 4 % of the model instead of 8 %
    still answers 61 % of the samples.
    """
    if len(cuts) <= limit:
        return tuple(cuts)
    chosen: list[CutPoint] = []
    start = 0
    for i in range(limit):
        mark = ((i + 1) / (limit + 1)) ** _DENSITY
        window = cuts[start : len(cuts) - (limit - i - 1)]
        best = min(window, key=lambda cut: abs(cut.flops_share_before - mark))
        start = best.index + 1
        chosen.append(best)
    return tuple(chosen)


_JOIN = (
    "Where two tensors carry data onward, let the model join them to one (Concat, then Split): "
    "that is a cut point. "
)


def _why_none(analysis: CutAnalysis) -> str:
    reasons = [f"`{r.tensor}` ({r.operator}): {r.reason}" for r in analysis.rejected[:_SHOWN]]
    return (
        "the model has no cut point, a place where one tensor carries all data onward, with "
        "work before and after it. "
        + (f"Rejected: {'; '.join(reasons)}. " if reasons else "")
        + (_JOIN if any("inside a block" in reason for reason in reasons) else "")
        + f"eecompile inspect lists {_places(analysis)}"
    )


def _places(analysis: CutAnalysis) -> str:
    places = sum(r.places for r in analysis.rejected)
    return f"the reasons for all {places:,} places" if places else "all places"
