"""The batch profile: shares of rows that continue after each exit, by window (E3 3.1).

The paper's series is the batch size after each exit. Here it is divided by the size of the batch
that entered the model: this share of rows does not depend on the batch size.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offramp.bundle.schema.errors import BundleSchemaError
from offramp.bundle.schema.serde import check_numbers, from_plain, to_plain
from offramp.engine.requests.departures import Departures

WINDOW_S: Final = 120.0
"""Length of a window, in seconds: the paper's two minutes (3.1)."""
KEPT: Final = 720
"""Number of windows that are kept: one day by default."""
MOST_PROFILE_BYTES: Final = 2**24
"""Largest size of a file, in bytes; a day of windows with thousands of exits fits."""
PROFILE_SCHEMA: Final = 1
_MOST_ROWS: Final = 2**53
"""Largest count that a float64 holds exactly."""


class BatchProfileError(ValueError):
    """A batch profile cannot be read; the message is one line with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileWindow:
    """Rows that exits decided on in one window of time."""

    start_s: float
    """Start of the window by the observer's clock; servers use seconds since 1970."""
    decided: tuple[int, ...]
    """[exits]: number of rows that each exit decided on; 0 for exits that were off."""
    went_on: tuple[int, ...]
    """[exits]: number of rows that did not leave at the exit."""

    def __post_init__(self) -> None:
        check_numbers(self, "start_s")
        check_numbers(self, "decided", "went_on", least=0, most=_MOST_ROWS)
        if len(self.decided) != len(self.went_on):
            raise ValueError(
                f"went_on has {len(self.went_on)} exits, expected {len(self.decided)} as decided "
                "has"
            )
        if any(on > all_ for on, all_ in zip(self.went_on, self.decided, strict=True)):
            raise ValueError(f"went_on {self.went_on} must be at most decided {self.decided}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProfile:
    """Windows in order of time; windows without any decision are omitted."""

    window_s: float
    exits: int
    windows: tuple[ProfileWindow, ...] = ()

    def __post_init__(self) -> None:
        check_numbers(self, "window_s", above=0)
        check_numbers(self, "exits", least=0)
        widths = {len(window.decided) for window in self.windows} - {self.exits}
        if widths:
            raise ValueError(f"the windows have {sorted(widths)} exits, expected {self.exits}")

    def describe(self) -> str:
        """Describe the number of windows and their time span."""
        count = len(self.windows)
        text = f"{count} {'window' if count == 1 else 'windows'} of {self.window_s:g} s"
        if not count:
            return text
        return f"{text}, {_span(self.windows[0].start_s, self.windows[-1].start_s + self.window_s)}"

    def going_on(self) -> NDArray[np.float64]:
        """Return the share of the rows entering the model that continued after each exit.

        float64[windows, exits]; NaN for exits that were off. Each exit has a share of decided rows
        that did not leave. The value of an exit is the product of these shares, over all exits up
        to this exit that were on. Rows that leave at one exit are assumed to leave at any later
        exit, too.
        """
        decided = np.array([w.decided for w in self.windows], np.float64).reshape(-1, self.exits)
        went_on = np.array([w.went_on for w in self.windows], np.float64).reshape(-1, self.exits)
        known = decided > 0
        each = np.where(known, went_on / np.where(known, decided, 1.0), 1.0)
        return np.where(known, np.cumprod(each, axis=1), np.nan)


def _span(start_s: float, end_s: float) -> str:
    try:
        start, end = (datetime.fromtimestamp(second, UTC) for second in (start_s, end_s))
    except (OverflowError, ValueError, OSError):  # dates outside of the calendar's range
        return f"second {start_s:g} to {end_s:g}"
    until = f"{end:%H:%M}" if end.date() == start.date() else f"{end:%Y-%m-%d %H:%M}"
    return f"{start:%Y-%m-%d %H:%M} to {until} UTC"


class BatchProfileRecorder:
    """Keeps the last windows of counts; the caller ends each window."""

    def __init__(
        self,
        exits: int,
        *,
        window_s: float = WINDOW_S,
        kept: int = KEPT,
        past: BatchProfile | None = None,
    ) -> None:
        if past is not None and (past.exits, past.window_s) != (exits, window_s):
            raise BatchProfileError(
                f"past windows have {past.exits} exits and last {past.window_s:g} s, expected "
                f"{exits} and {window_s:g}; start without them"
            )
        self._exits, self._window_s, self._kept = exits, window_s, kept
        self._windows = list(past.windows if past is not None else ())[-kept:]

    def add(self, start_s: float, seen: Iterable[Departures]) -> bool:
        """Add a finished window; return whether an exit decided anything in it.

        ``seen`` has the window's counts for each set of exits that was in use. A window without
        decisions is not kept.
        """
        decided, went_on = [0] * self._exits, [0] * self._exits
        for counted in seen:
            for exit_, all_, on in zip(
                counted.exits, counted.decided(), counted.went_on(), strict=True
            ):
                decided[exit_] += all_
                went_on[exit_] += on
        if not any(decided):
            return False
        self._windows.append(
            ProfileWindow(start_s=start_s, decided=tuple(decided), went_on=tuple(went_on))
        )
        del self._windows[: -self._kept]
        return True

    def profile(self) -> BatchProfile:
        """Return the finished windows that were recorded."""
        return BatchProfile(
            window_s=self._window_s, exits=self._exits, windows=tuple(self._windows)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedProfile:
    """A batch profile and the bundle that it belongs to: the content of a file."""

    bundle: str
    """SHA-256 of the bundle's manifest; empty if unknown."""
    profile: BatchProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileStatus:
    """The last recorded window, with the forecast made for it."""

    window_s: float
    windows: int
    """Number of finished windows that are kept."""
    going_on: tuple[float | None, ...] = ()
    """[exits]: share of the last window's rows that continued after each exit; ``None`` for exits
    that were off. Empty before the first window."""
    forecast: tuple[float, ...] | None = None
    """[exits]: shares that were forecast for the last window; ``None`` without a forecast."""
    method: str = ""
    """Method that forecast the shares of the last window."""

    def shares(self) -> Iterator[tuple[int, float, float | None]]:
        """Yield each exit that was on in that window, with its observed and its forecast share."""
        for exit_, share in enumerate(self.going_on):
            if share is not None:
                yield exit_, share, None if self.forecast is None else self.forecast[exit_]


def dump_batch_profile(profile: BatchProfile, bundle: str = "") -> str:
    """Write a batch profile as JSON, with the hash of its bundle."""
    document = {"schema": PROFILE_SCHEMA, "bundle": bundle, "batch_profile": to_plain(profile)}
    return json.dumps(document) + "\n"


def parse_recorded(text: str, where: str = "batch profile") -> RecordedProfile:
    """Read a batch profile and its bundle's hash from JSON; BatchProfileError with the reason."""
    remedy = "remove it, and a new one is recorded"
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BatchProfileError(f"{where}: is not JSON: {error!s:.200}; {remedy}") from error
    if not isinstance(document, dict) or document.get("schema") != PROFILE_SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else document
        raise BatchProfileError(
            f"{where}: schema {found!r:.80}, expected {PROFILE_SCHEMA}; {remedy}"
        )
    bundle = document.get("bundle", "")
    if not isinstance(bundle, str):
        raise BatchProfileError(f"{where}: bundle {bundle!r:.80}, expected a hash; {remedy}")
    try:
        profile = from_plain(BatchProfile, document.get("batch_profile"), where)
    except BundleSchemaError as error:
        raise BatchProfileError(f"{str(error).partition(';')[0]}; {remedy}") from error
    return RecordedProfile(bundle=bundle, profile=profile)
