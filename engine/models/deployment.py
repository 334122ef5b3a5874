"""Deployments: an exit policy with everything that executes it, activated as a whole.

A hot swap replaces one deployment by the next; running batches keep the deployment with which they
started.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from numpy.typing import NDArray

from offramp.bundle import ActiveExit, Bundle, ExitPolicy, Profile
from offramp.bundle.records import ClassLoss, losses_on_records
from offramp.certify.decision import MODEL_END, NEVER
from offramp.engine.common.errors import BackendError
from offramp.engine.models.device_profile import measure_variant
from offramp.engine.models.devices import ModelSplits
from offramp.engine.models.options import ModelOptions
from offramp.engine.models.variants import (
    as_fast_as,
    log_dominated,
    log_not_served,
    mode_of_variants,
    variants_to_serve,
)
from offramp.engine.models.weight_sharing import share_weights
from offramp.engine.scheduling import (
    Latencies,
    OperatingPoints,
    PlacedPlan,
    Placement,
    going_on,
    operating_points,
    pareto_front,
    stage_seconds,
)
from offramp.engine.scheduling.policies import PlanPolicy, PolicyName, policy_for
from offramp.engine.stages.backend_protocol import Backend, Stage
from offramp.engine.stages.pipeline import Pipeline, zeros
from offramp.engine.stages.plan import Mode, Plan, StageSpec, make_plan

STAGE_OVERHEAD_S: Final = 60e-6
"""Approximate time of a stage in the executor, in addition to its graph (``benchmarks.executor``).
"""
_KEPT_STAGES: Final = 32
"""Number of unused prepared stages that are kept: exits are often tried again."""

_Unit: TypeAlias = tuple[int, tuple[int, int, int | None], tuple[str, ...]]
"""Key of a prepared stage: a variant, a :attr:`StageSpec.unit`, and the tensors that it passes to
the next stage."""
_AUDIT_VARIANT: Final = -1
"""Variant number, in keys, of stages of the full model that run after a variant for audits."""
_LoadedVariant: TypeAlias = tuple[Bundle, Profile, Mapping[str, NDArray[Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """An exit policy, with everything that runs the batches started under it, to their end."""

    number: int
    """Number of the deployment's stage plan, unique for a model (:attr:`.Run.plan`)."""
    policy: ExitPolicy
    pipeline: Pipeline
    smaller: tuple[Pipeline, ...] = ()
    """Pipelines of the model's variants, from number 1 on."""
    points: OperatingPoints
    """Latency and agreement of the stages, for the scheduling policy."""
    batch_size: int
    """Largest number of rows in a new batch."""
    placement: Placement | None = None
    """Assignment of the stages to streams, if streams differ."""
    class_losses: tuple[ClassLoss, ...] = ()
    """Disagreement of the policy by class of the model, counted on the calibration data."""

    @property
    def plan(self) -> Plan:
        """Plan of the full model's stages."""
        return self.pipeline.plan

    def of_variant(self, variant: int) -> Pipeline:
        """Return the pipeline of a variant; 0 is the full model."""
        return self.smaller[variant - 1] if variant else self.pipeline

    def scheduled_by(
        self, policy: PolicyName, streams: int, before: PlacedPlan | None = None
    ) -> PlanPolicy:
        """Make the scheduling policy of this deployment; ValueError if it does not fit the plan.

        ``before`` is the previous placed plan.
        """
        return policy_for(
            policy,
            self.points,
            max_batch_size=self.batch_size,
            streams=streams,
            placement=self.placement,
            before=before,
        )

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """Pipelines of the full model and of all variants, by variant number."""
        return self.pipeline, *self.smaller


