"""Cutting a decoder between its layers.

Data flows from tokens to logits; caches, masks and positions are side inputs. A *border* is the one
tensor that all data passes through between the keys and values of two layers. Shapes do not count
as data: exports read the shape of one tensor in the first layers and reshape by it in all others,
and each size can be computed from the inputs of any graph (:mod:`.sizes`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property

from offramp.compiler.common.errors import ModelError
from offramp.compiler.graphs.graph import Operator, is_standard
from offramp.generation.graphs.decoder_export import DecoderExport


class DecoderCut:
    """Borders between a decoder's layers, and the operators between them."""

    def __init__(self, export: DecoderExport) -> None:
        self.export = export
        self.flow = export.flow

    @cached_property
    def borders(self) -> tuple[str, ...]:
        """State before each layer, then the output of the last layer; ModelError without one."""
        count = len(self.export.layers)
        found = [self._before(number) for number in range(count)]
        return (*found, self._behind_all(found))

    @cached_property
    def measured(self) -> frozenset[int]:
        """Indices of ``Shape`` operators that read data, but whose results are known without it."""
        data = self._data([self.export.ids, *(t for x in self.export.layers for t in x.inputs)])
        return frozenset(
            op.index
            for op in self.flow.operators
            if op.kind == "Shape"
            and is_standard(op.proto)
            and op.reads[0] in data
            and None not in (self.export.sizes.of(op.reads[0]) or (None,))
        )

    def needed(self, tensors: Iterable[str], *, stop: Iterable[str] = ()) -> tuple[Operator, ...]:
        """Return the operators, in order, that compute some tensors from those in ``stop``.

        Inputs of a measured ``Shape`` operator are not followed.
        """
        needed: set[int] = set()
        pending, ends = list(tensors), frozenset(stop)
        while pending:
            tensor = pending.pop()
            op = None if tensor in ends else self.flow.producers.get(tensor)
            if op is not None and op.index not in needed:
                needed.add(op.index)
                if op.index not in self.measured:
                    pending.extend(op.reads)
        return tuple(self.flow.operators[i] for i in sorted(needed))

    def _data(self, sources: Iterable[str], without: frozenset[int] = frozenset()) -> set[str]:
        """Return the tensors that depend on the values, not only on the sizes, of ``sources``."""
        data = set(sources)
        for op in self.flow.operators:
            if op.kind != "Shape" and op.index not in without and not data.isdisjoint(op.reads):
                data.update(op.writes)
        return data

    def _before(self, number: int) -> str:
        """Return the border before a layer: the last tensor that all earlier data goes through."""
        found = [t for t in self._gates(number) if self.export.sizes.is_state(t)]
        if found:
            return found[-1]
        raise ModelError(
            f"no single tensor [batch, tokens, width] is between the layers before layer {number} "
            "and those from it on, so the decoder cannot be cut there; expected layers one after "
            "another, each with its own keys and values, as transformers' decoders have them"
        )

    def _behind_all(self, before: Sequence[str]) -> str:
        """Return the output of the last layer, found by comparing it with the layer before.

        After it, all data also passes through tensors of the final norm and LM head. A border at
        any of them would give the same answers, but an exit needs the output of a layer.
        """
        gates = [t for t in self._gates(len(before)) if self.export.sizes.is_state(t)]
        gates = [t for t in gates if self.export.sizes.of(t) == self.export.sizes.of(before[-1])]
        if not gates:
            raise ModelError(
                f"no tensor of the width of {before[-1]!r} is between the last layer and "
                f"{self.export.logits!r}; expected a norm and a projection to the vocabulary"
            )
        if len(before) < 2:
            return gates[-1]
        layer = self._kinds(before[-2], before[-1])
        return min(gates, key=lambda gate: _distance(self._kinds(before[-1], gate), layer))

    def _kinds(self, start: str, end: str) -> Counter[str]:
        return Counter(op.kind for op in self.needed([end], stop=[start]))

    def _gates(self, number: int) -> list[str]:
        """Return the tensors that all data of earlier layers passes through to the later ones.

        Operators are visited in order. If, at some point, only one tensor with data of earlier
        layers still has unvisited readers, all later data is computed from it.
        """
        layers = self.export.layers
        targets = [t for layer in layers[number:] for t in layer.new.values()]
        targets.append(self.export.logits)
        sources = [self.export.ids, *(t for layer in layers[:number] for t in layer.inputs)]
        operators = [op for op in self.needed(targets) if op.index not in self.measured]
        readers = Counter(t for op in operators for t in op.reads)
        readers.update(targets)
        data = set(sources)
        live = {name for name in sources if readers[name]}
        gates: list[str] = []
        for op in operators:
            read = [t for t in op.reads if t in data]
            if not read:
                continue
            data.update(op.writes)
            for tensor in read:
                readers[tensor] -= 1
                if not readers[tensor]:
                    live.discard(tensor)
            live.update(t for t in op.writes if readers[t])
            if len(live) == 1 and (gate := next(iter(live))) not in gates:
                gates.append(gate)
        return [gate for gate in gates if gate in self.flow.producers]


def _distance(one: Counter[str], other: Counter[str]) -> int:
    return (one - other).total() + (other - one).total()
