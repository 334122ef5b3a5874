"""A frontier made by hand, and bundles to choose its policies from; contents are no real graphs."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.frontier.measurement import (
    Frontier,
    FrontierPoint,
    FrontierSystem,
    gain_of,
)
from benchmarks.frontier.policies import BOTH, EXITS, INT8, INT8_CERTIFIED, SOURCE
from tests.unit.bundle import cascades, examples

from offramp.bundle import ActiveExit, Bundle, ExitPolicy, Promise, Ratio, write_bundle
from offramp.bundle.files import dump


def records(known: Sequence[float], *, samples: int = 1000) -> bytes:
    """Exits that are sure and right on these shares of each split, and unsure and wrong else."""
    rng = np.random.default_rng(0)
    split = np.repeat(np.array([1, 2], np.uint8), samples)
    easy = rng.random(2 * samples) < np.array(known, np.float64)[:, None]
    sure = np.where(easy, rng.uniform(0.9, 1, easy.shape), rng.uniform(0, 0.3, easy.shape))
    stream = io.BytesIO()
    np.savez(
        stream,
        confidence=sure.astype(np.float32),
        prediction=np.where(easy, 1, 2).astype(np.int32),
        final_prediction=np.ones(2 * samples, np.int32),
        final_confidence=np.ones(2 * samples, np.float32),
        split=split,
    )
    return stream.getvalue()


def write_fp32(folder: Path, known: Sequence[float] = (0.6,), **changes: Any) -> Bundle:
    files = {**examples.FILES, "records.npz": records(known)}
    folder.mkdir(exist_ok=True)
    return examples.write(folder, files=files, **changes)


def write_int8(folder: Path, known: Sequence[float] = (0.6, 0.97)) -> Bundle:
    files = {
        **examples.FILES,
        "exits/01.onnx": b"the own answer",
        "profiles/cpu.json": dump(cascades.CASCADE_PROFILE),
        "records.npz": records(known),
    }
    manifest = cascades.cascade_manifest()
    return write_bundle(folder / "small_int8.ee", manifest, examples.POLICY, files)


def point(size: int, ratio: float, disagreement: float, *, width: float = 0.01) -> FrontierPoint:
    """The source model takes 2 ms a sample."""
    return FrontierPoint(
        batch_size=size,
        samples=1000,
        busy_ms_per_sample=2 * ratio,
        busy=Ratio(value=ratio, half_width=width),
        mean=Ratio(value=ratio, half_width=width),
        disagreement=disagreement,
        accuracy=0.9,
        exit_shares={"exit 0": 0.5, "final": 0.5},
        round_busy_ms=(2 * size * ratio,) * 6,
    )


def certified(
    name: str, bound: float, *points: FrontierPoint, reason: str | None = None
) -> FrontierSystem:
    promise = Promise(
        max_disagreement=bound, confidence_level=0.95, certify_samples=1000, certify_errors=4,
        p_value=0.04, predicted_savings=0.5,
    )  # fmt: skip
    policy = ExitPolicy(version=1, active=(ActiveExit(exit=0, threshold=0.5),), promise=promise)
    return FrontierSystem(
        system=name,
        max_disagreement=bound,
        policy=None if reason else policy,
        reason=reason,
        predicted_ratio={} if reason else {1: 0.25},
        measured=points,
    )


def without_bound(name: str, *points: FrontierPoint) -> FrontierSystem:
    return FrontierSystem(
        system=name, max_disagreement=None, policy=None, reason=None, predicted_ratio={},
        measured=points,
    )  # fmt: skip


def frontier(**changes: Any) -> Frontier:
    """Two batch sizes and two bounds; at the lower one nothing is certified for exits alone."""
    systems = (
        without_bound(SOURCE, point(1, 1.0, 0.0, width=0.0), point(16, 1.0, 0.0, width=0.0)),
        without_bound(INT8, point(1, 0.5, 0.03), point(16, 0.6, 0.03)),
        certified(INT8_CERTIFIED, 0.005, point(1, 0.8, 0.004), point(16, 1.1, 0.004)),
        certified(EXITS, 0.005, reason="too <few> samples"),
        certified(BOTH, 0.005, point(1, 0.6, 0.004), point(16, 0.9, 0.004)),
        certified(INT8_CERTIFIED, 0.02, point(1, 0.6, 0.01), point(16, 0.7, 0.01)),
        certified(EXITS, 0.02, point(1, 0.4, 0.022), point(16, 0.5, 0.022)),
        certified(BOTH, 0.02, point(1, 0.3, 0.015), point(16, 0.4, 0.015)),
    )
    gains = (gain_of(systems, bound, size) for bound in (0.005, 0.02) for size in (1, 16))
    given = {"systems": systems, "gains": tuple(g for g in gains if g), "disturbed": ()}
    return Frontier(**{**given, **changes})
