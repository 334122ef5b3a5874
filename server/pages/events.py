"""Events on the status page's time axis: the differences between two snapshots of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from offramp.engine.learning.lifecycle import Phase
from offramp.engine.requests.statistics import ModelStatistics


class ChangeKind(StrEnum):
    """The kinds of events."""

    VERSION = "version"
    """The model was replaced, or unloaded and loaded again."""
    READINESS = "readiness"
    DRIFT = "drift"
    """A drift alarm of the controller."""
    POLICY = "policy"
    """Other thresholds or exits are active."""
    STREAMS = "streams"
    """Streams or workers left service, or came back."""
    LEARNING = "learning"
    """Learning exits entered another phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChange:
    """A difference between two snapshots that an operator wants to see."""

    kind: ChangeKind
    text: str
    """In plain words, without a full stop."""
    warning: bool = False
    """Whether something went wrong."""


def was_loaded_again(before: ModelStatistics, now: ModelStatistics) -> bool:
    """Whether a model was unloaded and loaded under the same name, so that it counts from 0."""
    if now.version == before.version:
        return now.uptime_s < before.uptime_s
    return now.version < before.version


def changes_between(before: ModelStatistics, now: ModelStatistics) -> Iterator[ModelChange]:
    """Yield what changed between two snapshots of a model.

    A controller and a policy count from the start again where the model was replaced; so only the
    replacement is reported then.
    """
    if was_loaded_again(before, now):
        yield ModelChange(kind=ChangeKind.VERSION, text="the model was unloaded and loaded again")
    elif now.version != before.version:
        yield ModelChange(
            kind=ChangeKind.VERSION,
            text=f"version {now.version} serves in the place of version {before.version}",
        )
    else:
        yield from _drift(before, now)
        if now.policy_version != before.policy_version:
            text = f"exit policy {now.policy_version} in the place of {before.policy_version}"
            yield ModelChange(kind=ChangeKind.POLICY, text=text)
    yield from _service(before, now)
    yield from _learning(before, now)


def readiness_change(*, before: bool, now: bool) -> Iterator[ModelChange]:
    """Yield the change of a model's readiness, if there was one."""
    if before != now:
        text = "the model is ready" if now else "the model is not ready"
        yield ModelChange(kind=ChangeKind.READINESS, text=text, warning=not now)


def _drift(before: ModelStatistics, now: ModelStatistics) -> Iterator[ModelChange]:
    if before.control is None or now.control is None:
        return
    alarms = now.control.alarms - before.control.alarms
    if alarms > 0:
        counted = "drift alarm" if alarms == 1 else f"{alarms} drift alarms"
        text = f"{counted}; the controller is now {now.control.state}"
        yield ModelChange(kind=ChangeKind.DRIFT, text=text, warning=True)


def _service(before: ModelStatistics, now: ModelStatistics) -> Iterator[ModelChange]:
    for what, was, is_, total in (
        ("streams", before.streams_in_service, now.streams_in_service, now.streams),
        ("workers", before.workers_in_service, now.workers_in_service, now.workers),
    ):
        if was != is_:
            text = f"{is_} of {total} {what} in service, {was} before"
            yield ModelChange(kind=ChangeKind.STREAMS, text=text, warning=is_ < was)


def _learning(before: ModelStatistics, now: ModelStatistics) -> Iterator[ModelChange]:
    if now.learning is None:
        return
    if before.learning is None or before.learning.phase != now.learning.phase:
        wrong = now.learning.phase in (Phase.WAITING, Phase.STOPPED)
        text = f"learning: {now.learning.text}"
        yield ModelChange(kind=ChangeKind.LEARNING, text=text, warning=wrong)
