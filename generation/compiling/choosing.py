"""Choice of exits and of the path of thresholds to test, from records of tuning prompts."""

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
"""Risk of the first and of the last level of a path, as multiples of the bound. The range is wide:
if skipped layers are filled by state propagation, the risk in decoding differs from that on
records."""
_PRICE: Final = 0.005
"""Smallest share of the model's time that each exit must save, after its own cost is deducted."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChosenExits:
    """Chosen exits, and a path of their thresholds."""

    exits: tuple[int, ...]
    """Indices of the chosen exits among the candidates."""
    path: FloatArray
    """float64[levels, exits]: thresholds at each level, from conservative to aggressive."""
    expected: float
    """Expected mean time of a token at the bound, as a share of its time without exits. It is
    computed from records and measured costs."""


def choose_exits(
    records: TextRecords,
    layers: Sequence[int],
    costs: TextCosts,
    promise: TextPromise,
    *,
    differing: bool,
    fills: bool,
) -> tuple[ChosenExits, ...]:
    """Return up to three sets of exits that are expected to save time at the bound.

    The caller measures the speed of each. They are the set that saves most time, the single exit
    that saves most time, and the first exit at which all tokens may leave within the bound. In the
    third case the decoder ends at that exit, and needs no check or filling of later layers.
    ``layers`` are the numbers of layers before each exit of the records. ``differing`` is true if
    the risk is the share of answers that differ; otherwise it is the share of wrong tokens.
    """
    found: list[tuple[float, tuple[int, ...], FloatArray]] = []
    cut_off: list[tuple[float, tuple[int, ...], FloatArray]] = []
    for chosen in _sets(records.exits):
        own = records.of_exits(chosen)
        path = np.vstack([tuning_path(own.confidences, own.agrees), np.zeros(len(chosen))])
        level = _last_level(own, path, promise, promise.bound, differing=differing)
        at = own.answered_at(path[level])
        ends = [layers[exit_] for exit_ in chosen]
        share = costs.of_tokens(ends, at, fills=fills) / costs.whole + _PRICE * len(chosen)
        if share < 1:
            found.append((share, chosen, path))
            if len(chosen) == 1 and level == len(path) - 1 and not cut_off:
                cut_off.append(found[-1])
    found.sort(key=lambda choice: choice[0])
    single = [choice for choice in found if len(choice[1]) == 1]
    wanted = {id(choice): choice for choice in (*found[:1], *single[:1], *cut_off)}
    return tuple(
        ChosenExits(
            exits=chosen,
            path=_spread(records.of_exits(chosen), path, promise, differing=differing),
            expected=share - _PRICE * len(chosen),
        )
        for share, chosen, path in wanted.values()
    )


def risk_on_records(
    records: TextRecords, answered_at: IntArray, risk: TextRisk, *, differing: bool
) -> float:
    """Estimate a risk without decoding; ``answered_at``, int64[tokens], has each token's exit."""
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
    """Return the last level of a path whose risk in the records is at most ``most``.

    The risk never falls from one level to the next.
    """
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
    """Return levels of a path whose risks in the records are spread around the bound."""
    targets = np.geomspace(_LEAST_RISK, _MOST_RISK, _LEVELS) * promise.bound
    levels = [_last_level(records, path, promise, t, differing=differing) for t in targets]
    return np.unique(path[sorted({*levels} - {0})], axis=0)[::-1]
