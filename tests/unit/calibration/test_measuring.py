"""Savings of a policy, measured on a virtual machine where every time is known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.facts import tells
from tests.fakes import fake_plan

from offramp.bundle import NEVER, ActiveExit, Answer, ExitPolicy, Measured
from offramp.calibration.choose.exit_records import ExitRecords
from offramp.calibration.data.dataset import Dataset
from offramp.calibration.measure.measuring import (
    Budget,
    Compared,
    deal,
    measure_runners,
    stages_of_samples,
)
from offramp.calibration.measure.paired import StagedModel, never_exiting
from offramp.engine.answers.agreement import agreement_of
from offramp.engine.stages.pipeline import Departure, Pipeline
from offramp.testing.backend import SCRIPT, FakeBackend

SOURCE_MS, FIRST_MS, SECOND_MS = 10.0, 2.0, 9.0
"""A row, in the source model and in both stages."""

AGREEMENT = agreement_of(Answer(output="answer", classes=2, form="logits"))


class Machine:
    """A clock that moves while something runs, and a model whose exit takes three rows of four."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.backend = FakeBackend(on_run=self.work)
        self.stage = np.array([0, 0, 1, 0] * 25)
        script = np.empty((100, 2, 2))
        script[:, 0] = np.where(self.stage[:, None] == 0, [0.05, 0.95], [0.6, 0.4])
        script[:, 1] = [0.99, 0.01]
        self.data = Dataset(inputs={SCRIPT: script}, labels=None, sha256="")

    def work(self, stage: int, rows: int) -> None:
        self.now_ms += rows * (FIRST_MS, SECOND_MS)[stage]

    def clock(self) -> float:
        return self.now_ms / 1e3

    def run(self, tensors: Any) -> Iterator[Departure]:
        """The source model: always the first class."""
        rows = len(tensors[SCRIPT])
        self.now_ms += SOURCE_MS * rows
        yield Departure(0, np.arange(rows), np.array([[0.9, 0.1]] * rows), np.empty(0, np.float32))

    def warm_up(self, tensors: Any) -> None:
        list(self.run(tensors))

    def measure(self, *batch_sizes: int, **settings: Any) -> Measured:
        plan, slot = fake_plan([0.9]), self.backend.open_slot()
        compared = Compared(
            source=self,
            bundle=StagedModel(Pipeline(self.backend, plan), slot),
            nothing_exits=StagedModel(Pipeline(self.backend, never_exiting(plan)), slot),
        )
        clocks = dict.fromkeys(("clock", "wall_clock", "cpu_clock"), self.clock)
        settings = {**clocks, "threads": 1, **settings}
        return measure_runners(
            compared,
            self.data,
            self.stage,
            agreement=AGREEMENT,
            batch_sizes=batch_sizes,
            **settings,
        )


def test_ratios_are_those_of_the_machine() -> None:
    found = Machine().measure(1, 4, budget=Budget(seconds=1.6))
    one, four = found.sizes
    assert (one.batch_size, one.rounds, one.samples) == (1, 12, 48)
    assert one.mean.value == pytest.approx((3 * 2 + 11) / 40)
    assert one.median.value == pytest.approx(2 / 10)
    assert one.busy.value == pytest.approx((3 * 2 + 11) / 40)
    assert one.nothing_exits.value == pytest.approx(11 / 10)
    assert (four.batch_size, four.rounds, four.samples) == (4, 12, 48)
    # three leave after 8 ms, the fourth is alone in the second stage
    assert four.mean.value == pytest.approx((3 * 8 + 17) / 4 / 40)
    assert four.median.value == pytest.approx(8 / 40)
    assert four.busy.value == pytest.approx(17 / 40)
    assert four.nothing_exits.value == pytest.approx(11 / 10)
    widths = [r.half_width for at in found.sizes for r in (at.mean, at.busy, at.nothing_exits)]
    assert widths == pytest.approx([0.0] * 6)
    assert found.agreement == 0.25  # the exit gives another class
    assert 48 <= found.samples <= 96
    assert found.disturbed == ()


def test_only_the_batch_sizes_that_survivors_have_are_run() -> None:
    machine = Machine()
    machine.measure(4, budget=Budget(seconds=1.6))
    assert {rows for stage, rows in machine.backend.runs if stage == 1} == {1, 4}


def test_a_round_in_which_something_else_ran_moves_no_ratio() -> None:
    machine, runs = Machine(), 0

    def work(stage: int, rows: int) -> None:
        nonlocal runs
        runs += 1
        machine.work(stage, rows)
        machine.now_ms += 500 if runs in (70, 71, 72) else 0

    machine.backend.on_run = work
    (found,) = machine.measure(4, budget=Budget(seconds=1.6)).sizes
    assert runs > 72
    assert found.busy.value == pytest.approx(17 / 40)
    assert found.nothing_exits.value == pytest.approx(11 / 10)


def test_a_machine_that_was_busy_is_noted() -> None:
    found = Machine().measure(1, cpu_clock=lambda: 0.0)
    assert len(found.disturbed) == 1
    tells(found.disturbed[0], "policy", "0% of a core")


@pytest.mark.parametrize(
    ("seconds_a_batch", "available", "expected"),
    [
        (0.01, 1e6, (12, 15)),  # 180 batches
        (0.01, 40, (12, 3)),  # no more than there are
        (0.2, 1e6, (9, 1)),
        (5.0, 1e6, (6, 1)),  # a large model: as few as say something
        (0.01, 2, (6, 1)),  # little data: it repeats
    ],
)
def test_rounds_within_the_budget(
    seconds_a_batch: float, available: float, expected: tuple[int, int]
) -> None:
    assert Budget(seconds=1.8).batches(seconds_a_batch, available) == expected


def test_every_round_has_the_mix_of_the_whole_split() -> None:
    stage = np.repeat([0, 1, 2], [500, 300, 200])
    rows = deal(stage, rounds=5, batches=2, size=10)
    assert rows.shape == (5, 2, 10)
    assert len(np.unique(rows)) == 100
    for of_round in stage[rows.reshape(5, -1)]:
        assert np.bincount(of_round).tolist() == [10, 6, 4]


def test_few_samples_repeat() -> None:
    rows = deal(np.array([0, 1, 1]), rounds=6, batches=1, size=4)
    assert sorted(np.bincount(rows.ravel()).tolist()) == [8, 8, 8]


def test_a_sample_belongs_to_the_first_stage_that_answers_it() -> None:
    records = ExitRecords(
        confidence=np.array([[0.9, 0.1, 0.1], [1.0, 1.0, 1.0], [0.9, 0.8, 0.1]], np.float32),
        prediction=np.zeros((3, 3), np.int32),
        final_prediction=np.zeros(3, np.int32),
        final_confidence=np.ones(3, np.float32),
        labels=None,
    )
    thresholds = {0: 0.5, 1: NEVER, 2: 0.5}  # the second exit is not in use
    active = tuple(ActiveExit(exit=e, threshold=t) for e, t in thresholds.items())
    policy = ExitPolicy(version=1, active=active)
    assert stages_of_samples(policy, records).tolist() == [0, 1, 2]
