"""Policies by name, for the command line and the configuration."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from offramp.certify.decision import MODEL_END
from offramp.engine.scheduling.latency import Latencies
from offramp.engine.scheduling.parallel import ParallelLimit
from offramp.engine.scheduling.placed import KindPolicy, PlacedPlan
from offramp.engine.scheduling.placement import Placement
from offramp.engine.scheduling.points import OperatingPoint, OperatingPoints, pareto_front
from offramp.engine.scheduling.policies import batching, merging, slack, slackfit
from offramp.engine.scheduling.policies.slack import Fixed, SlackPolicy
from offramp.engine.scheduling.policy_protocol import NeverBuffers, Policy
from offramp.engine.scheduling.queue import SampleQueue
from offramp.engine.scheduling.scheduler import ModelScheduler
from offramp.engine.scheduling.stage_table import StageTable

_BY_NAME: Final[Mapping[str, Callable[[OperatingPoints, int, int], Policy]]] = {
    policy.name: policy
    for policy in (
        *(
            batching.RunThrough,
            merging.Refill,
            merging.Rebatch,
            slackfit.SlackFit,
            slackfit.BareSlackFit,
        ),
        *(slack.MaxAccuracy, slack.MaxBatch, slack.Cheapest, slack.Clockwork, batching.Delay),
    )
}
POLICIES: Final = (*_BY_NAME, Fixed.name)
"""Names of all policies. ``fixed`` is followed by an exit: ``fixed:2``, or ``fixed:final``; and
optionally by a variant below the full model: ``fixed:final@1``."""


@dataclass(frozen=True, slots=True)
class PolicyName:
    """The name of an existing policy, with the exit and the variant of ``fixed``."""

    name: str
    exit: int = MODEL_END
    """Exit at which ``fixed`` answers."""
    variant: int = 0
    """Variant that ``fixed`` runs."""

    @classmethod
    def parse(cls, text: str) -> PolicyName:
        """Read ``slackfit``, ``fixed:2`` or ``fixed:2@1``; ValueError if it is unknown."""
        name, colon, place = text.partition(":")
        if name not in POLICIES or (colon and name != Fixed.name):
            close = difflib.get_close_matches(name, POLICIES, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(f"there is no policy {text!r:.80}; {hint}known: {', '.join(POLICIES)}")
        if name != Fixed.name:
            return cls(name)
        depth, at, variant = place.partition("@")
        if (depth != "final" and not depth.isdecimal()) or (at and not variant.isdecimal()):
            raise ValueError(
                f"policy {text!r} has no exit; expected an exit after it, for instance "
                "fixed:2, or fixed:final"
            )
        return cls(name, MODEL_END if depth == "final" else int(depth), int(variant or 0))

    def __str__(self) -> str:
        """Return the name in the form that :meth:`parse` reads."""
        return f"{self.name}:{self.place}" if self.name == Fixed.name else self.name

    @property
    def place(self) -> str:
        """The exit, and the variant if it is not the full model."""
        return _place(self.exit, self.variant)


class PlanPolicy(NamedTuple):
    """The policy of a plan's batches, and its predictions."""

    policy: Policy
    latencies: Latencies
    placed: PlacedPlan | None = None
    """Policies by stream, if streams differ; used instead of ``policy`` and ``latencies``."""


def make_policy(
    chosen: PolicyName, points: OperatingPoints, max_batch_size: int, streams: int = 1
) -> Policy:
    """Make a policy; ValueError if the exit of ``fixed`` is not in use, or may not be forced."""
    if chosen.name == Fixed.name:
        return Fixed(points, max_batch_size, streams, point=_point_at(points, chosen))
    return _BY_NAME[chosen.name](points, max_batch_size, streams)


def may_buffer(chosen: PolicyName) -> bool:
    """Return whether batches may wait at a split under a policy, and be merged."""
    kind: object = Fixed if chosen.name == Fixed.name else _BY_NAME[chosen.name]
    return not (isinstance(kind, type) and issubclass(kind, NeverBuffers))


def chooses_points(chosen: PolicyName) -> bool:
    """Return whether a policy chooses among operating points, and so may run other variants."""
    if chosen.name == Fixed.name:
        return chosen.variant > 0
    kind: object = _BY_NAME[chosen.name]
    chooses = isinstance(kind, type) and issubclass(kind, SlackPolicy)
    return chooses and kind is not slack.Clockwork


