"""Events on the status page's time axis: differences between two snapshots of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from offramp.engine.learning.lifecycle import Phase
from offramp.engine.requests.statistics import ModelStatistics


class ChangeKind(StrEnum):
    """Kinds of events on the status page."""

    VERSION = "version"
    """The model was replaced, or unloaded and loaded again."""
    READINESS = "readiness"
    DRIFT = "drift"
    """The controller raised a drift alarm."""
    POLICY = "policy"
    """Other thresholds or exits became active."""
    STREAMS = "streams"
    """Streams or workers left service or returned to it."""
    LEARNING = "learning"
    """Learning entered another phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChange:
    """A difference between two snapshots that matters to an operator."""

    kind: ChangeKind
    text: str
    """Plain description, without a full stop."""
    warning: bool = False
    """True if something went wrong."""


def was_loaded_again(before: ModelStatistics, now: ModelStatistics) -> bool:
    """Return whether a model was unloaded and loaded under the same name, with new counters."""
    if now.version == before.version:
        return now.uptime_s < before.uptime_s
    return now.version < before.version


def changes_between(before: ModelStatistics, now: ModelStatistics) -> Iterator[ModelChange]:
    """Yield the changes between two snapshots of a model.

    If the model was replaced, only the replacement is reported, because controller and policy then
    count from the start again.
    """
    if was_loaded_again(before, now):
        yield ModelChange(kind=ChangeKind.VERSION, text="the model was unloaded and loaded again")
    elif now.version != before.version:
        yield ModelChange(
            kind=ChangeKind.VERSION,
            text=f"version {now.version} replaced version {before.version}",
        )
    else:
        yield from _drift(before, now)
        if now.policy_version != before.policy_version:
            text = f"exit policy {now.policy_version} replaced exit policy {before.policy_version}"
            yield ModelChange(kind=ChangeKind.POLICY, text=text)
    yield from _service(before, now)
    yield from _learning(before, now)


def readiness_change(*, before: bool, now: bool) -> Iterator[ModelChange]:
    """Yield the change of a model's readiness, if any."""
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
