"""A supernet: a model, with its elastic parts as found in the graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import onnx
from onnx import numpy_helper

from offramp.compiler.frontend.preparation import remove_unused
from offramp.compiler.graphs.graph import Dataflow, emptied, hoisted, refill
from offramp.compiler.graphs.runtime import GraphRunner
from offramp.compiler.graphs.shapes import TensorType, declared_types
from offramp.compiler.graphs.source_model import SourceModel
from offramp.supernet.graphs.depth import DepthBlock, find_block, skip_blocks
from offramp.supernet.graphs.elastic_spec import ElasticSpec, SubnetChoice
from offramp.supernet.graphs.errors import ElasticSpecError
from offramp.supernet.graphs.names import NamedWeight, WeightFinder
from offramp.supernet.graphs.slicing_plan import SlicePlan
from offramp.supernet.graphs.width import kept_channels, plan_slices


@dataclass(frozen=True, kw_only=True)
class Supernet:
    """A model with the blocks and the weights that its spec names."""

    model: SourceModel
    """The model, with all constants as initializers; treat it as read-only."""
    spec: ElasticSpec
    blocks: tuple[tuple[DepthBlock, ...], ...]
    """Blocks of each depth group, in the order in which they are dropped."""
    weights: tuple[tuple[NamedWeight, ...], ...]
    """Weights of each width group, which lose channels together."""

    @classmethod
    def of(cls, model: SourceModel, spec: ElasticSpec) -> Supernet:
        """Find a spec's names in a model's graph, and try every ratio and the smallest subnet.

        Raises:
            ElasticSpecError: A name is unknown, or a ratio is not a whole number of channels.
            NotElasticError: The graph cannot be reduced; the message names the operator.
        """
        model = _with_plain_constants(model)
        flow, types = model.flow, declared_types(model.proto)
        blocks = tuple(
            tuple(find_block(skip, spec.source, flow, types) for skip in group.skip)
            for group in spec.depths
        )
        finder = WeightFinder(spec, flow, types)
        weights = tuple(finder.find(group) for group in spec.widths)
        found = cls(model=model, spec=spec, blocks=blocks, weights=weights)
        found._check_once()
        for choice in found._steps():
            found.plan(choice)
        return found

    @cached_property
    def types(self) -> dict[str, TensorType]:
        """Types of all tensors, by name."""
        return declared_types(self.model.proto)

    @cached_property
    def initializers(self) -> dict[str, onnx.TensorProto]:
        """All weights and other constants, by name."""
        return {tensor.name: tensor for tensor in self.model.proto.graph.initializer}

    def skipped(self, choice: SubnetChoice) -> list[DepthBlock]:
        """Return the blocks that a subnet omits."""
        pairs = zip(self.blocks, choice.skipped, strict=True)
        return [block for group, count in pairs for block in group[:count]]

    def shallow(self, choice: SubnetChoice) -> onnx.ModelProto:
        """Return the graph without the blocks that a subnet omits, and without weights.

        ElasticSpecError if the spec does not allow the subnet.
        """
        self.spec.check(choice)
        model = self.model.proto
        proto = emptied(model, model.graph.name, producer=model.producer_name)
        proto.graph.node.extend(model.graph.node)
        proto.graph.input.extend(model.graph.input)
        proto.graph.output.extend(model.graph.output)
        skip_blocks(proto, self.skipped(choice))
        return proto

    def plan(self, choice: SubnetChoice, shallow: onnx.ModelProto | None = None) -> SlicePlan:
        """Return the slices of a subnet; ``shallow`` is its graph from :meth:`shallow`.

        ElasticSpecError if the spec does not allow this subnet, NotElasticError if the graph cannot
        be reduced to it.
        """
        named = {
            place: kept
            for group, ratio in zip(self.weights, choice.ratios, strict=True)
            for place, kept in kept_channels(group, ratio).items()
        }
        flow = Dataflow((shallow or self.shallow(choice)).graph)
        return plan_slices(flow, self.types, self.initializers, named)

    def _check_once(self) -> None:
        """Raise ElasticSpecError for weights that two names refer to."""
        seen: set[tuple[str, int]] = set()
        for weight in (w for group in self.weights for w in group):
            if (weight.node, weight.position) in seen:
                raise ElasticSpecError(
                    f"{self.spec.source}: width.weights names the weight of {weight.node} twice, "
                    "by the operator and by the initializer, or in two [[width]]; keep one"
                )
            seen.add((weight.node, weight.position))

    def _steps(self) -> Iterator[SubnetChoice]:
        """Yield each ratio of each width group alone, and then the smallest subnet."""
        full = self.spec.full
        for index, group in enumerate(self.spec.widths):
            for ratio in group.ratios:
                ratios = (*full.ratios[:index], ratio, *full.ratios[index + 1 :])
                yield replace(full, ratios=ratios)
        yield self.spec.smallest


def _with_plain_constants(model: SourceModel) -> SourceModel:
    """Return a model with initializers for all tensors that do not depend on a graph input.

    Simplified models are returned unchanged; other models may, for instance, transpose weights at
    run time.
    """
    if len(model.flow.changing) == len(model.flow.operators):
        return model
    model = replace(model, proto=hoisted(model.proto))
    copy, flow = model.proto, model.flow
    computed = {op.name for op in flow.operators if flow.is_constant(op)}
    if not computed:
        return model
    read = {t for op in flow.operators if op.name not in computed for t in op.reads}
    read.update(flow.outputs)
    wanted = [t for op in flow.operators if op.name in computed for t in op.writes if t in read]
    part = emptied(copy, "constants")
    part.graph.node.extend(op.proto for op in flow.operators if op.name in computed)
    part.graph.initializer.extend(copy.graph.initializer)
    part.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted)
    remove_unused(part)
    found = GraphRunner(part).run({}) if wanted else {}
    graph = copy.graph
    graph.initializer.extend(numpy_helper.from_array(found[name], name) for name in wanted)
    refill(graph.node, [node for node in graph.node if node.name not in computed])
    refill(graph.value_info, [info for info in graph.value_info if info.name not in found])
    remove_unused(copy)
    return replace(model)  # with recomputed cached properties
