"""Ramp adjustment (Apparate 3.3): which exits to use next, one decision from recent samples.

    measure the utility of every exit in use
    some lose?   tune thresholds at once; if that does not mend it, stop using the losers,
                 and try the candidate behind the last winner that could win the most
    all win?     probe: one more exit just before the best, or the worst one place earlier

The utility of an exit is the sum of the raw latency that samples avoid by leaving there, less the
sum of the latency that it adds to the samples that pass it without leaving. Raw latency is the
model's own time after the exit; the exits behind it are not counted as avoided, so that an exit's
utility does not grow with what others cost.

What the paper leaves open, and what is chosen here:

* The round of tuning: its thresholds stay if they save no less than those deployed on the same
  samples, even where some utility is still negative; the exits to stop using are then the losers
  under them. A new exit is thus judged by what it does once it may answer.
* A utility of exactly 0 does no harm: it counts as positive.
* Candidate intervals: an even one starts with the earlier of its two middles, since a search that
  goes on only goes later; it goes on exit by exit, in all intervals at once.
* Figure 12's rate where no deactivated exit follows: that of the earlier deactivations alone. This
  is no bound then, but trying exits that nothing speaks for would never end.
* A candidate that does not fit the ramp budget is passed over, not the end of the search.
* Where every sample has left before a candidate, it is not tried: 0 is not positive.
* Probing: where the place before the best exit is taken, or is the model's start, the next best
  one's is looked at; likewise the next worst one is shifted. The best is never shifted.
* A cascade: the source model begins anew after the last exit in use, so that what lies between
  the last two is that exit's cost (:meth:`.CostModel.added_ms`).
* No exits in use: nothing is known of any. All samples reach each, which bounds what it could win;
  the search runs as over one interval, from the middle of the model.
* Exits in use beyond the budget (it was lowered): those of the least utility go, none is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Final

import numpy as np

from offramp.bundle import NEVER, ExitPolicy
from offramp.certify import (
    Float32Array,
    FloatArray,
    IntArray,
    Observations,
    Window,
    count_answers,
    first_exit,
)
from offramp.engine.control.costs import CostModel

ADJUST_EVERY: Final = 128
"""Samples between two adjustments (Apparate 3.3)."""
AGAIN_AFTER: Final = 65_536
"""Samples after which a set of exits that was proposed may be proposed again."""
JUDGED_BY: Final = 512
"""Samples that exits are judged by, drawn from a window of twice as many complete ones."""


class ExitProposals:
    """Judges the exits in use by recent samples, and proposes others.

    Every 128 samples the exits in use are judged as Apparate does (3.3, :func:`adjust`). What it
    would do at once is only proposed here: the controller runs the new exits in shadow mode, tests
    thresholds for the new set, and uses them when a level that saves more is certified
    (:meth:`.certified.CertifiedController.consider`). So an adjustment never loosens what is
    promised.

    Chosen here: a set that was proposed is not proposed again for a while, since testing one takes
    many samples, and low-risk probing would come back to the same exit whenever the test fails.
    After a drift alarm everything may be proposed again.
    """

    def __init__(
        self, costs: CostModel, *, max_overhead: float, again_after: int = AGAIN_AFTER
    ) -> None:
        """Start with an empty window, for all exits of the bundle.

        ``max_overhead`` is the ramp budget: how much later the model's end may come, as a share. A
        set may be proposed again after ``again_after`` samples.
        """
        if not max_overhead >= 0:
            raise ValueError(f"max_overhead is {max_overhead}, expected at least 0")
        self._costs, self._max_overhead, self._again_after = costs, max_overhead, again_after
        self._window = Window(exits=costs.exits, capacity=2 * JUDGED_BY)
        self._seen = self._adjusted_at = 0
        self._proposed: dict[tuple[int, ...], int] = {}
        """Sets of exits, and after how many samples each was."""
        self._alarms = 0

    def propose(
        self, seen: Observations, policy: ExitPolicy, *, alarms: int
    ) -> tuple[int, ...] | None:
        """Take in samples; when it is time, judge the exits in use and say what Apparate would do.

        Returns the exits to use instead of those of the policy in force; ``None`` for no change.
        With each drift alarm, of ``alarms`` so far, what was seen and proposed before is forgotten.
        """
        self._window.add(seen)
        self._seen += len(seen)
        if self._seen - self._adjusted_at < ADJUST_EVERY:
            return None
        self._adjusted_at = self._seen
        if alarms != self._alarms:
            self._alarms = alarms
            self._window.keep(0)
            self._proposed.clear()
        thresholds = [a.threshold for a in policy.active]
        if all(threshold >= NEVER for threshold in thresholds):
            return None  # nothing answers: there is nothing to judge by
        exits = tuple(a.exit for a in policy.active)
        samples = self._window.seen_by(exits)
        if samples.effective < JUDGED_BY / 4:
            return None
        alike = representative(samples.confidence, samples.weight, JUDGED_BY)
        found = adjust(alike, exits, thresholds, self._costs, max_overhead=self._max_overhead)
        before = self._proposed.get(found.active)
        is_due = before is None or self._seen - before >= self._again_after
        return found.active if found.active != exits and is_due else None

    def accepted(self, exits: tuple[int, ...]) -> None:
        """Remember that a proposal is tried; one that came at a bad time may be made again."""
        self._proposed[exits] = self._seen


def representative(confidence: Float32Array, weight: FloatArray, count: int) -> Float32Array:
    """Turn weighted samples (at least one) into ``count`` of equal weight: float32[exits, count].

    Systematic resampling (Kitagawa 1996): a sample comes up in proportion to its weight, up to
    rounding, and nothing is left to chance.
    """
    upto = np.cumsum(weight)
    places = (np.arange(count) + 0.5) * (upto[-1] / count)
    return np.asarray(confidence[:, np.searchsorted(upto, places)])


DEFAULT_MAX_OVERHEAD = 0.02
"""Apparate's ramp budget: exits make the worst case this share slower (5.1)."""


