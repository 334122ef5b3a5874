"""Exits of rows, for the batch profile: each answered row counts once in all cases."""

from __future__ import annotations

import asyncio

import pytest
from tests.fakes import ScriptedController, policy_of, script
from tests.unit.engine.serving import Gate, until, with_engine

from offramp.bundle import NEVER
from offramp.engine.common.errors import BackendError
from offramp.engine.core import Engine
from offramp.engine.requests.departures import Departures
from offramp.engine.scheduling.policies import PolicyName
from offramp.testing.backend import SCRIPT, FakeBackend

TWO_EXITS = (0.9, 0.9)
ROWS = script([0.95, 0.3, 0.4], [0.6, 0.95, 0.9], [0.5, 0.6, 0.7], [0.02, 0.3, 0.8])
"""Two are sure at exit 0, one at exit 1, one nowhere."""
SEEN = Departures(exits=(0, 1), left=(2, 1, 1), forced=(0, 0, 0))


def departures(engine: Engine) -> list[Departures]:
    return list(engine.statistics()["fake"].departures)


def test_what_leaves_at_an_exit_was_decided_by_all_before_it() -> None:
    assert SEEN.decided() == (4, 2)
    assert SEEN.went_on() == (2, 1)
    forced = Departures(exits=(0, 1, 4), left=(2, 0, 3, 1), forced=(0, 5, 0, 0))
    assert forced.decided() == (11, 9, 4)  # what was forced out at exit 1 never came to exit 4
    assert forced.went_on() == (9, 9, 1)
    none = Departures(exits=(), left=(7,), forced=(0,))
    assert (none.decided(), none.went_on()) == ((), ())
    more = Departures(exits=(0, 1), left=(5, 1, 2), forced=(1, 0, 0))
    assert more - SEEN == Departures(exits=(0, 1), left=(3, 0, 1), forced=(1, 0, 0))


def test_in_leave_mode_what_leaves_is_counted_where_it_leaves() -> None:
    async def body(engine: Engine, _backend: FakeBackend) -> None:
        await engine.infer("fake", {SCRIPT: ROWS})
        assert departures(engine) == [SEEN]

    with_engine(body, thresholds=TWO_EXITS)


@pytest.mark.parametrize("audit_probability", [1.0, 0.5])
def test_what_runs_on_after_its_answer_has_left(audit_probability: float) -> None:
    controller = ScriptedController(policy_of(3, e0=0.9, e1=0.9), audit_probability)

    async def body(engine: Engine, _backend: FakeBackend) -> None:
        for _ in range(8):
            await engine.infer("fake", {SCRIPT: ROWS})
        await until(lambda: engine.statistics()["fake"].auditing == 0)
        assert departures(engine) == [Departures(exits=(0, 1), left=(16, 8, 8), forced=(0, 0, 0))]

    with_engine(body, thresholds=TWO_EXITS, controller=controller)


def test_at_exits_in_shadow_mode_nothing_leaves() -> None:
    controller = ScriptedController(policy_of(3, e0=NEVER, e1=0.9))

    async def body(engine: Engine, _backend: FakeBackend) -> None:
        await engine.infer("fake", {SCRIPT: ROWS})
        (seen,) = departures(engine)
        assert seen == Departures(exits=(0, 1), left=(0, 1, 3), forced=(0, 0, 0))
        assert (seen.decided(), seen.went_on()) == ((4, 4), (4, 3))

    with_engine(body, thresholds=TWO_EXITS, controller=controller)


def test_what_is_forced_to_leave_is_not_what_an_exit_lets_go() -> None:
    async def body(engine: Engine, _backend: FakeBackend) -> None:
        await engine.infer("fake", {SCRIPT: ROWS})
        (seen,) = departures(engine)
        assert seen == Departures(exits=(0, 1), left=(2, 0, 0), forced=(2, 0, 0))
        assert (seen.decided(), seen.went_on()) == ((4, 0), (2, 0))

    with_engine(body, thresholds=TWO_EXITS, scheduling=PolicyName("fixed", 0))


def test_a_batch_that_is_tried_again_counts_once() -> None:
    failures = [BackendError("out of memory")]

    def fail_at_the_end(stage: int, _rows: int) -> None:
        if stage == 2 and failures:
            raise failures.pop()

    async def body(engine: Engine, _backend: FakeBackend) -> None:
        await engine.infer("fake", {SCRIPT: ROWS})
        assert engine.statistics()["fake"].retried == 1
        assert departures(engine) == [SEEN]

    with_engine(body, fail_at_the_end, thresholds=TWO_EXITS)


def test_what_has_no_answer_is_not_there() -> None:
    def fail(stage: int, _rows: int) -> None:
        if stage == 1:
            raise BackendError("out of memory")

    async def body(engine: Engine, _backend: FakeBackend) -> None:
        with pytest.raises(BackendError):
            await engine.infer("fake", {SCRIPT: ROWS})
        assert departures(engine) == [Departures(exits=(0, 1), left=(2, 0, 0), forced=(0, 0, 0))]

    with_engine(body, fail, thresholds=TWO_EXITS)


def test_a_row_counts_for_the_exits_that_it_was_started_under() -> None:
    controller = ScriptedController(policy_of(1, e0=0.9, e1=0.9))
    gate = Gate()

    async def body(engine: Engine, _backend: FakeBackend) -> None:
        asked = asyncio.create_task(engine.infer("fake", {SCRIPT: ROWS}))
        await gate.wait_entered()
        controller.policy = policy_of(2, e1=0.9)
        await until(lambda: len(engine.model("fake").policy.active) == 1)
        gate.open()
        await asked
        await engine.infer("fake", {SCRIPT: ROWS})
        one = Departures(exits=(1,), left=(1, 3), forced=(0, 0))
        assert departures(engine) == [SEEN, one]
        # Back to exits that there were: their counts go on.
        controller.policy = policy_of(3, e0=0.9, e1=0.9)
        await until(lambda: engine.statistics()["fake"].policy_version == 3)
        await engine.infer("fake", {SCRIPT: ROWS})
        assert departures(engine) == [
            Departures(exits=(0, 1), left=(4, 2, 2), forced=(0, 0, 0)),
            one,
        ]

    with_engine(body, gate, thresholds=TWO_EXITS, controller=controller)
