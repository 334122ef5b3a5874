"""Tensors whose batch is not in front are turned at a cut, and cost nothing elsewhere."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from tests import models

from offramp.calibration.heads.families import family_of
from offramp.compiler.cuts.cuts import find_cuts
from offramp.compiler.frontend import passes
from offramp.compiler.graphs.runtime import GraphRunner, random_inputs

BUILDERS = {"batch second": models.batch_second, "recurrent": models.recurrent}


def transposes(proto: onnx.ModelProto, folder: Path) -> int:
    """Return the number of ``Transpose`` operators that ONNX Runtime executes."""
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    options.log_severity_level = 4
    ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    nodes = onnx.load(options.optimized_model_filepath).graph.node
    return Counter(node.op_type for node in nodes)["Transpose"]


@pytest.mark.parametrize("name", BUILDERS)
def test_pairs_without_a_cut_between_them_cost_nothing(name, read, tmp_path, monkeypatch):
    turned = read(BUILDERS[name]()).proto
    monkeypatch.setattr(passes, "turn_batch_first", lambda proto, **_: proto)
    plain = read(BUILDERS[name]()).proto

    assert len(turned.graph.node) >= len(plain.graph.node) + 4
    assert transposes(turned, tmp_path) == transposes(plain, tmp_path)
    inputs = random_inputs(plain, 3)
    (wanted,), (found,) = (list(GraphRunner(p).run(inputs).values()) for p in (plain, turned))
    np.testing.assert_array_equal(found, wanted)


def test_models_with_the_batch_in_front_are_left_alone(read):
    for proto in (models.residual_cnn(), models.bert_like(), models.mlp()):
        names = [node.name for node in read(proto).proto.graph.node]
        assert not any("/batch_first" in name for name in names)


@pytest.mark.parametrize("name", BUILDERS)
def test_turned_tensors_are_tokens_to_heads(name, read):
    for cut in find_cuts(read(BUILDERS[name]())).cuts:
        seen = cut.head_input()
        assert (cut.shape, seen.form, seen.width) == (("batch", "sequence", 8), "tokens", 8)
        assert {head.kind for head in family_of(seen)} == {"first", "mean", "attention"}


def test_readers_inside_bodies_read_the_turned_tensor_too(read):
    """An ``If`` whose bodies capture a tensor that is turned."""
    b = models.Builder()
    x = b.input("x", ["batch", 4, 8])
    x = b.node("Relu", b.matmul(b.node("Transpose", x, perm=[1, 0, 2]), 8, 8), out="inner")
    weight = b.weight(8, 8)
    many = b.node("Greater", b.node("Size", "x"), b.constant(10_000, np.int64))
    bodies = {
        f"{branch}_branch": onnx.helper.make_graph(
            [onnx.helper.make_node("MatMul", ["inner", weight], [f"{branch}_out"])],
            branch,
            [],
            [onnx.helper.make_tensor_value_info(f"{branch}_out", 1, [4, "batch", 8])],
        )
        for branch in ("then", "else")
    }
    x = b.node("Relu", b.node("If", many, **bodies))
    b.linear(b.node("ReduceMean", x, axes=[0], keepdims=0), 8, 3, out="logits")
    b.output("logits", ["batch", 3])

    found = read(b.build(), simplify=False)

    assert "inner/batch_first" in [cut.tensor for cut in find_cuts(found).cuts]
    (conditional,) = (n for n in found.proto.graph.node if n.op_type == "If")
    assert {g.g.node[0].input[0] for g in conditional.attribute} == {"inner/as_before"}


def test_a_batch_at_the_end_is_turned_and_turned_back(read, monkeypatch):
    """[tokens, width, batch], whose way back is another one than its way to the front."""
    b = models.Builder()
    x = b.input("x", ["batch", 4, 8])
    x = b.node("Transpose", x, perm=[1, 2, 0])
    for i in range(3):
        x = b.node("Relu", b.node("MatMul", b.weight(8, 8), x), out=f"layer{i}")
    x = b.node("Transpose", b.node("ReduceMean", x, axes=[0], keepdims=0), perm=[1, 0])
    b.linear(x, 8, 3, out="logits")
    b.output("logits", ["batch", 3])
    proto = b.build()

    turned = read(proto)
    monkeypatch.setattr(passes, "turn_batch_first", lambda proto, **_: proto)
    inputs = random_inputs(proto, 5)
    wanted = GraphRunner(read(proto).proto).run(inputs)["logits"]

    assert [cut.shape for cut in find_cuts(turned).cuts][:2] == [("batch", 4, 8)] * 2
    np.testing.assert_array_equal(GraphRunner(turned.proto).run(inputs)["logits"], wanted)
