"""A policy with everything that executes it; put in force and replaced as a whole."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import NEVER, ActiveExit, Bundle, ExitPolicy, Manifest, Profile
from offramp.engine.backends.base import Backend, Stage
from offramp.engine.options import ModelOptions
from offramp.engine.pipeline import Pipeline
from offramp.engine.plan import Mode, Plan, StageSpec, make_plan
from offramp.engine.scheduling import (
    Latencies,
    OperatingPoints,
    Span,
    going_on,
    operating_points,
    stage_seconds,
)

STAGE_OVERHEAD_S: Final = 60e-6
"""What a stage costs the executor beyond its graph, about (``benchmarks.executor``)."""
_KEPT_STAGES: Final = 32
"""Prepared stages that are kept though no plan has them: exits that were tried come back."""

_Key: TypeAlias = tuple[int, int, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What batches that start under a policy are run with, to their end."""

    number: int
    """Of the plan; never used twice for a model (:attr:`offramp.engine.scheduling.Run.plan`)."""
    policy: ExitPolicy
    pipeline: Pipeline
    points: OperatingPoints
    """For the scheduling policy."""

    @property
    def exits(self) -> tuple[int, ...]:
        """Exits in use, in depth order."""
        return tuple(s.exit for s in self.pipeline.plan.stages if s.exit is not None)


class Deployments(Protocol):
    """Makes the deployments of a model, one after another; used by one thread at a time."""

    def prepared(self, exits: Sequence[int]) -> bool:
        """Whether all stages for these exits in use are there."""
        ...

    def prepare(self, exits: Sequence[int]) -> None:
        """Assemble, load and warm up the stages for these exits; takes seconds.

        May be called by another thread than the rest.

        Raises:
            BackendError: A stage cannot be loaded.
        """
        ...

    def cancel(self) -> None:
        """Leave off preparing, now and for good; called by any thread."""
        ...

    def make(self, policy: ExitPolicy, before: Deployment | None = None) -> Deployment:
        """Put a policy into force on paper; fast once its stages are prepared.

        Args:
            policy: Whose.
            before: What it follows, whose observed speeds it takes over.
        """
        ...


class BundleDeployments:
    """Of a bundle; see :class:`Deployments`."""

    def __init__(
        self,
        bundle: Bundle,
        backend: Backend,
        profile: Profile,
        *,
        mode: Mode,
        options: ModelOptions,
    ) -> None:
        """Prepare nothing yet.

        Args:
            bundle: Whose.
            backend: Prepares the stages.
            profile: What the model's parts take there.
            mode: Of serving.
            options: Of the model.
        """
        self._bundle = bundle
        self._backend = backend
        self._mode = mode
        self._options = options
        self._profile = profile
        self._records = bundle.records()
        self._stages: OrderedDict[_Key, Stage] = OrderedDict()
        self._number = 0
        self._cancelled = threading.Event()

    def prepared(self, exits: Sequence[int]) -> bool:
        """Whether all stages are there."""
        return all(_key(spec) in self._stages for spec in self._plan(_looking_on(exits)).stages)

    def prepare(self, exits: Sequence[int]) -> None:
        """Load the stages that are missing; see :meth:`Deployments.prepare`."""
        plan = self._plan(_looking_on(exits))
        pipeline = Pipeline(self._backend, plan, prepare=self._stage)
        self._evict(plan)
        slot = self._backend.open_slot()
        try:
            # Where slots share nothing, it is enough to see that the stages run at all.
            largest = self._options.max_batch_size if self._backend.on_cpu else 1
            for size in range(largest, 0, -1):
                if self._cancelled.is_set():
                    return
                started_s = time.monotonic()
                pipeline.warm_up(slot, zeros(self._bundle.manifest, size))
                # Batches of requests run beside this: leave them half of the time.
                time.sleep(time.monotonic() - started_s)
        finally:
            slot.close()

    def cancel(self) -> None:
        """Leave off; see :meth:`Deployments.cancel`."""
        self._cancelled.set()

    def make(self, policy: ExitPolicy, before: Deployment | None = None) -> Deployment:
        """Make the next deployment; see :meth:`Deployments.make`."""
        plan = self._plan(policy)
        pipeline = Pipeline(self._backend, plan, prepare=self._stage)
        points = points_from(self._profile, self._records, plan, self._options)
        if before is not None:
            points = _as_before(points, pipeline, before)
        self._number += 1
        return Deployment(number=self._number, policy=policy, pipeline=pipeline, points=points)

    def _plan(self, policy: ExitPolicy) -> Plan:
        return make_plan(self._bundle, policy, self._mode)

    def _stage(self, spec: StageSpec) -> Stage:
        """Prepare a stage, unless it is there: its graph does not depend on thresholds."""
        key = _key(spec)
        if key not in self._stages:
            self._stages[key] = self._backend.prepare(spec)
        self._stages.move_to_end(key)
        return self._stages[key]

    def _evict(self, plan: Plan) -> None:
        """Let go of what was not used for longest; whoever runs it keeps it alive."""
        while len(self._stages) > _KEPT_STAGES + len(plan.stages):
            self._stages.popitem(last=False)


