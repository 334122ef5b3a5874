"""One model in service: its facts, what it starts with, and what observes it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Answer, Bundle, ExitPolicy, Manifest, Profile, TensorSpec
from offramp.bundle.engines import list_targets
from offramp.engine.backends import Backend, Slot
from offramp.engine.control.controller import Controller
from offramp.engine.control_state import state_path_of
from offramp.engine.controllers import make_controller
from offramp.engine.deployment import BundleDeployments, Deployment, Deployments, zeros
from offramp.engine.device_profile import measure_profile
from offramp.engine.errors import BackendError, OptionsError
from offramp.engine.options import ModelOptions
from offramp.engine.pipeline import Pipeline
from offramp.engine.plan import Mode
from offramp.engine.profile_check import profile_here, say_what_exits_bring
from offramp.engine.recorder import Recorder
from offramp.engine.scheduling import (
    Latencies,
    ModelScheduler,
    OperatingPoints,
    ParallelLimit,
    make_scheduler,
)

_log = logging.getLogger(__name__)

_TIMED_RUNS = 5
"""Runs whose fastest says how fast this machine is, against the profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What a model needs to be observed, and changed, while it serves."""

    controller: Controller
    recorder: Recorder
    deployments: Deployments
    fingerprint: Mapping[str, str]
    """What a kept state of the controller must have been made for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Immutable but for its scheduler, which the executor owns, and what observes it."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    answer: Answer
    mode: Mode
    options: ModelOptions
    deployment: Deployment
    """To start with."""
    scheduler: ModelScheduler
    """Of that deployment."""
    good_inputs: Mapping[str, NDArray[Any]]
    """A sample that is known to run."""
    observed: Observed | None = None
    """``None`` in modes that observe nothing."""
    state_path: Path | None = None
    """Where its controller's state is kept over restarts; ``None`` keeps none."""
    loaded_s: float = field(default_factory=time.monotonic)

    @classmethod
    def load(
        cls,
        name: str,
        bundle: Bundle,
        backend: Backend,
        *,
        mode: Mode,
        options: ModelOptions,
        streams: int,
        parallel: ParallelLimit,
        keep_state: bool = True,
    ) -> Self:
        """Prepare the stages, warm up every batch size, and see how fast they are here.

        Raises:
            BackendError: A stage cannot be loaded.
            OptionsError: The scheduling policy does not fit the model.
        """
        profile = bundle.profile()
        if backend.name == "onnxruntime-cpu" and mode is not Mode.OFF:
            profile = _profile_here(name, bundle, backend, profile, options, keep=keep_state)
        elif not backend.on_cpu:
            try:
                profile = measure_profile(
                    bundle, backend, profile, max_batch_size=options.max_batch_size
                )
            except BackendError as error:
                _log.warning("%s: scheduled by the CPU's profile: %s", name, error)
        deployments = BundleDeployments(bundle, backend, profile, mode=mode, options=options)
        policy, observed = bundle.policy, None
        if mode.observed:
            controller, found_under = make_controller(bundle, profile, mode, options)
            policy = controller.policy
            observed = Observed(
                controller=controller,
                recorder=Recorder(len(bundle.manifest.exits)),
                deployments=deployments,
                fingerprint={**found_under, **_arithmetic(bundle, backend)},
            )
            observed.recorder.audit_probability = controller.audit_probability
        elif mode is Mode.OFF:
            policy = replace(policy, active=(), promise=None)
        deployment = deployments.make(policy)
        points = deployment.points
        try:
            scheduler = scheduler_of(
                points, options, streams=streams, parallel=parallel, plan=deployment.number
            )
        except ValueError as error:
            raise OptionsError(f"{name}: {error}") from error
        pipeline = deployment.pipeline
        speed = _speed(pipeline, bundle.manifest, points.latencies, options.max_batch_size)
        points.latencies.calibrate(speed)
        return cls(
            inputs=bundle.manifest.inputs,
            outputs=bundle.manifest.outputs,
            answer=bundle.manifest.answer,
            mode=mode,
            options=options,
            deployment=deployment,
            scheduler=scheduler,
            good_inputs=zeros(bundle.manifest, 1),
            observed=observed,
            state_path=state_path_of(bundle.path) if keep_state else None,
        )

    @property
    def policy(self) -> ExitPolicy:
        """To start with."""
        return self.deployment.policy

    @property
    def recorder(self) -> Recorder | None:
        """Where to keep what is observed."""
        return self.observed.recorder if self.observed else None

    def probe(self, slot: Slot, deployment: Deployment) -> None:
        """Run a sample that is known to be good through all stages."""
        deployment.pipeline.warm_up(slot, self.good_inputs)

    def warm_up(self, slot: Slot, deployment: Deployment) -> None:
        """Run every batch size twice, the largest first (a CUDA graph is made at the second)."""
        for size in range(self.options.max_batch_size, 0, -1):
            rows = {name: array.repeat(size, axis=0) for name, array in self.good_inputs.items()}
            for _ in range(2):
                deployment.pipeline.warm_up(slot, rows)


