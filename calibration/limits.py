"""Why no exit is active: which limit binds, its value, and what would lift it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from offramp.bundle.manifest import HeadScore
from offramp.calibration.records import ExitRecords
from offramp.calibration.selection import MIN_GAIN, Candidates
from offramp.certify import allowed_errors, walk
from offramp.engine.control.costs import CostModel

_MOST_SAMPLES = 200_000
"""Certify samples beyond which no number is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingLimit:
    """The limit that kept all exits out of use."""

    kind: Literal["agreement", "costs", "overhead", "data"]
    message: str
    """A sentence with the value that was found, the one that was allowed, and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTerms:
    """What the user asked of the exit policy."""

    max_disagreement: float
    confidence_level: float
    """Of the certificate."""
    max_overhead: float | None
    batch_size: int
    """The batch size that savings are predicted at."""

    def allowed_errors(self, samples: int) -> int:
        """Errors with which a policy is certified on so many samples; -1 if none is."""
        return allowed_errors(samples, self.max_disagreement, self.confidence_level)


def limit_of_heads(best: Sequence[HeadScore], source_ms: float, terms: PolicyTerms) -> BindingLimit:
    """Say why no exit was built: no head saves, alone, more than it costs.

    ``best`` is, of every candidate, the head that nets most; ``source_ms`` is the model's time at
    the batch size of the terms.
    """
    if not best:
        return BindingLimit(
            kind="agreement",
            message="no cut point's tensor has a shape that a head could read; eecompile inspect "
            "lists them, --exits names others",
        )

    def if_free(head: HeadScore) -> float:
        """Share of the model's time that the head would save if it took none."""
        return head.net_savings + head.cost_ms / source_ms

    dearest = max(best, key=if_free)
    if if_free(dearest) >= MIN_GAIN:
        return BindingLimit(
            kind="costs",
            message=f"heads cost more than they save: at batch {terms.batch_size} the best one "
            f"would save {if_free(dearest):.1%} of the model's {source_ms:.3g} ms if "
            f"it cost nothing, but takes {dearest.cost_ms:.3g} ms "
            f"({dearest.cost_ms / source_ms:.1%}); a larger model has more to save",
        )
    return BindingLimit(
        kind="agreement",
        message=f"none of the {len(best)} candidate exits saves time: the best one agrees with "
        f"the model on {max(head.agreement for head in best):.1%} of the tuning samples, and too "
        f"few samples can leave while at most {terms.max_disagreement:g} disagree "
        "(--max-disagreement); more --data or --epochs make better heads, and a larger "
        "--max-disagreement lets more samples leave",
    )


def limit_of_rehearsal(max_violations: float) -> BindingLimit:
    """Say why a rehearsal kept no exit."""
    return BindingLimit(
        kind="overhead",
        message="every exit made too many of the rehearsed batches later than the unmodified model "
        f"would (--max-violations {max_violations:g}); a larger one, or --selection savings, keeps "
        "exits",
    )


