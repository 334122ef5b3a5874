"""The compiled schema, in a private descriptor pool.

tritonclient registers messages of the same names in protobuf's process-wide pool, where a name can
be registered only once: with generated code, importing both would end the process (MLServer and
KServe have this bug). Our messages are in :data:`POOL`, which no other package uses.
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
"""Pool of our messages; gRPC reflection describes the server from it."""

FILE: Final = _load(POOL)
"""The descriptor of ``inference.proto``."""


def message_class(name: str) -> type[Message]:
    """Return the class of a message of the schema, for instance ``ModelInferRequest``."""
    return message_factory.GetMessageClass(FILE.message_types_by_name[name])


def method_path(method: str) -> str:
    """Return the path of a method of the service: ``/inference.GRPC…/ModelInfer``."""
    return f"/{SERVICE}/{method}"
