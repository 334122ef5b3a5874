"""The compiled schema, in a descriptor pool of our own.

tritonclient registers messages of the same names in protobuf's process-wide pool, and a name can
be registered there but once: with generated code, importing both ends the process (MLServer and
KServe have this bug). Ours live in :data:`POOL`, which nobody else sees.
"""

from __future__ import annotations

from importlib import resources
from typing import Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import Message

PACKAGE: Final = "inference"
SERVICE: Final = f"{PACKAGE}.GRPCInferenceService"
"""Full name of the gRPC service."""


def _load(pool: descriptor_pool.DescriptorPool) -> FileDescriptor:
    compiled = resources.files(__package__).joinpath("inference.binpb").read_bytes()
    (file,) = descriptor_pb2.FileDescriptorSet.FromString(compiled).file
    pool.AddSerializedFile(file.SerializeToString())
    return pool.FindFileByName(file.name)


POOL: Final = descriptor_pool.DescriptorPool()
"""Holds our messages; gRPC reflection describes the server from it."""

FILE: Final = _load(POOL)
"""The descriptor of ``inference.proto``."""


def message_class(name: str) -> type[Message]:
    """The class of a message of the schema, for instance ``ModelInferRequest``."""
    return message_factory.GetMessageClass(FILE.message_types_by_name[name])


def method_path(method: str) -> str:
    """The path that a method of the service is called at: ``/inference.GRPC…/ModelInfer``."""
    return f"/{SERVICE}/{method}"
