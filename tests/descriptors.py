"""Reads message descriptors in a way that all versions of protobuf have."""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto


def layout(message: Descriptor) -> dict[str, tuple[int, int, bool]]:
    """Number, type and whether it is repeated, of each field by name."""
    proto = DescriptorProto()
    message.CopyToProto(proto)
    repeated = FieldDescriptorProto.LABEL_REPEATED
    return {f.name: (f.number, f.type, f.label == repeated) for f in proto.field}
