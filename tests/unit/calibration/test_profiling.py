"""Profiles have the structure that predictions rely on; how long anything takes is not tested."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
from tests.sliced import inputs_of, sliced

from offramp.calibration import profiling
from offramp.calibration.estimates import sets_of_exits
from offramp.calibration.profiling import (
    profile_backbone,
    profile_heads,
    profile_stages,
    time_rounds,
)
from offramp.calibration.timing import Effort
from offramp.compiler.heads import build_empty
from offramp.compiler.packing import draft
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.pipeline import Pipeline
from offramp.engine.plan import Mode, Plan, chain_stages

SIZES = (1, 3)


def test_the_backbone_s_columns_add_up() -> None:
    pieces = sliced("residual")
    steps: list[int] = []
    times = profile_backbone(
        pieces.model.proto.SerializeToString(),
        pieces.graphs,
        lambda size: inputs_of(pieces, size),
        threads=1,
        batch_sizes=SIZES,
        progress=steps.append,
    )
    assert times.batch_sizes == SIZES
    assert steps == [1] * Effort().least
    assert len(times.source_ms) == 2
    assert len(times.segments_ms) == len(pieces.segments)
    for total, *column in zip(times.source_ms, *times.segments_ms, strict=True):
        assert total > 0
        assert min(column) > 0
        assert sum(column) == pytest.approx(total)  # scaled to, up to rounding


def test_borders_cost_what_all_sets_of_exits_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a virtual machine where a call takes 1 ms, and a byte that crosses 0.01 ms."""
    crossing = np.array([400.0, 200.0, 100.0])

    def staged_ms(exits: tuple[int, ...], _slot: object, tensors: dict[str, np.ndarray]) -> float:
        rows = len(next(iter(tensors.values())))
        return 100.0 + sum(2.0 + 1.0 + 0.01 * rows * crossing[e] for e in exits)

    monkeypatch.setattr(profiling.TimedGraph, "time_ms", lambda *_: 100.0)
    monkeypatch.setattr(profiling, "Pipeline", lambda _backend, plan: plan.stages)
    monkeypatch.setattr(profiling, "_staged_ms", staged_ms)
    monkeypatch.setattr(profiling, "_crossing_bytes", lambda *_: crossing)
    pieces = sliced("mlp")
    found = profile_stages(
        pieces.model.proto.SerializeToString(),
        tuple,
        partial(inputs_of, pieces),
        exits_ms=[(2.0, 2.0)] * 3,
        threads=1,
        batch_sizes=SIZES,
    )
    assert np.array(found.stages_ms) == pytest.approx(
        np.array([[5.0, 13.0], [3.0, 7.0], [2.0, 4.0]])
    )
    assert found.added_widths == (0.0, 0.0)
    assert found.rounds == (Effort().least,) * 2


@pytest.mark.parametrize("name", ["residual", "bert"])
def test_what_crosses_a_border_is_counted_and_its_cost_is_not_negative(name: str) -> None:
    pieces = sliced(name)
    anatomy, files = draft(pieces, [])
    stages = chain_stages(anatomy, files.__getitem__)
    inputs = inputs_of(pieces, 3)
    backend = OnnxRuntimeBackend(threads=1)
    pipeline = Pipeline(backend, Plan(stages=stages, policy_version=0, mode=Mode.LEAVE))
    crossing = profiling._crossing_bytes(pipeline, backend.open_slot(), inputs)
    tensors = dict(inputs)
    for graph in pieces.graphs:
        tensors |= profiling.TimedGraph(graph, 1).run(tensors)
    assert crossing.tolist() == [
        sum(tensors[tensor].nbytes for tensor in stage.carried) / 3 for stage in stages[:-1]
    ]
    found = profile_stages(
        pieces.model.proto.SerializeToString(),
        lambda _: stages,
        partial(inputs_of, pieces),
        exits_ms=[(0.0, 0.0)] * (len(stages) - 1),
        threads=1,
        batch_sizes=SIZES,
        effort=Effort(least=2, most=2),
    )
    assert np.array(found.stages_ms).shape == (len(stages) - 1, 2)
    assert min(map(min, found.stages_ms)) >= 0