class Reason(StrEnum):
    """Why the exits in use change, or do not."""

    STEADY = "every exit is of use, and no earlier place is free for another"
    RETUNED = "new thresholds make every exit useful"
    HARMFUL = "exits cost more time than they save"
    OVER_BUDGET = "exits cost more than the budget allows"
    EMPTY = "no exit is in use"
    PROBED_BEFORE_BEST = "every exit is of use; one is tried before the best"
    SHIFTED_WORST = "every exit is of use; the least useful one is tried a place earlier"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustment:
    """The exits to use from now on."""

    active: tuple[int, ...]
    """Indices in depth order; their overhead is within the budget."""
    thresholds: tuple[float, ...]
    """Of each of them; ``NEVER`` for the one that is tried, until the next tuning."""
    deactivated: tuple[int, ...]
    """In use before, not any more."""
    tried: int | None
    """Newly in use."""
    reason: Reason
    tuned: bool
    """A round of tuning was run."""
    utility_ms: tuple[float, ...]
    """Of the exits in use before, over the samples given, under the thresholds that decided."""


def adjust(
    confidence: Float32Array,
    active: Sequence[int],
    thresholds: Sequence[float],
    costs: CostModel,
    *,
    max_overhead: float = DEFAULT_MAX_OVERHEAD,
    retune: Callable[[], FloatArray] | None = None,
) -> Adjustment:
    """Decide on the exits in use (Apparate 3.3).

    By float32[active, n] confidences of recent samples, in [0, 1]; every exit in use saw all.
    ``max_overhead`` is the ramp budget: how much later the model's end may come, as a share, at
    least 0. ``retune`` tunes thresholds for the exits in use, float64[active], on whatever samples;
    it is called at most once, and only if an exit loses time.
    """
    _check(confidence, active, thresholds, costs)
    if not max_overhead >= 0:
        raise ValueError(f"max_overhead must be at least 0, got {max_overhead}")
    worth = measure_utilities(confidence, thresholds, active, costs)
    tuned = retune is not None and bool((worth.utility_ms < 0).any())
    if tuned and retune is not None:
        tuned_thresholds = tuple(float(t) for t in retune())
        after = measure_utilities(confidence, tuned_thresholds, active, costs)
        if after.mean_ms <= worth.mean_ms:
            thresholds, worth = tuned_thresholds, after

    kept = tuple(e for e, u in zip(active, worth.utility_ms, strict=True) if u >= 0)
    harmful = len(kept) < len(active)
    kept = _within_budget(kept, worth, costs, max_overhead)
    tried = None
    if harmful or not active:
        tried = _best_candidate(kept, worth, costs, max_overhead)
        reason = Reason.HARMFUL if harmful else Reason.EMPTY
    elif len(kept) < len(active):
        reason = Reason.OVER_BUDGET
    elif tuned:
        reason = Reason.RETUNED
    else:
        kept, tried, reason = _probe(worth, costs, max_overhead)
    now = kept if tried is None else tuple(sorted((*kept, tried)))
    known = dict(zip(active, thresholds, strict=True))
    return Adjustment(
        active=now,
        thresholds=tuple(float(known.get(e, NEVER)) for e in now),
        deactivated=tuple(e for e in active if e not in now),
        tried=tried,
        reason=reason,
        tuned=tuned,
        utility_ms=tuple(worth.utility_ms.tolist()),
    )


