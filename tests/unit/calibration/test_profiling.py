"""Profiles have the structure that predictions rely on; how long anything takes is not tested."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import onnx
import pytest
from tests.sliced import dataset_of, inputs_of, sliced

from offramp.calibration.data.dataset import DataError
from offramp.calibration.data.running import run_over
from offramp.calibration.measure import profiling
from offramp.calibration.measure.estimates import sets_of_exits
from offramp.calibration.measure.profiling import profile_backbone, profile_heads, profile_stages
from offramp.compiler.blueprints.packing import Draft
from offramp.compiler.exits.heads import build_empty
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.common.timing import Effort
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import Mode, Plan, chain_stages

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
    """The machine is virtual: a call takes 1 ms, and a byte across a border 0.01 ms."""
    crossing = np.array([400.0, 200.0, 100.0])

    def staged_ms(
        exits: tuple[int, ...], _slot: object, tensors: dict[str, np.ndarray], _clock
    ) -> float:
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
    empty = [build_empty(cut.read, "empty/", opset=17, ir_version=8) for cut in pieces.cuts]
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


def test_the_segments_of_a_cascade_add_up_to_the_quantised_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model takes 4 ms, its segments alone 6, 3 and 3 ms; the source model takes 10 ms."""
    pieces = sliced("mlp")
    known = {(("x",), ("logits",)): 10.0, (("x",), ("again",)): 4.0}

    def time_ms(timed: profiling.TimedGraph, _tensors: object) -> float:
        reads, gives = (
            tuple(t.name for t in found)
            for found in (timed.session.get_inputs(), timed.session.get_outputs())
        )
        return known.get((reads, gives), 6.0 if reads == ("x",) else 3.0)

    monkeypatch.setattr(profiling.TimedGraph, "time_ms", time_ms)
    source = pieces.model.proto.SerializeToString()
    whole = onnx.ModelProto.FromString(source)
    whole.graph.node[-1].output[0] = whole.graph.output[0].name = "again"
    times = profile_backbone(
        source,
        [*pieces.graphs[:-1], source],
        lambda size: inputs_of(pieces, size),
        threads=1,
        batch_sizes=SIZES,
        quantised=whole.SerializeToString(),
    )
    assert times.source_ms == (10.0, 10.0)
    assert np.array(times.segments_ms) == pytest.approx(
        np.array([[2.0, 2.0], [1.0, 1.0], [1.0, 1.0], [10.0, 10.0]])
    )


def test_the_quantised_model_is_no_border(monkeypatch: pytest.MonkeyPatch) -> None:
    """A border costs 1 ms, a head 2 ms; until the exits the quantised model takes 5, 7, 9 ms."""
    until = (5.0, 7.0, 9.0)

    def staged_ms(exits: tuple[int, ...], _slot: object, _tensors: object, _clock) -> float:
        return 100.0 + until[exits[-1]] + 3.0 * len(exits)

    monkeypatch.setattr(profiling.TimedGraph, "time_ms", lambda *_: 100.0)
    monkeypatch.setattr(profiling, "Pipeline", lambda _backend, plan: plan.stages)
    monkeypatch.setattr(profiling, "_staged_ms", staged_ms)
    monkeypatch.setattr(profiling, "_crossing_bytes", lambda *_: np.zeros(3))
    pieces = sliced("mlp")
    found = profile_stages(
        pieces.model.proto.SerializeToString(),
        tuple,
        partial(inputs_of, pieces),
        exits_ms=[(2.0, 2.0)] * 3,
        until_ms=[(ms, ms) for ms in until],
        threads=1,
        batch_sizes=SIZES,
    )
    assert np.array(found.stages_ms) == pytest.approx(np.ones((3, 2)))


def test_several_graphs_answer_as_one() -> None:
    """Outputs are in the requested order; a graph without requested outputs does not run."""
    pieces = sliced("mlp")
    samples = dataset_of(pieces, 70)
    first, second = pieces.graphs[0], pieces.model.proto.SerializeToString()
    wanted = ["logits", pieces.segments[0].output]
    found = list(run_over([first, second], wanted, samples, threads=1))
    assert [rows for rows, _ in found] == [slice(0, 64), slice(64, 70)]
    for output, graph, place in ((wanted[0], second, 0), (wanted[1], first, 1)):
        alone = [values for _, (values,) in run_over(graph, [output], samples, threads=1)]
        for (_, values), expected in zip(found, alone, strict=True):
            np.testing.assert_array_equal(values[place], expected)
    broken = replace(samples, inputs={"x": samples.inputs["x"][:, :3]})
    (once,) = list(run_over([first, second], ["logits"], samples.subset(np.arange(9)), threads=1))
    assert len(once[1]) == 1
    with pytest.raises(DataError, match="the model fails on calibration sample 0"):
        list(run_over([first, second], wanted, broken, threads=1))
