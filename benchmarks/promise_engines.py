"""Frequency with which a policy certified for engines of a precision breaks its promise.

    python -m benchmarks.promise_engines BUNDLE --data TEST.npz --calibration CALIBRATION.npz \\
        --precision int8 [--draws 500] [--json FILE]

As ``benchmarks.promise``, for the certificate of ``eecompile build --precision``: the population is
the bundle's certify split and the test data; each draw takes as many of them as the certify split
has, with replacement, and shares the promise between the model's end in that precision and its
exits. Counted are disagreements of served answers with the *float32* model in the whole population.
Arithmetic is that of the graphs of the engines, on ONNX Runtime.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import make_parser

from offramp.bundle import Bundle
from offramp.bundle.engines import Precision
from offramp.calibration.choose.exit_records import ExitRecords
from offramp.calibration.data.dataset import read_samples
from offramp.certify.decision import first_exit
from offramp.compiler.common.errors import VerificationError
from offramp.compiler.engines.engine_verification import (
    part_data,
    recorder,
    share_promise,
    source_predictions,
)
from offramp.compiler.engines.units import ranges_of
from offramp.engine.common.environment import available_cores
from offramp.tools.bench.common.output import check_outputs, describe_environment, write_json


def main() -> None:
    """Draw, certify, look up, print."""
    parser = make_parser(__doc__, bundle=True, data=True)
    parser.add_argument("--calibration", type=Path, required=True, metavar="NPZ",
                        help="data that the bundle was compiled with")  # fmt: skip
    parser.add_argument("--precision", choices=("fp32", "fp16", "int8"), required=True)
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    check_outputs(options.json)
    found = resample(
        Bundle.open(options.bundle),
        options.data,
        options.calibration,
        options.precision,
        draws=options.draws,
        seed=options.seed,
    )
    for name, value in found.items():
        print(f"{name}: {value if isinstance(value, str) else format(value, '.5g')}")
    write_json(options.json, {**found, "environment": describe_environment(seed=options.seed)})


def resample(
    bundle: Bundle, data: Path, calibration: Path, precision: Precision, *, draws: int, seed: int
) -> dict[str, Any]:
    """Return the share of draws above the bound, and quantiles of the true disagreement."""
    promise = bundle.policy.promise
    if promise is None:
        raise SystemExit(f"{bundle.path} has no certified policy to look at")
    threads = available_cores()
    parts = part_data(bundle, read_samples(calibration, bundle.manifest), threads=threads)
    if not parts.certifies:
        raise SystemExit(f"{calibration} is not what {bundle.path} was compiled with")
    ranges = ranges_of(bundle, parts.ranges, threads=threads) if precision == "int8" else None
    record = recorder(bundle, precision, ranges, threads=threads)
    tune, unseen = record(parts.tune), [parts.judged, read_samples(data, bundle.manifest)]
    population = _joined([record(part) for part in unseen])
    source = np.concatenate([source_predictions(bundle, part, threads=threads) for part in unseen])
    rng, size = np.random.default_rng(seed), len(parts.judged)
    true, saved, spent = [], [], []
    refused = 0
    for _ in range(draws):
        drawn = rng.integers(0, len(source), size)
        try:
            shared = share_promise(bundle, precision, tune, _some(population, drawn), source[drawn])
        except VerificationError:
            refused += 1
            continue
        evidence = shared.evidence
        used = [active.exit for active in evidence.policy.active]
        thresholds = np.array([active.threshold for active in evidence.policy.active])
        left = first_exit(population.confidence[used], thresholds)
        said = np.vstack([population.prediction[used], population.final_prediction])
        answered = said[left, np.arange(len(source))]
        true.append(float(np.mean(answered != source)))
        certified = evidence.policy.promise
        saved.append(0.0 if certified is None else certified.predicted_savings)
        spent.append(evidence.spent(promise.confidence_level))
    return {
        "precision": precision,
        "draws": draws,
        "refused": refused,
        "population": len(source),
        "certify_samples": size,
        "bound": promise.max_disagreement,
        "allowed_share_above": 1 - promise.confidence_level,
        "share_above": float(np.sum(np.array(true) > promise.max_disagreement)) / draws,
        "median_disagreement": float(np.median(true)),
        "largest_disagreement": float(np.max(true)),
        "end_disagreement": float(np.mean(population.final_prediction != source)),
        "median_spent_by_end": float(np.median(spent)),
        "median_predicted_savings": float(np.median(saved)),
    }


def _joined(parts: list[ExitRecords]) -> ExitRecords:
    names = ("confidence", "prediction", "final_prediction", "final_confidence")
    arrays = {n: np.concatenate([getattr(part, n) for part in parts], axis=-1) for n in names}
    return ExitRecords(labels=None, **arrays)


def _some(records: ExitRecords, rows: np.ndarray[Any, Any]) -> ExitRecords:
    return ExitRecords(
        confidence=records.confidence[:, rows],
        prediction=records.prediction[:, rows],
        final_prediction=records.final_prediction[rows],
        final_confidence=records.final_confidence[rows],
        labels=None,
    )


if __name__ == "__main__":
    main()
