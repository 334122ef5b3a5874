"""Replanning while serving: when, on which data, and small changes for small gains."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np
import pytest
from tests.cluster.held import HeldBackend, cluster_for
from tests.cluster.loops import plans_of, profiles_of
from tests.cluster.split_serving import Serving, Small, in_process, serve
from tests.facts import tells
from tests.small import compile_small

from offramp.cluster.planning.replanning import ReplanGuard, ReplanRules
from offramp.cluster.serving.cluster_statistics import plan_of
from offramp.cluster.serving.plan_loop import GONE_AFTER_S, PlanLoop
from offramp.cluster.serving.plan_status import PlanStatus
from offramp.engine.scheduling.stragglers import ReplicaStatus, StragglerMonitor

RULES = ReplanRules(window_s=120.0, pause_s=1200.0, least_rows=100)
SPEEDS = {"slow": 1.0, "fast": 1.0}
"""All alike: plans differ in how many workers run which split."""


@pytest.fixture(autouse=True)
def nobody_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat streams slowed by a busy machine as usual, unless a test sets it."""
    monkeypatch.setattr(StragglerMonitor, "status", lambda _monitor, _stream: ReplicaStatus.USUAL)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    bundle, inputs = compile_small(tmp_path_factory.mktemp("small"))
    with np.load(inputs) as archive:
        return bundle, np.array_split(archive["x"][:200], 200)


@pytest.fixture(scope="module")
def leaving(small: Small) -> tuple[list[int], list[int]]:
    """Requests, of one row each, that leave early, and that do not."""
    exits = [int(result.exits[0]) for result in in_process(small)]
    early = [n for n, exit_ in enumerate(exits) if exit_ == 0]
    late = [n for n, exit_ in enumerate(exits) if exit_ != 0]
    assert min(len(early), len(late)) >= 10
    return early, late


class Planning:
    """An engine whose plan loop the test looks with, by a clock of its own."""

    def __init__(self, serving: Serving) -> None:
        loop = plans_of(serving.engine)
        assert loop is not None
        self.serving, self.loop, self.now_s = serving, loop, 1000.0
        loop._clock = lambda: self.now_s
        loop._guard = ReplanGuard(RULES)

    @property
    def status(self) -> PlanStatus:
        found = plan_of(self.serving.engine.statistics()["small"])
        assert found is not None
        return found

    @property
    def splits(self) -> list[tuple[int, int, int]]:
        """First and last segment of each split, and how many workers run it."""
        return [(s.first_segment, s.last_segment, s.workers) for s in self.status.splits]

    async def send(self, *numbers: int, rows: int = 200) -> None:
        """Send rows of these requests only, in turn, until they are answered."""
        self.serving.load.chosen = numbers
        await self.serving.load.more(16)  # what was under way
        await self.serving.load.more(rows)

    async def window(self, *numbers: int) -> None:
        """Pass a window with rows of these requests, and evaluate its end."""
        await self.send(*numbers)
        profiles_of(self.serving.engine).poll()
        self.now_s += RULES.window_s
        await self.poll()

    async def poll(self) -> None:
        """Look, until no change is under way."""
        await asyncio.to_thread(self.loop.poll)
        while self.status.changing:
            await asyncio.to_thread(self.loop.poll)


def plan(small: Small, body: Any, *, share: float = 0.8) -> HeldBackend:
    async def planned(serving: Serving) -> None:
        await body(Planning(serving))

    cluster = cluster_for(small[0], share=share, speeds=SPEEDS)
    return serve(small, planned, plan=None, cluster=cluster)


def test_the_plan_follows_what_is_observed(
    small: Small, leaving: tuple[list[int], list[int]]
) -> None:
    early, late = leaving

    async def body(planning: Planning) -> None:
        await planning.poll()
        assert planning.status.changes == 0
        assert planning.status.reason == "a change would gain 0.0%, less than 10%"
        profiles_of(planning.serving.engine).poll()  # what came before the test does not count
        await planning.send(*late)
        planning.now_s += 1
        await planning.poll()
        first = planning.status
        most_leave = [*late[:3], *early[:7]]
        halves = [(0, 1, 2), (2, 4, 2)]
        assert planning.splits == halves, "at once, as rows go on that were to leave"
        assert (first.changes, first.changed_s) == (1, 0.0)
        assert first.reason.startswith("better by")
        ((exit_, forecast, observed),) = first.shares
        assert exit_ == 0
        assert observed is not None
        assert observed > 0.8
        assert forecast >= observed - 1e-6
        for _ in range(7):  # after a jump, forecasts are wary for some windows
            await planning.window(*most_leave)
        assert planning.splits == halves
        assert "but the pause lasts" in planning.status.reason
        planning.now_s += RULES.pause_s
        await planning.window(*most_leave)
        assert planning.splits == [(0, 0, 2), (1, 4, 2)], "once the pause is over"
        assert planning.status.changes == 2
        assert planning.status.changed_for.startswith("better by")

    assert plan(small, body).trespasses == []


