"""Tools of all ways of quantising a graph for the CPU, and the way that rounds weights in blocks.

:class:`Editor` finds the matrix products that are worth quantising, and rewrites the graph.
:func:`quantise_blocks` rounds the weights of products to 4 or 8 bits.
:func:`depends_on_batch_mates` runs a quantised graph to check whether the answer to a row depends
on the other rows of its batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from offramp.engine.answers.differences import Scales, relative_difference
from offramp.engine.backends.onnxruntime import make_session

PREFIX = "offramp_cpu/"
"""Prefix of all names that are added; no tensor of the source is renamed."""
CONTRIB = "com.microsoft"
"""Domain of ONNX Runtime's operators."""
LEAST_WEIGHTS = 4096
"""Smallest number of weights of a matrix that is quantised: smaller products take almost no time,
and quantising their input takes some. So the last layers of most classifiers stay in float32."""
LEVELS = 127
"""Number of int8 steps on each side of zero."""
LEVELS_OF_16_BITS = 64
"""Number of weight steps on each side of zero for CPUs that add pairs of products in int16: 2 × 255
× 64 is below 2^15."""
LEAST_OPSET = 13
"""Oldest opset in which ``DequantizeLinear`` has an axis, and so one scale for each channel."""


class PrecisionError(Exception):
    """A graph cannot be quantised as requested; the message states the reason and a remedy."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Product:
    """A matrix product with constant weights: a ``MatMul``, or an equivalent ``Gemm``."""

    node: onnx.NodeProto
    activation: str
    """Name of the input that is not constant; its last axis is multiplied."""
    weight: NDArray[np.float32]
    """Weights, float32[inputs, outputs], with the transposition and scale of a ``Gemm`` applied."""
    bias: NDArray[np.float32] | None
    """Bias, float32[outputs] or an array that broadcasts to it; ``None`` without a bias."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rewrite:
    """Changes to a graph: nodes that replace others, and nodes that are added after tensors."""

    replaced: dict[str, list[onnx.NodeProto]] = field(default_factory=dict)
    """New nodes by the first output of the node that they replace."""
    following: dict[str, list[onnx.NodeProto]] = field(default_factory=dict)
    """New nodes by the tensor that they follow."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Tensors that are read in place of others, by the other tensor's name. Nodes in ``following``
    still read the other tensor."""


