"""Profiles have the structure that predictions rely on; how long anything takes is not tested."""

from __future__ import annotations

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
)
from offramp.compiler.heads import build_empty
from offramp.compiler.packing import Draft
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.pipeline import Pipeline
from offramp.engine.plan import Mode, Plan, chain_stages
from offramp.engine.timing import Effort

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
    built = Draft.of(pieces, [])
    stages = chain_stages(built, built.read)
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
