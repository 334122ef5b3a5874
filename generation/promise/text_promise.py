"""The two promises about generated text, and thresholds that are certified to keep one.

* ``tokens``: P(the next token differs from the model's at the same prefix) ≤ ε. Answers have the
  model's prefix up to the first token that differs, so an answer has at most one such token, w,
  among the n up to it. Prompts are drawn at random, and tokens of one are not independent; so a
  prompt is one observation: w − ε·n, whose mean is at most 0 if, and only if, the promise holds.
* ``texts``: E[dissimilarity of the whole output and the model's] ≤ ε, a number from 0 to 1 for each
  prompt, for instance 1 where anything differs, or the edit distance over the longer length.

Thresholds lie on one path, from none that exits to the most, fixed by other prompts; its levels are
tested in turn, each at level δ, and the last that passed is taken (Learn then Test: CALM 4.2;
Angelopoulos et al. 2021, fixed sequence testing). A level passes where the bound is rejected as the
mean of what was observed: by the exact binomial tail where only 0 and 1 can be, else by betting
(Waudby-Smith and Ramdas 2024). Which test it is has to be said before prompts are seen: two tests,
of which losses choose one, may pass twice as often. With bets that are fixed before each prompt is
seen, the wealth of whoever bets that the mean is below the bound reaches 1/δ with probability δ at
most if it is not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from offramp.certify.binomial import allowed_errors, check_promise
from offramp.certify.decision import FloatArray, IntArray

_PRIOR: Final = 20.0
"""Prompts that the first bets count as seen, at half of the bound; a bad guess only slows."""
_LARGEST_BET: Final = 0.75
"""Share of the wealth that the worst loss may take."""


class TextRisk(StrEnum):
    """What a promise is about."""

    TOKENS = "tokens"
    TEXTS = "texts"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPromise:
    """A bound on a risk, and how surely it holds."""

    risk: TextRisk
    bound: float
    confidence_level: float = 0.95
    most_tokens: int = 64
    """Of an answer, at most; ``tokens`` needs to know it before prompts are seen."""
    binary: bool = False
    """Whether losses of ``texts`` can be 0 and 1 alone."""

    def __post_init__(self) -> None:
        check_promise(self.bound, self.confidence_level)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextLosses:
    """What one level of a path does to some prompts."""

    losses: FloatArray
    """float64[prompts], 0 to 1: whether a token differs, or how unlike the answers are."""
    tokens: IntArray
    """int64[prompts]: tokens that were chosen at the model's prefix, the first that differs too."""

    def take(self, prompts: IntArray) -> TextLosses:
        """Return those of some prompts."""
        return TextLosses(losses=self.losses[prompts], tokens=self.tokens[prompts])

    def risk(self, risk: TextRisk) -> float:
        """Return the risk as observed."""
        total = self.tokens.sum() if risk is TextRisk.TOKENS else len(self.losses)
        return float(self.losses.sum() / total)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextCertificate:
    """The last level of a path that passed."""

    level: int
    risk: float
    """As observed."""
    prompts: int


def certify_levels(levels: Iterable[TextLosses], promise: TextPromise) -> TextCertificate | None:
    """Test the levels of a path in turn; ``None`` if not even the first passes.

    ``levels`` are asked for from conservative to aggressive, and no more once one fails.
    """
    found: TextCertificate | None = None
    for number, level in enumerate(levels):
        if not keeps(level, promise):
            return found
        risk, prompts = level.risk(promise.risk), len(level.losses)
        found = TextCertificate(level=number, risk=risk, prompts=prompts)
    return found


def keeps(level: TextLosses, promise: TextPromise) -> bool:
    """Whether the losses of prompts certify a promise, at its confidence level."""
    losses, bound, most = level.losses, promise.bound, promise.most_tokens
    if not ((losses >= 0) & (losses <= 1)).all():
        raise ValueError("losses must be from 0 to 1")
    if promise.risk is TextRisk.TOKENS:
        if not (level.tokens <= most).all():
            raise ValueError(
                f"an answer has {level.tokens.max()} tokens, most_tokens of the promise is {most}: "
                "what they may have has to be said before"
            )
        # w − ε·n is from −ε·most to 1; brought to 0 to 1, what was 0 is at ε·most of that range.
        least = bound * most
        losses = (losses - bound * level.tokens + least) / (1 + least)
        return rejects(losses, least / (1 + least), promise.confidence_level)
    if promise.binary:
        if not np.isin(losses, (0.0, 1.0)).all():
            raise ValueError("losses must be 0 or 1: the promise says that they are binary")
        allowed = allowed_errors(len(losses), bound, promise.confidence_level)
        return int(losses.sum()) <= allowed
    return rejects(losses, bound, promise.confidence_level)


def rejects(losses: FloatArray, bound: float, confidence_level: float) -> bool:
    """Whether "the mean loss is the bound or more" is rejected; losses are from 0 to 1.

    The bet on each loss is Kelly's, approximately, by the mean and the spread of those before it.
    """
    before = np.arange(len(losses))
    total = np.concatenate([[0.0], np.cumsum(losses)[:-1]])
    squares = np.concatenate([[0.0], np.cumsum(losses**2)[:-1]])
    mean = (_PRIOR * bound / 2 + total) / (_PRIOR + before)
    # As if each of the first ones had been 0 or 1, of the bound's mean: the spread is then largest.
    spread = (_PRIOR * bound / 2 + squares) / (_PRIOR + before) + bound * (bound - 2 * mean)
    bets = np.clip((bound - mean) / np.maximum(spread, 1e-12), 0.0, _LARGEST_BET / (1 - bound))
    wealth = np.cumsum(np.log1p(bets * (bound - losses)))
    return bool(wealth.max(initial=0.0) >= -np.log(1 - confidence_level))
