"""Workers without processes that hold parts of a model, and are to run nothing else."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offramp.bundle import Bundle
from offramp.cluster.planning.cluster import Cluster, DeviceType
from offramp.cluster.planning.cluster_plan import ClusterPlan, PlannedSplit, Replicas
from offramp.cluster.planning.cluster_times import times_of
from offramp.cluster.planning.goal import PlanningGoal
from offramp.cluster.remote.launching import LocalLauncher
from offramp.cluster.remote.worker_backend import Holds, RemoteBackend
from offramp.cluster.serving.cluster_serving import ServedCluster
from offramp.engine.backends.host import HostSlot, HostStage
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.common.errors import BackendError, StageNotLoadedError, WorkerLostError
from offramp.engine.stages.backend_protocol import StageResult, TensorBatch
from offramp.engine.stages.plan import StageSpec

ROWS = 8


@dataclass(eq=False)
class HeldStage:
    """A stage that workers hold."""

    spec: StageSpec
    stage: HostStage


class HeldBackend(RemoteBackend):
    """Takes the place of a backend of workers, in this process.

    It knows what each worker has loaded, and the most that this ever was; ``trespasses`` are runs
    of what a worker does not hold.
    """

    def __init__(self, kinds: Sequence[str], bytes_of: Callable[[int, int], int]) -> None:
        self.within = OnnxRuntimeBackend(threads=1)
        super().__init__(self.within, launchers=[LocalLauncher(device_type=k) for k in kinds])
        self.rule: Holds = lambda _worker, _spec: True
        self.up = [True] * len(kinds)
        self.refuses: Callable[[StageSpec], bool] = lambda _spec: False
        self.hold_fails = ""
        self.on_prepare: Callable[[StageSpec], None] = lambda _spec: None
        self.trespasses: list[str] = []
        self.most_bytes = [0] * len(kinds)
        self._made: weakref.WeakSet[HeldStage] = weakref.WeakSet()
        self._bytes_of = bytes_of
        self._has: list[weakref.WeakSet[HeldStage]] = [weakref.WeakSet() for _ in kinds]

    @property
    def there(self) -> tuple[bool, ...]:
        return tuple(self.up)

    def stages(self, worker: int) -> set[tuple[int, int, int | None]]:
        """Return the loaded stages of a worker."""
        return {stage.spec.unit for stage in list(self._has[worker])}

    def hold(self, holds: Holds) -> None:
        self.rule = holds
        if self.hold_fails:
            failure, self.hold_fails = self.hold_fails, ""
            raise BackendError(failure)
        self._load()
        for number, has in enumerate(self._has):
            for stage in list(has):
                if not holds(number, stage.spec):
                    has.discard(stage)

    def prepare(self, spec: StageSpec) -> HeldStage:  # type: ignore[override]
        self.on_prepare(spec)
        if not any(self.rule(n, spec) for n in range(self.workers)):
            raise BackendError(f"nobody holds {spec.unit}")
        holders = [n for n in range(self.workers) if self.rule(n, spec)]
        if self.refuses(spec):
            raise StageNotLoadedError(
                f"stage {spec.unit} cannot be loaded",
                device=holders[0],
                segments=(spec.first_segment, spec.last_segment),
            )
        same = [s for s in list(self._made) if s.spec.unit == spec.unit]
        stage = same[0] if same else HeldStage(spec, self.within.prepare(spec))
        self._made.add(stage)
        self._load()
        return stage

    def open_slot(self) -> Any:
        return HeldSlot(self, None, self.within.open_slot())

    def open_slot_of(self, number: int) -> Any:
        if not self.up[number]:
            raise BackendError(f"worker {number} is not there")
        return HeldSlot(self, number, self.within.open_slot())

    def close(self) -> None:
        self.within.close()

    def _load(self) -> None:
        for number, has in enumerate(self._has):
            for stage in list(self._made):
                if self.rule(number, stage.spec):
                    has.add(stage)
            units = [stage.spec.unit for stage in list(has)]
            size = sum(self._bytes_of(first, last) for first, last, _ in units)
            self.most_bytes[number] = max(self.most_bytes[number], size)


class HeldSlot:
    """A slot of one worker; without a number, of warm-ups or timing."""

    def __init__(self, backend: HeldBackend, number: int | None, slot: HostSlot) -> None:
        self._backend, self._number, self._slot = backend, number, slot

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slot, name)

    def run(
        self, stage: HeldStage, batch: TensorBatch, threshold: float | None = None
    ) -> StageResult:
        backend, number = self._backend, self._number
        if number is not None:
            if not backend.up[number]:
                raise WorkerLostError(f"worker {number} was lost")
            # Who warms up or times has others run what a worker does not hold.
            serving = "-stream-" in threading.current_thread().name
            if serving and stage not in backend._has[number]:
                backend.trespasses.append(f"worker {number}: {stage.spec.unit}")
        return self._slot.run(stage.stage, batch, threshold)


def weights_of(bundle: Bundle) -> Callable[[int, int], int]:
    """Return a function from first and last segment to the bytes of their weights."""
    sizes = [segment.weight_bytes for segment in bundle.manifest.segments]
    return lambda first, last: sum(sizes[first : last + 1])


def cluster_for(
    bundle: Bundle, *, share: float, speeds: Mapping[str, float] | None = None, count: int = 2
) -> ServedCluster:
    """Types of device by speed, with room for so much of the weights each."""
    total = sum(s.weight_bytes for s in bundle.manifest.segments)
    types = [
        DeviceType(
            name=name,
            count=count,
            cost_per_hour=1.0,
            times=times_of(bundle.profile(), ROWS, speed=speed),
            memory_bytes=share * total,
        )
        for name, speed in (speeds or {"fast": 2.0, "slow": 1.0}).items()
    ]
    goal = PlanningGoal(batch_sizes=(1, 2, 4, ROWS))
    return ServedCluster(cluster=Cluster(types=tuple(types)), goal=goal)


def plan_of(*splits: tuple[int, int, dict[str, int]], batch_size: int = 4) -> ClusterPlan:
    """A plan of splits: first and last segment, and workers by type; its figures say nothing."""
    return ClusterPlan(
        batch_size=batch_size,
        splits=tuple(
            PlannedSplit(
                first_segment=first,
                last_segment=last,
                replicas=tuple(
                    Replicas(device_type=kind, count=n, exits=(), stage_s=1.0, longest_s=1.0)
                    for kind, n in workers.items()
                ),
                share=1.0,
                period_s=1.0,
                fill_s=0.0,
                link_period_s=0.0,
                link_s=0.0,
            )
            for first, last, workers in splits
        ),
        cost_per_hour=1.0,
    )