def _profile_here(
    name: str,
    bundle: Bundle,
    backend: Backend,
    compiled: Profile,
    options: ModelOptions,
    *,
    keep: bool,
) -> Profile:
    """Check the profile on this CPU, and say what exits bring here."""
    try:
        here = profile_here(
            bundle, backend, compiled, max_batch_size=options.max_batch_size, keep=keep
        )
    except BackendError as error:
        _log.warning("%s: scheduled by the profile of where it was compiled: %s", name, error)
        return compiled
    say_what_exits_bring(name, bundle, here, compiled)
    return here


def warm_slots(backend: Backend, models: Mapping[str, ServedModel], streams: int) -> list[Slot]:
    """Open a slot for every stream and warm it up for all models, where slots share nothing.

    Raises:
        BackendError: One cannot be opened, for instance for want of memory; none is left open.
    """
    slots: list[Slot] = []
    if backend.on_cpu:
        return slots
    try:
        for _ in range(streams):
            slots.append(backend.open_slot())
            for model in models.values():
                model.warm_up(slots[-1], model.deployment)
    except BaseException:
        for slot in slots:
            slot.close()
        raise
    return slots


def _arithmetic(bundle: Bundle, backend: Backend) -> dict[str, str]:
    """What gives the answers: what was seen of them holds for nothing else."""
    targets = list_targets(bundle.path) if backend.name == "tensorrt" else ()
    return {"backend": backend.name, "engines": ", ".join(t.folder for t in targets)}


def scheduler_of(
    points: OperatingPoints,
    options: ModelOptions,
    *,
    streams: int,
    parallel: ParallelLimit | None = None,
    plan: int = 0,
) -> ModelScheduler:
    """The scheduler of a model with these options.

    Raises:
        ValueError: Its policy does not fit the operating points.
    """
    return make_scheduler(
        options.scheduling,
        points,
        max_batch_size=options.max_batch_size,
        max_delay_s=options.max_queue_delay_ms / 1e3,
        max_queue=options.max_queue_samples,
        streams=streams,
        parallel=parallel,
        plan=plan,
    )


def _speed(
    pipeline: Pipeline, manifest: Manifest, latencies: Latencies, max_batch_size: int
) -> float:
    """Warm up (the first run at a size allocates); observed over predicted time on the way.

    Where slots share nothing, only what is timed is run: :func:`warm_slots` warms those that serve.
    """
    slot = pipeline.backend.open_slot()
    try:
        for size in range(max_batch_size, 0, -1) if pipeline.backend.on_cpu else ():
            pipeline.warm_up(slot, zeros(manifest, size))
        ratios = []
        for size in {1, max_batch_size}:
            batch = zeros(manifest, size)
            predicted_s = latencies.span_s(0, latencies.stages - 1, size)
            ratios.append(
                min(_seconds(pipeline, slot, batch) for _ in range(_TIMED_RUNS)) / predicted_s
            )
        return float(np.mean(ratios))
    finally:
        slot.close()


def _seconds(pipeline: Pipeline, slot: Slot, batch: Mapping[str, NDArray[Any]]) -> float:
    started_s = time.perf_counter()
    pipeline.warm_up(slot, batch)
    return time.perf_counter() - started_s
