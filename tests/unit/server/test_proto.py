"""The schema, its compiled forms, and the messages in a process shared with tritonclient."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
import tritonclient.grpc as triton
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import Descriptor
from tests.descriptors import layout

from offramp.proto import messages
from offramp.proto.descriptors import FILE, POOL, SERVICE
from offramp.proto.generate import DESCRIPTORS, STUB, compile_schema
from offramp.proto.tensors import DATATYPES

TRITON = triton.service_pb2.DESCRIPTOR


PARTIAL = {
    f"inference.{name}"
    for name in (
        "ModelConfig",
        "ModelDynamicBatching",
        "ModelInput",
        "ModelInstanceGroup",
        "ModelOptimizationPolicy",
        "ModelOutput",
        "ModelVersionPolicy",
        "ModelWarmup",
        "ModelWarmup.Input",
    )
}
"""Triton's have many more fields."""


def all_messages() -> list[Descriptor]:
    found = list(FILE.message_types_by_name.values())
    for message in found:
        found.extend(message.nested_types)
    return found


def test_the_compiled_schema_is_that_of_the_proto_file() -> None:
    parse = descriptor_pb2.FileDescriptorSet.FromString
    assert parse(DESCRIPTORS.read_bytes()) == parse(compile_schema().descriptors)


def test_the_type_stub_has_every_message_and_field() -> None:
    classes: dict[str, set[str]] = {}

    def state(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                name = f"{prefix}.{child.name}"
                slots = next(c for c in child.body if isinstance(c, ast.Assign))
                classes[name] = set(ast.literal_eval(slots.value))
                state(child, name)

    state(ast.parse(STUB.read_text()), "inference")
    nested = [enum for message in all_messages() for enum in message.enum_types]
    for enum in (*FILE.enum_types_by_name.values(), *nested):
        assert classes.pop(enum.full_name) == set()
    assert classes == {m.full_name: set(m.fields_by_name) for m in all_messages()}


def test_every_message_has_a_class() -> None:
    for name, descriptor in FILE.message_types_by_name.items():
        assert getattr(messages, name).DESCRIPTOR is descriptor


@pytest.mark.parametrize("name", [message.full_name for message in all_messages()])
def test_field_numbers_and_types_are_tritons(name: str) -> None:
    theirs = descriptor_pool.Default().FindMessageTypeByName(name)
    ours = POOL.FindMessageTypeByName(name)
    assert theirs is not ours
    if name in PARTIAL:
        assert layout(ours).items() <= layout(theirs).items()
    else:
        assert layout(ours) == layout(theirs)


def test_element_types_are_tritons() -> None:
    theirs = descriptor_pool.Default().FindEnumTypeByName("inference.DataType")
    ours = POOL.FindEnumTypeByName("inference.DataType")
    numbers = {value.name: value.number for value in theirs.values}
    assert {v.name: v.number for v in ours.values}.items() <= numbers.items()
    unserved = {"TYPE_BF16"}
    served = {f"TYPE_{name.replace('BYTES', 'STRING')}" for name in DATATYPES}
    assert served | unserved == {v.name for v in ours.values if v.number}


def test_methods_are_tritons() -> None:
    ours = FILE.services_by_name["GRPCInferenceService"].methods_by_name
    theirs = TRITON.services_by_name["GRPCInferenceService"].methods_by_name
    assert set(ours) == set(theirs)
    for name, method in ours.items():
        assert method.input_type.full_name == theirs[name].input_type.full_name
        assert method.output_type.full_name == theirs[name].output_type.full_name
        assert method.client_streaming == theirs[name].client_streaming
        assert method.server_streaming == theirs[name].server_streaming
    assert TRITON.services_by_name["GRPCInferenceService"].full_name == SERVICE


@pytest.mark.parametrize(
    "order",
    ["offramp.proto.messages, tritonclient.grpc", "tritonclient.grpc, offramp.proto.messages"],
)
def test_tritonclient_may_be_imported_in_the_same_process(order: str) -> None:
    subprocess.run([sys.executable, "-c", f"import {order}"], check=True)
