"""WeightSlice: a subnet has the first output channels of some weights (SuperServe, section 3).

The paper selects channels by expand ratio E or width multiplier W at run time. In a static graph
the named weights lose their last output channels, and the change is propagated through the
following operators, up to those that sum over the channels, whose weights lose the same input
channels. :mod:`.width_rules` has a rule for the effect of each operator on an elastic dimension;
for an operator without a rule an error is raised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx

from offramp.compiler.graphs.graph import Dataflow, is_standard
from offramp.compiler.graphs.shapes import TensorType
from offramp.supernet.graphs.errors import NotElasticError
from offramp.supernet.graphs.names import NamedWeight
from offramp.supernet.graphs.operator_view import OperatorView
from offramp.supernet.graphs.slicing_plan import SlicePlan
from offramp.supernet.graphs.width_rules import RULES


def plan_slices(
    flow: Dataflow,
    types: Mapping[str, TensorType],
    weights: Mapping[str, onnx.TensorProto],
    named: Mapping[tuple[str, int], tuple[int, ...]],
) -> SlicePlan:
    """Find all changes when some weights keep only some output channels.

    ``flow`` is the graph without the omitted blocks; ``types`` and ``weights`` are the supernet's;
    ``named`` has the kept output channels, by operator and input. NotElasticError, with one line
    that names the operator, if an operator cannot be reduced.
    """
    plan = SlicePlan()
    for op in flow.operators:
        is_named = any(node == op.name for node, _ in named)
        if not is_named and plan.elastic.keys().isdisjoint(op.reads):
            continue
        view = OperatorView(op, flow, types, weights, named, plan)
        rule = RULES.get(op.kind) if is_standard(op.proto) and not op.has_body else None
        if rule is None:
            view.refuse(
                "its effect on fewer channels is unknown; keep its input whole, or export "
                "it as standard operators"
            )
        rule(view)
    for name in flow.outputs:
        if name in plan.elastic:
            raise NotElasticError(
                f"width: the output {name!r} would have {plan.elastic[name]} elements in dimension "
                f"{plan.elastic[name].axis}; answers keep their shape, so keep the weights of "
                "its operator whole"
            )
    return plan


def kept_channels(
    weights: Sequence[NamedWeight], ratio: float
) -> dict[tuple[str, int], tuple[int, ...]]:
    """Return the channels of a width group's weights that a ratio keeps; empty for ratio 1."""
    if ratio == 1.0:
        return {}
    return {(w.node, w.position): w.kept(ratio) for w in weights}