class Editor:
    """A graph that is being rewritten: nodes are replaced or inserted, constants added."""

    def __init__(
        self, graph: bytes, *, kept: Collection[str] = (), weight_levels: int = LEVELS
    ) -> None:
        """Take a serialised model; a ``PrecisionError`` if its opset is too old.

        ``kept`` are the outputs of operators that stay unchanged; int8 weights have
        ``weight_levels`` on each side of zero.
        """
        self.kept = frozenset(kept)
        self.weight_levels = weight_levels
        self.proto = onnx.ModelProto.FromString(graph)
        self.opset = max((o.version for o in self.proto.opset_import if not o.domain), default=0)
        if self.opset < LEAST_OPSET:
            raise PrecisionError(
                f"the model has opset {self.opset}, and quantised operators need {LEAST_OPSET} or "
                f"newer; export it with opset_version={LEAST_OPSET} or newer"
            )
        self.constants = {t.name: t for t in self.proto.graph.initializer}
        self.outputs = frozenset(o.name for o in self.proto.graph.output)
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        for node in self.proto.graph.node:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)
        self._added: set[str] = set()

    def floats(self, name: str) -> NDArray[np.float32] | None:
        """Return a float32 constant; ``None`` if there is none of that name."""
        tensor = self.constants.get(name)
        if tensor is None or tensor.data_type != TensorProto.FLOAT:
            return None
        array: NDArray[np.float32] = numpy_helper.to_array(tensor)
        return array

    def constant(self, name: str, value: Any) -> str:
        """Add a constant, once; return its name with :data:`PREFIX`."""
        name = PREFIX + name
        if name not in self._added:
            self._added.add(name)
            self.proto.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def products(self) -> list[Product]:
        """Return the matrix products that are large enough to quantise."""
        found = (self._product(node) for node in self.proto.graph.node if not self.keeps(node))
        return [p for p in found if p is not None and p.weight.size >= LEAST_WEIGHTS]

    def keeps(self, node: onnx.NodeProto) -> bool:
        """Return whether an operator stays unchanged."""
        return not self.kept.isdisjoint(node.output)

    def _product(self, node: onnx.NodeProto) -> Product | None:
        if node.op_type not in {"MatMul", "Gemm"} or node.domain:
            return None
        weight = self.floats(node.input[1])
        if weight is None or weight.ndim != 2 or node.input[0] in self.constants:
            return None
        if node.op_type == "MatMul":
            return Product(node=node, activation=node.input[0], weight=weight, bias=None)
        flags = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        added = node.input[2] if len(node.input) > 2 else ""
        bias = self.floats(added) if added else None
        if flags.get("transA") or (added and bias is None):
            return None
        weight = (weight.T if flags.get("transB") else weight) * np.float32(flags.get("alpha", 1.0))
        if bias is not None:
            bias = bias * np.float32(flags.get("beta", 1.0))
        weight = np.ascontiguousarray(weight)
        return Product(node=node, activation=node.input[0], weight=weight, bias=bias)

    def int8_weight(
        self, weight: NDArray[np.float32], axis: int, *, least: NDArray[np.float64] | None = None
    ) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
        """Round weights to symmetric int8, with a scale per channel of ``axis``.

        ``least`` [channels] are lower limits of the scales; the scale of a channel of zeros is 1,
        as scales must be positive.
        """
        levels = self.weight_levels
        others = tuple(a for a in range(weight.ndim) if a != axis)
        scale = np.abs(weight).max(axis=others) / np.float32(levels)
        if least is not None:
            scale = np.maximum(scale, least)
        scale = np.where(scale > 0, scale, 1).astype(np.float32)
        shape = [-1 if a == axis else 1 for a in range(weight.ndim)]
        steps = np.rint(weight / scale.reshape(shape))
        return np.clip(steps, -levels, levels).astype(np.int8), scale

    def with_bias(self, product: Product) -> tuple[str, list[onnx.NodeProto]]:
        """Return the name of a product's output before its bias, and the nodes that add it."""
        y = product.node.output[0]
        if product.bias is None:
            return y, []
        without, bias = f"{PREFIX}{y}/product", self.constant(f"{y}/bias", product.bias)
        return without, [make("Add", [without, bias], [y])]

    def rewritten(self, *rewrites: Rewrite) -> bytes:
        """Serialise the rewritten graph, without constants that are no longer read.

        The same graph and rewrites produce the same bytes.
        """
        graph = self.proto.graph
        copies = [onnx.NodeProto.FromString(n.SerializeToString()) for n in self._nodes(rewrites)]
        del graph.node[:]
        graph.node.extend(copies)
        read = {name for node in copies for name in node.input} | {o.name for o in graph.output}
        read |= {name for node in copies for name in _read_inside(node)}
        kept = [tensor for tensor in graph.initializer if tensor.name in read]
        kept = [onnx.TensorProto.FromString(tensor.SerializeToString()) for tensor in kept]
        del graph.initializer[:]
        graph.initializer.extend(kept)
        contrib = any(node.domain == CONTRIB for node in copies)
        if contrib and all(o.domain != CONTRIB for o in self.proto.opset_import):
            self.proto.opset_import.append(helper.make_opsetid(CONTRIB, 1))
        serialised: bytes = self.proto.SerializeToString(deterministic=True)
        return serialised

    def _nodes(self, rewrites: Sequence[Rewrite]) -> Iterator[onnx.NodeProto]:
        replaced = {y: nodes for r in rewrites for y, nodes in r.replaced.items()}
        renamed = {x: name for r in rewrites for x, name in r.renamed.items()}
        following: dict[str, list[onnx.NodeProto]] = {}
        for rewrite in rewrites:
            for x, nodes in rewrite.following.items():
                following.setdefault(x, []).extend(nodes)
        for given in self.proto.graph.input:
            yield from following.get(given.name, ())
        for node in self.proto.graph.node:
            for new in replaced.get(node.output[0], (node,)) if node.output else (node,):
                read = onnx.NodeProto()
                read.CopyFrom(new)
                del read.input[:]
                read.input.extend(renamed.get(name, name) for name in new.input)
                yield read
            for name in node.output:
                yield from following.get(name, ())


def make(
    kind: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **attributes: Any
) -> onnx.NodeProto:
    """Return a node that is named after its output."""
    return helper.make_node(
        kind, inputs, outputs, name=f"{kind}:{outputs[0]}", domain=domain, **attributes
    )


def multiply(
    editor: Editor,
    steps: str,
    scaled: tuple[str, str],
    weight: tuple[str, NDArray[np.int8], NDArray[np.float32]],
    result: str,
) -> onnx.NodeProto:
    """Return the node of an integer product with a float32 result; add its constants to the graph.

    ``steps`` is the name of the quantised activation; ``scaled`` are the names of its step size and
    of its zero point. ``weight`` has the prefix of the names of the constants, the int8 weights
    [inputs, outputs], and the step size of each output [outputs].
    """
    step, zero = scaled
    stem, values, sizes = weight
    inputs = [
        steps,
        editor.constant(f"{stem}/weight", values),
        step,
        editor.constant(f"{stem}/scale", sizes),
        zero,
        editor.constant(f"{stem}/zero", np.zeros(sizes.shape, np.int8)),
    ]
    return make("MatMulIntegerToFloat", inputs, [result], CONTRIB)


