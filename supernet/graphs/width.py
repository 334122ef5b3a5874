"""WeightSlice: weights of which a subnet has the first output channels (SuperServe, section 3).

The paper selects channels by expand ratio E or width multiplier W as it runs. In a static graph the
weights that are named lose their last output channels, and that is followed through the operators
behind them, up to those that sum over the channels, whose weights lose the same input channels.
What each operator does with a dimension that there is less of is in :mod:`.width_rules`; what none
of them says is refused.
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
    """Find all that changes where some weights keep some output channels only.

    ``flow`` is the graph, blocks left out already; ``types`` and ``weights`` are the supernet's;
    ``named`` tells what is kept of output channels, by operator and input. NotElasticError where an
    operator cannot do with less, in one line that names it.
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
                "what it does with fewer channels is not known; keep its input whole, or export "
                "it as standard operators"
            )
        rule(view)
    for name in flow.outputs:
        if name in plan.elastic:
            raise NotElasticError(
                f"width: the output {name!r} would have {plan.elastic[name]} elements in dimension "
                f"{plan.elastic[name].axis}; answers keep their shape, so leave the weights of "
                "its operator whole"
            )
    return plan


def kept_channels(
    weights: Sequence[NamedWeight], ratio: float
) -> dict[tuple[str, int], tuple[int, ...]]:
    """Give what a ratio keeps of the weights of a width group; none if that is all."""
    if ratio == 1.0:
        return {}
    return {(w.node, w.position): w.kept(ratio) for w in weights}