def make_scheduler(
    chosen: PolicyName,
    points: OperatingPoints,
    *,
    max_batch_size: int,
    max_delay_s: float = 0.0,
    max_queue: int = 4096,
    streams: int = 1,
    parallel: ParallelLimit | None = None,
    plan: int = 0,
    placement: Placement | None = None,
) -> ModelScheduler:
    """Make the scheduler of a model whose latencies reach up to ``max_batch_size``.

    At most ``max_queue`` samples wait. A sample waits for a fuller batch at most ``max_delay_s``,
    and not at all under policies that choose by slack. ``parallel`` is the device's limit on
    parallel batches, ``plan`` the number of the first plan. ``placement`` assigns the plan's stages
    to streams, if streams differ. Raises the errors of :func:`make_policy` and :func:`place`.
    """
    policy, latencies, placed = policy_for(
        chosen, points, max_batch_size=max_batch_size, streams=streams, placement=placement
    )
    if isinstance(policy, SlackPolicy):
        max_delay_s = 0.0
    queue = SampleQueue(max_queue, full=max_batch_size, max_delay_s=max_delay_s)
    return ModelScheduler(
        policy, latencies, queue, streams=streams, parallel=parallel, plan=plan, placed=placed
    )


def policy_for(
    chosen: PolicyName,
    points: OperatingPoints,
    *,
    max_batch_size: int,
    streams: int,
    placement: Placement | None = None,
    before: PlacedPlan | None = None,
) -> PlanPolicy:
    """Make the policy and predictions for the batches of a plan, placed or not.

    ``before`` is the previous placed plan: observed times are kept where predicted times are equal.
    Raises the errors of :func:`make_policy` and :func:`place`.
    """
    if placement is None or placement.is_shared:
        policy = make_policy(chosen, points, max_batch_size, streams)
        return PlanPolicy(policy, points.latencies)
    placed = place(chosen, points, placement, max_batch_size, before)
    policy, latencies = placed.first()
    return PlanPolicy(policy, latencies, placed)


def place(
    chosen: PolicyName,
    points: OperatingPoints,
    placement: Placement,
    max_batch_size: int,
    before: PlacedPlan | None = None,
) -> PlacedPlan:
    """Make a policy for each kind of device of a placement, with predictions for that kind.

    ValueError if batches would have to be merged at a split and the policy never merges, if tables
    do not fit, or as in :func:`make_policy`.
    """
    if placement.is_split and not may_buffer(chosen):
        raise ValueError(
            f"policy {chosen} never merges batches, so it cannot serve a model in several splits; "
            "choose refill or rebatch, or let every stream prefer all stages"
        )
    full, *smaller = points.latencies.variants
    if placement.stages != full.stages:
        raise ValueError(
            f"the placement has {placement.stages} stages, expected {full.stages} like the plan"
        )
    kinds = {}
    for kind in placement.kinds:
        if smaller and kind.seconds:
            raise ValueError(f"kind {kind.name!r} has no times of variants; set its speed instead")
        scaled = [
            StageTable(
                [[kind.speed * s for s in row] for row in table.seconds],
                table.going_on,
                table.unanswered,
            )
            for table in smaller
        ]
        expected_s = placement.expected_s(kind.name, full.seconds)
        latencies = Latencies(expected_s, full.going_on, unanswered=full.unanswered, smaller=scaled)
        known = before.latencies.get(kind.name) if before is not None else None
        if known is not None and known.predicts_as(latencies):
            latencies = known
        else:
            latencies.calibrate((known or points.latencies).speed)
        there = OperatingPoints(points=pareto_front(points.points, latencies), latencies=latencies)
        policy = make_policy(chosen, there, max_batch_size, len(placement.streams))
        kinds[kind.name] = KindPolicy(policy, latencies)
    return PlacedPlan(placement, kinds, placement.continued_stages(full.seconds))


def _place(exit_: int, variant: int) -> str:
    depth = "final" if exit_ == MODEL_END else str(exit_)
    return f"{depth}@{variant}" if variant else depth


def _point_at(points: OperatingPoints, chosen: PolicyName) -> OperatingPoint:
    for point in points.points:
        if (point.exit, point.variant) == (chosen.exit, chosen.variant):
            return point
    known = ", ".join(_place(point.exit, point.variant) for point in points.points)
    raise ValueError(
        f"policy {chosen}: exit {chosen.place} is not in use here, or may not be forced; "
        f"there are: {known}"
    )
