"""Ramp adjustment (Apparate 3.3): which exits to use next, one decision from recent samples.

    measure the utility of every exit in use
    some lose time?  tune thresholds; if some still lose time, stop using these exits, and
                     try the candidate after the last winner that could win the most
    all win time?    probe: add an exit just before the best, or shift the worst one place earlier

The utility of an exit is the sum of the raw latency that samples avoid by leaving there, less the
sum of the latency that the exit adds to samples that pass it without leaving. Raw latency is the
model's own time after the exit. It excludes later exits, so that the utility of one exit does not
grow with the cost of others.

The paper leaves some points open. Our choices:

* The round of tuning: the new thresholds stay if they save at least as much as the deployed ones on
  the same samples, even where some utility is still negative. The exits to stop using are then the
  losers under the new thresholds. A new exit is thus judged by its effect once it may answer.
* A utility of exactly 0 does no harm: it counts as positive.
* Candidate intervals: an interval of even length starts with the earlier of its two middles, since
  the search only moves later. It moves exit by exit, in all intervals in parallel.
* Figure 12's rate where no deactivated exit follows: the rate of the earlier deactivations alone.
  This is not an upper bound, but otherwise the search would also try exits without any evidence for
  them, and never end.
* A candidate that does not fit the ramp budget is skipped; the search goes on.
* Where every sample has left before a candidate, it is not tried: 0 is not positive.
* Probing: where the place before the best exit is taken, or is the model's start, the place before
  the next best exit is considered; likewise the next worst exit is shifted. The best exit is never
  shifted.
* A cascade: the source model starts from its beginning after the last exit in use, so that the
  segments between the last two exits count as the last exit's cost (:meth:`.CostModel.added_ms`).
* No exits in use: there are no statistics for any exit. All samples reach each exit, which bounds
  the time that it could win; the search treats all exits as one interval, from its middle.
* Exits in use beyond the budget (it was lowered): exits with the smallest utility are dropped, and
  no exit is tried.
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
"""Number of samples between two adjustments (Apparate 3.3)."""
AGAIN_AFTER: Final = 65_536
"""Number of samples after which a set of exits may be proposed again."""
JUDGED_BY: Final = 512
"""Number of samples to judge exits by, drawn from a window of twice as many complete samples
(:attr:`.Observations.complete`)."""


class ExitProposals:
    """Judges the exits in use by recent samples, and proposes others.

    Every 128 samples, the exits in use are judged as in Apparate (3.3, :func:`adjust`). Apparate
    changes the exits immediately; here the change is only proposed. The controller runs the new
    exits in shadow mode (no sample leaves there) and tests thresholds for the new set. It uses the
    new set once thresholds that save more are certified
    (:meth:`.certified.CertifiedController.consider`). So an adjustment never weakens the promise.

    Our choice: a set that was proposed is not proposed again for a while, since one test takes many
    samples. Otherwise Apparate's low-risk probing, which tries the place before an exit in use,
    would propose the same set again after a failed test. After a drift alarm, every set may be
    proposed again.
    """

    def __init__(
        self, costs: CostModel, *, max_overhead: float, again_after: int = AGAIN_AFTER
    ) -> None:
        """Start with an empty window, for all exits of the bundle.

        ``max_overhead`` is the ramp budget: the largest allowed delay of the model's end, as a
        share of its time. A set may be proposed again after ``again_after`` samples.
        """
        if not max_overhead >= 0:
            raise ValueError(f"max_overhead is {max_overhead}, expected at least 0")
        self._costs, self._max_overhead, self._again_after = costs, max_overhead, again_after
        self._window = Window(exits=costs.exits, capacity=2 * JUDGED_BY)
        self._seen = self._adjusted_at = 0
        self._proposed: dict[tuple[int, ...], int] = {}
        """Number of samples seen at the last test of each set of exits."""
        self._alarms = 0

    def propose(
        self, seen: Observations, policy: ExitPolicy, *, alarms: int
    ) -> tuple[int, ...] | None:
        """Add samples; when an adjustment is due, judge the exits in use.

        Returns the exits to use instead of the active policy's; ``None`` for no change. ``alarms``
        is the number of drift alarms so far: after a new one, all earlier samples and proposals are
        forgotten.
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
            return None  # no exit answers, so there are no samples to judge by
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
        """Record that a proposal is tested; without this record it may be made again at once."""
        self._proposed[exits] = self._seen


def representative(confidence: Float32Array, weight: FloatArray, count: int) -> Float32Array:
    """Turn weighted samples (at least one) into ``count`` of equal weight: float32[exits, count].

    Systematic resampling (Kitagawa 1996): each sample occurs in proportion to its weight, up to
    rounding, and the result is deterministic.
    """
    upto = np.cumsum(weight)
    places = (np.arange(count) + 0.5) * (upto[-1] / count)
    return np.asarray(confidence[:, np.searchsorted(upto, places)])


DEFAULT_MAX_OVERHEAD = 0.02
"""Apparate's ramp budget: the worst case may be slower by this share (5.1)."""


