"""Compiles ``inference.proto``: ``python -m offramp.proto.generate`` (needs grpcio-tools).

It writes two files: ``inference.binpb``, which :mod:`offramp.proto.descriptors` loads, and
``messages.pyi``, the types of :mod:`offramp.proto.messages`. No Python code is generated: it
would register its messages in the process-wide pool, where they conflict with those of other
clients of the protocol, and it would require one version of the protobuf runtime.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from grpc_tools import protoc

FOLDER = Path(__file__).parent
SCHEMA = FOLDER / "inference.proto"
DESCRIPTORS = FOLDER / "inference.binpb"
STUB = FOLDER / "messages.pyi"

_STUB_HEADER = """\
# Generated from inference.proto by `python -m offramp.proto.generate`; not to be edited.
# ruff: noqa
# fmt: off
# mypy: disable-error-code="type-arg"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """The two files that are generated from the schema."""

    descriptors: bytes
    """A serialised ``google.protobuf.FileDescriptorSet``."""
    stub: str
    """Type stub of the messages."""


def compile_schema() -> Generated:
    """Run protoc on the schema and return its output.

    Raises:
        RuntimeError: protoc failed; its reasons are on stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        descriptors = Path(folder) / "inference.binpb"
        arguments = [f"-I{FOLDER}", f"--pyi_out={folder}", f"--descriptor_set_out={descriptors}"]
        if status := protoc.main(["protoc", *arguments, str(SCHEMA)]):
            raise RuntimeError(f"protoc ended with status {status} on {SCHEMA}")
        stub = (Path(folder) / "inference_pb2.pyi").read_text(encoding="utf-8")
        return Generated(descriptors=descriptors.read_bytes(), stub=_STUB_HEADER + stub)


def main() -> None:
    """Write both files next to the schema."""
    generated = compile_schema()
    DESCRIPTORS.write_bytes(generated.descriptors)
    STUB.write_text(generated.stub, encoding="utf-8")


if __name__ == "__main__":
    main()
