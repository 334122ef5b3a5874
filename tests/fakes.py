"""The fake model that the engine's tests serve."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from offramp.bundle import ActiveExit, Answer, ExitPolicy, TensorSpec
from offramp.certify import MODEL_END, NEVER, Observations
from offramp.engine.common.state_file import StateFile
from offramp.engine.control.controller import ControlEvent, ControlStatus, Evidence, Job
from offramp.engine.control.evidence_window import EvidenceWindow
from offramp.engine.models.deployment import Deployment, DeploymentMaker
from offramp.engine.models.devices import ModelSplits
from offramp.engine.models.options import ModelOptions
from offramp.engine.models.served_model import ModelControl, ServedModel
from offramp.engine.requests.input_guard import InputGuard
from offramp.engine.requests.recorder import Recorder
from offramp.engine.scheduling import (
    Latencies,
    OperatingPoint,
    OperatingPoints,
    ParallelLimit,
    Placement,
)
from offramp.engine.scheduling.policies import make_scheduler
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import Mode, Plan, StageSpec
from offramp.testing.backend import SCRIPT, FakeBackend

FAKE_HASH = "fa" * 32
"""Hash of the bundle that the fake model claims to be from."""


def fake_plan(
    thresholds: Sequence[float], active: Mapping[int, float] | None = None, mode: Mode = Mode.LEAVE
) -> Plan:
    """A plan of one exit per threshold, then the end; stages that carry the script.

    Args:
        thresholds: Of every exit there is.
        active: Of those in use, by exit, instead of all.
        mode: Of serving.
    """
    stages: list[StageSpec] = []
    used = dict(enumerate(thresholds)) if active is None else active
    for index, threshold in [*sorted(used.items()), (len(thresholds), 0.0)]:
        final = index == len(thresholds)
        stages.append(
            StageSpec(
                index=len(stages),
                first_segment=stages[-1].last_segment + 1 if stages else 0,
                last_segment=index,
                exit=MODEL_END if final else index,
                load=bytes,
                inputs=(SCRIPT,),
                carried=() if final else (SCRIPT,),
                answer=None if threshold == NEVER and active is None else "answer",
                form="probabilities",
                threshold=threshold,
            )
        )
    return Plan(stages=tuple(stages), policy_version=7, mode=mode)


class FakeDeployments(DeploymentMaker):
    """Makes deployments of a model of some exits; preparing waits for as long as ``gate`` does."""

    def __init__(
        self, backend: FakeBackend, exits: int, settings: ModelOptions, stage_s: float = 1e-3
    ) -> None:
        self.backend = backend
        self.exits = exits
        self.settings = settings
        self.stage_s = stage_s
        self.there: set[tuple[int, ...]] = {tuple(range(exits))}
        self.gate: Callable[[], None] = lambda: None
        self.made: list[Deployment] = []
        self.splits = None
        self.swapping = threading.RLock()

    def prepared(self, exits: Sequence[int], splits: ModelSplits | None = None) -> bool:
        return tuple(exits) in self.there

    def prepare(self, exits: Sequence[int], splits: ModelSplits | None = None) -> None:
        self.gate()
        self.there.add(tuple(exits))

    def cancel(self) -> None:
        pass

    def make(self, policy: ExitPolicy, before: Deployment | None = None) -> Deployment:
        active = {a.exit: a.threshold for a in policy.active}
        plan = fake_plan([NEVER] * self.exits, active, Mode.RELEASE)
        self.made.append(
            Deployment(
                number=len(self.made),
                policy=policy,
                pipeline=Pipeline(self.backend, plan),
                points=fake_points(plan, self.settings, self.stage_s),
                batch_size=self.settings.max_batch_size,
            )
        )
        return self.made[-1]


class ScriptedController:
    """Does as the test says, and keeps what it is shown."""

    name = "scripted"

    def __init__(self, policy: ExitPolicy, audit_probability: float = 1.0) -> None:
        self.policy = policy
        self.audit_probability = audit_probability
        self.seen: list[Observations] = []
        self.jobs: list[Job] = []
        self.results: list[Any] = []
        self.events: list[ControlEvent] = []
        self.kept: Mapping[str, Any] | None = None

    def observe(self, seen: Observations) -> None:
        self.seen.append(seen)

    def take_job(self) -> Job | None:
        return self.jobs.pop(0) if self.jobs else None

    def finish(self, job: Job, result: Any) -> None:
        self.results.append((job.number, result))

    def status(self) -> ControlStatus:
        seen = sum(len(observations) for observations in self.seen)
        return ControlStatus(
            controller=self.name,
            max_disagreement=0.01,
            confidence_level=0.95,
            evidence=Evidence.NONE,
            disagreement=None,
            disagreement_upper_bound=1.0,
            audit_probability=self.audit_probability,
            observed=seen,
            audited=0,
            disagreed=0,
            alarms=0,
            tunings=len(self.results),
            adjustments=0,
            state="scripted",
        )

    def take_events(self) -> list[ControlEvent]:
        events, self.events = self.events, []
        return events

    def state(self) -> Mapping[str, Any] | None:
        return self.kept

    def restore(self, state: Mapping[str, Any]) -> None:
        if "policy" not in state:
            raise ValueError("no policy in it")
        self.kept = state


def policy_of(version: int, **thresholds: float) -> ExitPolicy:
    """A policy of exits by name: ``policy_of(2, e0=0.9, e1=NEVER)``."""
    active = sorted((int(name[1:]), value) for name, value in thresholds.items())
    return ExitPolicy(
        version=version,
        active=tuple(ActiveExit(exit=index, threshold=value) for index, value in active),
    )


def fake_points(plan: Plan, settings: ModelOptions, stage_s: float) -> OperatingPoints:
    """A stage takes ``stage_s`` for a sample and a tenth of it for each further one.

    An exit forced at stage k is taken to agree in (k + 1) of (stages) cases.
    """
    stages, size = len(plan.stages), settings.max_batch_size
    latencies = Latencies([[0.0, *(stage_s * (1 + 0.1 * n) for n in range(size))]] * stages)
    points = tuple(
        OperatingPoint(
            deepest=s.index,
            exit=s.answered_by,
            agreement=(s.index + 1) / stages,
        )
        for s in plan.stages
        if s.answer is not None
    )
    return OperatingPoints(
        points=points if settings.forced_exits else points[-1:], latencies=latencies
    )


def fake_model(
    backend: Any,
    thresholds: Sequence[float] = (0.9,),
    *,
    classes: int = 2,
    streams: int = 1,
    max_delay_s: float = 0.0,
    stage_s: float = 1e-3,
    parallel: ParallelLimit | None = None,
    placement: Placement | None = None,
    controller: ScriptedController | None = None,
    state_path: Path | None = None,
    guard: InputGuard | None = None,
    state_bundle: Path | None = None,
    window: EvidenceWindow | None = None,
    release: bool = True,
    **options: Any,
) -> ServedModel:
    """A served model that answers by script [n, stages, classes], float32; see fake_points.

    With a controller it is observed, and starts under the controller's policy.
    """
    settings = ModelOptions(**{"max_batch_size": 8, **options})
    control = None
    if controller is None:
        plan = fake_plan(thresholds)
        deployment = Deployment(
            number=0,
            policy=ExitPolicy(version=7, active=()),
            pipeline=Pipeline(backend, plan),
            points=fake_points(plan, settings, stage_s),
            batch_size=settings.max_batch_size,
            placement=placement,
        )
    else:
        deployments = FakeDeployments(backend, len(thresholds), settings, stage_s)
        deployment = deployments.make(controller.policy)
        recorder = Recorder(len(thresholds), seed=0, window=window, release=release)
        recorder.audit_probability = controller.audit_probability
        control = ModelControl(
            controller=controller,
            recorder=recorder,
            deployments=deployments,
            fingerprint={},
            state_file=None if state_path is None else StateFile(state_path),
        )
    stages = len(thresholds) + 1
    return ServedModel(
        inputs=(TensorSpec(name=SCRIPT, dtype="float32", shape=("batch", stages, classes)),),
        outputs=(TensorSpec(name="answer", dtype="float32", shape=("batch", classes)),),
        answer=Answer(output="answer", classes=classes, form="probabilities"),
        mode=Mode.LEAVE if controller is None else Mode.RELEASE,
        options=settings,
        deployment=deployment,
        scheduler=make_scheduler(
            settings.scheduling,
            deployment.points,
            max_batch_size=settings.max_batch_size,
            max_delay_s=max_delay_s,
            max_queue=settings.max_queue_samples,
            streams=streams,
            parallel=parallel,
            plan=deployment.number,
            placement=placement,
        ),
        good_inputs={SCRIPT: np.zeros((1, stages, classes), np.float32)},
        control=control,
        guard=guard,
        bundle=FAKE_HASH,
        exits=len(thresholds),
        state_bundle=state_bundle,
    )


def script(*rows: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A script from the probability of class 0 at each stage, a row a sample."""
    first = np.array(rows, np.float32)
    return np.stack([first, 1 - first], axis=-1)
