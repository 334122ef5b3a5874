"""Workers over a network answer as one process does, and whatever ends them costs no answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.remote.listening import listening_worker, reaching
from tests.unit.remote.workers import (
    answers_of,
    break_at,
    in_process,
    left,
    random_scripts,
    serve,
)

from offramp.engine.core import Engine
from offramp.engine.scheduling import PolicyName
from offramp.testing.worker import FAULTS

SCRIPTS = random_scripts(60)
POINTS = ("before-run", "mid-run", "after-run", "after-write")


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of what goes wrong in workers."""
    folder = tmp_path / "faults"
    folder.mkdir()
    monkeypatch.setenv(FAULTS, str(folder))
    return folder


@pytest.mark.parametrize("policy", ["run-through", "refill"])
def test_killed_workers_cost_no_answer(policy: str, faults: Path, tmp_path: Path) -> None:
    break_at(faults, *(f"kill@{point}@{n + 1}" for n, point in enumerate(POINTS)))
    expected = in_process(SCRIPTS)
    with (
        listening_worker(tmp_path) as one,
        listening_worker(tmp_path) as other,
        reaching([one.address, other.address]) as backend,
    ):

        async def body(engine: Engine) -> None:
            assert await answers_of(engine, SCRIPTS) == expected
            statistics = engine.statistics()["fake"]
            assert statistics.answered == sum(map(len, SCRIPTS))
            assert (statistics.failed, statistics.retried) == ({}, 0)
            assert statistics.resumed >= len(POINTS)

        serve(backend, body, streams=2, scheduling=PolicyName(policy), max_batch_size=4)
        assert backend.restarts >= len(POINTS)
    assert left(faults) == []
