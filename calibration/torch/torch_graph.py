"""An ONNX graph as a trainable torch module, used to train backbone, bridges and heads together.

PAME 5.2 trains all parameters of a model with its exits. The ONNX file stays the reference: its
operators are run one by one on torch tensors, and trained weights are written back by the names of
their initialisers. The operators are in :mod:`.calibration.torch_operators`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import inliner
from torch import Tensor, nn

from offramp.calibration.data.errors import UntrainableError
from offramp.calibration.torch_operators.elementwise import ELEMENTWISE, REDUCTIONS
from offramp.calibration.torch_operators.layers import NORMALISATION, PRODUCTS, RECURRENT
from offramp.calibration.torch_operators.node import (
    DTYPES,
    GraphNode,
    TorchOperator,
    attributes_of,
    to_onnx,
    to_torch,
)
from offramp.calibration.torch_operators.shape_operators import INDEXING, SHAPES
from offramp.calibration.torch_operators.spatial import CONVOLUTIONS, RESIZING

OPERATORS: Mapping[str, TorchOperator] = {
    **ELEMENTWISE,
    **SHAPES,
    **INDEXING,
    **REDUCTIONS,
    **CONVOLUTIONS,
    **NORMALISATION,
    **PRODUCTS,
    **RESIZING,
    **RECURRENT,
}
"""ONNX operators that support training, by kind."""
_LEAST_OPSET = 13
"""Opset that older models are converted to before they are cut."""
REMEDY = "leave out --heads bridges and --train joint, or export it without them"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Step:
    """A node that is run, with its function."""

    node: GraphNode
    operator: TorchOperator
    releases: tuple[str, ...]
    """Tensors that no later node reads."""


class TorchGraph(nn.Module):
    """An ONNX graph that torch computes and trains.

    Every floating-point initialiser that is read is one parameter, even if several nodes read it.
    All parameters have gradients, except those that are settings: scalars (rank 0), bounds,
    exponents, and the statistics of batch normalisation. Exporters write settings as initialisers,
    too. ``requires_grad_`` of a parameter changes whether it has a gradient. Sizes, axes and
    factors are computed in host memory, exactly. Constants in ``Constant`` nodes are not trained.

    A graph is run in inference mode: dropout drops nothing, batch normalisation uses the statistics
    in the graph.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        *,
        outputs: Sequence[str] | None = None,
    ) -> None:
        """Take a model whose weights are all in memory.

        Args:
            model: The model; it is not changed.
            outputs: Tensors to compute, from the graph's outputs and its inner tensors; all outputs
                of the graph by default.

        Raises:
            UntrainableError: The graph has operators that are not supported.
        """
        super().__init__()
        graph = _inlined(model)
        self.outputs = tuple(o.name for o in graph.output) if outputs is None else tuple(outputs)
        nodes = _trainable_nodes(graph, _opset(model), self.outputs, REMEDY)
        initialisers = {tensor.name: tensor for tensor in graph.initializer}
        given = [i.name for i in graph.input if i.name not in initialisers]
        constants = {n.outputs[0]: n for n in nodes if n.kind == "Constant"}
        nodes = [node for node in nodes if node.kind != "Constant"]
        read = {name for node in nodes for name in node.inputs} | set(self.outputs)
        self.inputs = tuple(name for name in given if name in read)
        """Names of the graph inputs that operators or outputs read."""
        known = {*given, *constants, *(y for n in nodes for y in n.outputs), ""}
        uses = _uses(nodes)
        self._keys: dict[str, str] = {}
        """Name of each tensor among torch's parameters or buffers."""
        self._host: dict[str, Tensor] = {}
        """Constants that are not parameters: integers, and numbers that are only settings."""
        for name in sorted(read - known):
            self._add_initialiser(name, initialisers.get(name), uses.get(name, frozenset()))
        for name, node in constants.items():
            value = OPERATORS["Constant"].run(node)
            assert isinstance(value, Tensor)
            self._add_constant(name, value, uses.get(name, frozenset()))
        self._steps = _steps(nodes, self.outputs)

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """Parameters by the names of their initialisers."""
        return {
            name: self.get_parameter(key)
            for name, key in self._keys.items()
            if key in self._parameters
        }

    def forward(self, feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute the outputs, by name.

        Args:
            feeds: The graph inputs by name; others are ignored.
        """
        values = self._given(feeds)
        for step in self._steps:
            inputs = [values[name] if name else None for name in step.node.inputs]
            try:
                found = step.operator.run(step.node, *inputs)
            except Exception as error:
                shapes = ", ".join("–" if x is None else str(list(x.shape)) for x in inputs)
                error.add_note(f"computing {_described(step.node)} of inputs {shapes}")
                raise
            made = (found,) if isinstance(found, Tensor) else found
            values.update(zip(step.node.outputs, made, strict=False))
            for name in step.releases:
                values.pop(name, None)
        return {name: values[name] for name in self.outputs}

    def share(self, weights: Mapping[str, nn.Parameter]) -> None:
        """Use other graphs' parameters in place of this graph's initialisers of the same names.

        So graphs that are parts of one model train its shared weights together.
        """
        for name in self.weights.keys() & weights.keys():
            self.register_parameter(self._key(name), weights[name])

    def write_back(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """Return a copy of a model with these weights in place of its initialisers.

        The types of the initialisers stay unchanged.
        """
        return with_weights(model, self.weights)

    def _add_initialiser(
        self, name: str, tensor: onnx.TensorProto | None, uses: frozenset[str]
    ) -> None:
        value = to_torch(_dense(name, tensor, REMEDY))
        if not value.is_floating_point() or uses == {"setting"}:
            self._host[name] = value
            return
        trained = value.ndim > 0 and "untrained" not in uses
        self.register_parameter(self._key(name), nn.Parameter(value, requires_grad=trained))

    def _add_constant(self, name: str, value: Tensor, uses: frozenset[str]) -> None:
        if value.is_floating_point() and uses != {"setting"}:
            self.register_buffer(self._key(name), value, persistent=False)
        else:
            self._host[name] = value

    def _key(self, name: str) -> str:
        """Return a name that torch accepts: without dots, and not that of a module's attribute."""
        self._keys[name] = "onnx:" + name.replace("%", "%25").replace(".", "%2E")
        return self._keys[name]

    def _given(self, feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        values = {name: feeds[name] for name in self.inputs} | self._host
        for name, key in self._keys.items():
            values[name] = getattr(self, key)
        return values


def with_weights(model: onnx.ModelProto, weights: Mapping[str, Tensor]) -> onnx.ModelProto:
    """Return a copy of a model with other values in some initialisers of unchanged types."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    places = {tensor.name: tensor for tensor in copy.graph.initializer}
    for name, weight in weights.items():
        place = places[name]
        place.CopyFrom(to_onnx(weight.to(DTYPES[place.data_type]), name))
    return copy


def check_trainable(model: onnx.ModelProto, remedy: str = REMEDY) -> None:
    """Raise UntrainableError for a model that :class:`TorchGraph` would refuse.

    Weights are not read, so the model may name them in a file.
    """
    graph = _inlined(model)
    nodes = _trainable_nodes(graph, _opset(model), [o.name for o in graph.output], remedy)
    initialisers = {tensor.name: tensor for tensor in graph.initializer}
    made = {name for node in nodes for name in node.outputs}
    given = {"", *made, *(info.name for info in graph.input)} - initialisers.keys()
    for name in sorted({name for node in nodes for name in node.inputs} - given):
        _dense(name, initialisers.get(name), remedy)


def _inlined(model: onnx.ModelProto) -> onnx.GraphProto:
    return (inliner.inline_local_functions(model) if model.functions else model).graph


def _opset(model: onnx.ModelProto) -> int:
    return max((o.version for o in model.opset_import if o.domain in {"", "ai.onnx"}), default=0)


def _trainable_nodes(
    graph: onnx.GraphProto, opset: int, outputs: Sequence[str], remedy: str
) -> list[GraphNode]:
    """Return the nodes that outputs need; UntrainableError if any is not supported."""
    nodes = _needed([_read(node) for node in graph.node], outputs)
    _check_operators(nodes, opset, remedy)
    return nodes


def _dense(name: str, tensor: onnx.TensorProto | None, remedy: str) -> onnx.TensorProto:
    if tensor is None or tensor.data_type not in DTYPES:
        kind = "sparse" if tensor is None else f"of data type {tensor.data_type}"
        raise UntrainableError(
            f"the model cannot be trained as a whole: its initialiser {name!r} is {kind}, "
            f"expected a dense one of floats, integers or truth values; {remedy}"
        )
    return tensor


def _read(node: onnx.NodeProto) -> GraphNode:
    standard = node.domain in {"", "ai.onnx"}
    return GraphNode(
        kind=node.op_type if standard else f"{node.domain}.{node.op_type}",
        name=node.name,
        inputs=tuple(node.input),
        outputs=tuple(node.output),
        attributes=attributes_of(node),
    )


def _described(node: GraphNode) -> str:
    named = node.name or next((name for name in node.outputs if name), "")
    return f"{node.kind} {named!r}"


def _needed(nodes: Sequence[GraphNode], outputs: Iterable[str]) -> list[GraphNode]:
    """Return the nodes that outputs need, from a graph in topological order."""
    wanted, needed = set(outputs), []
    for node in reversed(nodes):
        if not wanted.isdisjoint(node.outputs):
            needed.append(node)
            wanted.update(filter(None, node.inputs))
    return needed[::-1]


def _check_operators(nodes: Iterable[GraphNode], opset: int, remedy: str) -> None:
    """Raise UntrainableError for unsupported operators, before anything is computed."""
    if opset < _LEAST_OPSET:
        raise UntrainableError(
            f"the model cannot be trained as a whole: it has opset {opset}, and operators of opset "
            f"{_LEAST_OPSET} or newer are known; export it with a newer opset, or {remedy}"
        )
    lacking: dict[str, GraphNode] = {}
    for node in nodes:
        known = OPERATORS.get(node.kind)
        why = known.lacks(node) if known is not None else ""
        if why is not None:
            lacking.setdefault(f"{node.kind} {why}".strip(), node)
    if lacking:
        first = next(iter(lacking.values()))
        raise UntrainableError(
            f"the model cannot be trained as a whole: no gradients are known through "
            f"{', '.join(sorted(lacking))}; the first is {_described(first)}; {remedy}"
        )


def _uses(nodes: Sequence[GraphNode]) -> dict[str, frozenset[str]]:
    """Return the uses of each tensor by operators: ``setting``, ``untrained`` or ``weight``."""
    found: dict[str, set[str]] = {}
    for node in reversed(nodes):
        operator = OPERATORS[node.kind]
        for index, name in enumerate(node.inputs):
            uses = found.setdefault(name, set())
            if node.kind == "Identity":  # exporters add it after equal weights
                uses |= found.get(node.outputs[0], {"weight"})
            elif index in operator.settings:
                uses.add("setting")
            else:
                uses.add("untrained" if index in operator.untrained else "weight")
    return {name: frozenset(uses) for name, uses in found.items()}


def _steps(nodes: Sequence[GraphNode], outputs: Iterable[str]) -> tuple[_Step, ...]:
    """Return the nodes as steps, each with the tensors that no later step reads."""
    last: dict[str, int] = {}
    for index, node in enumerate(nodes):
        for name in (*node.inputs, *node.outputs):
            last[name] = index
    kept = set(outputs)
    releases: list[list[str]] = [[] for _ in nodes]
    for name, index in last.items():
        if name not in kept:
            releases[index].append(name)
    return tuple(
        _Step(node=node, operator=OPERATORS[node.kind], releases=tuple(released))
        for node, released in zip(nodes, releases, strict=True)
    )