class DeploymentMaker:
    """Makes the deployments of a bundle, one after another.

    ``profile`` has the times of the model's parts on the backend, with packed weights. ``splits``
    is the split of the model among devices; ``None`` if it is not split. If variants of the bundle
    do not serve, the reason is logged (:mod:`.variants`).

    Any thread may prepare stages. Only the holder of :attr:`swapping` may make a deployment and
    activate it.
    """

    def __init__(
        self,
        bundle: Bundle,
        backend: Backend,
        profile: Profile,
        *,
        mode: Mode,
        options: ModelOptions,
        splits: ModelSplits | None = None,
    ) -> None:
        self.splits = splits
        """Splits that deployments are placed by; changed only by the holder of :attr:`swapping`."""
        self.swapping = threading.RLock()
        """Held from reading the active deployment until the next one is active: changes of
        thresholds and changes of splits must each be based on the other's result."""
        self.bundle = bundle
        self._backend = backend
        self.mode = mode
        """Mode: it decides what happens to samples that reach an exit's threshold."""
        self._options = options
        self._records = bundle.records()
        served = variants_to_serve(bundle, mode, options, is_split=splits is not None)
        sharing = share_weights(bundle.manifest, options.share_weights, backend, served=len(served))
        self._profile, self._sharing = sharing.slowed(profile, 0), sharing
        self._stages: OrderedDict[_Unit, Stage] = OrderedDict()
        self._stages_lock = threading.Lock()
        """Held while stages are looked up or changed, not while one is prepared."""
        self._pending: set[_Unit] = set()
        """Keys of the stages that are being prepared."""
        self._number = 0
        self._cancelled = threading.Event()
        self._smaller = self._load_variants(served, profile)
        """Bundle of each variant that serves, with its profile here, and its records."""

    def _load_variants(self, served: Sequence[Bundle], profile: Profile) -> list[_LoadedVariant]:
        """Profile the variants to serve; return none, with a warning, if a device refuses any.

        ``profile`` is the profile of the full model on this backend. On a CPU it scales the
        variants' profiles; on a GPU, where time grows differently with the batch, the variants'
        stages are timed.
        """
        compiled = self.bundle.profile()
        try:
            profiles = [
                as_fast_as(profile, compiled, shown.profile())
                if self._backend.on_cpu
                else measure_variant(
                    self._pipeline_of(shown),
                    shown.profile(),
                    max_batch_size=self._options.max_batch_size,
                )
                for shown in served
            ]
        except BackendError as error:
            for unit in [unit for unit in self._stages if unit[0]]:
                del self._stages[unit]
            log_not_served(self.bundle, str(error))
            return []
        return [
            (shown, self._sharing.slowed(found, shown.number), shown.records())
            for shown, found in zip(served, profiles, strict=True)
        ]

    def _pipeline_of(self, shown: Bundle) -> Pipeline:
        """Prepare the stages of a variant, which follow from the variant's own policy."""
        plan = make_plan(shown, shown.policy, mode_of_variants(self.mode))
        return Pipeline(self._backend, plan, prepare=self._stage)

    def prepared(self, exits: Sequence[int], splits: ModelSplits | None = None) -> bool:
        """Return whether all stages for these exits are prepared, in these or the active splits."""
        plan = self._of_exits(exits, splits)
        return all(_unit_of(spec) in self._stages for spec in plan.stages)

    def prepare(self, exits: Sequence[int], splits: ModelSplits | None = None) -> None:
        """Assemble, load and warm up the stages for these exits; takes seconds.

        ``splits`` are the splits to prepare for; by default the active ones. BackendError if a
        stage cannot be loaded.
        """
        plan = self._of_exits(exits, splits)
        pipeline = Pipeline(self._backend, plan, prepare=self._stage)
        self._evict(plan)
        self._warm_up(pipeline)  # variants are prepared at the start, and stay

    def renew(self, exits: Sequence[int]) -> None:
        """Reload and warm up the stages whose engines were missing; takes seconds.

        The next deployment uses them; active ones keep their stages. BackendError if a stage cannot
        be loaded; then all stages stay as they are.
        """
        renewed: dict[_Unit, Stage] = {}

        def prepare(spec: StageSpec) -> Stage:
            stage = self._stage(spec)
            if self._backend.missing(stage) is None:
                return stage
            return renewed.setdefault(_unit_of(spec), self._prepare(spec))

        pipeline = Pipeline(self._backend, self._of_exits(exits), prepare=prepare)
        self._warm_up(pipeline)
        with self._stages_lock:
            self._stages.update(renewed)

    def _warm_up(self, pipeline: Pipeline) -> None:
        slot = self._backend.open_slot()
        try:
            # Where slots share nothing, one run is enough to check that the stages run.
            largest = self._options.max_batch_size if self._backend.on_cpu else 1
            for size in range(largest, 0, -1):
                if self._cancelled.is_set():
                    return
                started_s = time.monotonic()
                pipeline.warm_up(slot, zeros(self.bundle.manifest, size))
                # Batches of requests run at the same time: leave them half of the time.
                time.sleep(time.monotonic() - started_s)
        finally:
            slot.close()

    def cancel(self) -> None:
        """Stop preparing, permanently; any thread may call this."""
        self._cancelled.set()

    def make(self, policy: ExitPolicy, before: Deployment | None = None) -> Deployment:
        """Make the deployment of a policy; fast once its stages are prepared.

        The new deployment takes over the observed times of equal stages from ``before``, the
        previous deployment. If no stages are equal, it takes over the observed speed of the
        machine.
        """
        splits, most = self.splits, self._options.max_batch_size
        plan = self._plan(policy)
        pipeline = Pipeline(self._backend, plan, prepare=self._stage)
        points = points_of(self._profile, self._records, plan, self._options)
        smaller = tuple(self._pipeline_of(shown) for shown, _, _ in self._smaller)
        points = with_variants(
            points,
            [
                points_of(profile, records, pipeline.plan, self._options)
                for (_, profile, records), pipeline in zip(self._smaller, smaller, strict=True)
            ],
        )
        if smaller and not self._number:
            log_dominated(self.bundle, {point.variant for point in points.points})
        if before is not None:
            if [s.unit for s in plan.stages] == [s.unit for s in before.plan.stages]:
                points = replace(points, latencies=before.points.latencies)
            else:
                points.latencies.calibrate(before.points.latencies.speed)
        self._number += 1
        return Deployment(
            number=self._number,
            policy=policy,
            pipeline=pipeline,
            smaller=smaller,
            points=points,
            batch_size=splits.batch_size(most) if splits else most,
            placement=splits.placement(plan, most, STAGE_OVERHEAD_S) if splits else None,
            class_losses=losses_on_records(self.bundle.manifest.answer, policy, self._records),
        )

    def units(
        self, exits: Sequence[int], splits: ModelSplits
    ) -> frozenset[tuple[int, int, int | None]]:
        """Return the :attr:`StageSpec.unit` of each stage for these exits and splits."""
        return frozenset(spec.unit for spec in self._of_exits(exits, splits).stages)

    def wants(self, spec: StageSpec) -> bool:
        """Return whether a stage is prepared or being prepared; new batches use no others."""
        return _unit_of(spec) in self._stages or _unit_of(spec) in self._pending

    def keep_only(self, plan: Plan) -> None:
        """Drop full-model stages that are not in a plan, as devices may need the memory."""
        kept = {_unit_of(spec) for spec in plan.stages}
        with self._stages_lock:
            for unit in [unit for unit in self._stages if unit[0] == 0 and unit not in kept]:
                del self._stages[unit]

    def _plan(self, policy: ExitPolicy, splits: ModelSplits | None = None) -> Plan:
        splits = splits or self.splits
        borders = splits.borders if splits else ()
        return make_plan(self.bundle, policy, self.mode, borders=borders)

    def _of_exits(self, exits: Sequence[int], splits: ModelSplits | None = None) -> Plan:
        """Return a plan that runs some exits.

        In modes with observation, these exits answer no sample. In modes without observation, exits
        that answer no sample would not run; there these exits answer every sample.
        """
        threshold = NEVER if self.mode.observed else 0.0
        active = tuple(ActiveExit(exit=index, threshold=threshold) for index in exits)
        return self._plan(ExitPolicy(version=0, active=active), splits)

    def _stage(self, spec: StageSpec) -> Stage:
        """Return a prepared stage, or prepare it: its graph does not depend on thresholds."""
        key = _unit_of(spec)
        with self._stages_lock:
            if key in self._stages:
                self._stages.move_to_end(key)
                return self._stages[key]
            self._pending.add(key)
        try:
            prepared = self._prepare(spec)
            with self._stages_lock:
                return self._stages.setdefault(key, prepared)
        finally:
            self._pending.discard(key)

    def _prepare(self, spec: StageSpec) -> Stage:
        return self._backend.prepare(self._sharing.of(spec))

    def _evict(self, plan: Plan) -> None:
        """Drop the least recently used stages; deployments that run them keep them alive."""
        with self._stages_lock:
            theirs = [unit for unit in self._stages if unit[0] == 0]
            for unit in theirs[: max(len(theirs) - _KEPT_STAGES - len(plan.stages), 0)]:
                del self._stages[unit]


