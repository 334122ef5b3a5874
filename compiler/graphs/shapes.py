"""Shapes of all tensors, with symbolic sizes.

ONNX's own inference loses a symbolic size at the first ``Reshape`` that computes with it. So it is
run twice on *concrete* sizes, where its data propagation folds nearly everything. A size that
differs between the two runs is traced back to its symbol.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import prod
from typing import TypeAlias

import onnx

from offramp.compiler.graphs.graph import bodies, emptied
from offramp.compiler.graphs.runtime_shapes import infer_shapes, types_in
from offramp.compiler.graphs.shape_trace import ShapeTrace

ConcreteShape: TypeAlias = "tuple[int | None, ...] | None"
"""Sizes, with ``None`` for an unknown one; ``None`` instead of a tuple if the rank is unknown."""

BATCH = "batch"
"""Name that the batch dimension gets in every model."""

UNKNOWN = "?"
"""A size that inference could not find."""

_KNOWN_TYPES = frozenset(onnx.TensorProto.DataType.values())
FLOATING = ("float16", "float32", "float64", "bfloat16")
_BATCH_PROBES = (2003, 3001)
_SMALL_PROBES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53)
"""Numbers that stand for symbolic sizes of sequences. They are smaller than the 64 or 77 positions
for which some models have tables."""
_LARGE_PROBES = (131, 137, 139, 149, 151, 157, 163, 167, 173, 179, 181, 191)
"""Numbers that stand for symbolic sizes of images, large enough for five strides."""
_PROBE_SCALES = (1, 8, 64, 512, 4096)
"""Factors of these numbers for models with wider windows, for instance a second of sound."""
_WINDOWED = frozenset(
    {"Conv", "ConvInteger", "FusedConv", "QLinearConv", "AveragePool", "LpPool", "MaxPool"}
)
"""Operators that refuse an input shorter than their window."""
_SMALL_INITIALIZER = 1024
"""Largest number of elements of an initializer whose values inference reads, because it may be a
shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorType:
    """Element type and shape of a tensor inside the graph."""

    elem_type: int
    """A value of ``onnx.TensorProto.DataType``."""
    shape: tuple[int | str, ...] | None
    """Sizes; a string is a symbol, :data:`UNKNOWN` or a product of symbols. ``None`` if the rank is
    unknown."""

    @property
    def dtype(self) -> str:
        """Name of the element type in numpy, or in ONNX if numpy has none."""
        return dtype_name(self.elem_type)

    @property
    def is_floating(self) -> bool:
        """True if the elements are floating-point numbers."""
        return self.dtype in FLOATING


def dtype_name(elem_type: int) -> str:
    """Return numpy's name for an ONNX element type, for instance ``float32``."""
    if elem_type == onnx.TensorProto.BFLOAT16:
        return "bfloat16"
    if elem_type == onnx.TensorProto.UNDEFINED or elem_type not in _KNOWN_TYPES:
        return f"type {elem_type}"
    return str(onnx.helper.tensor_dtype_to_np_dtype(elem_type).name)


def annotate(proto: onnx.ModelProto) -> None:
    """Replace the model's stated inner and output shapes by inferred ones.

    Stated shapes stay where inference finds none, so outdated ones have to be removed first
    (:func:`forget_shapes`).
    """
    stated, symbols = declared_types(proto), symbolic_sizes(proto)
    types = {
        name: _completed(found, stated.get(name), symbols)
        for name, found in infer_types(proto).items()
    }
    graph = proto.graph
    del graph.value_info[:]
    outputs = {o.name: o for o in graph.output}
    skip = {i.name for i in graph.input} | {t.name for t in graph.initializer}
    for name, tensor in types.items():
        if name in outputs:
            outputs[name].CopyFrom(_value_info(name, tensor))
        elif name not in skip and tensor.shape is not None:
            graph.value_info.append(_value_info(name, tensor))


def declared_types(proto: onnx.ModelProto) -> dict[str, TensorType]:
    """Return the types of tensors that an annotated model states, and those of initializers."""
    graph = proto.graph
    types = {
        t.name: TensorType(elem_type=t.data_type, shape=tuple(t.dims)) for t in graph.initializer
    }
    for info in (*graph.input, *graph.value_info, *graph.output):
        if info.type.HasField("tensor_type"):
            kind = info.type.tensor_type.elem_type
            types[info.name] = TensorType(elem_type=kind, shape=_declared_shape(info))
    return types


