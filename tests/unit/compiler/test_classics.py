"""The classic topologies that the onnx package carries, at opset 9 with the batch fixed at 1.

Their weights are constant fills, with which every class comes out alike and nothing is tested, so
they are replaced by random ones.
"""

from __future__ import annotations

import onnx
import pytest
from tests.zoo.ready import FOLDER, with_random_weights

from offramp.compiler.cuts.cuts import find_cuts
from offramp.compiler.cuts.slicing import split, verify
from offramp.compiler.frontend.model import read_model
from offramp.compiler.graphs.runtime import GraphRunner, random_inputs


@pytest.mark.parametrize(
    ("name", "cuts", "first", "last"),
    [
        ("squeezenet", 17, "MaxPool", "Concat"),
        ("inception_v1", 11, "LRN", "Concat"),
        pytest.param("resnet50", 16, "MaxPool", "Relu", marks=pytest.mark.slow),
    ],
)
def test_classic_topology(tmp_path, name, cuts, first, last):
    source = FOLDER / f"light_{name}.onnx"
    if not source.exists():
        pytest.skip(f"this version of the onnx package has no {source.name}")
    path = tmp_path / source.name
    onnx.save(with_random_weights(onnx.load(source)), path)

    model = read_model(path)
    analysis = find_cuts(model)
    samples = random_inputs(model.proto, 2)

    assert len(analysis.cuts) == cuts
    assert (analysis.cuts[0].operator, analysis.cuts[-1].operator) == (first, last)
    answers = GraphRunner(model.proto).run(samples)[model.answer.output]
    assert answers.std() > 0, "with equal answers a comparison shows nothing"
    assert verify(model, split(model, analysis.cuts), samples, batch_sizes=(1, 2)) <= 1e-5
