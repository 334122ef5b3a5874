"""Graphs name their weights in ``weights.bin``, and nowhere else; what is read has them in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.facts import Told, facts, tells
from tests.unit.bundle.examples import FILES, MANIFEST, replace_file, rewrite_manifest, write

from offramp.bundle import Bundle, BundleIntegrityError, BundleSchemaError
from offramp.bundle.engine_index import model_digest, parts_digest
from offramp.bundle.graph_weights import PAGE, WEIGHTS, moved, named_weights
from offramp.bundle.onnx_wire import Place
from offramp.proto.wire_format import WireError

FIRST = np.arange(2048, dtype=np.float32)
SECOND = np.arange(5000, dtype=np.int64)[::-1].copy()
CONTENT = FIRST.tobytes() + SECOND.tobytes() + b"the rest of a page"
SECOND_AT = 2 * PAGE
FILE = "segments/00.onnx"


def model(change: Callable[[TensorProto], None] | None = None) -> onnx.ModelProto:
    """A graph of a small weight and two large ones, which are in it."""
    weights = [
        numpy_helper.from_array(np.ones(3, np.float32), "small"),
        numpy_helper.from_array(FIRST.reshape(2, 1024), "first"),
        numpy_helper.from_array(SECOND, "second"),
    ]
    for tensor in weights[1:]:
        tensor.doc_string = f"of {tensor.name}"
        tensor.metadata_props.add(key="made by", value="a test")
    if change is not None:
        change(weights[1])
    node = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.zeros(2)))
    return helper.make_model(helper.make_graph([node], "g", [], [], weights))


def naming(change: Callable[[TensorProto], None] | None = None) -> onnx.ModelProto:
    """The same, which names its large weights; ``change`` is made to the first of these."""
    light = model()
    for tensor, at in zip(light.graph.initializer[1:], (0, SECOND_AT), strict=True):
        told = {"location": WEIGHTS, "offset": at, "length": len(tensor.raw_data)}
        tensor.ClearField("raw_data")
        for key, value in told.items():
            tensor.external_data.add(key=key, value=str(value))
        tensor.data_location = TensorProto.EXTERNAL
    if change is not None:
        change(light.graph.initializer[1])
    return light


def stored(folder: Path, graph: onnx.ModelProto | None = None) -> Bundle:
    """A bundle whose first segment names weights."""
    light = (naming() if graph is None else graph).SerializeToString()
    return write(folder, files={**FILES, FILE: light, WEIGHTS: CONTENT})


def hostile(folder: Path, graph: onnx.ModelProto) -> Bundle:
    """A bundle whose first segment was replaced, and signed again."""
    root = stored(folder).path
    replace_file(root, FILE, graph.SerializeToString())
    return Bundle.open(root)


def test_a_graph_is_read_with_its_weights_and_without(tmp_path: Path) -> None:
    written = stored(tmp_path)
    bundle = Bundle.open(written.path)
    assert bundle == written
    assert bundle.read(FILE) == model().SerializeToString()
    assert bundle.graph(FILE) == naming().SerializeToString()
    assert bundle.read("source.onnx") == bundle.graph("source.onnx") == FILES["source.onnx"]
    assert bundle.weight_folder() == tmp_path.resolve() / "small.ee"
    assert bundle.read(WEIGHTS) == CONTENT
    assert b"".join(bundle.stored(FILE)) == naming().SerializeToString()


def test_graphs_may_hold_their_weights(tmp_path: Path) -> None:
    graph = model().SerializeToString()
    bundle = write(tmp_path, files={**FILES, FILE: graph})
    assert bundle.weight_folder() is None
    assert bundle.read(FILE) == bundle.graph(FILE) == graph
    assert b"filled" not in (bundle.path / "manifest.json").read_bytes()


def test_engines_belong_to_graphs_wherever_their_weights_are(tmp_path: Path) -> None:
    graph = model().SerializeToString()
    held = write(tmp_path / "held", files={**FILES, FILE: graph}).manifest
    named = stored(tmp_path / "named").manifest
    (tmp_path / "other").mkdir()
    changed = CONTENT[:-20] + b"\1" * 20
    other = write(
        tmp_path / "other",
        files={**FILES, FILE: naming().SerializeToString(), WEIGHTS: b"\1" + CONTENT[1:]},
    ).manifest
    assert changed != CONTENT
    for digest in (model_digest, lambda m: parts_digest(m, 0, 0, None)):
        assert digest(held) == digest(named) != digest(other)


Change = Callable[[TensorProto], None]


def told(key: str, value: str) -> Change:
    def change(tensor: TensorProto) -> None:
        next(entry for entry in tensor.external_data if entry.key == key).value = value

    return change


def without(key: str) -> Change:
    def change(tensor: TensorProto) -> None:
        tensor.external_data.remove(next(e for e in tensor.external_data if e.key == key))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (told("location", "/etc/passwd"), ("'/etc/passwd'", "weights.bin")),
        (told("location", "./weights.bin"), ("'./weights.bin'",)),
        (told("location", "weights.bin\0x"), ("expected weights.bin",)),
        (told("location", ""), ("in the file '', expected",)),
        (told("offset", "1"), ("1 to 8193", "multiple of 4096")),
        (told("offset", "-4096"), ("offset '-4096'", "number")),
        (told("offset", "4096 "), ("offset '4096 '", "number")),
        (told("offset", "٤٠٩٦"), ("expected a number",)),
        (told("offset", str(2**70)), ("expected a number",)),
        (told("offset", str(2**62)), ("an end within", "bytes")),
        (told("offset", "49152"), ("49152 to 57344", "48210 bytes")),
        (told("length", "8191"), ("8191 bytes", "8192")),
        (told("length", "8193"), ("8193 bytes", "8192")),
        (told("length", ""), ("length ''", "number")),
        (without("location"), ("by ['length', 'offset'] only",)),
        (without("offset"), ("by ['length', 'location'] only",)),
        (without("length"), ("by ['location', 'offset'] only",)),
        (lambda t: t.external_data.add(key="offset", value="0"), ("'offset' in external_data",)),
        (
            lambda t: t.external_data.add(key="checksum", value="0"),
            ("'checksum' in external_data",),
        ),
        (lambda t: t.external_data.add(), ("has '' in external_data",)),
        (lambda t: t.ClearField("data_location"), ("expected data_location 1",)),
        (lambda t: t.ClearField("external_data"), ("by [] only",)),
        (lambda t: setattr(t, "raw_data", bytes(8192)), ("in the graph", "in a file")),
        (lambda t: t.float_data.append(1), ("in the graph", "in a file")),
        (lambda t: t.dims.append(2), ("8192 bytes", "16384")),
        (lambda t: t.dims.__setitem__(0, -2), ("no negative size",)),
        (lambda t: setattr(t, "data_type", TensorProto.STRING), ("is of type 8",)),
        (lambda t: setattr(t, "data_type", TensorProto.INT4), ("is of type 22",)),
    ],
)
def test_weights_are_nowhere_else(tmp_path: Path, change: Change, message: Told) -> None:
    bundle = hostile(tmp_path, naming(change))
    for read in (bundle.read, bundle.graph):
        with pytest.raises(BundleSchemaError, match=facts(*message)) as caught:
            read(FILE)
        assert "the weight 'first'" in str(caught.value)
        assert f"small.ee/{FILE}: " in str(caught.value)
        tells(str(caught.value), "copy the bundle again", "compile the model again")


def _external(name: str) -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[1])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": WEIGHTS, "offset": "0", "length": "4"}.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def _body() -> onnx.GraphProto:
    return helper.make_graph([], "body", [], [], [_external("deep")])


def _constant(value: TensorProto) -> onnx.NodeProto:
    node = onnx.NodeProto(op_type="Constant", output=["c"])
    node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR, t=value)
    return node


def _elsewhere() -> Iterator[Callable[[onnx.ModelProto], object]]:
    """Put a named tensor at each place where tensors may be."""
    yield lambda m: m.graph.node.append(_constant(_external("deep")))
    yield lambda m: m.graph.node.add().attribute.add().tensors.append(_external("deep"))
    yield lambda m: m.graph.node.add().attribute.add().g.CopyFrom(_body())
    yield lambda m: m.graph.node.add().attribute.add().graphs.append(_body())
    yield (
        lambda m: (
            m.graph.node.add().attribute.add().sparse_tensor.values.CopyFrom(_external("deep"))
        )
    )
    yield (
        lambda m: (
            m.graph.node.add()
            .attribute.add()
            .sparse_tensors.add()
            .indices.CopyFrom(_external("deep"))
        )
    )
    yield lambda m: m.graph.sparse_initializer.add().values.CopyFrom(_external("deep"))
    yield lambda m: m.functions.add().node.append(_constant(_external("deep")))
    yield lambda m: m.functions.add().attribute_proto.add().t.CopyFrom(_external("deep"))
    yield lambda m: m.training_info.add().initialization.CopyFrom(_body())
    yield lambda m: m.training_info.add().algorithm.CopyFrom(_body())


@pytest.mark.parametrize("change", list(_elsewhere()))
def test_initializers_alone_may_be_named(
    tmp_path: Path, change: Callable[[onnx.ModelProto], object]
) -> None:
    graph = naming()
    change(graph)
    bundle = hostile(tmp_path, graph)
    for read in (bundle.read, bundle.graph):
        with pytest.raises(BundleSchemaError, match=facts("'deep'", "file")):
            read(FILE)


def test_a_bundle_without_the_file_names_no_weights(tmp_path: Path) -> None:
    root = write(tmp_path).path
    replace_file(root, FILE, naming().SerializeToString())
    bundle = Bundle.open(root)
    for read in (bundle.read, bundle.graph):
        with pytest.raises(BundleSchemaError, match=r"in weights.bin, which is not there"):
            read(FILE)


def test_a_graph_that_would_have_more_than_protobuf_takes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = stored(tmp_path)
    size = len(model().SerializeToString())
    monkeypatch.setattr("offramp.bundle.stored_graphs.MOST_BYTES", size)
    bundle.read(FILE)
    monkeypatch.setattr("offramp.bundle.stored_graphs.MOST_BYTES", size - 1)
    with pytest.raises(BundleSchemaError, match=f"{size:,} bytes with its weights, above"):
        bundle.read(FILE)
    assert bundle.graph(FILE) == (bundle.path / FILE).read_bytes()


@pytest.mark.parametrize(
    "graph",
    [b"\x3a\x05ab", b"\x3b", b"\x00\x01", b"\x08" + b"\xff" * 11, b"\xff\xff\xff\xff\xff\x7f"],
)
def test_what_is_no_graph_is_refused(tmp_path: Path, graph: bytes) -> None:
    root = stored(tmp_path).path
    replace_file(root, FILE, graph)
    bundle = Bundle.open(root)
    for read in (bundle.read, bundle.graph):
        with pytest.raises(BundleSchemaError, match=r"not an? (whole )?ONNX graph"):
            read(FILE)


def test_bodies_in_bodies_without_end_are_refused() -> None:
    body = b"\x0a\x00"
    for _ in range(150):  # a node's attribute that holds a graph of a node
        attribute = b"\x32" + _length(body) + body
        node = b"\x2a" + _length(attribute) + attribute
        body = b"\x0a" + _length(node) + node
    with pytest.raises(WireError, match="more than 100 deep"):
        named_weights(b"\x3a" + _length(body) + body, 0)


def _length(content: bytes) -> bytes:
    return bytes([len(content) & 0x7F | 0x80, len(content) >> 7])


def test_a_weight_without_a_hash_of_the_whole_is_refused(tmp_path: Path) -> None:
    root = stored(tmp_path).path

    def forget(plain: dict) -> None:
        for entry in plain["files"]:
            entry.pop("filled_sha256", None)

    rewrite_manifest(root, forget)
    with pytest.raises(BundleIntegrityError, match=r"has other weights in weights.bin than"):
        Bundle.open(root).read(FILE)


def _shorten(place: Path) -> None:
    os.truncate(place, PAGE)


def _alter(place: Path) -> None:
    place.write_bytes(b"\1" + CONTENT[1:])


def _replace(place: Path) -> None:
    other = place.with_name("other")
    other.write_bytes(b"\1" + CONTENT[1:])
    other.replace(place)


@pytest.mark.parametrize("change", [_shorten, _alter, _replace, Path.unlink])
def test_weights_that_change_after_the_opening_are_noticed(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    bundle = stored(tmp_path)
    change(bundle.path / WEIGHTS)
    with pytest.raises(BundleIntegrityError, match=WEIGHTS):
        bundle.read(FILE)
    with pytest.raises(BundleIntegrityError, match=WEIGHTS):
        bundle.weight_folder()


def test_weights_that_were_copied_to_the_same_place_are_hashed_again(tmp_path: Path) -> None:
    bundle = stored(tmp_path)
    copy = tmp_path / "copy"
    copy.write_bytes(CONTENT)
    copy.replace(bundle.path / WEIGHTS)
    assert bundle.weight_folder() == bundle.path.resolve()
    assert bundle.read(FILE) == model().SerializeToString()


def test_what_is_stored_is_checked_in_the_end(tmp_path: Path) -> None:
    bundle = stored(tmp_path)
    _alter(bundle.path / WEIGHTS)
    pieces = bundle.stored(WEIGHTS)
    next(pieces)
    with pytest.raises(BundleIntegrityError, match=r"weights.bin was altered"):
        next(pieces)


def test_weights_are_moved() -> None:
    begins = {len(FIRST.tobytes()): PAGE, len(SECOND.tobytes()): 4 * PAGE}

    def move(weight: Place | memoryview) -> int | None:
        return begins.get(weight.length if isinstance(weight, Place) else len(weight))

    light = moved(model().SerializeToString(), 0, move)
    again = moved(naming().SerializeToString(), len(CONTENT), move)
    assert light == again
    assert onnx.load_from_string(light).SerializeToString() == light  # as the library writes it
    assert named_weights(light, 10 * len(CONTENT)) == ((PAGE, 8192), (4 * PAGE, 40_000))
    assert moved(light, 10 * len(CONTENT), lambda _: None) == light


def test_the_manifest_names_each_graph_once() -> None:
    assert MANIFEST.graphs == (
        "source.onnx",
        "segments/00.onnx",
        "segments/01.onnx",
        "exits/00.onnx",
    )
    last = replace(MANIFEST.segments[1], file="source.onnx")
    cascade = {"segments": (MANIFEST.segments[0], last), "files": ()}
    assert replace(MANIFEST, **cascade).graphs == MANIFEST.graphs[:2] + MANIFEST.graphs[3:]
