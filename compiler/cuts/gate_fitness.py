"""Checks whether an exit can be attached at a gate, and the choice among similar gates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import onnx

from offramp.calibration.heads.cut_tensors import CutTensor, why_no_head
from offramp.compiler.cuts.flow import Flow, Gate
from offramp.compiler.cuts.work import SYMBOLIC_SIZE, OperatorWork, work_of
from offramp.compiler.graphs.channel_axes import ChannelFinder
from offramp.compiler.graphs.graph import Dataflow, Operator
from offramp.compiler.graphs.shapes import BATCH, TensorType, declared_types

MAX_SIDE_SHARE = 0.02
"""Largest share of the model's FLOPs that a later segment may recompute in side operators."""
MIN_SHARE_LEFT = 0.005
"""The smallest share of the model's FLOPs that must remain after an exit; with less, the exit saves
nothing."""

_VIEWS = frozenset(
    {"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Dropout", "Cast"}
)
"""Operators that only rearrange values: an exit should read their input, which can be pooled."""

_RECURRENT = frozenset({"LSTM", "GRU", "RNN"})
"""Operators whose output has a dimension of directions. A view without that dimension is [batch,
tokens, width]."""
_TOKENS = 3
"""Number of dimensions of a tensor [batch, tokens, width]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateFitness:
    """Judges a model's gates by its graph, types and costs."""

    graph: Dataflow
    types: dict[str, TensorType]
    layouts: ChannelFinder
    work: OperatorWork
    total: float
    """Total work of all operators, in the unit of ``work``: FLOPs, or measured seconds."""
    transpose: bool
    """True if tensors are judged as if their batch were transposed to the front."""

    @classmethod
    def of(cls, proto: onnx.ModelProto, graph: Dataflow, *, transpose: bool) -> GateFitness:
        """Create the object for an annotated model with a single output."""
        work = work_of(proto, graph)
        types = declared_types(proto)
        return cls(
            graph=graph,
            types=types,
            layouts=ChannelFinder.of(proto, graph, types),
            work=work,
            total=sum(work.costs[op.index] for op in graph.needed),
            transpose=transpose,
        )

    def is_lazy(self, op: Operator) -> bool:
        """Return whether an operator should run only when it is needed.

        This is so if its output has no batch, or if it is a view that does not move the batch to
        the front.
        """
        if not batch_first(self._shape(op.writes[0])):
            return True
        brings = not self._is_in_front(op.reads[0]) and self._is_in_front(op.writes[0])
        return op.kind in _VIEWS and not brings

    def _is_in_front(self, name: str) -> bool:
        """Return whether the batch is the first dimension of a tensor."""
        return (self._shape(name) or ("",))[0] == BATCH

    def _shape(self, name: str) -> tuple[int | str, ...]:
        """Return a tensor's shape; empty if it is unknown."""
        tensor = self.types.get(name)
        return () if tensor is None else tensor.shape or ()

    def size(self, gate: Gate) -> tuple[int, float]:
        """Return how many tensors a gate has, and how many elements one sample has in them."""
        sized = [
            [size if isinstance(size, int) else SYMBOLIC_SIZE for size in self._shape(name)]
            for name in gate.tensors
        ]
        return len(gate.tensors), sum(map(prod, sized))

    def best_of(self, fit: Sequence[Gate]) -> Gate:
        """Return the last gate whose tensor has the batch in front and is not just a view.

        If no gate has both properties, the last one with the first property is returned, else the
        last one.
        """
        in_front = [g for g in fit if self._is_in_front(g.tensor)] or fit
        solid = [g for g in in_front if self.graph.producers[g.tensor].kind not in _VIEWS]
        if solid and self.graph.producers[solid[-1].tensor].kind in _RECURRENT:
            tokens = [g for g in in_front if len(self._shape(g.tensor)) == _TOKENS]
            return (tokens or solid)[-1]
        return (solid or in_front)[-1]

    def cut_tensor(self, name: str) -> CutTensor:
        """Describe a tensor in the form in which segments pass it on, with the batch in front."""
        channels, shape = self.layouts.channels_of(name), self._shape(name)
        if self.transpose and (order := batch_first(shape)):
            shape = tuple(shape[axis] for axis in order)
            channels = None if channels is None else order.index(channels)
        dtype = self.types[name].dtype
        return CutTensor(name=name, dtype=dtype, shape=shape, channels=channels)

    def share_after(self, flow: Flow, gate: Gate) -> float:
        """Return the share of the model's work after a gate."""
        return flow.flops_after[gate.step] / self.total if self.total else 0.0

    def useless(self, flow: Flow, run: Sequence[Gate]) -> str:
        """Return why an exit in a run of gates saves nothing; empty if the exit may save time."""
        if not flow.heavy_steps or flow.heavy_steps[0] > run[-1].step:
            return "no work is done yet, so an exit here has no information"
        return self._little_left() if self.is_end(flow, run) else ""

    def is_end(self, flow: Flow, run: Sequence[Gate]) -> bool:
        """Return whether hardly any work is left after a run of gates."""
        return self.share_after(flow, run[-1]) < MIN_SHARE_LEFT

    def _little_left(self) -> str:
        kinds = ", ".join(f"`{kind}`" for kind in self.work.unknown)
        if not self.total:
            what = f"of {kinds}, and it could not be measured" if kinds else "of its operators"
            return f"the work that is left is unknown: nothing is known {what}"
        how = ""
        if self.work.measured:
            how = f"; it was measured as time, since the work of {kinds} is not known"
        elif kinds:
            how = f"; that of {kinds} is not known, could not be measured, and counts nothing"
        return f"less than {MIN_SHARE_LEFT:.1%} of the work is left to save{how}"

    def unfit(self, gate: Gate) -> str:
        """Return why a gate cannot be a cut; empty if it can.

        Heads must be able to read at least one of the gate's tensors.
        """
        found = [self.types.get(name) for name in gate.tensors]
        if any(tensor is None or tensor.shape is None for tensor in found):
            return "its shape is not known to shape inference"
        unread = [self._no_floats(name) for name in gate.tensors]
        if all(unread):
            return unread[0]
        if elsewhere := [reason for name in gate.tensors if (reason := self._not_first(name))]:
            return elsewhere[0]
        described = map(self.cut_tensor, gate.tensors)
        lacks = [no or why_no_head(cut) for no, cut in zip(unread, described, strict=True)]
        if all(lacks):
            return lacks[0]
        share = gate.side_flops / self.total if self.total else 0.0
        if share > MAX_SIDE_SHARE:
            names = ", ".join(f"`{name}`" for name in sorted(gate.side_inputs))
            return (
                f"{share:.0%} of the work would have to be repeated after it, from {names}; at "
                f"most {MAX_SIDE_SHARE:.0%} is allowed; let the model add its results from them "
                "before this place"
            )
        return ""

    def _no_floats(self, name: str) -> str:
        tensor = self.types[name]
        floats = tensor.is_floating
        return "" if floats else f"its elements are {tensor.dtype}, not floating-point numbers"

    def _not_first(self, name: str) -> str:
        shape = self._shape(name)
        order = batch_first(shape)
        if order and (self.transpose or not order[0]):
            return ""
        sizes = ", ".join(map(str, shape))
        return (
            f"its shape is [{sizes}], and the first dimension has to be the batch; let the model "
            "keep it as a separate dimension there"
        )


def batch_first(shape: Sequence[int | str]) -> tuple[int, ...]:
    """Return the order of a tensor's dimensions with the batch first; empty without a batch."""
    if len(shape) < 2 or list(shape).count(BATCH) != 1:
        return ()
    front = list(shape).index(BATCH)
    return (front, *(axis for axis in range(len(shape)) if axis != front))
