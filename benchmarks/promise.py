"""Frequency with which a certified policy breaks its promise on unseen data.

    python -m benchmarks.promise BUNDLE --data TEST.npz [--draws 1000] [--json FILE]

The population is the bundle's certify split and the test data together: samples that were used
neither for training nor for tuning. The exits in use and the path of their thresholds are those of
the tuning split, as in compiling. Each draw takes as many samples of the population as the certify
split has, with replacement, certifies along the path, and counts the disagreements of the policy
with the unmodified model in the whole population, as the task defines them. The promise allows a
share of 1 - confidence of the draws to be above the bound.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from benchmarks.adapt.scenarios import answering
from benchmarks.common import make_parser

from offramp.bundle import Bundle
from offramp.bundle.records import CERTIFY, TUNE
from offramp.calibration.choose.exit_records import ExitRecords
from offramp.calibration.choose.selection import certified_policy
from offramp.calibration.data.dataset import read_samples
from offramp.certify import evaluate
from offramp.compiler.exits.policy_choice import PolicyChoice
from offramp.engine.common.environment import available_cores
from offramp.tools.bench.common.output import check_outputs, describe_environment, write_json


def main() -> None:
    """Draw, certify, look up, print."""
    parser = make_parser(__doc__, bundle=True, data=True)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    check_outputs(options.json)
    found = resample(options.bundle, options.data, draws=options.draws, seed=options.seed)
    print(
        f"{found['share_above']:.1%} of {options.draws:,} certified policies disagree in more than "
        f"{found['bound']:.2%} of the {found['population']:,} samples; the promise allows "
        f"{found['allowed_share_above']:.1%}.\n"
        f"Disagreement: median {found['median_disagreement']:.2%}, largest "
        f"{found['largest_disagreement']:.2%}. Each policy is certified on "
        f"{found['certify_samples']:,} of the samples, drawn with replacement. Median of the "
        f"predicted savings: {found['median_predicted_savings']:.0%}"
    )
    write_json(options.json, {**found, "environment": describe_environment(seed=options.seed)})


def resample(path: Path, data: Path, *, draws: int, seed: int) -> dict[str, float]:
    """Return the share of draws above the bound, and quantiles of the true disagreement."""
    bundle = Bundle.open(path)
    promise = bundle.policy.promise
    if promise is None:
        raise SystemExit(f"{path} has no certified policy to look at")
    choice = PolicyChoice.again(
        bundle,
        max_disagreement=promise.max_disagreement,
        confidence_level=promise.confidence_level,
    )
    fixed = choice.by_savings(ExitRecords.kept_by(bundle, TUNE))
    rows, certify = list(fixed.active), ExitRecords.kept_by(bundle, CERTIFY)
    test = answering(bundle, threads=available_cores())(
        read_samples(data, bundle.manifest), lambda _: None
    )
    confidence = np.concatenate([certify.confidence, test.confidence], axis=1)
    agreed = np.concatenate([certify.agrees, test.prediction == test.final], axis=1)
    cost = choice.cost(choice.batch_size)
    rng, size = np.random.default_rng(seed), certify.confidence.shape[1]
    true, saved = [], []
    for _ in range(draws):
        drawn = rng.integers(0, confidence.shape[1], size)
        policy = certified_policy(
            rows, fixed.thresholds, confidence[:, drawn], agreed[:, drawn], cost,
            max_disagreement=promise.max_disagreement, confidence_level=promise.confidence_level,
            whole=bundle.manifest.answer.criterion.depends_on_earlier,
        )  # fmt: skip
        used = [active.exit for active in policy.active]
        outcome = evaluate(
            confidence[used], agreed[used], cost.latency_ms(used),
            np.array([active.threshold for active in policy.active]), vanilla_ms=cost.source_ms,
        )  # fmt: skip
        true.append(outcome.errors / confidence.shape[1])
        saved.append(outcome.savings)
    return {
        "draws": draws,
        "population": confidence.shape[1],
        "certify_samples": size,
        "bound": promise.max_disagreement,
        "allowed_share_above": 1 - promise.confidence_level,
        "share_above": float(np.mean(np.array(true) > promise.max_disagreement)),
        "median_disagreement": float(np.median(true)),
        "largest_disagreement": float(np.max(true)),
        "median_predicted_savings": float(np.median(saved)),
    }


if __name__ == "__main__":
    main()