def test_without_exits_there_is_no_border() -> None:
    pieces = sliced("residual")
    found = profile_stages(
        b"", lambda _: [], partial(inputs_of, pieces), exits_ms=[], threads=1, batch_sizes=SIZES
    )
    assert (found.stages_ms, found.added_widths) == ((), (0.0, 0.0))


def test_heads_are_timed_on_the_tensors_that_they_read() -> None:
    pieces = sliced("bert")
    empty = [build_empty(cut, "empty/", opset=17, ir_version=8) for cut in pieces.cuts]
    heads = [[graph] * (1 + index % 2) for index, graph in enumerate(empty)]
    steps: list[int] = []
    costs = profile_heads(
        heads,
        empty,
        pieces.graphs,
        lambda size: inputs_of(pieces, size),
        threads=1,
        batch_sizes=SIZES,
        progress=steps.append,
    )
    assert [len(per_exit) for per_exit in costs] == [len(per_exit) for per_exit in heads]
    assert all(len(row) == 2 and min(row) >= 0 for per_exit in costs for row in per_exit)
    assert sum(steps) == len(pieces.cuts)


def test_no_heads() -> None:
    pieces = sliced("mlp")
    sampler = lambda size: inputs_of(pieces, size)  # noqa: E731
    assert profile_heads([], [], pieces.graphs, sampler, threads=1, batch_sizes=SIZES) == []


def test_systems_take_turns_in_every_round_and_warm_ups_are_forgotten() -> None:
    calls: list[str] = []

    def timer(name: str, warm: float, hot: float):
        times = itertools.chain([warm] * profiling.WARM_UP_ROUNDS, itertools.repeat(hot))

        def once() -> float:
            calls.append(name)
            return next(times)

        return once

    found = time_rounds(
        [[timer("a", 100.0, 2.0), timer("b", 50.0, 3.0)]], [2], Effort(least=2, most=2), lambda _: 0
    )
    assert found.rounds[0].times_ms.tolist() == [[2.0, 3.0]] * 4
    warm = ["a", "b"] * profiling.WARM_UP_ROUNDS
    assert calls == [*warm, "a", "b", "b", "a", "a", "b", "b", "a"]


def measured(widths: list[float], *, seconds: float) -> int:
    """Sweeps of a second each, with these widths after each of them."""
    clock = itertools.count()
    return (
        time_rounds(
            [[lambda: 1.0]],
            [1],
            Effort(least=2, most=6, seconds=seconds, half_width=0.01),
            lambda rounds: widths[rounds[0].count - 1],
            clock=lambda: float(next(clock)),
            cpu_clock=lambda: 0.0,
        )
        .rounds[0]
        .count
    )


def test_measuring_ends_when_it_is_narrow_enough_or_time_is_up() -> None:
    wide = [1.0] * 6
    assert measured([0.0] * 6, seconds=100) == 2, "never less than the least"
    assert measured([1.0, 1.0, 1.0, 0.01, 1.0, 1.0], seconds=100) == 4
    assert measured(wide, seconds=100) == 6, "never more than the most"
    assert measured(wide, seconds=3) == 2  # the clock is read once before the first sweep
    assert measured(wide, seconds=5) == 4
    assert measured(wide, seconds=0) == 2


def test_what_the_machine_did_is_kept() -> None:
    wall, cpu = itertools.count(), itertools.count(step=0.25)
    found = time_rounds(
        [[lambda: 1.0]],
        [1],
        Effort(least=3, most=3),
        lambda _: 0.0,
        clock=lambda: float(next(wall)),
        cpu_clock=lambda: float(next(cpu)),
    )
    assert found.load.own_cpu_s == 0.25
    assert found.load.own_share == pytest.approx(0.25 / found.load.wall_s)


@pytest.mark.parametrize(
    ("exits", "sets"),
    [
        (0, []),
        (1, [(0,)]),
        (2, [(0, 1), (0,), (1,)]),
        (5, [(0, 1, 2, 3, 4), (0, 1), (2, 3, 4)]),
    ],
)
def test_sets_of_exits(exits: int, sets: list[tuple[int, ...]]) -> None:
    assert sets_of_exits(exits) == sets
