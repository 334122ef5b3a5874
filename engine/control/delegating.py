"""A controller around another one: passes everything on, but for what a subclass does itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from offramp.bundle import ExitPolicy
from offramp.certify.observations import Observations
from offramp.engine.control.controller import Controller, ControlStatus, Event, Job


class Considering(Controller, Protocol):
    """A controller that can try other exits."""

    def consider(self, active: Sequence[int]) -> bool:
        """Try a set of exits, unless this is no time for it; says whether it will."""
        ...


_Inner = TypeVar("_Inner", bound=Considering)


class DelegatingController(Generic[_Inner]):
    """See :class:`.controller.Controller`; ``_inner`` is owned by this one."""

    def __init__(self, inner: _Inner) -> None:
        """Wrap a controller."""
        self._inner = inner

    @property
    def name(self) -> str:
        """The inner one's, like all that follows."""
        return self._inner.name

    @property
    def policy(self) -> ExitPolicy:
        """What shall be in force."""
        return self._inner.policy

    @property
    def audit_probability(self) -> float:
        """For samples that are started from now on."""
        return self._inner.audit_probability

    def observe(self, seen: Observations) -> None:
        """Take note of samples."""
        self._inner.observe(seen)

    def consider(self, active: Sequence[int]) -> bool:
        """Try a set of exits."""
        return self._inner.consider(active)

    def take_job(self) -> Job | None:
        """What to compute elsewhere."""
        return self._inner.take_job()

    def finish(self, job: Job, result: Any) -> None:
        """Take the result of a job."""
        self._inner.finish(job, result)

    def status(self) -> ControlStatus:
        """A snapshot."""
        return self._inner.status()

    def take_events(self) -> list[Event]:
        """What happened since the last call."""
        return self._inner.take_events()

    def state(self) -> Mapping[str, Any] | None:
        """What to keep over a restart."""
        return self._inner.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a kept state."""
        self._inner.restore(state)