def _within_budget(
    kept: tuple[int, ...], worth: Utilities, costs: CostModel, max_overhead: float
) -> tuple[int, ...]:
    """Drop the least useful exits until the rest fits."""
    utility = dict(zip(worth.active, worth.utility_ms, strict=True))
    while kept and costs.overhead(kept) > max_overhead:
        worst = min(kept, key=lambda e: utility[e])
        kept = tuple(e for e in kept if e != worst)
    return kept


def _best_candidate(
    kept: tuple[int, ...], worth: Utilities, costs: CostModel, max_overhead: float
) -> int | None:
    """Find the exit behind the last one kept that could win the most; ``None`` if none could."""
    leaving = dict(zip(worth.active, worth.counts.tolist(), strict=False))
    reaching = int(worth.counts.sum()) - sum(leaving[e] for e in kept)
    dropped = [e for e in worth.active if e not in kept]
    for candidates in _rounds(_intervals(max(kept, default=-1) + 1, dropped, costs.exits)):
        bounds = {
            e: upper_bound_ms(
                e, _most_leaving(e, dropped, leaving, reaching), reaching, costs, kept
            )
            for e in candidates
            if costs.overhead(sorted((*kept, e))) <= max_overhead
        }
        best = max(bounds, key=lambda e: bounds[e], default=None)
        if best is not None and bounds[best] > 0:
            return best
    return None


def _intervals(first: int, dropped: Sequence[int], exits: int) -> list[range]:
    """Divide the exits from ``first`` on at those dropped; empty ones are left out."""
    borders = [first - 1, *(e for e in dropped if e >= first), exits]
    spans = [range(a + 1, b) for a, b in pairwise(borders)]
    return [span for span in spans if span]