def _unit_of(spec: StageSpec) -> _Unit:
    if spec.bundle is None:
        return 0, spec.unit, spec.carried
    number = spec.bundle.number
    if number and spec.first_segment >= spec.bundle.manifest.source_begins:
        # The full model is the same after any variant: a device holds its weights once.
        return _AUDIT_VARIANT, (0, 0, None), spec.carried
    return number, spec.unit, spec.carried


def with_variants(points: OperatingPoints, smaller: Sequence[OperatingPoints]) -> OperatingPoints:
    """Add the operating points of variants 1, 2 … to those of the full model.

    A variant's last operating point is its own answer. After it, the full model runs only for
    audits, which are no operating point. Dominated points are left out.
    """
    if not smaller:
        return points
    full = points.latencies.variants[0]
    latencies = Latencies(
        full.seconds,
        full.going_on,
        unanswered=full.unanswered,
        smaller=[found.latencies.variants[0] for found in smaller],
    )
    every = [
        *points.points,
        *(
            replace(point, variant=number)
            for number, found in enumerate(smaller, 1)
            for point in found.points
            if point.exit != MODEL_END
        ),
    ]
    return OperatingPoints(points=pareto_front(every, latencies), latencies=latencies)


def points_of(
    profile: Profile,
    records: Mapping[str, NDArray[Any]],
    plan: Plan,
    options: ModelOptions,
    *,
    overhead_s: float = STAGE_OVERHEAD_S,
) -> OperatingPoints:
    """Predict the time of a plan's stages, and the agreement of the answers after each stage.

    ``profile`` has the times of the model's parts.

    The options set the largest batch, and whether exits may be forced; ``overhead_s`` is the time
    of each stage in addition to its graph.
    """
    spans = [stage.unit for stage in plan.stages]
    answering = [(s.index, s.answered_by, s.threshold) for s in plan.stages if s.answer is not None]
    seconds = stage_seconds(profile, spans, options.max_batch_size, overhead_s=overhead_s)
    unanswered = going_on(answering, records, len(plan.stages))
    shares = [1.0] * len(plan.stages) if plan.mode is Mode.RELEASE else unanswered
    return OperatingPoints(
        points=operating_points(answering, records, forced=options.forced_exits),
        latencies=Latencies(seconds, shares, unanswered=unanswered),
    )
