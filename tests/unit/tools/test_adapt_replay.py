"""The loop around a controller: its inputs and their times, and the costs of samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from benchmarks.adapt.replay import ComparedController, ReplaySettings, ReplayTrace, replay
from tests.unit.tools.adapt_cases import COSTS, FOUR, Scripted, in_order, policy_of, repeated

from offramp.bundle import NEVER
from offramp.certify import MODEL_END, UNKNOWN
from offramp.engine.stages.plan import Mode


def run(controller: Scripted, mode: Mode, times: int = 1, **settings: Any) -> ReplayTrace:
    given = {"chunk": 4, "delay_chunks": 0, "tuning_delay": 0, **settings}
    contender = ComparedController(label="x", description="", controller=controller, mode=mode)
    sequence = in_order(("all", repeated(FOUR, times)))
    return replay(sequence, contender, COSTS, ReplaySettings(**given))


def test_release_mode_tells_all() -> None:
    controller = Scripted()
    trace = run(controller, Mode.RELEASE)
    assert trace.answered_at.tolist() == [0, 1, 0, MODEL_END]
    assert trace.agrees.tolist() == [True, True, False, True]
    assert trace.audited.tolist() == [True, True, True, False]
    assert trace.latency_ms.tolist() == [3, 7, 3, 12]
    assert trace.compute_ms.tolist() == [12, 12, 12, 12]
    (seen,) = controller.seen
    np.testing.assert_array_equal(seen.confidence, FOUR.confidence)
    np.testing.assert_array_equal(seen.prediction, FOUR.prediction)
    np.testing.assert_array_equal(seen.final, FOUR.final)
    assert seen.answered_at.tolist() == [0, 1, 0, MODEL_END]
    assert seen.audit_probability.tolist() == [1.0] * 4
    assert seen.policy_version.tolist() == [1] * 4
    assert not seen.forced.any()
    assert seen.loss.tolist() == [0, 0, 1, 0]


def test_a_sample_that_leaves_for_good_tells_what_it_passed() -> None:
    controller = Scripted(audit_probability=1e-9)
    trace = run(controller, Mode.AUDIT)
    assert trace.compute_ms.tolist() == [3, 7, 3, 12]
    assert not trace.audited.any()
    (seen,) = controller.seen
    unknown = np.isnan(seen.confidence)
    assert unknown.tolist() == [[False] * 4, [True, False, True, False]]
    assert (seen.prediction[unknown] == UNKNOWN).all()
    np.testing.assert_array_equal(seen.prediction[~unknown], FOUR.prediction[~unknown])
    assert seen.final.tolist() == [UNKNOWN, UNKNOWN, UNKNOWN, 4]
    assert seen.audit_probability.tolist() == [1e-9] * 4


def test_exits_not_in_use_say_nothing_and_shadows_cost_time() -> None:
    controller = Scripted(policy_of(7, {1: NEVER}))
    trace = run(controller, Mode.RELEASE)
    assert trace.answered_at.tolist() == [MODEL_END] * 4
    assert trace.latency_ms.tolist() == [11] * 4
    (seen,) = controller.seen
    assert np.isnan(seen.confidence[0]).all()
    np.testing.assert_array_equal(seen.confidence[1], FOUR.confidence[1])
    assert (seen.prediction[0] == UNKNOWN).all()


def test_leave_mode_tells_nothing_and_runs_no_shadows() -> None:
    controller = Scripted(policy_of(7, {0: NEVER, 1: 0.5}), jobs=True)
    trace = run(controller, Mode.LEAVE, times=3)
    assert controller.calls == []
    assert trace.tunings == ()
    # exit 1 alone: 2 + 3 ms of the model, 1 ms for the exit
    assert trace.latency_ms[:4].tolist() == [6, 6, 11, 11]
    assert trace.compute_ms.tolist() == trace.latency_ms.tolist()


def test_audits_are_drawn_by_the_seed_with_the_probability() -> None:
    size = 2000
    traces = [
        run(Scripted(audit_probability=0.3), Mode.AUDIT, size, seed=seed) for seed in (1, 1, 2)
    ]
    np.testing.assert_array_equal(traces[0].audited, traces[1].audited)
    assert (traces[0].audited != traces[2].audited).any()
    early = traces[0].answered_at != MODEL_END
    assert not traces[0].audited[~early].any()
    # 6,000 coins: 5 standard deviations are 0.03
    assert abs(traces[0].audited[early].mean() - 0.3) < 0.03


def test_what_is_known_comes_late() -> None:
    controller = Scripted()
    trace = run(controller, Mode.RELEASE, times=5, delay_chunks=2)
    assert len(controller.seen) == 3
    observed = [status.observed for status in trace.statuses]
    assert observed == [0, 0, 0, 4, 8]  # when each chunk starts


def test_a_result_comes_late_and_a_policy_holds_for_whole_chunks() -> None:
    controller = Scripted(jobs=True)
    trace = run(controller, Mode.RELEASE, times=6, tuning_delay=5)
    # taken when 4 samples had started, there from 9 on: the chunk from 12 is the first under it
    assert [(t.taken_at, t.arrived_at) for t in trace.tunings] == [(4, 9), (16, 21)]
    assert [t.purpose for t in trace.tunings] == ["doubling"] * 2
    assert [(c.at, c.policy.version) for c in trace.changes] == [(0, 1), (12, 2)]
    assert trace.policy.tolist() == [0] * 12 + [1] * 12
    assert [s.policy_version.tolist() for s in controller.seen[2:4]] == [[1] * 4, [2] * 4]
    observe = "observe 4"
    assert controller.calls == [observe, observe, observe, "finish", observe, observe, observe]
    assert trace.answered_at[12:16].tolist() == [0, MODEL_END, 0, MODEL_END]
    assert trace.latency_ms[12:16].tolist() == [3, 11, 3, 11]


def test_an_immediate_job_is_active_from_the_next_chunk() -> None:
    trace = run(Scripted(jobs=True), Mode.RELEASE, times=3, tuning_delay=0)
    assert [c.at for c in trace.changes] == [0, 4, 8]


def test_without_a_delay_given_the_run_time_decides() -> None:
    fast = run(Scripted(jobs=True), Mode.RELEASE, times=3, tuning_delay=None, rate=1e-9)
    slow = run(Scripted(jobs=True), Mode.RELEASE, times=3, tuning_delay=None, rate=1e12)
    assert [t.arrived_at - t.taken_at for t in fast.tunings] == [1, 1]
    assert all(t.took_ms > 0 for t in fast.tunings)
    assert len(slow.tunings) == 1
    assert slow.tunings[0].arrived_at > 12


def test_the_last_chunk_may_be_short() -> None:
    controller = Scripted()
    trace = run(controller, Mode.RELEASE, times=2, chunk=5)
    assert [len(s) for s in controller.seen] == [5, 3]
    assert len(trace.agrees) == 8
    assert [at for at, _ in trace.events] == [5, 8]


@pytest.mark.parametrize("mode", [Mode.RELEASE, Mode.AUDIT, Mode.LEAVE])
def test_modes_answer_alike(mode: Mode) -> None:
    trace = run(Scripted(audit_probability=0.5), mode, times=4)
    assert trace.answered_at.tolist() == [0, 1, 0, MODEL_END] * 4
    assert trace.agrees.tolist() == [True, True, False, True] * 4
