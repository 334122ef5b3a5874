"""Torch exports of models that reread inputs, transpose their batch, or have other layouts."""

from __future__ import annotations

import importlib.util

import numpy as np
import onnx
import pytest
from tests.torch_families import FAMILIES, export

from offramp.calibration.heads.families import family_of
from offramp.compiler.cuts.cuts import find_cuts
from offramp.compiler.cuts.slicing import split, verify
from offramp.compiler.frontend.model import read_model
from offramp.compiler.graphs.runtime import GraphRunner, random_inputs
from offramp.engine.answers.differences import relative_difference
from offramp.engine.graphs.assembly import assemble

TOLERANCE = 1e-5
"""float32 sums in another order; the models are a few layers deep."""
DYNAMO = pytest.param(
    True,
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(
            importlib.util.find_spec("onnxscript") is None,
            reason="torch's newer exporter needs onnxscript",
        ),
    ],
    id="dynamo",
)


@pytest.mark.parametrize("dynamo", [pytest.param(False, id="TorchScript"), DYNAMO])
@pytest.mark.parametrize(
    ("name", "dynamic"),
    [(name, False) for name in FAMILIES] + [(n, True) for n, f in FAMILIES.items() if f.dynamic],
)
def test_they_have_cuts_heads_and_stages_that_answer_alike(name, dynamic, dynamo, tmp_path):
    family = FAMILIES[name]
    if dynamo and dynamic and family.written_in:
        pytest.skip("torch's newer exporter writes the length into the graph")
    export(name, tmp_path / "model.onnx", dynamic=dynamic, dynamo=dynamo)
    model = read_model(tmp_path / "model.onnx")
    cuts = find_cuts(model).cuts

    assert len(cuts) >= family.cuts
    for cut in cuts:
        assert cut.head_input().form == family.form
        assert family_of(cut.head_input())

    segments = split(model, cuts)
    values = random_inputs(model.proto, 64)
    assert verify(model, segments, values, batch_sizes=(1, 7, 64)) <= TOLERANCE

    # three stages, with 64, then 7, then 1 row
    wanted = GraphRunner(model.proto).run(values)[model.answer.output]
    inputs = {spec.name for spec in model.inputs}
    for stage, rows in ((segments[:1], 7), (segments[1:-1], 1), (segments[-1:], 1)):
        parts = [segment.proto.SerializeToString() for segment in stage]
        united = onnx.load_from_string(assemble(parts, [stage[-1].output]))
        given = values | GraphRunner(united).run(values)
        values = {name: given[name][-rows:] for name in (*inputs, stage[-1].output)}
    answer = values[model.answer.output]
    assert relative_difference(answer, np.asarray(wanted)[-1:]) <= TOLERANCE
