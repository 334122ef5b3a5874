"""Reasons why no exit is active: the limit that prevents exits, and how to raise this limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from offramp.bundle.schema.measured import Measured
from offramp.bundle.schema.parts import HeadScore
from offramp.calibration.choose.exit_records import ExitRecords
from offramp.calibration.choose.selection import MIN_GAIN, Candidates
from offramp.certify import Stratum, allowed_errors, samples_needed, walk
from offramp.certify.learn_then_test import count_errors, count_strata, level_of_each
from offramp.engine.control.costs import CostModel

_MOST_SAMPLES = 200_000
"""Largest number of certify samples that a message proposes."""
_BETTER_HEADS = (
    "more --data or --epochs make better heads, and a larger --max-disagreement lets more samples "
    "leave"
)


def measured_loss(measured: Measured, batch_size: int) -> str | None:
    """Return a message if exits were measured to take more time than they save; else ``None``.

    The message is about the measured batch size that is nearest to ``batch_size``, for which exits
    were chosen.
    """
    at = measured.nearest(batch_size)
    if at.busy.value - at.busy.half_width <= 1:
        return None
    return (
        f"with exits the model took {at.busy.value:.2f} ± {at.busy.half_width:.2f} of its own time "
        f"at batch {at.batch_size}, measured here, though savings were predicted; compile again on "
        "a quiet machine, or on the one that will serve"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTerms:
    """The user's requirements on the exit policy."""

    max_disagreement: float
    confidence_level: float
    """Confidence level of the certificate."""
    max_overhead: float | None
    batch_size: int
    """Batch size that savings are predicted at."""

    def tested(self, *, copies: bool) -> PolicyTerms:
        """Return these terms with the confidence level of one test.

        There are two tests if rows of the data are equal (``copies``); they share the risk of an
        error.
        """
        level = level_of_each(self.confidence_level, copies=copies)
        return replace(self, confidence_level=level)

    def allowed_errors(self, samples: int) -> int:
        """Return the largest number of errors that can be certified; −1 if none can be."""
        return allowed_errors(samples, self.max_disagreement, self.confidence_level)


def limit_of_heads(best: Sequence[HeadScore], source_ms: float, terms: PolicyTerms) -> str:
    """Return why no exit was built: no head alone saves more than it costs.

    ``best`` has, for every candidate, the head with the largest net savings; ``source_ms`` is the
    model's time at the batch size of the terms.
    """
    if not best:
        return (
            "no cut point's tensor has a shape that a head could read; eecompile inspect lists "
            "them, --exits names others"
        )
    # the share of the model's time that each head would save if it took no time
    if_free = [head.net_savings + head.cost_ms / source_ms for head in best]
    saved = max(if_free)
    if saved >= MIN_GAIN:
        cost_ms = best[if_free.index(saved)].cost_ms
        return (
            f"heads cost more than they save: at batch {terms.batch_size} the best one would save "
            f"{saved:.1%} of the model's {source_ms:.3g} ms if it cost nothing, but takes "
            f"{cost_ms:.3g} ms ({cost_ms / source_ms:.1%}); a larger model has more to save"
        )
    return (
        f"none of the {len(best)} candidate exits saves time: the best one agrees with the model "
        f"on {max(head.agreement for head in best):.1%} of the tuning samples, and too few samples "
        f"can leave while at most {terms.max_disagreement:g} disagree (--max-disagreement); "
        f"{_BETTER_HEADS}"
    )


def limit_of_rehearsal(max_violations: float, min_gain: float) -> str:
    """Return why a rehearsal kept no exit."""
    return (
        "every exit made too many of the rehearsed batches later than the unmodified model would "
        f"(--max-violations {max_violations:g}), or shortened their mean latency by too little "
        f"(--min-gain {min_gain:g}); raise the first, lower the second, or use "
        "--selection savings, to keep exits"
    )


def limit_of_choice(
    tune: ExitRecords,
    costs: dict[int, CostModel],
    terms: PolicyTerms,
    strata: Sequence[Stratum] = (),
) -> str:
    """Return why no set of exits was chosen on the tuning split.

    ``costs`` are the costs of all exits (at least one), by profiled batch size; ``strata`` are the
    classes of the tuning split that have a separate bound.
    """
    candidates = Candidates(
        tune.confidence,
        tune.agrees,
        max_disagreement=terms.max_disagreement,
        confidence_level=terms.confidence_level,
        strata=strata,
    )
    cost = costs[terms.batch_size]
    unlimited = candidates.choose(cost)
    if unlimited:
        return _overhead(unlimited, candidates, cost, terms)
    free = replace(cost, exits_ms=(0.0,) * cost.exits, stages_ms=(0.0,) * cost.exits)
    best = max(range(cost.exits), key=lambda index: candidates.savings((index,), free))
    could_save = candidates.savings((best,), free)
    if could_save >= MIN_GAIN:
        return _costs(best, could_save, candidates, costs, terms)
    if cost.front_ms >= cost.source_ms:
        return (
            f"the quantised model takes {cost.front_ms:.3g} ms at batch {terms.batch_size}, the "
            f"unmodified one {cost.source_ms:.3g} ms: nothing is saved by running it first; "
            "compile with --precision fp32, or on a CPU that is faster in int8"
        )
    return (
        f"no head agrees enough: even if exits cost nothing, {max(could_save, 0):.1%} of the "
        f"model's time would be saved while at most {terms.max_disagreement:g} of the samples "
        f"disagree (--max-disagreement); the best head agrees on "
        f"{tune.agrees.mean(axis=1).max():.1%} of all samples; {_BETTER_HEADS}"
    )


