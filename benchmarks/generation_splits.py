"""Test of promises about generated text, by random splits into certifying and testing prompts.

A pool of prompts is answered once at every level of a path of thresholds. Then prompts are drawn
that certify a level, with the compiler's code, and the others test it. The path is one threshold
for all exits and is fixed beforehand, so that it does not depend on the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from benchmarks.generation_runs import TextSetup, TextSystem, run_loop

from offramp.generation.promise.text_promise import (
    TextLosses,
    TextPromise,
    TextRisk,
    certify_levels,
)
from offramp.generation.scheduling import TokenThresholds
from offramp.generation.serving.text_differences import TextDifference, compare_texts

PATH: Final = tuple(1 - miss for miss in np.geomspace(1e-4, 0.9, 16).tolist())
"""Thresholds, from conservative to aggressive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCounts:
    """Results of repeated random splits of the prompts, for one promise."""

    splits: int
    certified: int
    """Splits that certified some level; the others promise nothing, and cannot break it."""
    above_on_test: int
    """Splits that certified a level whose risk on the testing prompts is above the bound."""
    above_in_pool: int
    """Splits that certified a level whose risk on the whole pool, from which prompts are drawn, is
    above the bound."""
    levels: tuple[int, ...]
    """Number of splits that certified each level."""

    @property
    def failing(self) -> float:
        """Share of all splits that broke the promise on the testing prompts."""
        return self.above_on_test / self.splits


def count_splits(
    levels: Sequence[TextLosses], promise: TextPromise, *, splits: int, seed: int = 0
) -> SplitCounts:
    """Split prompts at random into halves, repeatedly: one half certifies a level, the other tests
    it.

    ``levels`` hold losses and tokens of the same prompts at each level, from conservative to
    aggressive.
    """
    rng = np.random.default_rng(seed)
    prompts = len(levels[0].losses)
    reached = np.zeros(len(levels), np.int64)
    above_on_test = above_in_pool = 0
    for _ in range(splits):
        certifying, testing = np.array_split(rng.permutation(prompts), 2)
        found = certify_levels((level.take(certifying) for level in levels), promise)
        if found is None:
            continue
        reached[found.level] += 1
        level = levels[found.level]
        above_on_test += level.take(testing).risk(promise.risk) > promise.bound
        above_in_pool += level.risk(promise.risk) > promise.bound
    return SplitCounts(
        splits=splits,
        certified=int(reached.sum()),
        above_on_test=int(above_on_test),
        above_in_pool=int(above_in_pool),
        levels=tuple(reached.tolist()),
    )


class KindOfPromise(NamedTuple):
    """A promise's name, risk and loss of two answers."""

    name: str
    risk: TextRisk
    by_edits: bool


KINDS_OF_PROMISE: Final = (
    KindOfPromise("tokens", TextRisk.TOKENS, by_edits=False),
    KindOfPromise("whole outputs", TextRisk.TEXTS, by_edits=False),
    KindOfPromise("edit distance", TextRisk.TEXTS, by_edits=True),
)


def path_differences(
    system: TextSystem, full: Sequence[Sequence[int]], setup: TextSetup, batch: int
) -> list[list[TextDifference]]:
    """Answer the pool at each level of the path, and compare with the full model's answers."""
    exits = system.backend.stages - 1
    found = []
    for number, threshold in enumerate(PATH):
        level = TokenThresholds(version=number, by_stage=(threshold,) * exits)
        run = run_loop(
            replace(system, thresholds=level), setup, setup.pool, in_flight=batch, batch=batch
        )
        found.append([compare_texts(*pair) for pair in zip(run.texts, full, strict=True)])
    return found


def losses_for(kind: KindOfPromise, level: Sequence[TextDifference]) -> TextLosses:
    """Return the losses of a promise for some differences."""
    losses = [difference.edits if kind.by_edits else difference.differs for difference in level]
    return TextLosses(
        losses=np.array(losses, np.float64),
        tokens=np.array([difference.compared for difference in level], np.int64),
    )


def split_counts(
    unmodified: TextSystem,
    system: TextSystem,
    setup: TextSetup,
    *,
    batch: int,
    bound: float,
    splits: int,
    seed: int,
) -> dict[str, SplitCounts]:
    """Count splits of a pool for each kind of promise, by its name."""
    full = run_loop(unmodified, setup, setup.pool, in_flight=batch, batch=batch).texts
    path = path_differences(system, full, setup, batch)
    found = {}
    for kind in KINDS_OF_PROMISE:
        promise = TextPromise(
            risk=kind.risk,
            bound=bound,
            most_tokens=setup.most_tokens,
            binary=not kind.by_edits,
        )
        levels = [losses_for(kind, level) for level in path]
        found[kind.name] = count_splits(levels, promise, splits=splits, seed=seed)
    return found
