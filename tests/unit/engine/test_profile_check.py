"""A profile is scaled, part by part, to the CPU that serves; what was measured is kept by CPU."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.engines import engine_bundle
from tests.facts import tells
from tests.unit.bundle.cascades import CASCADE_PROFILE, write_cascade
from tests.unit.bundle.examples import PROFILE, write
from tests.unit.engine.test_device_profile import TimedBackend

from offramp.bundle import ActiveExit, Bundle, ExitPolicy, Profile
from offramp.bundle.schema.serde import from_plain
from offramp.engine.models import profile_check
from offramp.engine.models.profile_check import (
    MeasuredTimes,
    log_predicted_savings,
    predicted_savings,
    read_kept,
    scaled,
    sizes_within,
    write_kept,
)
from offramp.engine.stages.plan import Mode, Plan, make_plan

COMPILED = replace(  # two stages: 1 + 0.25 + 0.125 ms, and 3 ms, of a model of 4 ms at batch 1
    PROFILE,
    batch_sizes=(1, 4),
    source_ms=(4.0, 16.0),
    segments_ms=((1.0, 4.0), (3.0, 12.0)),
    exits_ms=((0.25, 1.0),),
    stages_ms=((0.125, 0.5),),
)
HERE = {"cpu": "fast", "cores": "2"}


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return write(tmp_path)


@pytest.fixture
def plan(bundle: Bundle) -> Plan:
    return make_plan(bundle, bundle.policy, Mode.LEAVE)


def test_a_machine_that_is_as_the_compilers_changes_nothing(plan: Plan) -> None:
    seen = [
        MeasuredTimes(batch_size=b, source_ms=4.0 * b, stages=(1.375 / 4, 3 / 4)) for b in (1, 4)
    ]
    found = scaled(COMPILED, plan, seen)
    for field in ("source_ms", "segments_ms", "exits_ms", "stages_ms"):
        assert np.array(getattr(found, field)) == pytest.approx(np.array(getattr(COMPILED, field)))


def test_a_slower_machine_is_slower_in_all_parts(plan: Plan) -> None:
    seen = [MeasuredTimes(batch_size=1, source_ms=8.0, stages=(1.375 / 4, 3 / 4))]
    found = scaled(COMPILED, plan, seen)
    assert found.source_ms == pytest.approx((8.0, 32.0))  # one size speaks for all
    assert found.segments_ms[0] == pytest.approx((2.0, 8.0))
    assert found.exits_ms[0] == pytest.approx((0.5, 2.0))
    assert found.stages_ms[0] == pytest.approx((0.25, 1.0))


def test_borders_that_cost_more_here_do_so_in_the_profile(plan: Plan) -> None:
    """All stages take 1.28125 of the model instead of 1.09375: three times as much beyond it."""
    seen = [MeasuredTimes(batch_size=1, source_ms=4.0, stages=(1.375 / 4 * 1.28125 / 1.09375,
                                                      0.75 * 1.28125 / 1.09375))]  # fmt: skip
    found = scaled(COMPILED, plan, seen)
    assert found.exits_ms[0][0] + found.stages_ms[0][0] == pytest.approx(3 * 0.375)
    assert found.segments_ms[0][0] == pytest.approx(1.0)
    free = [MeasuredTimes(batch_size=1, source_ms=4.0, stages=(0.2, 0.7))]
    assert scaled(COMPILED, plan, free).stages_ms[0] == (0.0, 0.0)


def test_a_stage_that_takes_more_of_the_model_here(plan: Plan) -> None:
    seen = [
        MeasuredTimes(batch_size=1, source_ms=4.0, stages=(1.375 / 2, 3 / 4))
    ]  # the first twice as much
    found = scaled(COMPILED, plan, seen)
    assert found.segments_ms[0][0] == pytest.approx(4.0 * 0.5 / 1.25)
    assert sum(row[1] for row in found.segments_ms) == pytest.approx(16.0)


def test_between_sizes_factors_are_interpolated(plan: Plan) -> None:
    middle = replace(COMPILED, batch_sizes=(1, 2, 4), source_ms=(4.0, 8.0, 16.0),
                     segments_ms=((1.0, 2.0, 4.0), (3.0, 6.0, 12.0)),
                     exits_ms=((0.25, 0.5, 1.0),), stages_ms=((0.125, 0.25, 0.5),))  # fmt: skip
    seen = [
        MeasuredTimes(batch_size=1, source_ms=4.0, stages=(1.375 / 4, 3 / 4)),
        MeasuredTimes(batch_size=4, source_ms=32.0, stages=(1.375 / 4, 3 / 4)),
    ]
    assert scaled(middle, plan, seen).source_ms == pytest.approx((4.0, 12.0, 32.0))


def test_only_sizes_that_there_is_time_for_are_measured() -> None:
    runs = profile_check._RUNS * 4.0 / 1e3  # seconds a row
    assert sizes_within(COMPILED, 16, 1.0, 25 * runs) == [1, 8, 16]
    assert sizes_within(COMPILED, 16, 1.0, 24 * runs) == [1, 8]
    assert sizes_within(COMPILED, 16, 1.0, 8 * runs) == [1]
    assert sizes_within(COMPILED, 16, 4.0, 25 * runs) == [1]
    assert sizes_within(COMPILED, 4, 1.0, 25 * runs) == [1, 4]


parse = partial(from_plain, Profile)


def test_what_was_measured_is_kept_by_machine(tmp_path: Path) -> None:
    path = tmp_path / "model.ee.measured.json"
    other = {**HERE, "cpu": "slow"}
    assert read_kept(path, HERE, parse) is None
    write_kept(path, HERE, COMPILED)
    write_kept(path, other, PROFILE)
    assert (read_kept(path, HERE, parse), read_kept(path, other, parse)) == (COMPILED, PROFILE)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    for number in range(40):
        write_kept(path, {"cpu": str(number)}, PROFILE)
    assert read_kept(path, HERE, parse) is None
    assert len(json.loads(path.read_text())) == 16


@pytest.mark.parametrize(
    "content", ["", "[]", "{", "\x00", "[" * 200_000, '{"a":' * 100_000, "\xff", "9" * 5_000]
)
def test_an_unreadable_profile_is_measured_again(tmp_path: Path, content: str) -> None:
    path = tmp_path / "kept.json"
    path.write_text(content)
    assert read_kept(path, HERE, parse) is None
    write_kept(path, HERE, COMPILED)
    assert read_kept(path, HERE, parse) == COMPILED
    plain = json.loads(path.read_text())
    for entry in plain.values():
        entry["profile"]["source_ms"] = "fast"
    path.write_text(json.dumps(plain))
    assert read_kept(path, HERE, parse) is None


def test_a_pipe_or_an_endless_file_in_its_place_is_measured_again(tmp_path: Path) -> None:
    pipe, endless = tmp_path / "pipe.json", tmp_path / "endless.json"
    os.mkfifo(pipe)
    endless.symlink_to("/dev/zero")
    assert read_kept(pipe, HERE, parse) is None
    assert read_kept(endless, HERE, parse) is None


def test_a_profile_of_other_parts_is_measured_again(tmp_path: Path) -> None:
    bundle = engine_bundle("mlp", tmp_path / "model.ee")
    own = bundle.profile()
    path = tmp_path / "kept.json"
    for wrong in (
        replace(own, segments_ms=own.segments_ms[1:]),
        replace(own, exits_ms=own.exits_ms[1:], stages_ms=own.stages_ms[1:]),
    ):
        write_kept(path, HERE, wrong)
        assert read_kept(path, HERE, bundle.parse_profile) is None
    write_kept(path, HERE, own)
    assert read_kept(path, HERE, bundle.parse_profile) == own


def test_where_nothing_can_be_written_nothing_fails(tmp_path: Path) -> None:
    write_kept(tmp_path / "nowhere" / "kept.json", HERE, COMPILED)
    assert list(tmp_path.iterdir()) == []


def saving(monkeypatch: pytest.MonkeyPatch, here: float, compiled: float, bundle: Bundle,
           caplog: pytest.LogCaptureFixture) -> logging.LogRecord:  # fmt: skip
    slow: Profile = replace(PROFILE, threads=7)
    monkeypatch.setattr(
        profile_check,
        "predicted_savings",
        lambda _bundle, profile, _size: here if profile is slow else compiled,
    )
    with caplog.at_level(logging.INFO):
        log_predicted_savings("small", bundle, slow, PROFILE)
    (record,) = caplog.records
    return record


def test_a_warning_is_printed_when_exits_save_nothing(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record = saving(monkeypatch, -0.031, 0.4, bundle, caplog)
    assert record.levelno == logging.WARNING
    said = record.getMessage()
    tells(said, "small", "EXITS DO NOT PAY HERE", "batch 8")
    assert "3.1 % later" in said
    assert "they saved 40.0 %" in said
    assert "--mode off" in said


def test_what_exits_bring_is_said(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record = saving(monkeypatch, 0.35, 0.4, bundle, caplog)
    assert record.levelno == logging.INFO
    tells(record.getMessage(), "35.0 %", "batch 8")


def test_savings_are_those_of_the_certify_split(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = {
        "confidence": np.array([[0.99, 0.99, 0.1, 0.99]], np.float32),
        "split": np.array([1, 2, 2, 2], np.uint8),
    }
    monkeypatch.setattr(Bundle, "records", lambda _self: records)
    # two of three leave after 1.375 ms, one after 4.375, of a model of 4 ms
    expected = 1 - (2 * 1.375 + 4.375) / 3 / 4
    assert predicted_savings(bundle, COMPILED, 1) == pytest.approx(expected)


def quick(tmp_path: Path) -> tuple[Bundle, TimedBackend]:
    """A bundle of four segments, and a backend on which each takes 1 ms, the model 4 ms."""
    made = engine_bundle("mlp", tmp_path / "made.ee")
    alone = {(first, last): (0.001 * (last - first + 1), 0.0)
             for first in range(4) for last in range(first, 4)}  # fmt: skip
    return made, TimedBackend(alone)


def test_stages_are_timed_beside_the_source_model(tmp_path: Path) -> None:
    made, backend = quick(tmp_path)
    plan = make_plan(made, made.policy, Mode.LEAVE)

    def clock() -> float:
        return backend.now_s

    seen, disturbed = profile_check.measure(
        made, backend, plan, made.profile(), 4, clock=clock, cpu_clock=clock
    )
    assert seen[0].source_ms == pytest.approx(4.0)
    lengths = [stage.last_segment - stage.first_segment + 1 for stage in plan.stages]
    assert seen[0].stages == pytest.approx([length / 4 for length in lengths])
    assert (disturbed, backend.open) == ((), 0)


@pytest.mark.parametrize("disturbed", [(), ("busy",)])
def test_what_a_disturbed_machine_showed_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disturbed: tuple[str, ...]
) -> None:
    made, backend = quick(tmp_path)
    stages = make_plan(made, made.policy, Mode.LEAVE).stages
    seen = [MeasuredTimes(batch_size=1, source_ms=4.0, stages=(1 / len(stages),) * len(stages))]
    calls = []

    def measure(*_: object) -> tuple[list[MeasuredTimes], tuple[str, ...]]:
        calls.append(1)
        return seen, disturbed

    monkeypatch.setattr(profile_check, "measure", measure)
    settings = {"max_batch_size": 4, "keep": True}
    first = profile_check.profile_here(made, backend, made.profile(), **settings)
    again = profile_check.profile_here(made, backend, made.profile(), **settings)
    assert first == again
    assert first.disturbed == disturbed
    assert len(calls) == (2 if disturbed else 1)
    assert (tmp_path / "made.ee.measured.json").exists() == (not disturbed)


@pytest.fixture
def cascade(tmp_path: Path) -> Bundle:
    """Return a cascade: the quantised model takes 0.5 + 0.5 of 4 ms, at batch 1; see SEEN."""
    return write_cascade(tmp_path)


# exit 0 with head and border adds 0.375 ms, the own one 0.125 ms
SEEN = (0.875 / 4, 0.625 / 4, 1.0)


def of_cascade(bundle: Bundle, active: ExitPolicy, *seen: float) -> Profile:
    plan = make_plan(bundle, active, Mode.LEAVE)
    profile = replace(
        CASCADE_PROFILE,
        batch_sizes=(1,),
        **{
            name: tuple(row[:1] for row in getattr(CASCADE_PROFILE, name))
            for name in ("segments_ms", "exits_ms", "stages_ms")
        },
        source_ms=(4.0,),
    )
    at = [MeasuredTimes(batch_size=1, source_ms=8.0, stages=seen)]
    return scaled(profile, plan, at, source_begins=bundle.manifest.source_begins)


def policy_of(*exits: int) -> ExitPolicy:
    return ExitPolicy(version=1, active=tuple(ActiveExit(exit=e, threshold=0.9) for e in exits))


def test_a_cascade_on_a_machine_of_half_the_speed(cascade: Bundle) -> None:
    found = of_cascade(cascade, policy_of(0, 1), *SEEN)
    assert found.source_ms == pytest.approx((8.0,))
    assert np.array(found.segments_ms) == pytest.approx(np.array([[1.0], [1.0], [8.0]]))
    assert np.array(found.exits_ms) == pytest.approx(np.array([[0.5], [0.0]]))
    assert np.array(found.stages_ms) == pytest.approx(np.array([[0.25], [0.25]]))


def test_a_machine_that_is_slow_in_int8(cascade: Bundle) -> None:
    """The quantised model takes three times as long, relative to the source model, as when
    compiled.
    """
    found = of_cascade(cascade, policy_of(0, 1), 3 * SEEN[0], 3 * SEEN[1], 1.02)
    assert np.array(found.segments_ms) == pytest.approx(np.array([[3.0], [3.0], [8.0]]))
    assert found.exits_ms[0][0] == pytest.approx(1.5)
    early = of_cascade(cascade, policy_of(0), 3 * SEEN[0], 1.0)
    # what lies behind the only exit was not run, and is taken to be as slow
    assert np.array(early.segments_ms) == pytest.approx(np.array([[3.0], [3.0], [8.0]]))


def test_a_cascade_without_exits_prints_no_quantised_model(cascade: Bundle) -> None:
    found = of_cascade(cascade, policy_of(), 1.0)
    assert np.array(found.segments_ms) == pytest.approx(np.array([[1.0], [1.0], [8.0]]))


def test_a_bundle_without_exits_is_scaled_too(bundle: Bundle) -> None:
    bare = replace(COMPILED, exits_ms=(), stages_ms=())
    seen = [MeasuredTimes(batch_size=1, source_ms=8.0, stages=(1.0,))]
    found = scaled(bare, make_plan(bundle, mode=Mode.OFF), seen)
    assert (found.exits_ms, found.stages_ms) == ((), ())
    assert found.source_ms == pytest.approx((8.0, 32.0))
