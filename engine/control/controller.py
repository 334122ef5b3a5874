"""The interface of a controller, which watches a model serve and changes its exit policy.

Sans I/O: the driver of a controller feeds it observations, runs the jobs that it asks for
wherever that disturbs nobody, and puts :attr:`Controller.policy` in force whenever its version
has changed. The executor, the simulator and the tests drive the same objects.

    while serving:
        controller.observe(observations)
        if (job := controller.take_job()) is not None:
            controller.finish(job, job.run())        # elsewhere, while observing goes on
        if controller.policy.version != in_force.version:
            in_force = controller.policy
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from offramp.bundle import ExitPolicy, Manifest, Profile
from offramp.certify import Observations
from offramp.engine.control.costs import CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A pure computation that takes too long for the thread that observes (a tuning, say).

    It may run in another process: the function is one of a module, and everything pickles.
    """

    number: int
    """Unique for a controller; :meth:`Controller.finish` tells stale ones by it."""
    purpose: str
    """For logs: ``tuning after the drift alarm``."""
    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def run(self) -> Any:
        """Compute."""
        return self.function(*self.arguments)


class Evidence(StrEnum):
    """What stands behind the policy in force."""

    CERTIFIED = "certified"
    """What was observed while serving: disagreement is within the constraint, with confidence."""
    CALIBRATED = "calibrated"
    """The calibration data; what was observed since neither confirms nor contradicts it."""
    CONSERVATIVE = "cautious"
    """Nothing is needed: no exit answers."""
    SUSPICIOUS = "suspicious"
    """More than the constraint allows disagreed of late, or under the policy on the whole; too few
    audits yet for an alarm, and too many disagreements to call it certified or calibrated."""
    NONE = "none"
    """Nothing: the policy was tuned, and is not covered by any statement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlStatus:
    """A snapshot for statistics, metrics and status page."""

    controller: str
    """Name: ``certified``, ``apparate``, ``static`` …"""
    max_disagreement: float
    """The constraint."""
    confidence_level: float
    """1 − α of certificate and upper bound."""
    evidence: Evidence
    disagreement: float | None
    """Of the policy in force, the mean over its samples, those audited counted by the inverse of
    their probability; the certified controller says ``None`` until there are so many samples that
    the rarest audit, had it disagreed alone, is within the constraint."""
    disagreement_upper_bound: float
    """Not above it with ``confidence_level``, at any time, for the policy in force; 1 at first."""
    audit_probability: float
    observed: int
    """Samples seen since the start."""
    audited: int
    """Of those answered early, the ones that ran to the end."""
    disagreed: int
    """Of those audited, the ones answered unlike the source model."""
    alarms: int
    """Drift alarms."""
    tunings: int
    """Threshold tunings finished."""
    adjustments: int
    """Changes of the set of exits in use."""
    state: str
    """In a few words, for people: ``steady``, ``recovering: 312 of about 480 samples``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlEvent:
    """Something that an operator wants to read in the log."""

    kind: str
    """``alarm``, ``suspicion``, ``certified``, ``policy``, ``tuning``, ``exits``."""
    text: str
    warning: bool = False


class Controller(Protocol):
    """Decides which policy is in force, and how often answers are audited."""

    @property
    def name(self) -> str:
        """As on the command line."""

    @property
    def policy(self) -> ExitPolicy:
        """What shall be in force: exits in use with thresholds (``NEVER``: shadow mode)."""

    @property
    def audit_probability(self) -> float:
        """For samples that are started from now on, in (0, 1]; audit mode only."""

    def observe(self, seen: Observations) -> None:
        """Take note of samples, in the order in which they were started."""

    def take_job(self) -> Job | None:
        """What to compute elsewhere, once; at most one is out at a time."""

    def finish(self, job: Job, result: Any) -> None:
        """Take the result of a job; ``observe`` may have been called since it was taken.

        ``None`` says that the job failed; whatever was tried may be tried again later.
        """

    def status(self) -> ControlStatus:
        """A snapshot; cheap."""

    def take_events(self) -> list[ControlEvent]:
        """What happened since the last call."""

    def state(self) -> Mapping[str, Any] | None:
        """What to keep over a restart: JSON values and numpy arrays; ``None`` for nothing."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a kept state; ValueError if it does not fit this controller."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ControlTask:
    """The model that an extension's controller is made for, and the limits it works within."""

    manifest: Manifest
    profile: Profile
    """As measured on this machine."""
    policy: ExitPolicy
    """The bundle's policy, cut down to the limits below where it exceeds them."""
    batch_size: int
    """Most rows of a batch."""
    costs: CostModel
    """At that batch size."""
    max_overhead: float
    """Ramp budget: how much later the model's end may come for the exits in use, as a share."""
    max_disagreement: float
    """The constraint."""
    confidence_level: float
    audit_probability: float
    """Share of the early answers after which samples run on; 1 where all of them do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerKind:
    """A controller that an extension adds; ``EXTENSION`` of its module ``for_control`` has them.

    It tunes thresholds of its own, so it suits no model that must keep to compiled ones.
    """

    name: str
    """As on the command line."""
    description: str
    """For the help."""
    make: Callable[[ControlTask], Controller]
    runs_on: bool = False
    """Whether every sample runs to the end in audit mode too. Exits save no compute then, so that
    the ramp budget is that of release mode, and all answers are audited."""
