"""Deployments: an exit policy with everything that executes it, put in force as a whole.

A hot swap replaces one deployment by the next; batches that run keep the one they started under.
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
"""What a stage costs the executor beyond its graph, about (``benchmarks.executor``)."""
_KEPT_STAGES: Final = 32
"""Prepared stages that are kept though no plan has them: exits that were tried come back."""

_Unit: TypeAlias = tuple[int, tuple[int, int, int | None], tuple[str, ...]]
"""What a prepared stage was made of: a variant, a :attr:`StageSpec.unit`, what it carries on."""
_BEHIND_VARIANTS: Final = -1
"""Stands for a variant in the key of the full model that audits run behind all of them."""
_LoadedVariant: TypeAlias = tuple[Bundle, Profile, Mapping[str, NDArray[Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """An exit policy, and what batches that start under it are run with, to their end."""

    number: int
    """The plan's number, never used twice for a model (:attr:`.Run.plan`)."""
    policy: ExitPolicy
    pipeline: Pipeline
    smaller: tuple[Pipeline, ...] = ()
    """Those of the model's variants, from number 1 on."""
    points: OperatingPoints
    """Costs and worth of the stages, for the scheduling policy."""
    batch_size: int
    """Most rows that a batch is formed of."""
    placement: Placement | None = None
    """Where the stages run, if streams differ."""
    class_losses: tuple[ClassLoss, ...] = ()
    """Disagreement of the policy by class of the model, counted on the calibration data."""

    @property
    def plan(self) -> Plan:
        """The stages."""
        return self.pipeline.plan

    def of_variant(self, variant: int) -> Pipeline:
        """Give what runs a variant; 0 is the full model."""
        return self.smaller[variant - 1] if variant else self.pipeline

    def scheduled_by(
        self, policy: PolicyName, streams: int, before: PlacedPlan | None = None
    ) -> PlanPolicy:
        """Make what chooses for its batches; ValueError if the policy does not fit.

        ``before`` is the placed plan that it follows.
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
        """All of them, by variant."""
        return self.pipeline, *self.smaller


class DeploymentMaker:
    """Makes the deployments of a bundle, one after another.

    ``profile`` says what the model's parts take on the backend, with packed weights. ``splits`` is
    the plan that the model is split by among devices, if it is. The log says why variants of the
    bundle do not serve, if they do not: see :mod:`.variants`.

    Stages are prepared by any thread. To make a deployment, and to put it in force, is for whoever
    has :attr:`swapping`.
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
        """What deployments are placed by; changed by whoever has :attr:`swapping`."""
        self.swapping = threading.RLock()
        """Held from looking at what is in force until another deployment is: those who change
        thresholds and those who change splits must each build on what the other did."""
        self.bundle = bundle
        self._backend = backend
        self.mode = mode
        """What becomes of samples that are sure at an exit."""
        self._options = options
        self._records = bundle.records()
        served = variants_to_serve(bundle, mode, options, is_split=splits is not None)
        sharing = share_weights(bundle.manifest, options.share_weights, backend, served=len(served))
        self._profile, self._sharing = sharing.slowed(profile, 0), sharing
        self._stages: OrderedDict[_Unit, Stage] = OrderedDict()
        self._stages_lock = threading.Lock()
        """Held while they are looked up or changed, not while one is prepared."""
        self._pending: set[_Unit] = set()
        """Those that are being prepared."""
        self._number = 0
        self._cancelled = threading.Event()
        self._smaller = self._load_variants(served, profile)
        """The bundle as each variant that serves, its profile here, and its records."""

    def _load_variants(self, served: Sequence[Bundle], profile: Profile) -> list[_LoadedVariant]:
        """Profile variants where they are served; none, with a warning, if a device refuses one.

        ``profile`` is the full model's there. On a CPU a variant's own is scaled by it; on a GPU,
        where time grows otherwise with the batch, the variant's stages are timed.
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
        """Prepare the stages of a variant, which its own policy plans."""
        plan = make_plan(shown, shown.policy, mode_of_variants(self.mode))
        return Pipeline(self._backend, plan, prepare=self._stage)

    def prepared(self, exits: Sequence[int], splits: ModelSplits | None = None) -> bool:
        """Whether all stages for these exits in use are there; ``splits`` if not those in force."""
        plan = self._of_exits(exits, splits)
        return all(_unit_of(spec) in self._stages for spec in plan.stages)

    def prepare(self, exits: Sequence[int], splits: ModelSplits | None = None) -> None:
        """Assemble, load and warm up the stages for these exits; takes seconds.

        ``splits`` are those that they are for, if not the ones in force. BackendError if a stage
        cannot be loaded.
        """
        plan = self._of_exits(exits, splits)
        pipeline = Pipeline(self._backend, plan, prepare=self._stage)
        self._evict(plan)
        self._warm_up(pipeline)  # variants are there since the start, and stay

    def renew(self, exits: Sequence[int]) -> None:
        """Load and warm up anew the stages of which engines were missing; takes seconds.

        The next deployment has them; those in force keep what they run. BackendError if one cannot
        be loaded: all stay as they are.
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
            # Where slots share nothing, it is enough to see that the stages run at all.
            largest = self._options.max_batch_size if self._backend.on_cpu else 1
            for size in range(largest, 0, -1):
                if self._cancelled.is_set():
                    return
                started_s = time.monotonic()
                pipeline.warm_up(slot, zeros(self.bundle.manifest, size))
                # Batches of requests run beside this: leave them half of the time.
                time.sleep(time.monotonic() - started_s)
        finally:
            slot.close()

    def cancel(self) -> None:
        """Stop preparing, now and for good; called by any thread."""
        self._cancelled.set()

    def make(self, policy: ExitPolicy, before: Deployment | None = None) -> Deployment:
        """Make the deployment of a policy; fast once its stages are prepared.

        It takes over what was observed of the same stages of ``before``, the deployment that it
        follows, or of the machine's speed at least.
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
        """Give the :attr:`StageSpec.unit` of each stage for these exits, split like this."""
        return frozenset(spec.unit for spec in self._of_exits(exits, splits).stages)

    def wants(self, spec: StageSpec) -> bool:
        """Whether a stage is prepared, or about to be: others live only where they still run."""
        return _unit_of(spec) in self._stages or _unit_of(spec) in self._pending

    def keep_only(self, plan: Plan) -> None:
        """Forget the stages that a plan of the full model does not have: devices may need room."""
        kept = {_unit_of(spec) for spec in plan.stages}
        with self._stages_lock:
            for unit in [unit for unit in self._stages if unit[0] == 0 and unit not in kept]:
                del self._stages[unit]

    def _plan(self, policy: ExitPolicy, splits: ModelSplits | None = None) -> Plan:
        splits = splits or self.splits
        borders = splits.borders if splits else ()
        return make_plan(self.bundle, policy, self.mode, borders=borders)

    def _of_exits(self, exits: Sequence[int], splits: ModelSplits | None = None) -> Plan:
        """Give the plan of some exits that are run, and answer nothing where answers are observed.

        Elsewhere exits that answer nothing would not run: there, they answer everything.
        """
        threshold = NEVER if self.mode.observed else 0.0
        active = tuple(ActiveExit(exit=index, threshold=threshold) for index in exits)
        return self._plan(ExitPolicy(version=0, active=active), splits)

    def _stage(self, spec: StageSpec) -> Stage:
        """Prepare a stage, unless it is there: its graph does not depend on thresholds."""
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
        """Forget what was not used for longest; the deployments that run it keep it alive."""
        with self._stages_lock:
            theirs = [unit for unit in self._stages if unit[0] == 0]
            for unit in theirs[: max(len(theirs) - _KEPT_STAGES - len(plan.stages), 0)]:
                del self._stages[unit]


def _unit_of(spec: StageSpec) -> _Unit:
    if spec.bundle is None:
        return 0, spec.unit, spec.carried
    number = spec.bundle.number
    if number and spec.first_segment >= spec.bundle.manifest.source_begins:
        # The full model behind any variant is the same: a device holds its weights once for all.
        return _BEHIND_VARIANTS, (0, 0, None), spec.carried
    return number, spec.unit, spec.carried


def with_variants(points: OperatingPoints, smaller: Sequence[OperatingPoints]) -> OperatingPoints:
    """Add the operating points of variants 1, 2 … to those of the full model.

    A variant ends at its own answer at the latest: to run the full model behind it is no operating
    point, but what audits do. What others dominate is left out.
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
    """Predict what a plan's stages cost by a profile, and what stopping at each is worth.

    The options give the largest batch, and whether exits may be forced; ``overhead_s`` is what each
    stage costs beyond its graph.
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
