"""Why no exit is active: which limit binds, its value, and what would lift it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from offramp.bundle.manifest import HeadTrial
from offramp.calibration.records import ExitRecords
from offramp.calibration.selection import MIN_GAIN, Candidates
from offramp.certify import allowed_errors, walk
from offramp.engine.control.costs import CostModel

_MOST_SAMPLES = 200_000
"""Certify samples beyond which no number is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What kept all exits out of use."""

    kind: Literal["agreement", "costs", "overhead", "data"]
    message: str
    """A sentence with the value that was found, the one that was allowed, and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was asked of the policy."""

    max_disagreement: float
    confidence: float
    max_overhead: float | None
    batch_size: int
    """That savings are predicted at."""


def limit_of_heads(best: Sequence[HeadTrial], source_ms: float, asked: Asked) -> Limit:
    """Say why no exit was built: no head saves, alone, more than it costs.

    Args:
        best: Of every candidate, the head that nets most.
        source_ms: The model's time at the batch size of ``asked``.
        asked: Of the policy.
    """
    if not best:
        return Limit(
            kind="agreement",
            message="no cut point's tensor has a shape that a head could read; eecompile inspect "
            "lists them, --exits names others",
        )
    dearest = max(best, key=lambda trial: _if_free(trial, source_ms))
    if _if_free(dearest, source_ms) >= MIN_GAIN:
        return Limit(
            kind="costs",
            message=f"heads cost more than they save: at batch {asked.batch_size} the best one "
            f"would save {_if_free(dearest, source_ms):.1%} of the model's {source_ms:.3g} ms if "
            f"it cost nothing, but takes {dearest.cost_ms:.3g} ms "
            f"({dearest.cost_ms / source_ms:.1%}); a larger model has more to save",
        )
    return Limit(
        kind="agreement",
        message=f"none of the {len(best)} candidate exits saves time: the best one agrees with "
        f"the model on {max(trial.agreement for trial in best):.1%} of the tuning samples, and too "
        f"few samples can leave while at most {asked.max_disagreement:g} disagree "
        "(--max-disagreement); more --data or --epochs make better heads, and a larger "
        "--max-disagreement lets more samples leave",
    )


def _if_free(trial: HeadTrial, source_ms: float) -> float:
    """Share of the model's time that a head would save if it took none."""
    return trial.net_savings + trial.cost_ms / source_ms


def limit_of_rehearsal(max_violations: float) -> Limit:
    """Say why a rehearsal kept no exit."""
    return Limit(
        kind="overhead",
        message="every exit made too many of the rehearsed batches later than the unmodified model "
        f"would (--max-violations {max_violations:g}); a larger one, or --selection savings, keeps "
        "exits",
    )


def limit_of_choice(tune: ExitRecords, costs: dict[int, CostModel], asked: Asked) -> Limit:
    """Say why no set of exits was chosen on the tuning split.

    Args:
        tune: Records of the tuning split, of at least one exit.
        costs: Of all exits, by profiled batch size.
        asked: Of the policy.
    """
    candidates = Candidates(
        tune.confidence,
        tune.agrees,
        max_disagreement=asked.max_disagreement,
        confidence_level=asked.confidence,
    )
    cost = costs[asked.batch_size]
    unlimited = candidates.choose(cost)
    if unlimited:
        return _overhead(unlimited, candidates, cost, asked)
    free = replace(cost, exits_ms=(0.0,) * cost.exits, stages_ms=(0.0,) * cost.exits)
    best = max(range(cost.exits), key=lambda index: candidates.savings((index,), free))
    could_save = candidates.savings((best,), free)
    if could_save < MIN_GAIN:
        return _agreement(tune, asked, could_save)
    return _costs(best, could_save, candidates, costs, asked)


def _overhead(
    active: tuple[int, ...], candidates: Candidates, cost: CostModel, asked: Asked
) -> Limit:
    assert asked.max_overhead is not None
    least = min(cost.sure_overhead((index,)) for index in range(cost.exits))
    names = ", ".join(map(str, active))
    return Limit(
        kind="overhead",
        message=f"--max-overhead {asked.max_overhead:g}: exits {names} would save "
        f"{candidates.savings(active, cost):.1%} of the model's time, but add "
        f"{cost.overhead(active):.1%} (surely {cost.sure_overhead(active):.1%}) at batch "
        f"{asked.batch_size} where none is taken, and the cheapest exit alone surely adds "
        f"{least:.1%}; without --max-overhead, or with --max-overhead "
        f"{_up(cost.sure_overhead(active)):g}, they would be used",
    )


