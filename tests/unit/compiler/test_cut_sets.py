"""Cut points of several tensors: where no single one carries everything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from tests import models
from tests.exports import replayed_bundle, replayed_inputs, run_bundle
from tests.facts import tells
from tests.sliced import inputs_of, sliced
from tests.unit.bundle.examples import rewrite_manifest

from offramp.bundle import Bundle, BundleSchemaError
from offramp.compiler.cuts.cuts import CutAnalysis, find_cuts
from offramp.compiler.graphs.runtime import GraphRunner
from offramp.compiler.graphs.source_model import SourceModel

Read = Callable[..., SourceModel]
LSTM = ("states0/batch_first", "last0/batch_first")


def sets_of(analysis: CutAnalysis) -> list[set[str]]:
    return [set(cut.tensors) for cut in analysis.cuts]


def test_branches_that_are_done_are_carried_beside_what_the_others_read(read: Read) -> None:
    analysis = find_cuts(read(models.text_cnn()))
    assert sets_of(analysis) == [{"pooled0", "embedded"}, {"pooled1", "pooled0", "embedded"}]
    first, second = analysis.cuts
    assert (first.tensor, second.tensor) == ("pooled0", "pooled1")  # what is written last
    assert {t.name: t.shape for t in second.head_input().tensors} == {
        "pooled0": ("batch", 24),
        "pooled1": ("batch", 24),
        "embedded": ("batch", 16, 12),
    }
    assert 0 < first.flops_share_before < second.flops_share_before < 1


def test_branches_are_pooled_before_the_next_one_begins(read: Read) -> None:
    """However the exporter orders them: here all convolutions come first."""
    proto = models.text_cnn()
    depth = {"Gather": 0, "Transpose": 1, "Conv": 2, "Relu": 3, "ReduceMax": 4}
    nodes = sorted(proto.graph.node, key=lambda node: depth.get(node.op_type, 5))
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    analysis = find_cuts(read(proto, simplify=False))
    assert sets_of(analysis) == [{"pooled0", "embedded"}, {"pooled1", "pooled0", "embedded"}]


def test_towers_advance_side_by_side(read: Read) -> None:
    """An exit that had read one input only could not know the answer."""
    analysis = find_cuts(read(models.two_tower(layers=4, merged=0)))
    assert analysis.main_inputs == ("left", "right")
    assert {"left0", "right0"} == sets_of(analysis)[0]
    assert {"left2", "right2"} in sets_of(analysis)
    for cut in analysis.cuts[:-1]:
        assert {name[:4] for name in cut.tensors} == {"left", "righ"}


def test_states_of_recurrent_layers_are_turned_and_carried(read: Read) -> None:
    analysis = find_cuts(read(models.hidden_states()))
    assert sets_of(analysis) == [
        set(LSTM),
        {"states1/batch_first", "last0/batch_first", "last1/batch_first"},
        {"last2/batch_first", "last0/batch_first", "last1/batch_first"},
    ]
    assert {t.shape for t in analysis.cuts[0].head_input().tensors} == {
        ("batch", 6, 16),
        ("batch", 1, 16),
    }


@pytest.mark.parametrize(("most", "cuts"), [(1, 0), (2, 1), (3, 2), (4, 2)])
def test_a_cut_point_has_no_more_tensors_than_allowed(read: Read, most: int, cuts: int) -> None:
    assert len(find_cuts(read(models.text_cnn()), max_tensors=most).cuts) == cuts


def test_states_that_many_tensors_carry_are_turned_where_so_many_are_allowed(read: Read) -> None:
    proto = models.hidden_states(layers=6)
    found = find_cuts(read(proto, max_cut_tensors=8), max_tensors=8)
    assert [len(cut.tensors) for cut in found.cuts] == [2, 3, 4, 5, 6, 6]
    alone = read(proto, max_cut_tensors=1).proto
    assert not any(node.output[0].endswith("/batch_first") for node in alone.graph.node)


def test_what_would_take_too_many_tensors_says_so(read: Read) -> None:
    model = read(models.text_cnn())
    (reason,) = (r.reason for r in find_cuts(model, max_tensors=1).rejected if "block" in r.reason)
    assert "`embedded` also carries data past this place" in reason
    tells(reason, "at least 2 tensors", "at most 1", "--max-cut-tensors")
    assert not any("inside a block" in r.reason for r in find_cuts(model).rejected)


@pytest.mark.parametrize("blocks", [3, 5])
def test_blocks_of_which_there_are_many_are_not_cut_inside(read: Read, blocks: int) -> None:
    assert not any(cut.beside for cut in find_cuts(read(models.residual_cnn(blocks=blocks))).cuts)


def test_a_dominant_residual_branch_is_cut_inside(read: Read) -> None:
    """The branch of a single residual block that does nearly all the work."""
    b = models.Builder()
    x = b.node("Relu", b.linear(b.input("x", ["batch", 16]), 16, 16), out="stem")
    y = b.node("Relu", b.linear(x, 16, 64), out="inner0")
    y = b.node("Relu", b.linear(y, 64, 64), out="inner1")
    y = b.node("Add", b.linear(y, 64, 16), x, out="block")
    b.linear(b.node("Relu", b.linear(y, 16, 16), out="last"), 16, 3, out="logits")
    b.output("logits", ["batch", 3])
    analysis = find_cuts(read(b.build()))
    assert sets_of(analysis) == [
        {"stem"},
        {"inner0", "stem"},
        {"inner1", "stem"},
        {"block"},
        {"last"},
    ]


def test_an_exit_that_reads_a_set_reads_all_of_it() -> None:
    pieces = sliced("text cnn")
    assert [segment.outputs for segment in pieces.segments] == [
        ("pooled0", "embedded"),
        ("pooled1",),
        ("logits",),
    ]
    assert [set(segment.inputs) for segment in pieces.segments] == [
        {"input_ids"},
        {"embedded"},
        {"embedded", "pooled0", "pooled1"},
    ]


@pytest.mark.parametrize("name", ["text cnn", "hidden states", "long towers"])
def test_samples_that_stay_are_answered_as_by_the_source(name: str, tmp_path: Path) -> None:
    """Tensors that a segment does not read pass it, and lose the rows of those who left."""
    pieces = sliced(name)
    last = len(pieces.segments) - 2
    bundle = replayed_bundle(name, tmp_path, exits_after=(0, last))
    sure = np.random.default_rng(3).random((64, 2), np.float32)
    inputs = replayed_inputs(name, sure)
    said = run_bundle(bundle, inputs)
    stayed = (sure < 0.5).all(axis=1)
    assert 4 < stayed.sum() < 60
    np.testing.assert_array_equal(said.exit == -1, stayed)
    right = GraphRunner(pieces.model.proto).run(inputs_of(pieces, 64))[pieces.model.answer.output]
    np.testing.assert_allclose(said.answer[stayed], right[stayed], rtol=1e-4, atol=1e-5)


def test_a_bundle_that_reads_what_is_not_given_is_refused(tmp_path: Path) -> None:
    path = replayed_bundle("text cnn", tmp_path, exits_after=(0, 1)).path
    assert '"also"' in (path / "manifest.json").read_text()
    rewrite_manifest(path, lambda plain: plain["segments"][0].update(also=["elsewhere"]))
    with pytest.raises(BundleSchemaError, match=r"reads .*'embedded'.*, expected"):
        Bundle.open(path)


def test_bundles_of_single_tensors_are_written_as_ever(tmp_path: Path) -> None:
    path = replayed_bundle("mlp", tmp_path, exits_after=(0,)).path
    assert '"also"' not in (path / "manifest.json").read_text()
    assert onnx.load(path / "segments" / "00.onnx").graph.output[0].name == "hidden0"
