"""Batch profiles recorded while shifting mixes are served in simulation, to be forecast.

The samples of each scenario of `python -m benchmarks.adapt` are served by a controller, chunk by
chunk, on the recorded answers of a real bundle's exits; the rows of each window are counted as a
server counts them, and passed to the same recorder.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from benchmarks.adapt.contenders import ControllerInputs, make_contender
from benchmarks.adapt.replay import (
    ComparedController,
    ReplaySettings,
    ReplayTrace,
    replay,
)
from benchmarks.adapt.scenarios import (
    ScenarioData,
    ScenarioSettings,
    answering,
    scenarios_of,
)
from benchmarks.adapt.sequence import draw
from numpy.typing import NDArray

from offramp.bundle import NEVER, Bundle
from offramp.calibration.data.dataset import read_samples
from offramp.certify import MODEL_END
from offramp.cluster.planning.batch_profile import BatchProfile, BatchProfileRecorder
from offramp.engine.backends.custom_ops import open_runnable
from offramp.engine.control.costs import CostModel
from offramp.engine.requests.departures import Departures

CONTROLLERS = ("leave", "certified")
"""Fixed thresholds, and those changed by the server's default controller."""
BATCH = 32


def served_profiles(
    bundle_path: Path, data: Path, rows: NDArray[np.int64], window_s: float, seed: int
) -> dict[str, BatchProfile]:
    """Record a profile for each scenario and controller, with ``rows`` [windows] in each window."""
    bundle = open_runnable(bundle_path)
    record = answering(bundle, threads=1)
    dataset = read_samples(data, bundle.manifest)
    settings = ScenarioSettings(samples=0, corruption="noise", severity=3, seed=seed)
    material = ScenarioData({data.stem: dataset}, lambda d: record(d, lambda _: None), settings)
    workplace = workplace_of(bundle)
    found = {}
    for name, scenario in scenarios_of(("all",), material).items():
        segments = scenario.segments(material)
        each = int(-(-rows.sum() // len(segments)))
        sequence = draw(
            name,
            scenario.description,
            [replace(segment, samples=each) for segment in segments],
            np.random.default_rng(seed),
        )
        for controller in CONTROLLERS:
            contender = make_contender(controller, workplace)
            pace = ReplaySettings(chunk=BATCH, tuning_delay=10 * BATCH, seed=seed)
            trace = replay(sequence, contender, workplace.costs, pace)
            profile = profile_of(trace, contender, rows, window_s, exits=len(bundle.manifest.exits))
            found[f"served, {name}, {controller}"] = profile
    return found


def workplace_of(bundle: Bundle) -> ControllerInputs:
    """Return the default inputs of controllers in `python -m benchmarks.adapt`."""
    promise = bundle.policy.promise
    return ControllerInputs(
        bundle=bundle,
        batch_size=BATCH,
        costs=CostModel.of(bundle.manifest, bundle.profile(), BATCH),
        max_disagreement=0.01 if promise is None else promise.max_disagreement,
        confidence_level=0.95,
        ramp_budget=None,
        audit_budget=0.05,
    )


def profile_of(
    trace: ReplayTrace,
    contender: ComparedController,
    rows: NDArray[np.int64],
    window_s: float,
    *,
    exits: int,
) -> BatchProfile:
    """Count served samples as a server does: by the exit that answered, and the exits in use."""
    in_use = [
        tuple(a.exit for a in c.policy.active if contender.mode.observed or a.threshold < NEVER)
        for c in trace.changes
    ]
    recorder = BatchProfileRecorder(exits, window_s=window_s, kept=len(rows))
    ends = np.cumsum(rows)
    for window, (end, count) in enumerate(zip(ends.tolist(), rows.tolist(), strict=True)):
        here = slice(end - count, end)
        answered_at, policies = trace.answered_at[here], trace.policy[here]
        seen = [
            departures_of(answered_at[policies == policy], in_use[policy])
            for policy in np.unique(policies).tolist()
        ]
        recorder.add(window * window_s, seen)
    return recorder.profile()


def departures_of(answered_at: NDArray[np.int64], exits: tuple[int, ...]) -> Departures:
    """Count rows by the exit that answered."""
    left = tuple(int((answered_at == place).sum()) for place in (*exits, MODEL_END))
    if sum(left) != len(answered_at):
        raise ValueError(f"rows were answered by exits that are not among {exits}")
    return Departures(exits=exits, left=left, forced=(0,) * len(left))