def points_of(
    bundle: Bundle, plan: Plan, options: ModelOptions, *, overhead_s: float = STAGE_OVERHEAD_S
) -> OperatingPoints:
    """What a plan of a bundle costs, and is worth; see :func:`points_from`."""
    return points_from(bundle.profile(), bundle.records(), plan, options, overhead_s=overhead_s)


def points_from(
    profile: Profile,
    records: Mapping[str, NDArray[Any]],
    plan: Plan,
    options: ModelOptions,
    *,
    overhead_s: float = STAGE_OVERHEAD_S,
) -> OperatingPoints:
    """What a plan's stages cost by a profile, and what stopping at each is worth.

    Args:
        profile: Of the bundle.
        records: Of the bundle.
        plan: Of it.
        options: Say the largest batch, and whether exits may be forced.
        overhead_s: What each stage costs beyond its graph.
    """
    stages = [
        Span(first_segment=s.first_segment, last_segment=s.last_segment, exit=s.exit)
        for s in plan.stages
    ]
    answering = [(s.index, s.exit, s.threshold) for s in plan.stages if s.answer is not None]
    seconds = stage_seconds(profile, stages, options.max_batch_size, overhead_s=overhead_s)
    shares = going_on(answering, records, len(plan.stages))
    if plan.mode is Mode.RELEASE:
        shares = [1.0] * len(plan.stages)
    return OperatingPoints(
        points=operating_points(answering, records, forced=options.forced_exits),
        latencies=Latencies(seconds, shares),
    )


def zeros(manifest: Manifest, batch_size: int) -> dict[str, NDArray[Any]]:
    """A batch of the shapes that the calibration data had."""
    shapes: Mapping[str, Sequence[int]] = manifest.calibration.sample_shapes
    return {t.name: np.zeros((batch_size, *shapes[t.name]), t.dtype) for t in manifest.inputs}


def _as_before(points: OperatingPoints, pipeline: Pipeline, before: Deployment) -> OperatingPoints:
    """Take over what was observed of the same stages, or of the machine's speed at least."""
    same = [_key(s) for s in pipeline.plan.stages] == [_key(s) for s in before.pipeline.plan.stages]
    if same:
        return OperatingPoints(points=points.points, latencies=before.points.latencies)
    points.latencies.calibrate(before.points.latencies.speed)
    return points


def _looking_on(exits: Sequence[int]) -> ExitPolicy:
    active = tuple(ActiveExit(exit=index, threshold=NEVER) for index in exits)
    return ExitPolicy(version=0, active=active)


def _key(spec: StageSpec) -> _Key:
    return (spec.first_segment, spec.last_segment, spec.exit)