def test_shares_that_go_up_and_down_change_no_plan(
    small: Small, leaving: tuple[list[int], list[int]]
) -> None:
    early, late = leaving

    async def body(planning: Planning) -> None:
        planning.now_s += 1e4
        await planning.window(*late[:6], *early[:4])
        before = planning.status.changes
        for _ in range(4):
            planning.now_s += 1e4  # no pause keeps it from changing
            await planning.window(*late[:5], *early[:5])
            planning.now_s += 1e4
            await planning.window(*late[:6], *early[:4])
        assert planning.status.changes == before
        assert planning.status.given_up == 0
        assert "less than 10%" in planning.status.reason

    plan(small, body)


def test_a_worker_that_is_gone_for_long_is_planned_without(small: Small) -> None:
    async def body(planning: Planning) -> None:
        backend = planning.serving.backend
        roles = planning.serving.segments()
        await planning.poll()
        lost = next(n for n, role in enumerate(roles) if role and roles.count(role) > 1)
        backend.up[lost] = False
        await planning.poll()
        planning.now_s += GONE_AFTER_S - 1
        await planning.poll()
        assert planning.serving.segments()[lost] is not None
        assert planning.status.changes == 0
        planning.now_s += 1
        await planning.poll()
        assert planning.serving.segments()[lost] is None
        assert planning.status.changes == 1
        assert sum(split.workers for split in planning.status.splits) <= 3
        assert planning.status.spare >= 1
        await planning.serving.load.more()
        backend.up[lost] = True
        planning.now_s += RULES.pause_s
        profiles_of(planning.serving.engine).poll()
        await planning.poll()
        assert planning.status.reason != "workers of the active plan are gone"

    plan(small, body, share=1.3)


def test_a_straggler_is_left_out_and_serves_to_the_switch(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(planning: Planning) -> None:
        roles = planning.serving.segments()
        slow = next(n for n, role in enumerate(roles) if role and roles.count(role) > 1)

        def excluded(_monitor: StragglerMonitor, stream: int) -> ReplicaStatus:
            return ReplicaStatus.EXCLUDED if stream == slow else ReplicaStatus.USUAL

        with monkeypatch.context() as patched:
            patched.setattr(StragglerMonitor, "status", excluded)
            assert sum(split.excluded for split in planning.status.splits) == 1
            await planning.poll()
            assert planning.status.changes == 1
            assert planning.status.changed_for == "devices of the active plan are gone"
            assert planning.serving.segments()[slow] is None
            await planning.serving.load.more()
        assert planning.status.spare >= 1

    plan(small, body, share=1.3)


def test_a_change_that_fails_is_told_in_a_line(
    small: Small, leaving: tuple[list[int], list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    async def body(planning: Planning) -> None:
        await planning.poll()
        before = planning.splits
        planning.serving.backend.hold_fails = "out of memory"
        profiles_of(planning.serving.engine).poll()
        await planning.send(*leaving[1])
        await planning.poll()
        assert planning.status.given_up == 1
        assert planning.splits == before
        tells(planning.status.reason, "given up", "out of memory")
        planning.now_s += RULES.pause_s
        planning.serving.backend.hold_fails = "out of memory"
        await planning.window(*leaving[1])
        assert planning.status.given_up == 2
        assert planning.splits == before

    with caplog.at_level(logging.WARNING):
        plan(small, body)
    said = [record.getMessage() for record in caplog.records if "plan stays" in record.msg]
    [said] = said
    tells(said, "small", "plan stays", "out of memory")


def test_what_goes_wrong_is_logged_once(
    small: Small, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(planning: Planning) -> None:
        def fails(_loop: PlanLoop, _now_s: float) -> None:
            raise RuntimeError("no clock")

        with monkeypatch.context() as patched:
            patched.setattr(PlanLoop, "_gone", fails)
            planning.loop.poll()
            planning.loop.poll()
        await planning.poll()
        assert planning.status.reason.startswith("a change would gain")

    plan(small, body)
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == [
        "small: planning failed; its plan stays"
    ]
