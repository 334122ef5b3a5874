"""Which exits are used, and the path of thresholds that is tested: by records of tuning prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np

from offramp.certify.agreement import tuning_path
from offramp.certify.decision import FloatArray, IntArray
from offramp.generation.compiling.costs import TextCosts
from offramp.generation.promise.text_promise import TextPromise, TextRisk
from offramp.generation.promise.text_records import TextRecords

_LEVELS: Final = 32
_LEAST_RISK, _MOST_RISK = 0.03, 6.0
"""Of the first and last level, as multiples of the bound: decoding finds other risks than records
where skipped layers are filled."""
_PRICE: Final = 0.005
"""Share of the model's time that an exit has to bring, beside its own."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChosenExits:
    """Some exits, and a path of their thresholds."""

    exits: tuple[int, ...]
    """Numbers among those that were there to choose from."""
    path: FloatArray
    """float64[levels, exits], from conservative to aggressive."""
    expected: float
    """Share of the model's time that is expected at the bound, by records and measured costs."""


def choose_exits(
    records: TextRecords,
    layers: Sequence[int],
    costs: TextCosts,
    promise: TextPromise,
    *,
    differing: bool,
    fills: bool,
) -> ChosenExits | None:
    """Choose the exits that bring most at the bound; ``None`` if none bring anything.

    ``layers`` are those in front of each exit of the records. ``differing`` says that whole answers
    are to be the same; else texts are taken to differ by their wrong tokens.
    """
    best: tuple[float, tuple[int, ...], FloatArray] | None = None
    for chosen in _sets(records.exits):
        own = records.of_exits(chosen)
        path = tuning_path(own.confidences, own.agrees)
        level = _last_level(own, path, promise, promise.bound, differing=differing)
        at = own.answered_at(path[level])
        ends = [layers[exit_] for exit_ in chosen]
        share = costs.of_tokens(ends, at, fills=fills) / costs.whole + _PRICE * len(chosen)
        if best is None or share < best[0]:
            best = share, chosen, path
    assert best is not None, "there is an exit"
    share, chosen, path = best
    if share >= 1:
        return None
    own = records.of_exits(chosen)
    return ChosenExits(
        exits=chosen,
        path=_spread(own, path, promise, differing=differing),
        expected=share - _PRICE * len(chosen),
    )


def risk_on_records(
    records: TextRecords, answered_at: IntArray, risk: TextRisk, *, differing: bool
) -> float:
    """Estimate a risk, without decoding, of tokens that leave at some places, int64[tokens]."""
    wrong = records.wrong(answered_at)
    if risk is TextRisk.TEXTS and not differing:
        return float((records.by_prompt(wrong) / records.lengths).mean())
    differs = records.differs(answered_at)
    if risk is TextRisk.TEXTS:
        return float(differs.mean())
    return float(differs.sum() / records.at_prefix(wrong).sum())


def _sets(exits: int) -> Iterator[tuple[int, ...]]:
    for count in range(1, exits + 1):
        yield from combinations(range(exits), count)


def _last_level(
    records: TextRecords, path: FloatArray, promise: TextPromise, most: float, *, differing: bool
) -> int:
    """Return the last level whose risk is at most ``most``, by records: it rises along the path."""
    low, high = 0, len(path)
    while high - low > 1:
        middle = (low + high) // 2
        at = records.answered_at(path[middle])
        fits = risk_on_records(records, at, promise.risk, differing=differing) <= most
        low, high = (middle, high) if fits else (low, middle)
    return low


def _spread(
    records: TextRecords, path: FloatArray, promise: TextPromise, *, differing: bool
) -> FloatArray:
    """Take levels whose risks by records are spread around the bound."""
    targets = np.geomspace(_LEAST_RISK, _MOST_RISK, _LEVELS) * promise.bound
    levels = [_last_level(records, path, promise, t, differing=differing) for t in targets]
    return np.unique(path[sorted({*levels} - {0})], axis=0)[::-1]
