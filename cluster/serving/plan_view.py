"""The plan and the batch profile of a split model, as texts for the status page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from offramp.cluster.planning.batch_profile import ProfileStatus
from offramp.cluster.serving.plan_status import PlanStatus, SplitStatus
from offramp.engine.stages.plan import exit_label


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitView:
    """A row of the table of splits."""

    segments: str
    devices: str
    in_service: str
    lacking: bool
    """``True`` if one of its workers is out of service, or gets less work."""
    slow: str
    """Number of workers that get less work than others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """The active plan of a model, as the status page shows it."""

    splits: tuple[SplitView, ...]
    predicted: str
    exits: tuple[tuple[str, float | None, float], ...]
    """Each exit, with the share of rows that continue in the current window, 0 to 1, and the share
    that was forecast for the plan."""
    state: str
    """Description of the current and the last change of plans, with the reasons."""


def view_plan(plan: PlanStatus | None, ago: Callable[[float], str]) -> PlanView | None:
    """Describe a plan in words; ``ago`` formats seconds. Returns ``None`` without a plan."""
    if plan is None:
        return None
    spare = f"; {plan.spare} spare, which help where they can" if plan.spare else ""
    return PlanView(
        splits=tuple(map(_view_split, plan.splits)),
        predicted=f"In batches of {plan.batch_size}. Predicted under the forecast, without queues: "
        f"{plan.rate_rps:,.1f} rows/s, {1e3 * plan.latency_s:,.2f} ms at worst{spare}.",
        exits=tuple((exit_label(e), seen, share) for e, share, seen in plan.shares),
        state=_describe_changes(plan, ago),
    )


def _view_split(split: SplitStatus) -> SplitView:
    slow = [f"{split.slow} get less work"] if split.slow else []
    slow += [f"{split.excluded} excluded"] if split.excluded else []
    return SplitView(
        segments=f"{split.first_segment} to {split.last_segment}",
        devices=" and ".join(f"{count} × {kind}" for kind, count in split.devices),
        in_service=f"{split.in_service} of {split.workers}",
        lacking=split.in_service < split.workers,
        slow=", ".join(slow) or "–",
    )


def _describe_changes(plan: PlanStatus, ago: Callable[[float], str]) -> str:
    changes = "change of plans" if plan.changes == 1 else "changes of plans"
    text = f"{plan.changes:,} {changes}"
    if plan.changed_s is not None:
        text += f", the last {ago(plan.changed_s)} ago ({plan.changed_for})"
    if plan.given_up:
        text += f"; {plan.given_up:,} given up"
    now = "Workers change to another plan now" if plan.changing else "When last looked at"
    return f"{text}. {now}: {plan.reason}."


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileView:
    """The batch profile's last window."""

    heading: str
    windows: str
    """Number of kept windows, and the method of the forecast."""
    exits: tuple[tuple[str, float, float | None], ...]
    """Each exit, with the share of rows that continued, 0 to 1, and the forecast share."""


def view_profile(profile: ProfileStatus | None) -> ProfileView | None:
    """Describe a batch profile; ``None`` if there is no window."""
    if profile is None or not profile.windows:
        return None
    window = f"{profile.window_s:g} s"
    kept = f"{profile.windows:,} {'window is' if profile.windows == 1 else 'windows are'} kept"
    if not profile.going_on:
        return ProfileView(
            heading=f"Rows that continue after each exit, by windows of {window}",
            windows=f"{kept} from before; none is over since the start.",
            exits=(),
        )
    forecast = "nothing was forecast for this one"
    if profile.forecast is not None:
        forecast = f"forecast before it began by {profile.method}, conservatively"
    return ProfileView(
        heading=f"Rows that continued after each exit in the last window of {window}",
        windows=f"{kept}; {forecast}.",
        exits=tuple((exit_label(k), share, told) for k, share, told in profile.shares()),
    )
