"""A model's weights are on the disk once, and what names them computes the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from tests.sliced import Sliced, sliced

from offramp.bundle.graph_weights import filled_parts, named_weights
from offramp.bundle.onnx_wire import Place
from offramp.calibration.data.scratch import ScratchError, ScratchSpace
from offramp.compiler.graphs import weights
from offramp.compiler.graphs.graph import weight_bytes
from offramp.compiler.graphs.runtime import GraphRunner, random_inputs
from offramp.compiler.graphs.weights import PackedWeights, WeightSizes, pack_weights, weight_file
from offramp.engine.backends.onnxruntime import make_session
from offramp.engine.graphs.assembly import assemble


@pytest.fixture(autouse=True)
def _store_small_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "LEAST_BYTES", 64)


def held(graph: bytes) -> int:
    """Bytes of the weights that a graph holds itself."""
    proto = onnx.ModelProto.FromString(graph)
    return sum(len(tensor.raw_data) for tensor in proto.graph.initializer)


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


def weights_of(packed: PackedWeights) -> bytes:
    return b"".join(packed.pieces())


def filled(graph: bytes, content: bytes) -> bytes:
    """A graph with its weights, as bundles read it."""
    parts = filled_parts(graph, len(content))
    if parts is None:
        return graph
    return b"".join(
        content[part.offset : part.offset + part.length] if isinstance(part, Place) else part
        for part in parts
    )


@pytest.mark.parametrize("piece_bytes", [1000, 2**20])
def test_what_is_packed_is_what_the_library_writes(
    piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_PIECE_BYTES", piece_bytes)
    model = rich_model()
    whole = model.SerializeToString()
    with weight_file(ScratchSpace(tmp_path)) as file:
        light = file.light(model)
        again = onnx.ModelProto()
        again.CopyFrom(light)
        file.fill(again)
        assert again == model
        packed = pack_weights({"a": light.SerializeToString(), "b": whole}, file)
        pieces = list(packed.pieces())
    assert packed.graphs["a"] == packed.graphs["b"]
    assert held(packed.graphs["a"]) == 12
    assert filled(packed.graphs["a"], b"".join(pieces)) == whole
    assert packed.sizes == WeightSizes(
        file_bytes=len(b"".join(pieces)), graph_bytes=2 * 4 * (64 + 300_000)
    )
    assert max(map(len, pieces)) <= max(piece_bytes, 4096)


def test_fields_that_nobody_knows_stay_where_they_are() -> None:
    model = rich_model()
    for message in (model, model.graph, model.graph.initializer[2]):
        message.MergeFromString(UNKNOWN)
    packed = pack_weights({"a": model.SerializeToString()}, None)
    assert filled(packed.graphs["a"], weights_of(packed)) == model.SerializeToString()


def test_a_graph_without_large_weights_is_left_as_it_is() -> None:
    graph = onnx.ModelProto(producer_name="test").SerializeToString() + UNKNOWN
    packed = pack_weights({"a": graph}, None)
    assert (packed.graphs, weights_of(packed)) == ({"a": graph}, b"")
    assert packed.sizes == WeightSizes(file_bytes=0, graph_bytes=0)


def with_weights(*arrays: np.ndarray) -> onnx.ModelProto:
    named = [onnx.numpy_helper.from_array(a, f"w{i}") for i, a in enumerate(arrays)]
    return onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [], named))


FULL = np.random.default_rng(0).standard_normal((100, 64)).astype(np.float32)
OTHER = FULL + (np.arange(100)[:, None] > 50)
"""The same in its first rows."""


def places(graph: bytes) -> list[Place]:
    return list(named_weights(graph, 2**30))


def test_the_first_rows_of_a_kept_weight_are_a_view_of_it(tmp_path: Path) -> None:
    with weight_file(ScratchSpace(tmp_path)) as file:
        first = file.keep(FULL.tobytes())
        size = file.size_bytes
        for rows in (1, 30, 99, 100):
            assert file.keep(FULL[:rows].tobytes()) == first
        assert file.size_bytes == size
        subnet = file.light(with_weights(FULL[:30], FULL[:, :30].copy(), OTHER[:60], OTHER[:51]))
        view, columns, other, beginning = places(subnet.SerializeToString())
        assert view == (first, FULL[:30].nbytes)
        assert beginning == (first, OTHER[:51].nbytes)
        assert 0 < columns.offset < other.offset
        file.fill(subnet)
        assert subnet == with_weights(FULL[:30], FULL[:, :30].copy(), OTHER[:60], OTHER[:51])


@pytest.mark.parametrize("in_a_file", [False, True])
def test_a_longer_weight_that_comes_later_is_found_too(tmp_path: Path, in_a_file: bool) -> None:
    models = [
        with_weights(FULL[:10], OTHER[:99], FULL),
        with_weights(OTHER, FULL[:51], FULL[:, 1:]),
    ]
    whole = [model.SerializeToString() for model in models]
    with weight_file(ScratchSpace(tmp_path)) as file:
        graphs = [file.light(m).SerializeToString() for m in models] if in_a_file else whole
        packed = pack_weights(dict(zip("ab", graphs, strict=True)), file if in_a_file else None)
        content = weights_of(packed)
    assert [filled(graph, content) for graph in packed.graphs.values()] == whole
    first, second, third = places(packed.graphs["a"])
    longest, again, columns = places(packed.graphs["b"])
    assert first.offset == third.offset == again.offset == 0 < longest.offset == second.offset
    assert len(content) == columns.offset + columns.length
    assert len(content) < 3 * (FULL.nbytes + 4096)


def test_weights_of_half_bytes_and_of_typed_fields_stay_in_the_graph(tmp_path: Path) -> None:
    model = with_weights(FULL)
    model.graph.initializer.add(
        name="halves", data_type=onnx.TensorProto.INT4, dims=[200], raw_data=bytes(100)
    )
    model.graph.initializer.add(
        name="typed", data_type=onnx.TensorProto.FLOAT, dims=[99], float_data=[1.0] * 99
    )
    whole = model.SerializeToString()
    with weight_file(ScratchSpace(tmp_path)) as file:
        light = file.light(model).SerializeToString()
    packed = pack_weights({"a": whole}, None)
    assert held(light) == held(packed.graphs["a"]) == 100
    assert len(places(packed.graphs["a"])) == 1
    assert filled(packed.graphs["a"], weights_of(packed)) == whole


@pytest.mark.parametrize("name", ["residual", "bert", "mlp"])
def test_every_weight_is_kept_once_and_comes_back(name: str, tmp_path: Path) -> None:
    pieces: Sliced = sliced(name)
    source = pieces.model.proto.SerializeToString()
    scratch = ScratchSpace(tmp_path)
    with weight_file(scratch) as file:
        stored = pieces.stored(file)
        assert held(source) > 10 * held(stored.model.proto.SerializeToString())
        assert all(held(graph) < 512 for graph in stored.graphs)
        (place,) = tmp_path.rglob("weights.bin")
        assert place.stat().st_size == scratch.taken_bytes
        # Each weight begins at a page of its own, and none is there for the segments again.
        count = sum(len(t.raw_data) >= 64 for t in pieces.model.proto.graph.initializer)
        assert place.stat().st_size <= weight_bytes(pieces.model.proto) + 4096 * count
        graphs = (stored.model.proto.SerializeToString(), *stored.graphs)
        packed = pack_weights({str(i): g for i, g in enumerate(graphs)}, file)
        content = weights_of(packed)
        assert len(content) == packed.sizes.file_bytes == place.stat().st_size
        assert [filled(g, content) for g in packed.graphs.values()] == [source, *pieces.graphs]
        assert stored.whole_model().proto == pieces.model.proto
    assert scratch.taken_bytes == 0
    assert list(tmp_path.iterdir()) == []


def test_sessions_find_the_weights_that_graphs_name(tmp_path: Path) -> None:
    pieces = sliced("residual")
    feeds = random_inputs(pieces.model.proto, 3)
    answer = pieces.model.answer.output
    wanted = GraphRunner(pieces.model.proto).run(feeds)[answer]
    chained = make_session(assemble(pieces.graphs, [answer]), 1).run([answer], feeds)[0]
    with weight_file(ScratchSpace(tmp_path)) as file:
        stored = pieces.stored(file)
        np.testing.assert_array_equal(GraphRunner(stored.model.proto).run(feeds)[answer], wanted)
        graph = assemble(stored.graphs, [answer])
        np.testing.assert_array_equal(make_session(graph, 1).run([answer], feeds)[0], chained)
    with pytest.raises(RuntimeError):  # the file is gone, and names lead nowhere
        GraphRunner(stored.model.proto)


def test_weights_without_room_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 7})()
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    message = rf"the model's weights take .*, but {tmp_path} has .*\(7 bytes\) free; free the space"
    with (
        weight_file(ScratchSpace(tmp_path)) as file,
        pytest.raises(ScratchError, match=message),
    ):
        file.check_space(sliced("mlp").model.proto)
