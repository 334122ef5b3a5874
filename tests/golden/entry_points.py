"""All functions of Offramp that recordings call besides its commands; update it when they move."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks import adjustment, e3_halves, superserve

from offramp.baselines.thresholds import tune
from offramp.bundle import Bundle
from offramp.bundle.records import CERTIFY, TUNE
from offramp.bundle.schema.serde import to_plain
from offramp.calibration.choose.selection import Candidates, certified_policy
from offramp.certify.agreement import tuning_path
from offramp.engine.control.costs import CostModel
from offramp.tools.bench.common.traces import bursty, constant

CONFIDENCE = 0.95
Json = dict[str, Any]


def selected(
    path: Path, *, max_disagreement: float, max_overhead: float | None, batch_size: int
) -> Json:
    """Exits in use, levels of their path, and the certified policy, by records and a profile."""
    bundle = Bundle.open(path)
    records, cost = bundle.records(), CostModel.of(bundle.manifest, bundle.profile(), batch_size)
    agrees = records["prediction"] == records["final_prediction"]
    tuned, certify = records["split"] == TUNE, records["split"] == CERTIFY
    candidates = Candidates(
        records["confidence"][:, tuned],
        agrees[:, tuned],
        max_disagreement=max_disagreement,
        confidence_level=CONFIDENCE,
    )
    active = candidates.choose(cost, max_overhead=max_overhead)
    rows = list(active)
    levels = np.empty((0, 0))
    if rows:
        levels = tuning_path(records["confidence"][rows][:, tuned], agrees[rows][:, tuned])
    policy = certified_policy(
        active,
        levels,
        records["confidence"][:, certify],
        agrees[:, certify],
        cost,
        max_disagreement=max_disagreement,
        confidence_level=CONFIDENCE,
    )
    some = levels[:: max(1, len(levels) // 5)]
    return {
        "active": rows,
        "levels": len(levels),
        "some_levels": some.tolist(),
        "policy": to_plain(policy),
    }


def searched(path: Path, *, max_disagreement: float, method: str, samples: int) -> Json:
    """Thresholds that a window of records is tuned to."""
    bundle = Bundle.open(path)
    records, cost = bundle.records(), CostModel.of(bundle.manifest, bundle.profile(), 8)
    agrees = records["prediction"] == records["final_prediction"]
    found = tune(
        records["confidence"][:, :samples],
        agrees[:, :samples],
        cost.latency_ms(range(cost.exits)),
        max_disagreement,
        method,
    )
    return {"thresholds": np.asarray(found.thresholds).tolist(), "savings": float(found.savings)}


def adjusted(samples: int, count: int) -> list[Json]:
    """Return the decisions of Apparate's adjustment in random situations."""
    found = []
    for kind, situations in adjustment.draw(samples, count).items():
        for situation in situations:
            decided = asdict(adjustment.adjust(**situation))
            found.append({"kind": kind, **decided, "reason": decided["reason"].value})
    return found


def shrinking(system: str, *, easy: float, size: int, rate: float) -> Json:
    """E3's batch-shrink experiment, at one rate: a twentieth of its length."""
    whole = e3_halves.DURATION_S
    try:
        e3_halves.DURATION_S = whole / 20
        return e3_halves.run(system, easy, size, rate=rate, seed=0).to_json()
    finally:
        e3_halves.DURATION_S = whole


def bursts(policy: str, *, cv2: float, duration_s: float) -> Json:
    """SuperServe's bursty experiment, its costs assumed instead of found."""
    costs = np.linspace(5.5e-5, 2.2e-4, len(superserve.ACCURACIES)).tolist()
    table = superserve.affine(costs, superserve.FIXED_PART)
    return superserve.run(policy, table, bursty(1_500, 5_550, cv2, duration_s, 0), 0).to_json()


def sustained(rps: float) -> Json:
    """Return the simulation that determines SuperServe's costs, at one rate."""
    table = superserve.affine([2e-4], superserve.FIXED_PART)
    return superserve.run("fixed:final", table, constant(rps, 0.2), 0).to_json()
