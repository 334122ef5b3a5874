"""A model's weights are on the disk once, and what names them computes the same."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from tests.sliced import Sliced, sliced

from offramp.bundle.files import FileContent
from offramp.calibration.scratch import ScratchError, ScratchSpace
from offramp.compiler import weights
from offramp.compiler.graph import weight_bytes
from offramp.compiler.runtime import GraphRunner, random_inputs
from offramp.compiler.weights import weight_file
from offramp.engine.assembly import assemble
from offramp.engine.backends.onnxruntime import make_session


@pytest.fixture(autouse=True)
def _store_small_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "LEAST_BYTES", 64)


def held(graph: bytes) -> int:
    """Bytes of the weights that a graph holds itself."""
    proto = onnx.ModelProto.FromString(graph)
    return sum(len(tensor.raw_data) for tensor in proto.graph.initializer)


def joined(pieces: FileContent) -> bytes:
    return pieces if isinstance(pieces, bytes) else b"".join(pieces)


def rich_model() -> onnx.ModelProto:
    """A model with all that a message may have around its weights, before and after them."""
    weights = [
        onnx.numpy_helper.from_array(np.arange(size, dtype=np.float32), f"weight{size}")
        for size in (3, 64, 300_000)
    ]
    weights[1].doc_string = "of weight64"
    weights[1].metadata_props.add(key="made by", value="a test")
    twice = onnx.helper.make_function(
        "own", "Twice", ["x"], ["y"], [onnx.helper.make_node("Add", ["x", "x"], ["y"])], OPSETS
    )
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Twice", [f"weight{size}"], [f"y{size}"], domain="own")
         for size in (3, 64, 300_000)],
        "rich",
        [],
        [onnx.helper.make_tensor_value_info("y64", onnx.TensorProto.FLOAT, [64])],
        weights,
        doc_string="of the graph",
        value_info=[onnx.helper.make_tensor_value_info("y3", onnx.TensorProto.FLOAT, [3])],
    )  # fmt: skip
    graph.node[0].MergeFromString(UNKNOWN)
    graph.metadata_props.add(key="k", value="v")
    model = onnx.helper.make_model(graph, functions=[twice], opset_imports=OPSETS, ir_version=10)
    model.doc_string, model.producer_name, model.model_version = "of the model", "test", 3
    model.metadata_props.add(key="classes", value="cat,dog")
    return model


OPSETS = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("own", 1)]
UNKNOWN = b"\xc2\x3e\x05later"
"""Field 1000, which no message of ONNX has yet."""


@pytest.mark.parametrize("piece_bytes", [1000, 2**20])
def test_pieces_are_what_the_library_writes(
    piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_PIECE_BYTES", piece_bytes)
    model = rich_model()
    whole = model.SerializeToString()
    with weight_file(model, ScratchSpace(tmp_path)) as file:
        light = file.light(model)
        for message in (light, light.graph, light.graph.initializer[2]):
            message.MergeFromString(UNKNOWN)
        filled = onnx.ModelProto()
        filled.CopyFrom(light)
        file.fill(filled)
        assert filled.SerializeToString() == joined(file.pieces(light.SerializeToString()))
        pieces = list(file.pieces(file.light(model).SerializeToString()))
    assert joined(pieces) == whole
    assert max(map(len, pieces)) <= max(piece_bytes, 1500)
    assert onnx.load_from_string(joined(pieces)) == model


def test_a_graph_that_names_no_weights_is_left_as_it_is(tmp_path: Path) -> None:
    model = rich_model()
    graph = model.SerializeToString() + UNKNOWN
    with weight_file(model, ScratchSpace(tmp_path)) as file:
        assert list(file.pieces(graph)) == [graph]


@pytest.mark.parametrize("name", ["residual", "bert", "mlp"])
def test_every_weight_is_kept_once_and_comes_back(name: str, tmp_path: Path) -> None:
    pieces: Sliced = sliced(name)
    source = pieces.model.proto.SerializeToString()
    scratch = ScratchSpace(tmp_path)
    with weight_file(pieces.model.proto, scratch) as file:
        stored = pieces.stored(file)
        assert held(source) > 10 * held(stored.model.proto.SerializeToString())
        assert all(held(graph) < 512 for graph in stored.graphs)
        (place,) = tmp_path.rglob("weights")
        assert place.stat().st_size == scratch.taken_bytes
        # Each weight begins at a page of its own, and none is there for the segments again.
        count = sum(len(t.raw_data) >= 64 for t in pieces.model.proto.graph.initializer)
        assert place.stat().st_size <= weight_bytes(pieces.model.proto) + 4096 * count
        assert joined(file.pieces(stored.model.proto.SerializeToString())) == source
        assert [joined(stored.pieces(graph)) for graph in stored.graphs] == list(pieces.graphs)
        assert stored.whole_model().proto == pieces.model.proto
    assert scratch.taken_bytes == 0
    assert list(tmp_path.iterdir()) == []


def test_sessions_find_the_weights_that_graphs_name(tmp_path: Path) -> None:
    pieces = sliced("residual")
    feeds = random_inputs(pieces.model.proto, 3)
    answer = pieces.model.answer.output
    wanted = GraphRunner(pieces.model.proto).run(feeds)[answer]
    chained = make_session(assemble(pieces.graphs, [answer]), 1).run([answer], feeds)[0]
    with weight_file(pieces.model.proto, ScratchSpace(tmp_path)) as file:
        stored = pieces.stored(file)
        np.testing.assert_array_equal(GraphRunner(stored.model.proto).run(feeds)[answer], wanted)
        graph = assemble(stored.graphs, [answer])
        np.testing.assert_array_equal(make_session(graph, 1).run([answer], feeds)[0], chained)
    with pytest.raises(RuntimeError):  # the file is gone, and names lead nowhere
        GraphRunner(stored.model.proto)


def test_the_model_itself_is_not_kept(tmp_path: Path) -> None:
    model = rich_model()
    before = sys.getrefcount(model)
    with weight_file(model, ScratchSpace(tmp_path)):
        assert sys.getrefcount(model) == before


def test_weights_without_room_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 7})()
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    message = rf"the model's weights take .*, but {tmp_path} has .*\(7 bytes\) free; free the space"
    with (
        pytest.raises(ScratchError, match=message),
        weight_file(sliced("mlp").model.proto, ScratchSpace(tmp_path)),
    ):
        pass
