"""The two promises about generated text, and certification of thresholds that keep one.

* ``tokens``: P(the next token differs from the model's at the same prefix) ≤ ε. An answer has the
  model's prefix only up to the first token that differs; let n be the number of tokens up to and
  including that one, and w be 1 if there is one, else 0. Prompts are drawn at random, but the
  tokens of one prompt are not independent; so each prompt is one observation, w − ε·n. The promise
  is kept if, and only if, the mean of these observations is at most 0.
* ``texts``: E[dissimilarity of the whole output and the model's] ≤ ε. The dissimilarity is a number
  from 0 to 1 for each prompt, for instance 1 if anything differs, or the edit distance divided by
  the longer length.

Thresholds are levels of one path, from no exits to the largest number, fixed on other prompts.
Levels are tested in turn, each with an error probability of δ, and the last level before the first
failure is used (Learn then Test: CALM 4.2; Angelopoulos et al. 2021, fixed sequence testing). A
level passes if the test rejects the hypothesis that the mean observation is at or above the bound.
The test is the exact binomial tail if observations can only be 0 or 1, else betting (Waudby-Smith
and Ramdas 2024); the choice is fixed before prompts are seen. In betting, each bet that the mean is
below the bound is fixed before its prompt is seen; if the mean is not below the bound, the wealth
reaches 1/δ with probability at most δ.
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
"""Weight of the prior of the bets, as a number of prompts whose mean loss is half of the bound; a
bad prior only makes the test need more prompts."""
_LARGEST_BET: Final = 0.75
"""Largest share of the wealth that one loss may take."""


class TextRisk(StrEnum):
    """Risk that a promise bounds."""

    TOKENS = "tokens"
    TEXTS = "texts"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPromise:
    """A bound on a risk, and its confidence level."""

    risk: TextRisk
    bound: float
    confidence_level: float = 0.95
    most_tokens: int = 64
    """Limit on the tokens of an answer. The promise ``tokens`` needs this limit before prompts are
    seen."""
    binary: bool = False
    """True if losses of the promise ``texts`` can only be 0 or 1."""

    def __post_init__(self) -> None:
        check_promise(self.bound, self.confidence_level)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextLosses:
    """Losses of some prompts at one level of a path."""

    losses: FloatArray
    """float64[prompts], 0 to 1: for ``tokens`` 1 if a token differs, for ``texts`` the
    dissimilarity."""
    tokens: IntArray
    """int64[prompts]: number of tokens up to and including the first token that differs; number of
    all tokens if none differs."""

    def take(self, prompts: IntArray) -> TextLosses:
        """Return the losses of the prompts with these indices."""
        return TextLosses(losses=self.losses[prompts], tokens=self.tokens[prompts])

    def risk(self, risk: TextRisk) -> float:
        """Return the observed risk: mean loss per token, or per prompt for ``texts``."""
        total = self.tokens.sum() if risk is TextRisk.TOKENS else len(self.losses)
        return float(self.losses.sum() / total)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextCertificate:
    """The last level of a path that passed the test, with its observed risk."""

    level: int
    risk: float
    """Risk observed at this level on the tested prompts."""
    prompts: int


def certify_levels(levels: Iterable[TextLosses], promise: TextPromise) -> TextCertificate | None:
    """Test the levels of a path in turn; ``None`` if the first does not pass.

    ``levels`` are requested from conservative to aggressive, up to the first that fails.
    """
    found: TextCertificate | None = None
    for number, level in enumerate(levels):
        if not keeps(level, promise):
            return found
        risk, prompts = level.risk(promise.risk), len(level.losses)
        found = TextCertificate(level=number, risk=risk, prompts=prompts)
    return found


def keeps(level: TextLosses, promise: TextPromise) -> bool:
    """Return True if the losses of prompts certify a promise at its confidence level."""
    losses, bound, most = level.losses, promise.bound, promise.most_tokens
    if not ((losses >= 0) & (losses <= 1)).all():
        raise ValueError("losses must be from 0 to 1")
    if promise.risk is TextRisk.TOKENS:
        if not (level.tokens <= most).all():
            raise ValueError(
                f"an answer has {level.tokens.max()} tokens, most_tokens of the promise is {most}: "
                "the limit must be fixed before prompts are seen"
            )
        # w − ε·n is in [−ε·most, 1]; scaled to [0, 1], 0 becomes ε·most / (1 + ε·most).
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
    """Return whether the test rejects the hypothesis that the mean loss is at least ``bound``.

    ``losses`` are from 0 to 1. The bet on each loss is approximately Kelly's, from the mean and the
    variance of the losses before it.
    """
    before = np.arange(len(losses))
    total = np.concatenate([[0.0], np.cumsum(losses)[:-1]])
    squares = np.concatenate([[0.0], np.cumsum(losses**2)[:-1]])
    mean = (_PRIOR * bound / 2 + total) / (_PRIOR + before)
    # The prior assumes losses of 0 or 1 (the largest variance) with half of the bound as mean.
    spread = (_PRIOR * bound / 2 + squares) / (_PRIOR + before) + bound * (bound - 2 * mean)
    bets = np.clip((bound - mean) / np.maximum(spread, 1e-12), 0.0, _LARGEST_BET / (1 - bound))
    wealth = np.cumsum(np.log1p(bets * (bound - losses)))
    return bool(wealth.max(initial=0.0) >= -np.log(1 - confidence_level))