def _overhead(
    active: tuple[int, ...], candidates: Candidates, cost: CostModel, terms: PolicyTerms
) -> str:
    assert terms.max_overhead is not None
    least = min(cost.sure_overhead((index,)) for index in range(cost.exits))
    names = ", ".join(map(str, active))
    sure = cost.sure_overhead(active)
    passing = np.ceil(round(sure * 1000, 6)) / 1000  # rounded up, so that this value is accepted
    return (
        f"--max-overhead {terms.max_overhead:g}: exits {names} would save "
        f"{candidates.savings(active, cost):.1%} of the model's time, but add "
        f"{cost.overhead(active):.1%} (certainly {sure:.1%}) at batch {terms.batch_size} where "
        f"none is taken, and the cheapest exit alone certainly adds {least:.1%}; without "
        f"--max-overhead, or with --max-overhead {passing:g}, they would be used"
    )


def _costs(
    best: int,
    could_save: float,
    candidates: Candidates,
    costs: dict[int, CostModel],
    terms: PolicyTerms,
) -> str:
    cost = costs[terms.batch_size]
    paying = [size for size, elsewhere in costs.items() if candidates.choose(elsewhere)]
    remedy = "a larger model, or one on a slower machine, has more to save"
    if paying:
        saved = candidates.savings(candidates.choose(costs[paying[0]]), costs[paying[0]])
        size = paying[0]
        remedy = f"at batch {size} {saved:.1%} would be saved: --reference-batch-size {size}"
    head, border = cost.exits_ms[best], cost.stages_ms[best]
    return (
        f"exits cost more than they save: at batch {terms.batch_size} exit {best} would save "
        f"{could_save:.1%} of the model's {cost.source_ms:.3g} ms if it cost nothing, but its head "
        f"takes {head:.3g} ms and its border {border:.3g} ms "
        f"({(head + border) / cost.source_ms:.1%}); {remedy}"
    )


def limit_of_samples(samples: int, terms: PolicyTerms) -> str | None:
    """Return a message if the certify split is too small for any policy; else ``None``."""
    if terms.allowed_errors(samples) >= 0:
        return None
    needed = samples_needed(terms.max_disagreement, terms.confidence_level)
    return (
        f"{samples} certify samples are too few to certify disagreement ≤ "
        f"{terms.max_disagreement:g} with confidence {terms.confidence_level:g}: {needed} are the "
        "least, if all of them agree; pass more --data, or a larger --max-disagreement"
    )


def limit_of_certificate(
    active: Sequence[int],
    path: NDArray[np.float64],
    certify: ExitRecords,
    terms: PolicyTerms,
    strata: Sequence[Stratum] = (),
) -> str:
    """Return why no policy on the path of the chosen exits was certified to save time.

    ``active`` is at least one exit; ``path``, float64[levels, active], has their thresholds from
    conservative to aggressive; ``certify`` has records of all exits on the certify split;
    ``strata`` are the classes of the certify split that have a separate bound.
    """
    rows = list(active)
    confidence, agrees = certify.confidence[rows], certify.agrees[rows]
    leaving = confidence.shape[1] - walk(path, confidence, agrees).counts[:, -1]
    tested = terms.tested(copies=certify.copies is not None)
    of_all = count_errors(
        path, confidence, agrees, certify.copies, max_disagreement=terms.max_disagreement
    )
    counted = [*of_all, *count_strata(path, confidence, agrees, certify.copies, strata)]
    passing = [
        (c.errors <= c.allowed(tested.confidence_level)).cumprod(dtype=bool) for c in counted
    ]
    strictest = int(np.argmin([levels.sum() for levels in passing]))
    passed, counts = passing[strictest], counted[strictest]
    samples, bound = counts.of, counts.max_disagreement
    allowed = counts.allowed(tested.confidence_level)
    some = np.flatnonzero(leaving > 0)
    if len(some) and not passed[some[0]]:
        errors = int(counts.errors[some[0]])
        found = (
            f"the most conservative policy that lets any sample leave disagreed on {errors} of "
            f"{samples} {counts.unit}, where at most {allowed} may"
        )
    else:
        share = float(leaving[passed].max(initial=0)) / confidence.shape[1]
        errors = int(counts.errors[~passed].min(initial=samples)) if len(some) else 0
        found = (
            f"of {samples} {counts.unit} at most {allowed} may disagree, and up to there "
            f"only {share:.1%} of them leave, which saves less than exits cost"
        )
    needed = _samples_for(errors / samples, replace(tested, max_disagreement=bound))
    bounds = "--max-disagreement" if strictest < len(of_all) else "--max-class-disagreement"
    more = (
        f" (with as many errors a sample, some {needed} {counts.unit} would do)" if needed else ""
    )
    return (
        f"the data is too little to certify disagreement ≤ {bound:g} with "
        f"confidence {terms.confidence_level:g}: {found}; pass more --data{more}, a larger "
        f"{bounds} or a smaller --confidence"
    )


def _samples_for(error_rate: float, terms: PolicyTerms) -> int | None:
    """Return about how many certify samples a policy with ``error_rate`` needs to pass."""
    samples = 100
    while error_rate < terms.max_disagreement and samples < _MOST_SAMPLES:
        if error_rate * samples <= terms.allowed_errors(samples):
            return samples
        samples = samples * 5 // 4
    return None
