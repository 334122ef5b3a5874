"""A cluster's plan as it is served: the role of each stream, and the placement of stages."""

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
    """Facts with the exits' shares that the plan was made for."""
    cluster: Cluster
    """All devices, with times for batches up to the largest that is served."""
    goal: PlanningGoal
    """Goal of the plan, and of later plans."""
    roles: tuple[StreamRole, ...]
    """Role of each worker in the plan, by the worker's number."""
    batches_per_worker: int = 1
    """Streams of each worker; stream s belongs to worker s modulo the number of workers."""
    kept: bool = False
    """``True`` if the plan was configured, and must not change."""
    steals: bool = True
    """``True`` if devices hold segments in addition to their split, as far as memory allows."""
    held: tuple[frozenset[int], ...] = ()
    """[workers]: segments whose weights each worker has; if empty, computed from the other
    fields."""

    def __post_init__(self) -> None:
        if not self.held:
            found = tuple(map(self._held_by, self.roles))
            object.__setattr__(self, "held", found)  # frozen from here on

    def _held_by(self, role: StreamRole) -> frozenset[int]:
        return held_segments(role, self.model, self.cluster) if self.steals else role.own

    @property
    def borders(self) -> frozenset[int]:
        """Segments after which stages must end."""
        return borders_of(self.plan)

    @property
    def exits(self) -> frozenset[int]:
        """Exits that the plan was made with."""
        return frozenset(self.model.exit_names)

    def batch_size(self, most: int) -> int:
        """Return the plan's batch size, the same at every split (E3), but at most ``most``."""
        return min(self.plan.batch_size, most)

    def placement(self, stages: Plan, max_batch_size: int, overhead_s: float) -> Placement:
        """Place the stages of a policy; PlanError if the splits do not end where stages do.

        ``overhead_s`` is the time of each stage in addition to its graph.
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
        """Return whether a stream's device has or may load a stage, which must fit the splits."""
        inside = self.held[stream] >= {*range(spec.first_segment, spec.last_segment + 1)}
        return inside and ends_with(spec, self.borders)


def ends_with(spec: StageSpec, borders: Collection[int]) -> bool:
    """Return whether a stage fits a plan whose splits end after the segments ``borders``.

    Stages of other plans have other cuts; a device that held stages of two plans would have the
    weights twice.
    """
    torn = any(spec.first_segment <= border < spec.last_segment for border in borders)
    return not torn and (spec.exit is not None or spec.last_segment in borders)
