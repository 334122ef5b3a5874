"""The subset of ONNX's schema loses nothing of what it does not know."""

from __future__ import annotations

import onnx
import pytest
from google.protobuf.descriptor import FieldDescriptor
from onnx import TensorProto, helper, numpy_helper
from tests import models
from tests.descriptors import layout
from tests.sliced import BUILDERS

from offramp.engine.graphs.assembly import ModelProto


def rich() -> onnx.ModelProto:
    """A model that uses fields which joining graphs needs nothing of."""
    model = models.bert_like()
    model.producer_name, model.producer_version, model.model_version = "p", "1.2", 7
    model.domain, model.doc_string = "example.org", "words"
    helper.set_model_props(model, {"author": "someone", "licence": "MIT"})
    model.opset_import.append(helper.make_opsetid("com.example", 3))
    body = helper.make_node("Add", ["a", "b"], ["c"])
    model.functions.append(
        helper.make_function(
            "com.example", "Plus", ["a", "b"], ["c"], [body], [helper.make_opsetid("", 17)]
        )
    )
    graph = model.graph
    graph.doc_string = "about the graph"
    graph.metadata_props.add(key="k", value="v")
    values = helper.make_tensor("sparse", TensorProto.FLOAT, [1], [2.0])
    indices = helper.make_tensor("places", TensorProto.INT64, [1], [3])
    graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [9]))
    graph.quantization_annotation.add(tensor_name="w0")
    node = graph.node[0]
    node.doc_string, node.domain, node.overload = "about the node", "com.example", "v2"
    node.metadata_props.add(key="k", value="v")
    for value in (1, 1.5, "text", [1, 2], [1.5], ["a", "b"], values):
        node.attribute.append(helper.make_attribute(f"attribute{len(node.attribute)}", value))
    node.attribute.append(helper.make_attribute("body", models.mlp().graph))
    graph.value_info.append(
        helper.make_tensor_sequence_value_info("sequence", TensorProto.FLOAT, ["n", 3])
    )
    graph.initializer[0].doc_string = "about the weight"
    graph.initializer[0].external_data.add(key="location", value="weights.bin")
    return model


BUILT = {"rich": rich, **BUILDERS, "if": models.conditional}


@pytest.mark.parametrize("name", BUILT)
def test_everything_survives_a_round_trip(name: str) -> None:
    model = BUILT[name]()
    document = ModelProto.FromString(model.SerializeToString()).SerializeToString()
    assert onnx.load_from_string(document) == model


def test_names_and_edges_are_understood() -> None:
    model = rich()
    subset = ModelProto.FromString(model.SerializeToString())
    graph, wanted = subset.graph, model.graph
    assert graph.name == wanted.name
    assert [list(n.input) for n in graph.node] == [list(n.input) for n in wanted.node]
    assert [list(n.output) for n in graph.node] == [list(n.output) for n in wanted.node]
    for field in ("initializer", "input", "output", "value_info"):
        found = [item.name for item in getattr(graph, field)]
        assert found == [item.name for item in getattr(wanted, field)] != []


def test_moved_items_keep_what_is_unknown() -> None:
    """Assembling does this: items are serialised and added to another graph."""
    model = rich()
    subset, other = ModelProto.FromString(model.SerializeToString()), ModelProto()
    for field in ("node", "initializer", "input", "output", "value_info"):
        items = getattr(subset.graph, field)
        getattr(other.graph, field).extend(
            type(item).FromString(item.SerializeToString()) for item in items
        )
    moved = onnx.load_from_string(other.SerializeToString()).graph
    for field in ("node", "initializer", "input", "output", "value_info"):
        assert list(getattr(moved, field)) == list(getattr(model.graph, field))


def test_weights_survive_to_the_bit() -> None:
    model = models.residual_cnn()
    document = ModelProto.FromString(model.SerializeToString()).SerializeToString()
    again = onnx.load_from_string(document)
    for ours, theirs in zip(again.graph.initializer, model.graph.initializer, strict=True):
        assert numpy_helper.to_array(ours).tobytes() == numpy_helper.to_array(theirs).tobytes()


def test_fields_have_the_numbers_of_the_real_schema() -> None:
    ours = {
        message.name: message
        for message in ModelProto.DESCRIPTOR.file.message_types_by_name.values()
    }
    nested = {
        "TensorTypeProto": onnx.TypeProto.Tensor,
        "ShapeProto": onnx.TensorShapeProto,
        "DimensionProto": onnx.TensorShapeProto.Dimension,
    }
    assert {"GraphProto", "ModelProto", *nested} < set(ours)
    for name, message in ours.items():
        theirs = layout((nested.get(name) or getattr(onnx, name)).DESCRIPTOR)
        for field, found in layout(message).items():
            number, kind, repeated = theirs[field]
            # An enum is an int32 on the wire.
            kind = FieldDescriptor.TYPE_INT32 if kind == FieldDescriptor.TYPE_ENUM else kind
            assert found == (number, kind, repeated)


def test_it_lives_beside_the_real_schema_and_apart_from_it() -> None:
    assert ModelProto.DESCRIPTOR.full_name == "offramp.onnx_subset.ModelProto"
    assert ModelProto.DESCRIPTOR.file.pool is not onnx.ModelProto.DESCRIPTOR.file.pool