def limit_of_choice(
    tune: ExitRecords, costs: dict[int, CostModel], terms: PolicyTerms
) -> BindingLimit:
    """Say why no set of exits was chosen on the tuning split.

    ``costs`` are those of all exits (at least one), by profiled batch size.
    """
    candidates = Candidates(
        tune.confidence,
        tune.agrees,
        max_disagreement=terms.max_disagreement,
        confidence_level=terms.confidence_level,
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
    return BindingLimit(
        kind="agreement",
        message=f"no head agrees enough: even if exits cost nothing, {max(could_save, 0):.1%} of "
        f"the model's time would be saved while at most {terms.max_disagreement:g} of the samples "
        f"disagree (--max-disagreement); the best head agrees on "
        f"{tune.agrees.mean(axis=1).max():.1%} of all samples. More --data or --epochs make better "
        "heads, and a larger --max-disagreement lets more samples leave",
    )


def _overhead(
    active: tuple[int, ...], candidates: Candidates, cost: CostModel, terms: PolicyTerms
) -> BindingLimit:
    assert terms.max_overhead is not None
    least = min(cost.sure_overhead((index,)) for index in range(cost.exits))
    names = ", ".join(map(str, active))
    return BindingLimit(
        kind="overhead",
        message=f"--max-overhead {terms.max_overhead:g}: exits {names} would save "
        f"{candidates.savings(active, cost):.1%} of the model's time, but add "
        f"{cost.overhead(active):.1%} (surely {cost.sure_overhead(active):.1%}) at batch "
        f"{terms.batch_size} where none is taken, and the cheapest exit alone surely adds "
        f"{least:.1%}; without --max-overhead, or with --max-overhead "
        f"{_up(cost.sure_overhead(active)):g}, they would be used",
    )


def _costs(
    best: int,
    could_save: float,
    candidates: Candidates,
    costs: dict[int, CostModel],
    terms: PolicyTerms,
) -> BindingLimit:
    cost = costs[terms.batch_size]
    paying = [size for size, elsewhere in costs.items() if candidates.choose(elsewhere)]
    remedy = "a larger model, or one on a slower machine, has more to save"
    if paying:
        saved = candidates.savings(candidates.choose(costs[paying[0]]), costs[paying[0]])
        remedy = (
            f"at batch {paying[0]} {saved:.1%} would be saved: --reference-batch-size {paying[0]}"
        )
    head, border = cost.exits_ms[best], cost.stages_ms[best]
    return BindingLimit(
        kind="costs",
        message=f"exits cost more than they save: at batch {terms.batch_size} exit {best} would "
        f"save {could_save:.1%} of the model's {cost.source_ms:.3g} ms if it cost nothing, but its "
        f"head takes {head:.3g} ms and its border {border:.3g} ms "
        f"({(head + border) / cost.source_ms:.1%}); {remedy}",
    )


def limit_of_certificate(
    active: Sequence[int], path: NDArray[np.float64], certify: ExitRecords, terms: PolicyTerms
) -> BindingLimit:
    """Say why no policy on the path of the chosen exits was certified to save time.

    Args:
        active: The exits chosen on the tuning split, at least one.
        path: float64[levels, active], thresholds from conservative to aggressive.
        certify: Records of the certify split, all exits.
        terms: What was asked for.
    """
    rows = list(active)
    walked = walk(path, certify.confidence[rows], certify.agrees[rows])
    samples = certify.confidence.shape[1]
    allowed = terms.allowed_errors(samples)
    leaving = samples - walked.counts[:, -1]
    passed = (walked.errors <= allowed).cumprod(dtype=bool)
    some = np.flatnonzero(leaving > 0)
    if len(some) and not passed[some[0]]:
        errors = int(walked.errors[some[0]])
        found = (
            f"the most conservative policy that lets any sample leave disagreed on {errors} of "
            f"{samples} certify samples, where at most {allowed} may"
        )
    else:
        share = float(leaving[passed].max(initial=0)) / samples
        errors = int(walked.errors[~passed].min(initial=samples)) if len(some) else 0
        found = (
            f"of {samples} certify samples at most {allowed} may disagree, and up to there "
            f"only {share:.1%} of them leave, which saves less than exits cost"
        )
    needed = _samples_for(errors / samples, terms)
    more = f" (with as many errors a sample, some {needed} would do)" if needed else ""
    return BindingLimit(
        kind="data",
        message=f"the data is too little to certify disagreement ≤ {terms.max_disagreement:g} "
        f"with confidence {terms.confidence_level:g}: {found}; more --data lifts it{more}, "
        "so does a larger --max-disagreement or a smaller --confidence",
    )


def _samples_for(error_rate: float, terms: PolicyTerms) -> int | None:
    """Certify samples with which such an error rate passes; ``None`` where none would do."""
    samples = 100
    while error_rate < terms.max_disagreement and samples < _MOST_SAMPLES:
        if error_rate * samples <= terms.allowed_errors(samples):
            return samples
        samples = samples * 5 // 4
    return None


def _up(share: float) -> float:
    """Round up to a thousandth, so that a limit of that value lets it pass."""
    return float(np.ceil(round(share * 1000, 6)) / 1000)
