"""The few fields of ONNX's schema that joining graphs needs, in a private descriptor pool.

Serving must not need the ``onnx`` package. Protobuf keeps the fields that a schema does not
know, so this subset (field numbers of onnx.proto3, stable since IR version 3) can take graphs
apart and join them without understanding their operators.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "offramp.onnx_subset"
_REPEATED = descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
_OPTIONAL = descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL

FLOAT16 = 10
"""``TensorProto.DataType`` of half precision."""

_FIELDS: dict[str, tuple[tuple[str, int, str, bool], ...]] = {
    # message: (field, number, type, repeated)
    "TensorProto": (("data_type", 2, "int32", False), ("name", 8, "string", False)),
    "ValueInfoProto": (("name", 1, "string", False),),
    "NodeProto": (("input", 1, "string", True), ("output", 2, "string", True)),
    "GraphProto": (
        ("node", 1, "NodeProto", True),
        ("name", 2, "string", False),
        ("initializer", 5, "TensorProto", True),
        ("input", 11, "ValueInfoProto", True),
        ("output", 12, "ValueInfoProto", True),
        ("value_info", 13, "ValueInfoProto", True),
    ),
    "ModelProto": (("graph", 7, "GraphProto", False),),
}


_SCALARS = {
    "string": descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    "int32": descriptor_pb2.FieldDescriptorProto.TYPE_INT32,
}


def _model_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(
        name="offramp/onnx_subset.proto", package=_PACKAGE, syntax="proto2"
    )
    for message, fields in _FIELDS.items():
        described = file.message_type.add(name=message)
        for name, number, type_name, repeated in fields:
            field = described.field.add(name=name, number=number)
            field.label = _REPEATED if repeated else _OPTIONAL
            if type_name in _SCALARS:
                field.type = _SCALARS[type_name]
            else:
                field.type = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
                field.type_name = f".{_PACKAGE}.{type_name}"
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.ModelProto"))


ModelProto: Any = _model_class()
"""Message class: ``ModelProto.FromString(bytes)``, ``.SerializeToString()``."""


def has_half_precision(model: bytes) -> bool:
    """Whether any weight of a serialised model is float16."""
    weights = ModelProto.FromString(model).graph.initializer
    return any(weight.data_type == FLOAT16 for weight in weights)