def _rounds(intervals: list[range]) -> Iterator[list[int]]:
    """The middle of each interval, then what lies behind it, exit by exit in all at once."""
    tails = [span[(len(span) - 1) // 2 :] for span in intervals]
    for place in range(max((len(tail) for tail in tails), default=0)):
        yield [tail[place] for tail in tails if place < len(tail)]


def _most_leaving(
    candidate: int, dropped: Sequence[int], leaving: dict[int, int], reaching: int
) -> int:
    """Samples that could leave at a candidate, by figure 12 of Apparate.

    Those of the deactivated exit that follows, since later exits let more leave, and those of
    earlier deactivations, since they would have come this far.
    """
    if not leaving:
        return reaching
    following = next((e for e in dropped if e > candidate), None)
    return sum(leaving[e] for e in dropped if e < candidate or e == following)


def _probe(
    worth: Utilities, costs: CostModel, max_overhead: float
) -> tuple[tuple[int, ...], int | None, Reason]:
    """Add an exit just before the best, or else shift the worst: exits kept, exit tried, why."""
    active = worth.active
    worst_first = [active[i] for i in np.argsort(worth.utility_ms, kind="stable")]

    def fits(tried: int, kept: tuple[int, ...]) -> bool:
        is_free = tried >= 0 and tried not in active
        return is_free and costs.overhead(sorted((*kept, tried))) <= max_overhead

    for exit_ in reversed(worst_first):
        if fits(exit_ - 1, active):
            return active, exit_ - 1, Reason.PROBED_BEFORE_BEST
    for exit_ in worst_first[:-1]:
        kept = tuple(e for e in active if e != exit_)
        if fits(exit_ - 1, kept):
            return kept, exit_ - 1, Reason.SHIFTED_WORST
    return active, None, Reason.STEADY


def _check(
    confidence: Float32Array, active: Sequence[int], thresholds: Sequence[float], costs: CostModel
) -> None:
    """Refuse what would be judged wrongly without a word."""
    if list(active) != sorted(set(active)):
        raise ValueError(f"active exits {list(active)} must rise")
    if active and not 0 <= active[0] <= active[-1] < costs.exits:
        raise ValueError(f"active exits {list(active)} must be within 0 to {costs.exits - 1}")
    if len(thresholds) != len(active):
        raise ValueError(f"{len(thresholds)} thresholds do not fit {len(active)} active exits")
    if confidence.ndim != 2 or confidence.shape[0] != len(active) or not confidence.shape[1]:
        raise ValueError(
            f"confidence has shape {confidence.shape}, "
            f"expected [{len(active)}, samples] with samples to judge by"
        )
    if np.isnan(confidence).any():
        raise ValueError("confidence holds NaN: give only samples that every exit in use looked at")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Utilities:
    """Utilities of the exits in use, under one set of thresholds."""

    active: tuple[int, ...]
    counts: IntArray
    """int64[active + 1]: samples that leave at each, the last at the model's end."""
    utility_ms: FloatArray
    """float64[active]: milliseconds won, less those lost, summed over the samples."""
    mean_ms: float
    """Mean time until the answer, the cost of every exit passed included."""


def measure_utilities(
    confidence: Float32Array, thresholds: Sequence[float], active: Sequence[int], costs: CostModel
) -> Utilities:
    """Send samples through the exits in use, and add up what each of them wins and loses.

    Confidences are float32[active, n] in [0, 1], n above 0, and every exit in use saw every sample;
    a threshold is ``NEVER`` where the exit runs in shadow mode.
    """
    exits, samples = confidence.shape
    counts = count_answers(first_exit(confidence, thresholds), exits)
    passing = samples - np.cumsum(counts[:-1])
    rows = list(active)
    return Utilities(
        active=tuple(rows),
        counts=counts,
        utility_ms=counts[:-1] * costs.avoided_ms(rows) - passing * costs.added_ms(rows),
        mean_ms=float(counts @ costs.latency_ms(rows)) / samples,
    )


def upper_bound_ms(
    candidate: int, leaving: int, reaching: int, costs: CostModel, before: Sequence[int] = ()
) -> float:
    """Utility of an exit not in use if ``leaving`` of the ``reaching`` samples left there.

    ``before`` are the exits in use, all of which it is behind.
    """
    exits = (*before, candidate)
    avoided, added = costs.avoided_ms(exits)[-1], costs.added_ms(exits)[-1]
    return float(leaving * avoided - (reaching - leaving) * added)