def _agreement(tune: ExitRecords, asked: Asked, could_save: float) -> Limit:
    agreement = tune.agrees.mean(axis=1)
    return Limit(
        kind="agreement",
        message=f"no head agrees enough: even if exits cost nothing, {max(could_save, 0):.1%} of "
        f"the model's time would be saved while at most {asked.max_disagreement:g} of the samples "
        f"disagree (--max-disagreement); the best head agrees on {agreement.max():.1%} of all "
        "samples. More --data or --epochs make better heads, and a larger --max-disagreement lets "
        "more samples leave",
    )


def _costs(
    best: int,
    could_save: float,
    candidates: Candidates,
    costs: dict[int, CostModel],
    asked: Asked,
) -> Limit:
    cost = costs[asked.batch_size]
    paying = [size for size, elsewhere in costs.items() if candidates.choose(elsewhere)]
    remedy = "a larger model, or one on a slower machine, has more to save"
    if paying:
        saved = candidates.savings(candidates.choose(costs[paying[0]]), costs[paying[0]])
        remedy = (
            f"at batch {paying[0]} {saved:.1%} would be saved: --reference-batch-size {paying[0]}"
        )
    head, border = cost.exits_ms[best], cost.stages_ms[best]
    return Limit(
        kind="costs",
        message=f"exits cost more than they save: at batch {asked.batch_size} exit {best} would "
        f"save {could_save:.1%} of the model's {cost.source_ms:.3g} ms if it cost nothing, but its "
        f"head takes {head:.3g} ms and its border {border:.3g} ms "
        f"({(head + border) / cost.source_ms:.1%}); {remedy}",
    )


def limit_of_certificate(
    active: Sequence[int], path: NDArray[np.float64], certify: ExitRecords, asked: Asked
) -> Limit:
    """Say why no policy on the path of the chosen exits was certified to save time.

    Args:
        active: The exits chosen on the tuning split, at least one.
        path: float64[levels, active].
        certify: Records of the certify split, all exits.
        asked: Of the policy.
    """
    rows = list(active)
    walked = walk(path, certify.confidence[rows], certify.agrees[rows])
    samples = certify.confidence.shape[1]
    allowed = allowed_errors(samples, asked.max_disagreement, asked.confidence)
    leaving = samples - walked.counts[:, -1]
    passed = (walked.errors <= allowed).cumprod(dtype=bool)
    some = np.flatnonzero(leaving > 0)
    if len(some) and not passed[some[0]]:
        errors = int(walked.errors[some[0]])
        found = (f"the most cautious policy that lets any sample leave disagreed on {errors} of "
                 f"{samples} certify samples, where at most {allowed} may")  # fmt: skip
    else:
        share = float(leaving[passed].max(initial=0)) / samples
        errors = int(walked.errors[~passed].min(initial=samples)) if len(some) else 0
        found = (f"of {samples} certify samples at most {allowed} may disagree, and up to there "
                 f"only {share:.1%} of them leave, which saves less than exits cost")  # fmt: skip
    needed = _samples_for(errors / samples, asked)
    more = f" (with as many errors a sample, some {needed} would do)" if needed else ""
    return Limit(
        kind="data",
        message=f"the data is too little to certify disagreement ≤ {asked.max_disagreement:g} with "
        f"confidence {asked.confidence:g}: {found}; more --data lifts it{more}, so does a larger "
        "--max-disagreement or a smaller --confidence",
    )


def _samples_for(error_rate: float, asked: Asked) -> int | None:
    """Certify samples with which such an error rate passes; ``None`` where none would do."""
    samples = 100
    while error_rate < asked.max_disagreement and samples < _MOST_SAMPLES:
        if error_rate * samples <= allowed_errors(
            samples, asked.max_disagreement, asked.confidence
        ):
            return samples
        samples = samples * 5 // 4
    return None


def _up(share: float) -> float:
    """Round up to a thousandth, so that a limit of that value lets it pass."""
    return float(np.ceil(round(share * 1000, 6)) / 1000)