def _read_inside(node: onnx.NodeProto) -> Iterable[str]:
    """Yield the tensors that the inner graphs of a node (If, Loop) read, outer tensors included."""
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for inner in graph.node:
                yield from inner.input
                yield from _read_inside(inner)
            yield from (output.name for output in graph.output)


BLOCK = 128
"""Number of weights that share a scale; 32 was slower in measurements."""
_INT8_ACTIVATIONS = 4


def quantise_blocks(editor: Editor, *, bits: int) -> Rewrite:
    """Quantise the products that are large enough; weights have 4 or 8 ``bits``."""
    rewrite = Rewrite()
    for product in editor.products():
        y = product.node.output[0]
        steps, scales = _in_blocks(product.weight, bits)
        result, bias = editor.with_bias(product)
        inputs = [
            product.activation,
            editor.constant(f"{y}/weight", steps),
            editor.constant(f"{y}/scale", scales),
        ]
        rows, columns = product.weight.shape
        node = make(
            "MatMulNBits",
            inputs,
            [result],
            CONTRIB,
            K=rows,
            N=columns,
            bits=bits,
            block_size=BLOCK,
            accuracy_level=_INT8_ACTIVATIONS,
        )
        rewrite.replaced[y] = [node, *bias]
    return rewrite


def _in_blocks(
    weight: NDArray[np.float32], bits: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Round weights [inputs, outputs] around the middle of uint4 or uint8.

    Returns uint8[outputs, blocks, bytes], with two uint4 per byte, low half first; and
    float32[outputs, blocks].
    """
    inputs, outputs = weight.shape
    blocks = -(-inputs // BLOCK)
    padded = np.zeros((outputs, blocks * BLOCK), np.float32)
    padded[:, :inputs] = weight.T
    padded = padded.reshape(outputs, blocks, BLOCK)
    middle = 1 << (bits - 1)
    scales = np.abs(padded).max(axis=2) / np.float32(middle - 1)
    scales = np.where(scales > 0, scales, 1).astype(np.float32)
    steps = np.clip(np.rint(padded / scales[:, :, None]) + middle, 0, 2 * middle - 1)
    steps = steps.astype(np.uint8)
    return (steps if bits == 8 else steps[:, :, ::2] | (steps[:, :, 1::2] << 4)), scales


TOLERANCE = 1e-3
"""Largest difference of answers that counts as rounding, relative to the scale of each number
(:mod:`~offramp.engine.answers.differences`). Float32 kernels add in an order that depends on the
batch size, which changes the last bits (1e-7) and, where later tensors are rounded to 255 steps,
sometimes an activation by one step. Scales that are computed over a batch change all
activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDependence:
    """Differences between answers to the same rows in different batches."""

    rows: int
    changed: int
    """Rows whose largest class differed in some batch."""
    difference: float
    """Largest difference between two answers to the same row, relative to the scale of the element
    that differs (:class:`.Scales`); 0 if all answers to a row are equal."""

    @property
    def depends(self) -> bool:
        """True if answers differ by more than rounding explains (:data:`TOLERANCE`)."""
        return not self.difference <= TOLERANCE


def depends_on_batch_mates(
    graph: bytes, samples: Mapping[str, NDArray[Any]], *, answer: str, threads: int = 1
) -> BatchDependence:
    """Run rows together, alone, with other batch mates and in another order; compare the answers.

    ``samples`` are inputs by name, with as many rows as the largest batch served, at least 2
    (``ValueError``); ``answer`` is the output [rows, classes] that is compared.
    """
    rows = len(next(iter(samples.values())))
    if rows < 2:
        raise ValueError(f"{rows} samples cannot share a batch; pass at least 2, better 16")
    session = make_session(graph, threads)
    together = _run(session, samples, np.arange(rows), answer)
    scales = Scales.of(together)
    difference = np.inf if np.isnan(together).any() else 0.0
    changed = np.zeros(rows, bool)
    for chosen in _batches(rows):
        found = _run(session, samples, chosen, answer)
        difference = max(difference, relative_difference(found, together[chosen], scales))
        changed[chosen] |= found.argmax(axis=1) != together[chosen].argmax(axis=1)
    return BatchDependence(rows=rows, changed=int(changed.sum()), difference=difference)


def _batches(rows: int) -> Iterator[NDArray[np.intp]]:
    """Yield every row alone; then batches of doubling sizes, each in another order."""
    order = np.arange(rows)
    yield from order[:, None]
    rng = np.random.default_rng(0)
    size = 2
    while size < rows:
        order = rng.permutation(rows)
        yield from (order[start : start + size] for start in range(0, rows, size))
        size *= 2
    yield order[::-1]


def _run(
    session: ort.InferenceSession,
    samples: Mapping[str, NDArray[Any]],
    rows: NDArray[np.intp],
    answer: str,
) -> NDArray[Any]:
    feeds = {i.name: samples[i.name][rows] for i in session.get_inputs()}
    (found,) = session.run([answer], feeds)
    array: NDArray[Any] = found
    return array
