"""Decisions of a random life stay what they are, but where that is wanted."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from tests.unit.scheduling.helpers import SIZE, STAGES, scheduler, table

from offramp.engine.scheduling import Run, SchedulerFullError, Submission

STREAMS, STEPS = 2, 600
RECORDED = {
    "run-through": "012496e54470c9ba",
    "refill": "b82703521b0c91bb",
    "rebatch": "a54e5a19d1105a27",
    "slackfit": "b457df9ed760f322",
    "slackfit-bare": "2ab3a41076a25ee0",
    "max-accuracy": "e34b4196e95b83f0",
    "max-batch": "dcb81747fc15c9fd",
    "cheapest": "343d859c05f92521",
    "clockwork": "a246637384a85929",
    "delay": "0f99f3b217f535c0",
    "fixed:1": "d731721bae69d8ce",
    "fixed:final": "3b25877399c6a6d6",
}
"""Digests of all decisions and transitions of a random life, as they were when stages began to
count by their time."""


def life(policy: str) -> str:
    """Submit, ask and end at random, in eighths of a second; a digest of what was said."""
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
        else:
            run = running.pop(stream)
            exited = (random.random(len(run.requests)) < 0.3) | (run.stage == STAGES - 1)
            found = s.update(stream, exited, now_s)
            rows_of = (found.released, found.given_up, found.survivors, found.ended)
            said.append(([rows.tolist() for rows in rows_of], found.buffered))
        said.append([(d.request, d.count, d.cause.value) for d in s.take_dropped()])
        said.append(s.take_discarded())
    assert len(said) > STEPS
    return hashlib.sha256(repr(said).encode()).hexdigest()[:16]


@pytest.mark.parametrize("policy", RECORDED)
def test_decisions_are_those_recorded(policy: str) -> None:
    assert life(policy) == RECORDED[policy]
