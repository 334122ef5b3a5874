"""Profiles have the structure that predictions rely on; how long anything takes is not tested."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
from tests.sliced import inputs_of, sliced

from offramp.calibration import profiling
from offramp.calibration.profiling import (
    profile_backbone,
    profile_heads,
    profile_stages,
    time_calls,
)
from offramp.compiler.heads import build_empty
from offramp.compiler.packing import draft
from offramp.engine.plan import chain_stages, plan_stages

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
    assert steps == [1, 1]
    assert len(times.source_ms) == 2
    assert len(times.segments_ms) == len(pieces.segments)
    for total, *column in zip(times.source_ms, *times.segments_ms, strict=True):
        assert total > 0
        assert min(column) > 0
        assert sum(column) == pytest.approx(total)  # scaled to, up to rounding


@pytest.mark.parametrize("name", ["residual", "bert"])
def test_stages_are_timed_at_every_size_beyond_the_heads(name: str) -> None:
    pieces = sliced(name)
    anatomy, files = draft(pieces, [])
    timed = partial(
        profile_stages,
        pieces.model.proto.SerializeToString(),
        samples=partial(inputs_of, pieces),
        threads=1,
        batch_sizes=SIZES,
    )
    whole = plan_stages(anatomy, files.__getitem__, [])
    assert timed(stages=whole, exits_ms=[]) == (0.0, 0.0), "a single stage has no border"
    chained = chain_stages(anatomy, files.__getitem__)
    costs = timed(stages=chained, exits_ms=[])
    assert len(costs) == 2
    assert min(costs) >= 0
    assert timed(stages=chained, exits_ms=[(1e9, 1e9)]) == (0.0, 0.0), "never negative"


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
    assert sum(steps) == len(SIZES) * len(pieces.cuts)


def test_no_heads() -> None:
    pieces = sliced("mlp")
    sampler = lambda size: inputs_of(pieces, size)  # noqa: E731
    assert profile_heads([], [], pieces.graphs, sampler, threads=1, batch_sizes=SIZES) == []


def test_rounds_are_interleaved_and_the_first_ones_forgotten() -> None:
    calls: list[str] = []

    def timer(name: str, warm: float, hot: float):
        times = itertools.chain([warm] * profiling.WARM_UP_ROUNDS, itertools.repeat(hot))

        def once() -> float:
            calls.append(name)
            return next(times)

        return once

    assert time_calls([timer("a", 100.0, 2.0), timer("b", 50.0, 3.0)], rounds=1) == [2.0, 3.0]
    assert calls == ["a", "b"] * (1 + profiling.WARM_UP_ROUNDS)
