"""The batch profile on the status page: what went on behind each exit, and what was forecast."""

from __future__ import annotations

from dataclasses import dataclass

from offramp.cluster.planning.batch_profile import ProfileStatus
from offramp.engine.stages.plan import exit_label


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileView:
    """The batch profile's last window."""

    heading: str
    windows: str
    """How many are kept, and of what the forecast was made."""
    exits: tuple[tuple[str, float, float | None], ...]
    """By exit: the share of rows that went on, 0 to 1, and what had been forecast."""


def view_profile(profile: ProfileStatus | None) -> ProfileView | None:
    """Put a batch profile into words and figures; ``None`` where there is no window."""
    if profile is None or not profile.windows:
        return None
    window = f"{profile.window_s:g} s"
    kept = f"{profile.windows:,} {'window is' if profile.windows == 1 else 'windows are'} kept"
    if not profile.going_on:
        return ProfileView(
            heading=f"Rows that go on behind each exit, by windows of {window}",
            windows=f"{kept} from before; none is over since the start.",
            exits=(),
        )
    forecast = "nothing was forecast for this one"
    if profile.forecast is not None:
        forecast = f"forecast before it began by {profile.method}, conservatively"
    return ProfileView(
        heading=f"Rows that went on behind each exit in the last window of {window}",
        windows=f"{kept}; {forecast}.",
        exits=tuple((exit_label(k), share, told) for k, share, told in profile.shares()),
    )
