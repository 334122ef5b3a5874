"""The two promises about generated text, and thresholds that are certified to keep one.

* ``tokens``: P(the next token differs from the model's at the same prefix) ≤ ε. Prompts are drawn
  at random, and tokens of one are not independent; so a prompt is one observation: of w wrong
  tokens in n it has w − ε·n, whose mean is at most 0 if, and only if, the promise holds.
* ``texts``: E[dissimilarity of the whole output and the model's] ≤ ε, a number from 0 to 1 for each
  prompt, for instance 1 where anything differs, or the edit distance over the longer length.

Thresholds lie on one path, from none that exits to the most, fixed by other prompts; its levels are
tested in turn, each at level δ, and the last that passed is taken (Learn then Test: CALM 4.2;
Angelopoulos et al. 2021, fixed sequence testing). A level passes where the bound is rejected as the
mean of what was observed: by the exact binomial tail where that is 0 or 1, else by betting
(Waudby-Smith and Ramdas 2024): with bets that are fixed before each prompt is seen, the wealth of
whoever bets that the mean is below the bound reaches 1/δ with probability δ at most if it is not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from offramp.certify.binomial import allowed_errors, check_promise
from offramp.certify.decision import FloatArray, IntArray
from offramp.generation.promise.text_records import TextRecords

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
    """Of an output, at most; the closer to their lengths, the fewer prompts ``tokens`` takes."""

    def __post_init__(self) -> None:
        check_promise(self.bound, self.confidence_level)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextCertificate:
    """The last level of a path that passed."""

    level: int
    risk: float
    """As observed: mean loss of prompts, or wrong tokens over all tokens."""
    prompts: int


def certify_levels(
    losses: Iterable[FloatArray], promise: TextPromise, lengths: IntArray
) -> TextCertificate | None:
    """Test the levels of a path in turn; ``None`` if not even the first passes.

    ``losses`` gives float64[prompts] for each level, from conservative to aggressive, and is asked
    for no more once a level fails: wrong tokens of each prompt, or the dissimilarity of its output,
    from 0 to 1. ``lengths`` are the tokens of the model's output, int64[prompts].
    """
    found: TextCertificate | None = None
    for level, of_prompts in enumerate(losses):
        if not keeps(of_prompts, promise, lengths):
            return found
        total = lengths.sum() if promise.risk is TextRisk.TOKENS else len(lengths)
        found = TextCertificate(
            level=level, risk=float(of_prompts.sum() / total), prompts=len(lengths)
        )
    return found


def keeps(losses: FloatArray, promise: TextPromise, lengths: IntArray) -> bool:
    """Whether the losses of prompts certify a promise, at its confidence level."""
    bound, level = promise.bound, promise.confidence_level
    if promise.risk is TextRisk.TOKENS:
        if not (lengths <= promise.most_tokens).all():
            raise ValueError(
                f"an output has {lengths.max()} tokens, most_tokens of the promise is "
                f"{promise.most_tokens}: what they may have has to be said before"
            )
        # From 0 to 1; the mean is below the bound exactly where that of wrong − ε · n is below 0.
        return rejects((losses - bound * lengths) / promise.most_tokens + bound, bound, level)
    if not ((losses >= 0) & (losses <= 1)).all():
        raise ValueError("dissimilarities must be from 0 to 1")
    if np.isin(losses, (0.0, 1.0)).all():
        return int(losses.sum()) <= allowed_errors(len(losses), bound, level)
    return rejects(losses, bound, level)


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


def records_losses(
    records: TextRecords, path: Iterable[FloatArray], risk: TextRisk
) -> Iterable[FloatArray]:
    """Give the losses of a path's levels by records: wrong tokens, or 1 where an output differs.

    They are what :func:`certify_levels` takes. A dissimilarity other than "differs" has to be
    decoded.
    """
    for thresholds in path:
        at = records.answered_at(thresholds)
        if risk is TextRisk.TOKENS:
            yield records.by_prompt(records.wrong(at))
        else:
            yield records.differs(at).astype(np.float64)
