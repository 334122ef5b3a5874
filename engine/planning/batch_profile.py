"""The batch profile: how many rows go on behind each exit, as a series of windows (E3 3.1).

The paper's series is the batch size at each ramp; relative to the batch that entered, it is the
share of rows that go on, which does not depend on the batch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offramp.bundle.errors import BundleSchemaError
from offramp.bundle.serde import check_numbers, from_plain, to_plain

WINDOW_S: Final = 120.0
"""The paper's two minutes (3.1)."""
KEPT: Final = 720
"""Windows that are remembered: a day."""
PROFILE_SCHEMA: Final = 1


class BatchProfileError(ValueError):
    """A batch profile that cannot be read; one line that says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileWindow:
    """The rows that exits decided about in one window of time."""

    start_s: float
    """By the clock of whoever observed."""
    decided: tuple[int, ...]
    """[exits]: rows that each exit decided about; 0 where it was off."""
    went_on: tuple[int, ...]
    """[exits]: those of them that did not leave there."""

    def __post_init__(self) -> None:
        check_numbers(self, "start_s")
        check_numbers(self, "decided", "went_on", least=0)
        if len(self.decided) != len(self.went_on):
            raise ValueError(
                f"went_on has {len(self.went_on)} exits, expected {len(self.decided)} as decided"
            )
        if any(on > all_ for on, all_ in zip(self.went_on, self.decided, strict=True)):
            raise ValueError(f"went_on {self.went_on} must be at most decided {self.decided}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProfile:
    """Windows in the order of time; those in which nothing was decided are not there."""

    window_s: float
    exits: int
    windows: tuple[ProfileWindow, ...] = ()

    def __post_init__(self) -> None:
        check_numbers(self, "window_s", above=0)
        check_numbers(self, "exits", least=0)
        widths = {len(window.decided) for window in self.windows} - {self.exits}
        if widths:
            raise ValueError(f"windows of {sorted(widths)} exits, expected {self.exits}")

    def going_on(self) -> NDArray[np.float64]:
        """[windows, exits]: share of the rows that entered the model which went on behind each.

        NaN of exits that were off. A row that leaves at one exit would leave at any later one, so
        it is the product of the shares of the exits that were on.
        """
        decided = np.array([w.decided for w in self.windows], np.float64).reshape(-1, self.exits)
        went_on = np.array([w.went_on for w in self.windows], np.float64).reshape(-1, self.exits)
        known = decided > 0
        each = np.where(known, went_on / np.where(known, decided, 1.0), 1.0)
        return np.where(known, np.cumprod(each, axis=1), np.nan)


class BatchProfileRecorder:
    """Counts rows into windows; the caller serialises the calls, and gives the time."""

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
                f"past windows are of {past.exits} exits and {past.window_s:g} s, expected {exits} "
                f"and {window_s:g}; start without them"
            )
        self._exits, self._window_s, self._kept = exits, window_s, kept
        self._windows = list(past.windows if past is not None else ())[-kept:]
        self._start_s: float | None = None
        self._decided = np.zeros(exits, np.int64)
        self._went_on = np.zeros(exits, np.int64)

    def observe(self, exit_index: int, decided: int, went_on: int, now_s: float) -> None:
        """Take note of how many rows an exit decided about, and how many of them went on."""
        if not 0 <= went_on <= decided:
            raise ValueError(f"{went_on} of {decided} rows went on; expected 0 to {decided}")
        self.advance(now_s)
        if self._start_s is None:
            self._start_s = now_s
        self._decided[exit_index] += decided
        self._went_on[exit_index] += went_on

    def advance(self, now_s: float) -> bool:
        """Close the window if its time is over; whether it was: then a plan may be due."""
        if self._start_s is None or now_s < self._start_s + self._window_s:
            return False
        self._windows.append(
            ProfileWindow(
                start_s=self._start_s,
                decided=tuple(self._decided.tolist()),
                went_on=tuple(self._went_on.tolist()),
            )
        )
        del self._windows[: -self._kept]
        whole_windows = (now_s - self._start_s) // self._window_s
        self._start_s += whole_windows * self._window_s
        self._decided[:] = self._went_on[:] = 0
        if whole_windows > 1:  # a pause: the next window starts with what is observed next
            self._start_s = None
        return True

    def profile(self) -> BatchProfile:
        """Give the windows that are over."""
        return BatchProfile(
            window_s=self._window_s, exits=self._exits, windows=tuple(self._windows)
        )


def dump_batch_profile(profile: BatchProfile) -> str:
    """Write a batch profile as JSON."""
    return json.dumps({"schema": PROFILE_SCHEMA, "batch_profile": to_plain(profile)}) + "\n"


def parse_batch_profile(text: str, where: str = "batch profile") -> BatchProfile:
    """Read a batch profile from JSON; BatchProfileError says what is wrong with it."""
    remedy = "remove it, and it is recorded anew"
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BatchProfileError(f"{where}: is not JSON: {error!s:.200}; {remedy}") from error
    if not isinstance(document, dict) or document.get("schema") != PROFILE_SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else document
        raise BatchProfileError(
            f"{where}: schema {found!r:.80}, expected {PROFILE_SCHEMA}; {remedy}"
        )
    try:
        return from_plain(BatchProfile, document.get("batch_profile"), where)
    except BundleSchemaError as error:
        raise BatchProfileError(f"{str(error).partition(';')[0]}; {remedy}") from error
