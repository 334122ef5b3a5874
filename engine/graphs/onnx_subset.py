"""The few fields of ONNX's schema that changing graphs needs, in a private descriptor pool.

Serving must not need the ``onnx`` package. Protobuf keeps the fields that a schema does not
know, so this subset (field numbers of onnx.proto3, stable since IR version 3) can take graphs
apart, join them and put operators in without understanding all that is there.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "offramp.onnx_subset"

FLOAT32, UINT8, INT8, INT64, FLOAT16 = 1, 2, 3, 7, 10
"""``TensorProto.DataType``."""
INT, INTS = 2, 7
"""``AttributeProto.AttributeType`` of an integer, and of a list of them."""

_FIELDS = {
    # message: name, number and type of each field; a star says that it is repeated
    "TensorProto": "dims 1 int64*, data_type 2 int32, int64_data 7 int64*, name 8 string",
    "DimensionProto": "dim_value 1 int64",
    "ShapeProto": "dim 1 DimensionProto*",
    "TensorTypeProto": "elem_type 1 int32, shape 2 ShapeProto",
    "TypeProto": "tensor_type 1 TensorTypeProto",
    "ValueInfoProto": "name 1 string, type 2 TypeProto",
    "AttributeProto": "name 1 string, i 3 int64, ints 8 int64*, type 20 int32",
    "NodeProto": "input 1 string*, output 2 string*, name 3 string, op_type 4 string, "
    "attribute 5 AttributeProto*, domain 7 string",
    "GraphProto": "node 1 NodeProto*, name 2 string, initializer 5 TensorProto*, "
    "input 11 ValueInfoProto*, output 12 ValueInfoProto*, value_info 13 ValueInfoProto*",
    "OperatorSetIdProto": "domain 1 string, version 2 int64",
    "ModelProto": "graph 7 GraphProto, opset_import 8 OperatorSetIdProto*",
}

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {"string": _Field.TYPE_STRING, "int32": _Field.TYPE_INT32, "int64": _Field.TYPE_INT64}


def _messages() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="offramp/onnx_subset.proto", package=_PACKAGE, syntax="proto2"
    )
    for message, fields in _FIELDS.items():
        described = file.message_type.add(name=message)
        for name, number, kind in (field.split() for field in fields.split(", ")):
            field = described.field.add(name=name, number=int(number))
            field.label = _Field.LABEL_REPEATED if kind.endswith("*") else _Field.LABEL_OPTIONAL
            type_name = kind.removesuffix("*")
            if type_name in _SCALARS:
                field.type = _SCALARS[type_name]
            else:
                field.type = _Field.TYPE_MESSAGE
                field.type_name = f".{_PACKAGE}.{type_name}"
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {
        message: message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"{_PACKAGE}.{message}")
        )
        for message in ("ModelProto", "NodeProto")
    }


_MESSAGES = _messages()
NodeProto: Any = _MESSAGES["NodeProto"]
"""Message class of an operator."""
ModelProto: Any = _MESSAGES["ModelProto"]
"""Message class: ``ModelProto.FromString(bytes)``, ``.SerializeToString()``."""


def has_half_precision(model: bytes) -> bool:
    """Whether any weight of a serialised model is float16."""
    weights = ModelProto.FromString(model).graph.initializer
    return any(weight.data_type == FLOAT16 for weight in weights)
