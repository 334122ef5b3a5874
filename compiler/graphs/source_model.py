"""A model as slicing takes it."""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from offramp.bundle.schema.answers import Answer
from offramp.bundle.schema.inputs import TensorSpec, UnreadInput, declared_inputs
from offramp.compiler.graphs.tail import Tail
from offramp.compiler.graphs.unread_inputs import with_unread


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceModel:
    """A model in the form that slicing needs.

    The batch dimension is symbolic, shapes are inferred, operators have unique names, no shape
    crosses a cut point that could be read off a graph input, and the answer is the one output.
    """

    proto: onnx.ModelProto
    """The whole model, weights included. Treat it as read-only."""
    name: str
    inputs: tuple[TensorSpec, ...]
    """Inputs that the model reads, in the order of its file."""
    outputs: tuple[TensorSpec, ...]
    original_sha256: str
    """Hash of the file that was read and of its external data."""
    opset: int
    answer: Answer
    unread: tuple[UnreadInput, ...] = ()
    """Inputs that the file declares and nothing reads, which ``proto`` does not have."""
    tail: Tail | None = None
    """What follows the scores that heads imitate, where they do not imitate the answer itself."""

    @property
    def declared(self) -> tuple[TensorSpec, ...]:
        """All inputs of the file, in its order."""
        return declared_inputs(self.inputs, self.unread)

    def as_declared(self) -> onnx.ModelProto:
        """Return the model with all inputs that its file declares."""
        return with_unread(self.proto, self.unread)

    @property
    def taught(self) -> Answer:
        """The scores that heads imitate, described as an answer."""
        return self.answer if self.tail is None else self.tail.taught

    @property
    def versions(self) -> dict[str, int]:
        """Of operators and file format, as the graphs of exits take them."""
        return {"opset": self.opset, "ir_version": self.proto.ir_version}
