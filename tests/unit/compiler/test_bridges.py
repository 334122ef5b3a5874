"""Bridges: which blocks they keep, and that untrained they compute what these blocks compute."""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from tests import models
from tests.sliced import inputs_of, slice_proto

from offramp.calibration.torch.torch_graph import TorchGraph
from offramp.compiler.cuts.slicing import Sliced
from offramp.compiler.exits.bridges import Bridge, bridges_of
from offramp.compiler.graphs.graph import Dataflow
from offramp.compiler.graphs.tail import giving
from offramp.engine.graphs.assembly import assemble

BUILDERS = {
    "pixels": functools.partial(models.residual_cnn, blocks=5, dense="logits"),
    "probabilities of pixels": functools.partial(models.residual_cnn, blocks=4, dense="Softmax"),
    "classes of pixels": functools.partial(models.residual_cnn, blocks=4, dense="ArgMax"),
    "tags": functools.partial(models.bert_like, tags=4),
    "one class": functools.partial(models.residual_cnn, blocks=4),
}


@functools.cache
def made(name: str) -> tuple[Sliced, list[Bridge]]:
    pieces = slice_proto(BUILDERS[name]())
    return pieces, bridges_of(pieces)


def whole(bridges: list[Bridge]) -> list[Bridge]:
    """Return the bridges with all layers after the last cut point: the first of every candidate."""
    return [
        b for i, b in enumerate(bridges) if b.candidate not in {o.candidate for o in bridges[:i]}
    ]


def values_at(pieces: Sliced, names: list[str], inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the source model's values of some tensors, and its scores."""
    written = {name for segment in pieces.segments[:-1] for name in segment.outputs}
    wanted = [name for name in names if name in written]
    scores = pieces.model.taught.output
    graphs = [giving(graph, scores) for graph in pieces.graphs]
    session = ort.InferenceSession(assemble(graphs, [*wanted, scores]))
    fed = {i.name: inputs[i.name] for i in session.get_inputs()}
    found = session.run(None, fed)
    return {**inputs, **dict(zip(wanted, found, strict=False)), "": found[-1]}


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_untrained_a_bridge_is_its_torch_reference(name: str) -> None:
    pieces, bridges = made(name)
    assert bridges
    for bridge in bridges:
        onnx.checker.check_model(bridge.proto)
        values = values_at(pieces, list(bridge.reads), inputs_of(pieces, 3))
        session = ort.InferenceSession(bridge.proto.SerializeToString())
        fed = {tensor: values[tensor] for tensor in bridge.reads}
        expected = dict(
            zip((o.name for o in session.get_outputs()), session.run(None, fed), strict=True)
        )
        module = TorchGraph(bridge.proto)
        with torch.no_grad():
            found = module({k: torch.from_numpy(np.asarray(v)) for k, v in fed.items()})
        for output, value in expected.items():
            np.testing.assert_allclose(found[output].numpy(), value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_after_the_last_block_a_bridge_is_the_model_itself(name: str) -> None:
    """A bridge there drops nothing, and untrained it answers like the model."""
    pieces, bridges = made(name)
    last = whole(bridges)[-1]
    assert last.kept == last.dropped == 0
    values = values_at(pieces, list(last.reads), inputs_of(pieces, 3))
    session = ort.InferenceSession(last.proto.SerializeToString())
    (found,) = session.run([last.scores], {tensor: values[tensor] for tensor in last.reads})
    np.testing.assert_allclose(found, values[""], rtol=1e-4, atol=1e-5)


def test_of_every_later_region_the_first_block_is_kept() -> None:
    pieces, bridges = made("pixels")
    names = [cut.name for cut in pieces.cuts]
    assert names[:3] == ["stem", "block0", "block1"]
    by_name = dict(zip(names, whole(bridges), strict=True))
    # stem and block0 are of one shape; block1 halves the map, and those behind it repeat it
    assert (by_name["stem"].kept, by_name["block0"].kept, by_name["block1"].kept) == (1, 1, 0)
    assert by_name["stem"].dropped == by_name["block0"].dropped + 1
    kinds = [op.kind for op in Dataflow(by_name["stem"].proto.graph).operators]
    # block1 has three convolutions; behind its end there is what the head and the last block have
    at_block1 = [op.kind for op in Dataflow(by_name["block1"].proto.graph).operators]
    assert kinds.count("Conv") == 3 + at_block1.count("Conv")


@pytest.mark.parametrize("name", ["pixels", "tags", "one class"])
def test_a_short_bridge_leaves_the_last_block_out(name: str) -> None:
    pieces, bridges = made(name)
    long = whole(bridges)
    short = [bridge for bridge in bridges if bridge not in long]
    assert [b.candidate for b in short] == [b.candidate for b in long]
    assert pieces.analysis.end is not None
    for one, other in zip(short, long, strict=True):
        assert (one.kept, one.dropped) == (other.kept, other.dropped + 1)
        assert one.reads[0] == other.reads[0]
    # What is left of the last one is what the model has behind its last block.
    flow = Dataflow(pieces.model.proto.graph)
    end = flow.upstream([pieces.model.answer.output], stop=frozenset(pieces.analysis.end.tensors))
    found = [op.kind for op in Dataflow(short[-1].proto.graph).operators]
    assert found == [op.kind for op in end]


def test_shapes_that_come_again_are_gone_over_to_at_once() -> None:
    """Layers between two places of one shape are left out, whatever shapes they have."""
    b = models.Builder()
    x = b.input("x", ["batch", 16])
    widths = [16, 16, 32, 24, 16, 16]
    for place, (before, after) in enumerate(pairwise(widths)):
        x = b.node("Relu", b.linear(x, before, after), out=f"hidden{place}")
    b.linear(x, 16, 3, out="logits")
    b.output("logits", ["batch", 3])
    pieces = slice_proto(b.build(), exits=("hidden0", "hidden1", "hidden4"))
    first, second, last = whole(bridges_of(pieces))
    assert (first.kept, first.dropped) == (0, 4)
    assert (second.kept, second.dropped) == (2, 1)
    assert (last.kept, last.dropped) == (0, 0)
    kinds = [[op.kind for op in Dataflow(b.proto.graph).operators] for b in (first, second, last)]
    assert kinds[0] == kinds[2]
    assert kinds[1].count("Gemm") == kinds[2].count("Gemm") + 2


def test_every_weight_is_a_copy_under_a_name_of_its_own() -> None:
    pieces, bridges = made("pixels")
    theirs = {t.name for t in pieces.model.proto.graph.initializer}
    seen: set[str] = set()
    for bridge in whole(bridges):
        ours = {t.name for t in bridge.proto.graph.initializer}
        assert ours.isdisjoint(theirs | seen)
        seen |= ours


def test_bridges_end_with_the_scores_that_classes_are_picked_from() -> None:
    pieces, bridges = made("classes of pixels")
    assert pieces.model.taught.output != pieces.model.answer.output
    for bridge in bridges:
        assert bridge.scores.endswith(pieces.model.taught.output)
        assert bridge.scores_type.shape == ("batch", 5, 16, 16)
