"""With one variant every decision is what it was before there were variants."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from tests.unit.scheduling.helpers import SIZE, STAGES, scheduler, table

from offramp.engine.scheduling import Run, SchedulerFullError, Submission

STREAMS, STEPS = 2, 600
RECORDED = {
    "run-through": "796b8933bd5d682e",
    "refill": "91cc1208025589a7",
    "rebatch": "d0b2b86b15b9e9f1",
    "slackfit": "a3eebb4aa7109f0e",
    "slackfit-bare": "ca4054deadf99d58",
    "max-accuracy": "d5b607f90214caf3",
    "max-batch": "3cc2569437f40236",
    "cheapest": "b6441f8e05bec675",
    "clockwork": "ee7345aa319be3cf",
    "delay": "0f99f3b217f535c0",
    "fixed:1": "e895c6969c5d70c8",
    "fixed:final": "ee7345aa319be3cf",
}
"""Digests of all decisions and transitions of a random life, by commit 94840e6."""


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
