"""The interface of a controller, which watches a model serve and changes its exit policy.

Sans I/O: the driver of a controller passes it observations, runs its jobs where they disturb no
serving, and activates :attr:`Controller.policy` whenever its version has changed. The executor, the
simulator and the tests drive the same objects.

    while serving:
        controller.observe(observations)
        if (job := controller.take_job()) is not None:
            controller.finish(job, job.run())        # elsewhere, while observing goes on
        if controller.policy.version != active.version:
            active = controller.policy
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
    """A pure computation that takes too long for the observing thread, for example a tuning.

    It may run in another process: the function is at the top of a module, and the function and its
    arguments can be pickled.
    """

    number: int
    """Number of the job, unique within a controller; :meth:`Controller.finish` detects stale jobs
    by it."""
    purpose: str
    """For logs: ``tuning after the drift alarm``."""
    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def run(self) -> Any:
        """Run the computation and return its result."""
        return self.function(*self.arguments)


class Evidence(StrEnum):
    """Kind of evidence for the active policy."""

    CERTIFIED = "certified"
    """Evidence from observations while serving: disagreement is within the constraint, with the
    required confidence."""
    CALIBRATED = "calibrated"
    """Evidence from calibration data; later observations neither confirm nor contradict it."""
    CONSERVATIVE = "cautious"
    """The policy needs no evidence: no exit answers."""
    SUSPICIOUS = "suspicious"
    """More samples than the constraint allows disagreed recently, or under the policy overall.
    There were too few audits for an alarm, but too many disagreements to call the policy certified
    or calibrated."""
    NONE = "none"
    """The policy was tuned without evidence, and no statement covers it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlStatus:
    """A snapshot for statistics, metrics and status page."""

    controller: str
    """Name: ``certified``, ``apparate``, ``static`` …"""
    max_disagreement: float
    """Largest share of answers that may differ from the unmodified model's."""
    confidence_level: float
    """1 − α of certificate and upper bound."""
    evidence: Evidence
    disagreement: float | None
    """Estimate for the active policy: the mean over its samples, with audits weighted by the
    inverse of their probability. The certified controller reports ``None`` until there are so many
    samples that a single disagreement of the rarest audit would be within the constraint."""
    disagreement_upper_bound: float
    """Upper bound for the active policy, valid at any time with ``confidence_level``; 1 at
    first."""
    audit_probability: float
    observed: int
    """Samples seen since the start."""
    audited: int
    """Samples that were answered early and still ran to the end."""
    disagreed: int
    """Audited samples whose early answer differs from the source model's."""
    alarms: int
    """Number of drift alarms since the controller began."""
    tunings: int
    """Threshold tunings finished."""
    adjustments: int
    """Changes of the set of exits in use."""
    state: str
    """For people, such as ``steady``, ``recovering: 312 samples so far, at least 480 needed``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlEvent:
    """An event for the operator's log."""

    kind: str
    """``alarm``, ``suspicion``, ``certified``, ``policy``, ``tuning``, ``exits``."""
    text: str
    warning: bool = False


class Controller(Protocol):
    """Decides which policy is active, and how often answers are audited."""

    @property
    def name(self) -> str:
        """Name on the command line."""

    @property
    def policy(self) -> ExitPolicy:
        """Policy that should be active: exits in use with thresholds (``NEVER``: shadow mode)."""

    @property
    def audit_probability(self) -> float:
        """Audit probability of samples started from now on, in (0, 1]; audit mode only."""

    def observe(self, seen: Observations) -> None:
        """Add samples, in the order in which they were started."""

    def take_job(self) -> Job | None:
        """Return the next computation to run elsewhere, or ``None``; at most one runs at a time."""

    def finish(self, job: Job, result: Any) -> None:
        """Take the result of a job; ``observe`` may have been called since :meth:`take_job`.

        ``None`` means that the job failed; the controller may try the same again later.
        """

    def status(self) -> ControlStatus:
        """Return a snapshot of counts and bounds; takes little time."""

    def take_events(self) -> list[ControlEvent]:
        """Return the events since the last call."""

    def state(self) -> Mapping[str, Any] | None:
        """Return the state to keep across a restart: JSON values and numpy arrays; or ``None``."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; ValueError if it does not fit this controller."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ControlTask:
    """The model that an extension's controller is made for, and the limits for it."""

    manifest: Manifest
    profile: Profile
    """Profile of the bundle, as measured on this machine."""
    policy: ExitPolicy
    """The bundle's policy, reduced to the limits in this class where it exceeds them."""
    batch_size: int
    """Largest number of rows in a batch."""
    costs: CostModel
    """Cost model at that batch size."""
    max_overhead: float
    """Ramp budget: largest delay of the model's end by the exits in use, as a share."""
    max_disagreement: float
    """Largest share of answers that may differ from the unmodified model's."""
    confidence_level: float
    audit_probability: float
    """Share of the early answers after which samples run on to the end; 1 if all of them do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerKind:
    """A controller of an extension, listed by ``EXTENSION`` of the module ``for_control``.

    It tunes its own thresholds, so it does not fit a model that must keep the compiled ones.
    """

    name: str
    """Name on the command line."""
    description: str
    """Text for the command line's help."""
    make: Callable[[ControlTask], Controller]
    runs_on: bool = False
    """True if every sample runs to the end even in audit mode. Exits then save no compute, so the
    ramp budget is that of release mode, and all answers are audited."""
