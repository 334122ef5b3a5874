"""Detection of the normalising layers of a supernet."""

from __future__ import annotations

from dataclasses import dataclass

from offramp.compiler.graphs.graph import Operator
from offramp.supernet.graphs.depth import in_scope
from offramp.supernet.graphs.elastic_model import Supernet
from offramp.supernet.graphs.elastic_spec import AUTO, NONE
from offramp.supernet.graphs.errors import ElasticSpecError
from offramp.supernet.graphs.names import nearest

_CHANNELS_FIRST = frozenset({"Conv", "ConvTranspose"})
_CHANNELS_LAST = frozenset({"MatMul", "Gemm"})


@dataclass(frozen=True, slots=True, kw_only=True)
class NormLayer:
    """A layer that normalises channels: a batch norm, or an operator with a folded batch norm."""

    node: str
    tensor: str
    """Name of the normalised tensor: a batch norm's input, else the operator's output."""
    axis: int
    """Dimension of the channels."""
    rank: int
    elem_type: int
    folded: bool


def find_layers(supernet: Supernet) -> tuple[NormLayer, ...]:
    """Return the layers that ``norm.layers`` of a spec selects.

    ``auto`` selects batch norms, and convolutions with a bias whose output has spatial dimensions.
    Convolutions after a global pool, in squeeze-and-excitation or classifiers, have no norm. For
    models trained without batch norms, use ``none``: a bias does not indicate one. ElasticSpecError
    if a listed name does not select a layer with channels.
    """
    asked = supernet.spec.norm_layers
    if asked == NONE:
        return ()
    every = supernet.model.flow.changing
    if asked == AUTO:
        found = [op for op in every if _is_norm(op, supernet)]
    else:
        found = [op for op in every if any(in_scope(op.name, scope) for scope in asked)]
        found = [op for op in found if _layer(op, supernet) is not None]
        for scope in asked:
            if not any(in_scope(op.name, scope) for op in found):
                known = [op.name for op in every if _layer(op, supernet) is not None]
                raise ElasticSpecError(
                    f"{supernet.spec.source}: norm.layers names {scope!r}, but no batch norm, "
                    f"convolution or product with a weight has this name; {nearest(scope, known)}"
                )
    layers = (_layer(op, supernet) for op in found)
    return tuple(layer for layer in layers if layer is not None)


def _is_norm(op: Operator, supernet: Supernet) -> bool:
    if op.kind == "BatchNormalization":
        return True
    if op.kind not in _CHANNELS_FIRST or len(op.proto.input) < 3 or not op.proto.input[2]:
        return False
    kind = supernet.types.get(op.writes[0])
    places = () if kind is None or kind.shape is None else kind.shape[2:]
    return any(size != 1 for size in places)


def _layer(op: Operator, supernet: Supernet) -> NormLayer | None:
    """Describe a layer; ``None`` for operators without channels or without a constant weight."""
    batch_norm = op.kind == "BatchNormalization"
    tensor = op.proto.input[0] if batch_norm else op.writes[0]
    kind = supernet.types.get(tensor)
    if kind is None or kind.shape is None or not kind.is_floating:
        return None
    if not batch_norm:
        weighted = any(name in supernet.initializers for name in op.proto.input[:2])
        if not weighted or op.kind not in _CHANNELS_FIRST | _CHANNELS_LAST:
            return None
    rank = len(kind.shape)
    return NormLayer(
        node=op.name,
        tensor=tensor,
        axis=rank - 1 if op.kind in _CHANNELS_LAST else 1,
        rank=rank,
        elem_type=kind.elem_type,
        folded=not batch_norm,
    )