def shape_of(types: Mapping[str, TensorType], name: str) -> tuple[int | str, ...] | None:
    """Return the shape of a tensor; ``None`` if it is not known."""
    found = types.get(name)
    return None if found is None else found.shape


def infer_types(proto: onnx.ModelProto) -> dict[str, TensorType]:
    """Infer the types of all tensors whose element type can be known."""
    probes = probe_sizes(proto)
    first, second = (concrete_shapes(proto, sizes) for sizes in probes)
    labels = dict(_labels(*probes))
    return {
        name: TensorType(elem_type=elem_type, shape=_merge(shape, second[name][1], labels))
        for name, (elem_type, shape) in first.items()
        if name in second
    }


def symbolic_sizes(proto: onnx.ModelProto) -> dict[str, int]:
    """Return the symbols in the shapes of graph inputs, each with the highest rank it is in."""
    symbols: dict[str, int] = {}
    for info in proto.graph.input:
        shape = _declared_shape(info) or ()
        for size in shape:
            if isinstance(size, str):
                symbols[size] = max(symbols.get(size, 0), len(shape))
    return symbols


def concrete_shapes(
    proto: onnx.ModelProto, sizes: Mapping[str, int]
) -> dict[str, tuple[int, ConcreteShape]]:
    """Infer element types and shapes, by tensor name, for given sizes of the symbols."""
    skeleton, empty = _skeleton(proto)
    for info in skeleton.graph.input:
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]
    shapes = types_in(infer_shapes(skeleton, empty))
    return shapes | _followed(skeleton, shapes)


def _followed(
    skeleton: onnx.ModelProto, shapes: Mapping[str, tuple[int, ConcreteShape]]
) -> dict[str, tuple[int, ConcreteShape]]:
    """Find sizes that inference did not find, by computing the values that these sizes depend on.

    ONNX's data propagation ends at a ``Range`` or an ``Expand`` of sizes, from which transformers
    compute masks and positions.
    """
    lost = {name for name, (_, shape) in shapes.items() if shape is None or None in shape}
    if not lost:
        return {}
    trace = ShapeTrace(skeleton)
    for node in skeleton.graph.node:
        with suppress(ValueError):  # contradictions are reported elsewhere
            trace.follow(node)
    return {
        name: (shapes[name][0], shape) for name in lost if (shape := trace.shape(name)) is not None
    }


