"""Sizes of all tensors of a decoder in five symbols: batch, tokens, past, total and source.

Shapes are inferred at two sets of sizes, both consistent (the mask is as long as the past and the
new tokens together); a size that differs between them is mapped back to its symbol.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import onnx

from offramp.compiler.graphs.shapes import concrete_shapes

Size: TypeAlias = "int | str | None"
"""A number, a symbol, or ``None`` if unknown."""
_PROBES: Final = (
    {"batch": 7, "tokens": 13, "past": 19, "source": 37},
    {"batch": 11, "tokens": 17, "past": 29, "source": 53},
)
"""Sizes for the two inferences; each symbol, and each sum, has a unique pair of sizes."""
FLOATING: Final = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSizes:
    """Shapes and element types of tensors, by name."""

    shapes: Mapping[str, tuple[Size, ...]]
    types: Mapping[str, int]
    """Element types, values of ``onnx.TensorProto.DataType``."""
    tokens: Size
    """Symbol of the new tokens of a step, or 1 if the export fixes one token per step."""

    def of(self, tensor: str) -> tuple[Size, ...] | None:
        """Return a tensor's shape; ``None`` if not even its rank is known."""
        return self.shapes.get(tensor)

    def is_state(self, tensor: str) -> bool:
        """Return True if a tensor may be a state between layers: floats [batch, tokens, width]."""
        shape = self.shapes.get(tensor, ())
        return (
            len(shape) == 3
            and shape[0] == "batch"
            and shape[1] == self.tokens
            and isinstance(shape[2], int)
            and self.types[tensor] in FLOATING
        )


def measure(proto: onnx.ModelProto) -> TensorSizes:
    """Infer the shapes of all tensors of a decoder; its input sizes must be these symbols."""
    one_token = any(
        info.name in ("input_ids", "decoder_input_ids")
        and info.type.tensor_type.shape.dim[1].HasField("dim_value")
        for info in proto.graph.input
    )
    probes = [dict(probe) for probe in _PROBES]
    for probe in probes:
        if one_token:
            probe["tokens"] = 1
        probe["total"] = probe["past"] + probe["tokens"]
    with np.errstate(all="ignore"):  # values are computed too, such as log(0)
        first, second = (concrete_shapes(proto, probe) for probe in probes)
    symbols = [s for s in probes[0] if not (one_token and s == "tokens")]
    labels = {(probes[0][s], probes[1][s]): s for s in symbols}
    shapes: dict[str, tuple[Size, ...]] = {}
    for name, (_, shape) in first.items():
        other = second.get(name, (0, None))[1]
        if shape is not None and other is not None and len(shape) == len(other):
            shapes[name] = tuple(
                a if a == b else labels.get((a or 0, b or 0))
                for a, b in zip(shape, other, strict=True)
            )
    return TensorSizes(
        shapes=shapes,
        types={name: kind for name, (kind, _) in first.items()},
        tokens=1 if one_token else "tokens",
    )
