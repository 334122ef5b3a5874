"""The state of learning in words, for the log and the status page."""

from __future__ import annotations

import time

from offramp.bundle import Bundle
from offramp.engine.learning.lifecycle import LifeCycle, Phase


def describe_state(
    life: LifeCycle,
    *,
    recorded: str,
    progress: str,
    certified: str,
    since_unix_s: float,
    retry_unix_s: float,
    has_exits: bool,
) -> str:
    """Describe the phase of ``life`` in words; the other arguments appear in some phases' texts."""
    going_on = "the exits stay unchanged" if has_exits else "the unmodified model stays"
    return {
        Phase.RECORDING: recorded,
        Phase.COMPILING: f"compiling, {progress}" if progress else "compiling",
        Phase.WAITING: f"compiling failed: {life.reason}; again at {clock_time(retry_unix_s)}",
        Phase.SWITCHING: f"{certified}; loading",
        Phase.SERVING: f"{certified}; serving with exits since {clock_time(since_unix_s)}",
        Phase.RELEARNING: f"exits no longer answer requests, learning again: {recorded}",
        Phase.NOTHING_PAYS: f"no exit pays: {life.reason}; {going_on}",
        Phase.STOPPED: f"stopped: {life.reason}",
    }[life.phase]


def describe_promise(bundle: Bundle) -> str:
    """Describe a promise: ``certified: disagreement ≤ 1 % at 95 %, predicted to save 63 %``."""
    promise = bundle.policy.promise
    if promise is None:
        return "not certified"
    return (
        f"certified: disagreement ≤ {100 * promise.max_disagreement:g} % at "
        f"{100 * promise.confidence_level:g} %, predicted to save "
        f"{100 * promise.predicted_savings:.0f} %"
    )


def why_idle(bundle: Bundle) -> str:
    """Return why no exit of a bundle is in use."""
    reason = bundle.manifest.idle_reason or "none saves time within the promise"
    return f"{reason} ({bundle.path.name}/report.html in the learn folder has more)"


def clock_time(unix_s: float) -> str:
    """Format a time: ``14:02``, with the date if it is not today's."""
    then, today = time.localtime(unix_s), time.localtime()
    return time.strftime("%H:%M" if then[:3] == today[:3] else "%Y-%m-%d %H:%M", then)
