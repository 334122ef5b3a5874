"""Served models, loaded from bundles: facts, first deployment, scheduler, control."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Answer, Bundle, Profile, TensorSpec, Variant
from offramp.engine.backends import Backend, Slot
from offramp.engine.backends.factory import CPU_RUNTIMES
from offramp.engine.common.control_state import identity_of
from offramp.engine.common.environment import cpu_features
from offramp.engine.common.errors import BackendError, OptionsError
from offramp.engine.common.state_file import StateFile
from offramp.engine.control.controller import Controller, ControlStatus
from offramp.engine.control.evidence_window import EvidenceWindow
from offramp.engine.models.controllers import make_controller, policy_of_exits
from offramp.engine.models.deployment import Deployment, DeploymentMaker
from offramp.engine.models.device_profile import measure_profile
from offramp.engine.models.devices import ModelSplits
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.models.plain_serving import notes_on, options_for
from offramp.engine.models.profile_check import log_predicted_savings, profile_here
from offramp.engine.models.whole_promise import EndEvidence, end_evidence, whole_status
from offramp.engine.requests.input_guard import InputGuard
from offramp.engine.requests.lengths import LengthRules
from offramp.engine.requests.recorder import Recorder
from offramp.engine.requests.value_limits import ValueLimits
from offramp.engine.scheduling import (
    Latencies,
    ModelScheduler,
    OperatingPoints,
    ParallelLimit,
    Placement,
)
from offramp.engine.scheduling.policies import PolicyName, make_scheduler, may_buffer
from offramp.engine.stages.backend_protocol import SlotsByStream, StreamBackend
from offramp.engine.stages.pipeline import zeros
from offramp.engine.stages.plan import Mode
from offramp.engine.stages.precision import warn_of_other_kernels, warn_of_saturation

_log = logging.getLogger(__name__)

MERGING: Final = PolicyName("refill")
"""Policy for a split model, if the requested one cannot serve it."""
_TIMED_RUNS = 5
"""Number of timed runs; the fastest one sets the machine's speed relative to the profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelControl:
    """The control of a model: its observation while it serves, and changes of its policy."""

    controller: Controller
    recorder: Recorder
    deployments: DeploymentMaker
    fingerprint: Mapping[str, str]
    """Facts that a saved state of the controller must match."""
    state_file: StateFile | None = None
    """File for the controller's state across restarts; ``None`` keeps none."""
    evidence: EndEvidence | None = None
    """Evidence about the served engines, if they have another precision than the bundle."""

    def status(self) -> ControlStatus:
        """Return the controller's status, relative to the float32 model."""
        return whole_status(self.controller.status(), self.evidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model as loaded from its bundle, ready to be served.

    Immutable except for its scheduler, which the executor owns, and its control.
    """

    inputs: tuple[TensorSpec, ...]
    """All inputs of the model's file, in its order."""
    unread: frozenset[str] = frozenset()
    """Names of inputs that the graph does not read: checked if they are sent, then dropped."""
    outputs: tuple[TensorSpec, ...]
    answer: Answer
    mode: Mode
    options: ModelOptions
    deployment: Deployment
    """Deployment with which serving begins; others may replace it."""
    variants: tuple[Variant, ...] = ()
    """Variants that may serve in addition to the full model, from number 1 on."""
    scheduler: ModelScheduler
    """Scheduler made for the first deployment."""
    good_inputs: Mapping[str, NDArray[Any]]
    """A sample that is known to run."""
    control: ModelControl | None = None
    """Control; ``None`` in modes without observation."""
    guard: InputGuard | None = None
    """Input guard; ``None`` trusts all inputs."""
    evidence: EndEvidence | None = None
    """Evidence about the served engines, if they have another precision than the bundle."""
    lengths: LengthRules = field(default_factory=LengthRules)
    """Rules on lengths: which samples of different length share a batch, and which lengths are new.
    """
    limits: ValueLimits = field(default_factory=ValueLimits)
    """Values of inputs that the model accepts."""
    bundle: str = ""
    """SHA-256 of the bundle's manifest."""
    exits: int = 0
    """Number of the bundle's exits; 0 where none runs (mode off)."""
    state_bundle: Path | None = None
    """Path of the bundle, if extensions keep exit statistics in a file next to it across restarts;
    ``None`` keeps none."""
    split_by: DeploymentMaker | None = None
    """Maker of deployments for other plans, where the model is split among devices."""
    notes: tuple[str, ...] = ()
    """Messages for the user about the model (:attr:`.ModelInfo.notes`)."""
    loaded_s: float = field(default_factory=time.monotonic)

    @classmethod
    def load(
        cls,
        name: str,
        bundle: Bundle,
        backend: Backend,
        options: EngineOptions,
        parallel: ParallelLimit,
        *,
        splits: ModelSplits | None = None,
        file: Path | None = None,
    ) -> Self:
        """Prepare the stages, warm them up at every batch size, and measure their speed here.

        ``parallel`` is the device's limit on parallel batches; ``splits`` is the plan of the
        cluster whose devices run the streams; ``file`` is the ONNX file that the bundle was made of
        for serving, for notes. BackendError if a stage cannot be loaded,
        OptionsError if the scheduling policy does not fit the model.
        """
        options = options_for(name, bundle.manifest, options, file)
        mode, of_model, identity = options.mode, options.of(name), identity_of(bundle)["bundle"]
        if splits and not may_buffer(of_model.scheduling):
            of_model = merging_options(name, of_model)
        bundle = backend.as_computed(bundle)
        warn_of_saturation(name, bundle.manifest, cpu_features(), mode)
        warn_of_other_kernels(name, bundle.manifest, backend.name, mode)
        profile = bundle.profile() if splits else _profile(name, bundle, backend, options)
        if splits:
            policy = policy_of_exits(bundle, splits.exits, profile, of_model)
            bundle = replace(bundle, policy=policy)
        deployments = DeploymentMaker(
            bundle, backend, profile, mode=mode, options=of_model, splits=splits
        )
        policy, control = bundle.policy, None
        if mode.observed:
            controller, found_under = make_controller(bundle, profile, mode, of_model)
            policy = controller.policy
            control = ModelControl(
                controller=controller,
                recorder=Recorder(
                    len(bundle.manifest.exits),
                    window=EvidenceWindow(max_source_share=of_model.max_source_share),
                    release=mode is Mode.RELEASE,
                ),
                deployments=deployments,
                fingerprint={**found_under, **_arithmetic(bundle, backend)},
                state_file=StateFile.of(bundle.path, name) if options.keep_state else None,
                evidence=end_evidence(bundle),
            )
            control.recorder.audit_probability = controller.audit_probability
        elif mode is Mode.OFF:
            policy = replace(policy, active=(), promise=None)
        try:
            deployment = deployments.make(policy)
            scheduler = scheduler_of(
                deployment.points,
                of_model,
                streams=options.streams,
                parallel=parallel,
                plan=deployment.number,
                placement=deployment.placement,
                batch_size=deployment.batch_size,
            )
        except ValueError as error:
            raise OptionsError(f"{name}: {error}") from error
        _calibrate(scheduler, deployment, bundle)
        exits = 0 if mode is Mode.OFF else len(bundle.manifest.exits)
        return cls(
            inputs=bundle.manifest.declared,
            unread=bundle.manifest.unread_names,
            outputs=bundle.manifest.served_outputs,
            answer=bundle.manifest.answer,
            mode=mode,
            options=of_model,
            deployment=deployment,
            variants=bundle.manifest.variants if deployment.smaller else (),
            scheduler=scheduler,
            good_inputs=zeros(bundle.manifest, 1),
            control=control,
            guard=_guard(name, bundle) if control and not of_model.trust_inputs else None,
            evidence=end_evidence(bundle),
            lengths=_length_rules(name, bundle, of_model),
            limits=ValueLimits(bundle.manifest.value_bounds),
            bundle=identity,
            exits=exits,
            state_bundle=bundle.path if exits > 0 and options.keep_state else None,
            split_by=deployments if splits else None,
            notes=notes_on(name, bundle.manifest, options, file),
        )

    def probe(self, slot: Slot, deployment: Deployment) -> None:
        """Run a known good sample through all stages."""
        for pipeline in deployment.pipelines:
            pipeline.warm_up(slot, self.good_inputs)

    def warm_up(self, slot: Slot, deployment: Deployment) -> None:
        """Run every relevant size twice, the largest first (this captures its CUDA graph)."""
        backend = deployment.pipeline.backend
        for size in reversed(backend.sizes(self.options.max_batch_size)):
            rows = {name: array.repeat(size, axis=0) for name, array in self.good_inputs.items()}
            for pipeline in deployment.pipelines:
                for _ in range(2):
                    pipeline.warm_up(slot, rows)


def merging_options(name: str, options: ModelOptions) -> ModelOptions:
    """Return options with a policy that merges at splits; OptionsError if no such policy fits."""
    chosen = options.scheduling
    if chosen.name in ("fixed", "cheapest"):
        raise OptionsError(
            f"{name}: policy {chosen} fixes the exit that answers and never merges batches, but a "
            f"split model needs merging; remove it ({MERGING} is used then), or serve without a "
            "cluster"
        )
    level = logging.INFO if chosen == ModelOptions().scheduling else logging.WARNING
    _log.log(level, "%s: policy %s, as %s never merges", name, MERGING, chosen)
    return replace(options, scheduling=MERGING)


def _guard(name: str, bundle: Bundle) -> InputGuard | None:
    """Make the input guard of a bundle, if it has the ranges of the calibration inputs."""
    ranges = bundle.input_ranges()
    if ranges is None:
        _log.info("%s: the bundle has no input ranges: all inputs are trusted", name)
        return None
    return InputGuard(ranges)


def _length_rules(name: str, bundle: Bundle, options: ModelOptions) -> LengthRules:
    ranges, paddings = bundle.input_ranges(), bundle.manifest.paddings
    for padding in paddings if options.padding else ():
        _log.info("%s: %s", name, padding.describe())
    return LengthRules(
        bundle.manifest.inputs,
        paddings,
        ranges.lengths if ranges else (),
        pads=options.padding,
        whole_buckets=may_buffer(options.scheduling),
    )


def _profile(name: str, bundle: Bundle, backend: Backend, options: EngineOptions) -> Profile:
    """Return the profile of the model on the serving backend, measured where possible."""
    compiled, largest = bundle.profile(), options.of(name).max_batch_size
    try:
        if not backend.on_cpu:
            return measure_profile(bundle, backend, compiled, max_batch_size=largest)
        if backend.name in CPU_RUNTIMES and options.mode is not Mode.OFF:
            here = profile_here(
                bundle, backend, compiled, max_batch_size=largest, keep=options.keep_state
            )
            log_predicted_savings(name, bundle, here, compiled)
            return here
    except BackendError as error:
        _log.warning("%s: scheduled by the profile of the compiling machine: %s", name, error)
    return compiled


def warm_slots(backend: Backend, models: Mapping[str, ServedModel], streams: int) -> list[Slot]:
    """Open every stream's slot and warm it up for all models, where slots share nothing.

    BackendError if one cannot be opened, for example for lack of memory; then none stays open.
    """
    slots: list[Slot] = []
    if backend.on_cpu:
        return slots
    try:
        for stream in range(streams):
            if isinstance(backend, SlotsByStream):
                slots.append(backend.open_slot_of(stream))
            else:
                slots.append(backend.open_slot())
            for model in models.values():
                model.warm_up(slots[-1], model.deployment)
    except BaseException:
        for slot in slots:
            slot.close()
        raise
    return slots


def _arithmetic(bundle: Bundle, backend: Backend) -> dict[str, str]:
    """Return facts on the arithmetic of the answers; observations hold only for equal facts."""
    certified = {"certified": bundle.evidence.records.sha256} if bundle.evidence else {}
    return {"backend": backend.name, "engines": bundle.arithmetic, **certified}


def scheduler_of(
    points: OperatingPoints,
    options: ModelOptions,
    *,
    streams: int,
    parallel: ParallelLimit | None = None,
    plan: int = 0,
    placement: Placement | None = None,
    batch_size: int | None = None,
) -> ModelScheduler:
    """Make the scheduler of a model; ValueError if the policy does not fit the operating points.

    ``batch_size`` is the largest batch, if smaller than the option.
    """
    return make_scheduler(
        options.scheduling,
        points,
        max_batch_size=batch_size or options.max_batch_size,
        max_delay_s=options.max_queue_delay_ms / 1e3,
        max_queue=options.max_queue_samples,
        streams=streams,
        parallel=parallel,
        plan=plan,
        placement=placement,
    )


def _calibrate(scheduler: ModelScheduler, deployment: Deployment, bundle: Bundle) -> None:
    """Warm up, and calibrate predictions to the speed of the stages on this machine.

    Where streams differ, each kind has its own times, measured on its first available stream.
    BackendError if a stage fails.
    """
    most, backend = scheduler.latencies.max_batch_size, deployment.pipeline.backend
    if scheduler.placed is None:
        latencies = scheduler.latencies
        latencies.calibrate(_speed(deployment, latencies, bundle, backend.open_slot(), {1, most}))
        return
    assert isinstance(backend, StreamBackend), "stages are placed on streams that differ"
    for kind, latencies in scheduler.placed.latencies.items():
        streams = enumerate(scheduler.placed.placement.streams)
        there = [n for n, stream in streams if stream.kind == kind and backend.there[n]]
        if there:
            slot = backend.open_slot_of(there[0])
            latencies.calibrate(_speed(deployment, latencies, bundle, slot, {most}))


def _speed(
    deployment: Deployment,
    latencies: Latencies,
    bundle: Bundle,
    slot: Slot,
    sizes: Collection[int],
) -> float:
    """Warm up (the first run at a size allocates), and return observed divided by predicted time.

    Where slots share nothing, only timed sizes are run: :func:`warm_slots` warms the serving ones.
    """
    pipeline = deployment.pipeline
    try:
        for size in range(max(sizes), 0, -1) if pipeline.backend.on_cpu else ():
            for each in deployment.pipelines:
                each.warm_up(slot, zeros(bundle.manifest, size))
        ratios = []
        for size in sizes:
            batch = zeros(bundle.manifest, size)
            seconds = []
            for _ in range(_TIMED_RUNS):
                started_s = time.perf_counter()
                pipeline.warm_up(slot, batch)
                seconds.append(time.perf_counter() - started_s)
            ratios.append(min(seconds) / latencies.span_s(0, latencies.stages - 1, size))
        return float(np.mean(ratios))
    finally:
        slot.close()
