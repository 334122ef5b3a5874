"""With one variant every decision is what it was before there were variants."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from tests.unit.scheduling.helpers import SIZE, STAGES, scheduler, table

from offramp.engine.scheduling import Run, SchedulerFullError, Submission

STREAMS, STEPS = 2, 600
RECORDED = {
    "run-through": "d616da35efece7b2",
    "refill": "b6670892ee4c69c7",
    "rebatch": "e7d03c8e5808d16a",
    "slackfit": "b0116ab54c0e7e00",
    "slackfit-bare": "c4b9be94b95090f9",
    "max-accuracy": "80585722714c812a",
    "max-batch": "8fd31ac5c0f15b90",
    "cheapest": "fde51219886ef1cc",
    "clockwork": "6f5a87b65470b00b",
    "delay": "7f3c0ac15c7666c8",
    "fixed:1": "5aab0dae92f2d3b0",
    "fixed:final": "6f5a87b65470b00b",
}
"""Digests of all decisions and transitions of a random life, by commit 94840e6."""


def life(policy: str) -> str:
    """Submit, ask, end and fail at random, in eighths of a second; a digest of what was said."""
    random = np.random.default_rng(5)
    s = scheduler(policy, latencies=table(first_s=0.25, more_s=0.125), streams=STREAMS)
    running: dict[int, Run] = {}
    said: list[object] = []
    for step in range(STEPS):
        now_s = step / 8
        if random.random() < 0.5:
            slack_s = random.choice([0.5, 1.0, 2.0, 4.0, np.inf])
            rows, key = int(random.integers(1, SIZE + 1)), int(random.integers(2))
            try:
                s.submit(Submission(step, rows, now_s + slack_s, 0, key), now_s)
            except SchedulerFullError:
                said.append("full")
        stream = int(random.integers(STREAMS))
        if stream not in running:
            decision = s.next(stream, now_s)
            if not isinstance(decision, Run):
                continue
            running[stream] = decision
            pieces = [(piece.number, piece.positions.tolist()) for piece in decision.pieces]
            samples = list(zip(decision.requests.tolist(), decision.rows.tolist(), strict=True))
            said.append((decision.batch, decision.stage, decision.deepest, pieces, samples))
        elif random.random() < 0.02:
            del running[stream]
            s.failed(stream, now_s)
        else:
            run = running.pop(stream)
            exited = (random.random(len(run.requests)) < 0.3) | (run.stage == STAGES - 1)
            found = s.done(stream, exited, now_s)
            rows_of = (found.released, found.dropped, found.survivors, found.ended)
            said.append(([rows.tolist() for rows in rows_of], found.buffered))
        said.append([(d.request, d.count, d.cause.value) for d in s.take_dropped()])
        said.append(s.take_discarded())
    assert len(said) > STEPS
    return hashlib.sha256(repr(said).encode()).hexdigest()[:16]


@pytest.mark.parametrize("policy", RECORDED)
def test_decisions_are_those_recorded(policy: str) -> None:
    assert life(policy) == RECORDED[policy]