def _skeleton(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, frozenset[str]]:
    """Copy a model without the content of large weights and without stated inner shapes.

    Also returns the names of the weights whose content was left out.
    """
    skeleton = emptied(proto, proto.graph.name or "graph")
    graph = skeleton.graph
    graph.node.extend(proto.graph.node)
    graph.input.extend(proto.graph.input)
    graph.output.extend(proto.graph.output)
    forget_shapes(graph)
    empty = []
    for tensor in proto.graph.initializer:
        if prod(tensor.dims) <= _SMALL_INITIALIZER and not tensor.external_data:
            graph.initializer.append(tensor)
        else:
            graph.initializer.add(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
            empty.append(tensor.name)
    return skeleton, frozenset(empty)


def _completed(
    found: TensorType, stated: TensorType | None, symbols: Mapping[str, int]
) -> TensorType:
    """Where inference did not find a size, use the size that the model states."""
    if stated is None or stated.shape is None:
        return found
    shape = found.shape or (UNKNOWN,) * len(stated.shape)
    if len(shape) != len(stated.shape):
        return found
    sizes = tuple(
        told if size == UNKNOWN and (told in symbols or isinstance(told, int)) else size
        for size, told in zip(shape, stated.shape, strict=True)
    )
    return TensorType(elem_type=found.elem_type, shape=sizes)


def forget_shapes(graph: onnx.GraphProto) -> None:
    """Remove the shapes that a graph and its bodies state for inner tensors and outputs."""
    del graph.value_info[:]
    for output in graph.output:
        if output.type.HasField("tensor_type"):
            output.type.tensor_type.ClearField("shape")
    for node in graph.node:
        for body in bodies(node):
            forget_shapes(body)
            for info in body.input:  # ONNX Runtime needs the ranks
                for dim in info.type.tensor_type.shape.dim:
                    dim.Clear()


def probe_sizes(proto: onnx.ModelProto) -> tuple[dict[str, int], dict[str, int]]:
    """Assign two primes to each symbol; they are multiplied if windows are wider than them."""
    symbols = symbolic_sizes(proto)
    scaled = [_primes(symbols, 0, scale) for scale in _PROBE_SCALES]
    scale = _PROBE_SCALES[first_long_enough(proto, scaled)]
    return _primes(symbols, 0, scale), _primes(symbols, 1, scale)


def _primes(symbols: Mapping[str, int], which: int, scale: int) -> dict[str, int]:
    small, large = iter(_SMALL_PROBES[which::2]), iter(_LARGE_PROBES[which::2])
    sizes = {BATCH: _BATCH_PROBES[which]}
    for symbol, rank in symbols.items():
        if symbol != BATCH:
            sizes[symbol] = scale * next(large if rank > 3 else small, 1)
    return sizes


def first_long_enough(proto: onnx.ModelProto, tried: Sequence[Mapping[str, int]]) -> int:
    """Return the index in ``tried`` of the first sizes that are at least as wide as every window.

    Sizes in ``tried`` must grow. If the first ones are too short, the result is the index after the
    first ones that are long enough: if a window fits just once, the result's size looks as if it
    were fixed. If all sizes are too short, the result is 0.
    """
    windowed = [node for node in proto.graph.node if node.op_type in _WINDOWED]
    if not windowed or not symbolic_sizes(proto).keys() - {BATCH}:
        return 0
    weights = {t.name: tuple(t.dims) for t in proto.graph.initializer}
    for index, sizes in enumerate(tried):
        shapes = {name: shape for name, (_, shape) in concrete_shapes(proto, sizes).items()}
        if not any(_is_wider(node, shapes.get(node.input[0]), weights) for node in windowed):
            return min(index + 1, len(tried) - 1) if index else 0
    return 0


def _is_wider(
    node: onnx.NodeProto, shape: ConcreteShape, weights: Mapping[str, tuple[int, ...]]
) -> bool:
    """Return whether an operator's window is wider than its input, padding included.

    ONNX's inference does not refuse such an input: it may even find an output of one element.
    """
    told = {a.name: a for a in node.attribute}
    window = tuple(told["kernel_shape"].ints) if "kernel_shape" in told else ()
    window = window or next((weights[n][2:] for n in node.input[1:] if n in weights), ())
    if shape is None or len(shape) != len(window) + 2:
        return False
    if "auto_pad" in told and told["auto_pad"].s.startswith(b"SAME"):
        return False
    axes = len(window)
    pads = list(told["pads"].ints) if "pads" in told else [0] * (2 * axes)
    spread = list(told["dilations"].ints) if "dilations" in told else [1] * axes
    return any(
        size is not None and size + pads[i] + pads[i + axes] < spread[i] * (window[i] - 1) + 1
        for i, size in enumerate(shape[2:])
    )


def _labels(
    first: Mapping[str, int], second: Mapping[str, int]
) -> Iterator[tuple[tuple[int, int], str]]:
    """Yield pairs of sizes in both runs, and the symbol or product of symbols that they stand for.

    Products of two symbols come first.
    """
    for a, b in combinations_with_replacement(first, 2):
        yield (first[a] * first[b], second[a] * second[b]), f"{a}*{b}"
    for symbol in reversed(list(first)):
        yield (first[symbol], second[symbol]), symbol


def _merge(
    first: ConcreteShape, second: ConcreteShape, labels: Mapping[tuple[int, int], str]
) -> tuple[int | str, ...] | None:
    if first is None or second is None or len(first) != len(second):
        return None
    return tuple(_size(a, b, labels) for a, b in zip(first, second, strict=True))


def _size(a: int | None, b: int | None, labels: Mapping[tuple[int, int], str]) -> int | str:
    if a is None or b is None:
        return UNKNOWN
    if a == b:
        return a
    if (a, b) in labels:
        return labels[a, b]
    for (x, y), symbol in labels.items():
        if a % x == 0 and b % y == 0 and a // x == b // y:
            return f"{a // x}*{symbol}"
    return UNKNOWN


def _declared_shape(info: onnx.ValueInfoProto) -> tuple[int | str, ...] | None:
    tensor = info.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    return tuple(
        d.dim_value if d.HasField("dim_value") else d.dim_param or UNKNOWN for d in tensor.shape.dim
    )


def _value_info(name: str, tensor: TensorType) -> onnx.ValueInfoProto:
    dims = tensor.shape and [None if d == UNKNOWN else d for d in tensor.shape]
    return onnx.helper.make_tensor_value_info(name, tensor.elem_type, dims)
