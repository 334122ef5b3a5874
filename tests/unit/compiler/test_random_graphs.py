"""Random graphs: any of their cuts reassemble to the graph, and rows may leave at each."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
import onnx
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.random_graphs import RandomGraph

from offramp.calibration.heads.families import family_of
from offramp.compiler.cuts.cuts import CutAnalysis, find_cuts
from offramp.compiler.cuts.slicing import split, verify
from offramp.compiler.frontend.model import read_model
from offramp.compiler.graphs.graph import Dataflow
from offramp.compiler.graphs.runtime import GraphRunner, random_inputs
from offramp.compiler.graphs.source_model import SourceModel
from offramp.engine.answers.differences import relative_difference

TOLERANCE = 1e-5
"""float32 sums in another order; the graphs are a few layers deep."""
SEEDS = (*range(60), 90, 102, 106, 138)
"""The last have sets with tensors that are turned."""


@functools.cache
def analysed(seed: int) -> tuple[SourceModel, CutAnalysis]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(RandomGraph(seed).model(), path)
        model = read_model(path, simplify=False)
    return model, find_cuts(model)


@given(st.sampled_from(SEEDS), st.data())
@settings(max_examples=60, deadline=None)
def test_any_cuts_reassemble_to_the_source(seed, data):
    model, analysis = analysed(seed)
    chosen = [cut for cut in analysis.cuts if data.draw(st.booleans())]
    segments = split(model, chosen)

    assert verify(model, segments, random_inputs(model.proto, 7)) <= TOLERANCE
    there = {spec.name for spec in model.inputs}
    carried: set[str] = set()
    for segment, cut in zip(segments, [*chosen, None], strict=True):
        flow = Dataflow(segment.proto.graph)
        known = {*flow.producers, *flow.constants, *flow.inputs}
        assert {t for op in flow.operators for t in op.reads} <= known
        assert set(segment.inputs) <= there | carried
        carried |= set(segment.outputs)
        if cut is not None:  # nothing else is there behind a cut
            assert set(cut.tensors) <= carried
            carried = set(cut.tensors)


@given(st.sampled_from(SEEDS))
@settings(max_examples=40, deadline=None)
def test_rows_may_leave_at_every_cut(seed):
    model, analysis = analysed(seed)
    segments = split(model, analysis.cuts)
    values = random_inputs(model.proto, 64)
    wanted = GraphRunner(model.proto).run(values)[model.answer.output]
    rows = np.arange(64)

    for segment, kept in zip(segments, [7, 1, *[1] * len(segments)], strict=False):
        given_values = {name: array[rows] for name, array in values.items()}
        found = GraphRunner(segment.proto).run(given_values)
        stay = np.arange(len(rows))[-kept:]
        for name, value in found.items():
            values[name] = np.zeros((64, *value.shape[1:]), np.float32)
            values[name][rows] = value
        rows = rows[stay]

    answers = values[model.answer.output][rows]
    assert relative_difference(answers, wanted[rows]) <= TOLERANCE


@given(st.sampled_from(SEEDS))
@settings(max_examples=20, deadline=None)
def test_every_cut_has_a_head_and_its_batch_in_front(seed):
    for cut in analysed(seed)[1].cuts:
        assert cut.shape[0] == "batch"
        assert family_of(cut.head_input())


def test_the_graphs_have_all_that_they_are_to_have():
    """Otherwise the properties above would be true for graphs without cuts."""
    found = [analysed(seed)[1] for seed in SEEDS]

    assert sum(len(analysis.cuts) >= 2 for analysis in found) >= len(SEEDS) // 2
    assert sum(analysis.rereads for analysis in found) >= 5
    cuts = [cut for analysis in found for cut in analysis.cuts]
    assert sum(cut.tensor.endswith("/batch_first") for cut in cuts) >= 5
    assert sum(bool(cut.side_inputs) for cut in cuts) >= 10
    assert sum(bool(cut.beside) for cut in cuts) >= 10
    assert sum(any(t.endswith("/batch_first") for t in cut.tensors[1:]) for cut in cuts) >= 3
