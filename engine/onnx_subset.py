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

_FIELDS: dict[str, tuple[tuple[str, int, str | None, bool], ...]] = {
    # message: (field, number, message type or None for string, repeated)
    "TensorProto": (("name", 8, None, False),),
    "ValueInfoProto": (("name", 1, None, False),),
    "NodeProto": (("input", 1, None, True), ("output", 2, None, True)),
    "GraphProto": (
        ("node", 1, "NodeProto", True),
        ("name", 2, None, False),
        ("initializer", 5, "TensorProto", True),
        ("input", 11, "ValueInfoProto", True),
        ("output", 12, "ValueInfoProto", True),
        ("value_info", 13, "ValueInfoProto", True),
    ),
    "ModelProto": (("graph", 7, "GraphProto", False),),
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
            if type_name is None:
                field.type = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
            else:
                field.type = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
                field.type_name = f".{_PACKAGE}.{type_name}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file) if hasattr(pool, "Add") else pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.ModelProto"))


ModelProto: Any = _model_class()
"""Message class: ``ModelProto.FromString(bytes)``, ``.SerializeToString()``."""
