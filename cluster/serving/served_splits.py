"""A cluster's plan as it is served: what each stream is in it, and what that means for stages."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from offramp.cluster.planning.cluster import Cluster, ModelFacts
from offramp.cluster.planning.cluster_plan import ClusterPlan
from offramp.cluster.planning.goal import PlanningGoal
from offramp.cluster.planning.placing import StreamRole, borders_of, held_segments, place_plan
from offramp.engine.scheduling import Placement
from offramp.engine.stages.plan import Plan, StageSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServedSplits:
    """The splits of a model, and the streams that run them."""

    plan: ClusterPlan
    model: ModelFacts
    """With the exits' shares that it was planned on."""
    cluster: Cluster
    """All devices that there are; times reach up to the largest batch that is served."""
    goal: PlanningGoal
    """What is asked of the plan, and of those that follow it."""
    roles: tuple[StreamRole, ...]
    """[workers]."""
    batches_per_worker: int = 1
    """Streams of each worker; stream s is of worker s modulo their number."""
    kept: bool = False
    """Whether the plan was given, and is not to be changed."""
    steals: bool = True
    """Whether devices hold, beside their split, what else there is room for."""
    held: tuple[frozenset[int], ...] = ()
    """[workers] segments whose weights each has; empty is found once, from the above."""

    def __post_init__(self) -> None:
        if not self.held:
            found = tuple(map(self._held_by, self.roles))
            object.__setattr__(self, "held", found)  # frozen from here on

    def _held_by(self, role: StreamRole) -> frozenset[int]:
        return held_segments(role, self.model, self.cluster) if self.steals else role.own

    @property
    def borders(self) -> frozenset[int]:
        """The segments behind which stages have to end."""
        return borders_of(self.plan)

    @property
    def exits(self) -> frozenset[int]:
        """The exits that the plan was made with."""
        return frozenset(self.model.exit_names)

    def batch_size(self, most: int) -> int:
        """Rows of a batch: the plan's, as E3 keeps it constant at every split; ``most`` at most."""
        return min(self.plan.batch_size, most)

    def placement(self, stages: Plan, max_batch_size: int, overhead_s: float) -> Placement:
        """Place the stages of a policy; PlanError if the splits do not end where stages do.

        ``overhead_s`` is what each stage costs beyond its graph.
        """
        return place_plan(
            self.plan,
            self.roles * self.batches_per_worker,
            [stage.unit for stage in stages.stages],
            model=self.model,
            cluster=self.cluster,
            max_batch_size=max_batch_size,
            overhead_s=overhead_s,
            held=self.held * self.batches_per_worker,
        )

    def holds(self, stream: int, spec: StageSpec) -> bool:
        """Whether a stream's device has, or may load, a stage: one that ends as the splits do."""
        inside = self.held[stream] >= {*range(spec.first_segment, spec.last_segment + 1)}
        return inside and ends_with(spec, self.borders)


def ends_with(spec: StageSpec, borders: Collection[int]) -> bool:
    """Whether a stage may be of a plan whose splits end behind these segments.

    Stages of other plans are cut elsewhere, and a device that has them has the weights twice.
    """
    torn = any(spec.first_segment <= border < spec.last_segment for border in borders)
    return not torn and (spec.exit is not None or spec.last_segment in borders)