class Reason(StrEnum):
    """Reason for a change of the exits in use, or for none."""

    STEADY = "every exit is of use, and no earlier place is free for another"
    RETUNED = "new thresholds make every exit useful"
    HARMFUL = "exits cost more time than they save"
    OVER_BUDGET = "exits cost more than the budget allows"
    EMPTY = "no exit is in use"
    PROBED_BEFORE_BEST = "every exit is of use; one is tried before the best"
    SHIFTED_WORST = "every exit is of use; the least useful one is tried a place earlier"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustment:
    """Decision on the exits to use from now on."""

    active: tuple[int, ...]
    """Indices of the exits to use, in depth order; their overhead is within the budget."""
    thresholds: tuple[float, ...]
    """Thresholds of the active exits; ``NEVER`` for the exit that is tried, until the next
    tuning."""
    deactivated: tuple[int, ...]
    """Exits that were in use before, and are not any more."""
    tried: int | None
    """Exit that was not in use before, and is tried now; ``None`` if there is none."""
    reason: Reason
    tuned: bool
    """True if a round of tuning was run."""
    utility_ms: tuple[float, ...]
    """Utility of each exit that was in use before, summed over the samples, under the thresholds
    that the decision used."""


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

    ``confidence`` is float32[active, n] of recent samples, in [0, 1]; every exit in use has seen
    all n samples. ``max_overhead`` is the ramp budget: the largest allowed delay of the model's
    end, as a share, at least 0. ``retune`` returns tuned thresholds for the exits in use,
    float64[active]; it is called at most once, and only if an exit loses time.
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
    """Drop the least useful exits until the rest fits the ramp budget."""
    utility = dict(zip(worth.active, worth.utility_ms, strict=True))
    while kept and costs.overhead(kept) > max_overhead:
        worst = min(kept, key=lambda e: utility[e])
        kept = tuple(e for e in kept if e != worst)
    return kept


def _best_candidate(
    kept: tuple[int, ...], worth: Utilities, costs: CostModel, max_overhead: float
) -> int | None:
    """Return the exit after the last kept exit that could win the most time, or ``None``."""
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
    """Divide the exits from ``first`` on at the dropped ones; leave empty intervals out."""
    borders = [first - 1, *(e for e in dropped if e >= first), exits]
    spans = [range(a + 1, b) for a, b in pairwise(borders)]
    return [span for span in spans if span]


def _rounds(intervals: list[range]) -> Iterator[list[int]]:
    """Yield the middle exits of all intervals, then the next exit of each interval, and so on."""
    tails = [span[(len(span) - 1) // 2 :] for span in intervals]
    for place in range(max((len(tail) for tail in tails), default=0)):
        yield [tail[place] for tail in tails if place < len(tail)]


def _most_leaving(
    candidate: int, dropped: Sequence[int], leaving: dict[int, int], reaching: int
) -> int:
    """Return how many samples could leave at a candidate, by figure 12 of Apparate.

    The result is the sum of the samples that left at the deactivated exit that follows (later exits
    let more samples leave) and at earlier deactivated exits (these samples would have come this
    far).
    """
    if not leaving:
        return reaching
    following = next((e for e in dropped if e > candidate), None)
    return sum(leaving[e] for e in dropped if e < candidate or e == following)


def _probe(
    worth: Utilities, costs: CostModel, max_overhead: float
) -> tuple[tuple[int, ...], int | None, Reason]:
    """Add an exit before the best, or shift the worst; return exits kept, exit tried, reason."""
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
    """Refuse inputs that would lead to a wrong decision silently."""
    if list(active) != sorted(set(active)):
        raise ValueError(f"active exits {list(active)} must increase")
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
        raise ValueError("confidence holds NaN: pass only samples that every exit in use has seen")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Utilities:
    """Utilities of the exits in use, under one set of thresholds."""

    active: tuple[int, ...]
    counts: IntArray
    """int64[active + 1]: samples that leave at each exit, the last at the model's end."""
    utility_ms: FloatArray
    """float64[active]: milliseconds won minus milliseconds lost, summed over the samples."""
    mean_ms: float
    """Mean time of a sample until its answer, including the cost of every exit passed."""


def measure_utilities(
    confidence: Float32Array, thresholds: Sequence[float], active: Sequence[int], costs: CostModel
) -> Utilities:
    """Simulate samples passing the exits in use, and sum the time that each exit wins and loses.

    ``confidence`` is float32[active, n] in [0, 1], n above 0; every exit in use has seen every
    sample. A threshold is ``NEVER`` where the exit runs in shadow mode.
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
    """Return the utility of an unused exit if ``leaving`` of ``reaching`` samples left there.

    ``before`` are the exits in use; all of them are before the candidate.
    """
    exits = (*before, candidate)
    avoided, added = costs.avoided_ms(exits)[-1], costs.added_ms(exits)[-1]
    return float(leaving * avoided - (reaching - leaving) * added)
