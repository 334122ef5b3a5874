"""The loop that records batch profiles while models are served (E3 3.1), beside the streams.

At the end of each window one thread takes what was counted since the last: streams count as they
always do, and wait for nothing. Then it keeps the windows beside the bundle, and forecasts the next
one, as a plan made now would.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from offramp.cluster.planning.batch_profile import (
    WINDOW_S,
    BatchProfile,
    BatchProfileRecorder,
    ProfileStatus,
)
from offramp.cluster.planning.forecasting import Forecaster, ShareForecast, forecast_next
from offramp.cluster.serving.profile_file import ProfileFile
from offramp.engine.models.served_model import ServedModel
from offramp.engine.requests.departures import Departures
from offramp.engine.serving.executor import Executor
from offramp.engine.serving.periodic import PeriodicLoop

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Recorded:
    """The batch profile of one model in the loop."""

    key: str
    """Of the executor."""
    name: str
    """For messages."""
    bundle: str
    """Hash of the bundle's manifest."""
    exits: int
    """Of the bundle."""
    file: ProfileFile | None
    keeps_file: bool = True
    """Whether the file is this model's, if it has one."""
    recorder: BatchProfileRecorder
    seen: dict[tuple[int, ...], Departures] = field(default_factory=dict)
    """Counts at the end of the last window, by the exits in use."""
    kept: bool = True
    """Whether the file has all windows that are over."""
    forecast: ShareForecast | None = None
    """For the window that runs now."""
    status: ProfileStatus


class ProfileLoop(PeriodicLoop):
    """Records the batch profile of every model that has exits to run, until stopped.

    Models are known by the executor's key; that of the first ones is their name. ``wall`` tells the
    time since the epoch, ``clock`` steadily.
    """

    def __init__(
        self,
        executor: Executor,
        models: Mapping[str, ServedModel],
        *,
        window_s: float = WINDOW_S,
        forecaster: Forecaster | None = None,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("batch-profile")
        self._executor = executor
        self._window_s = window_s
        self._forecaster = forecaster
        self._clock = clock
        self._epoch_s = wall() - clock()
        """Windows begin by this: a wall clock that is set must not tear one."""
        self._begin_s = clock()
        self._recorded = {
            name: _make(name, name, model, window_s, _file_of(name, model))
            for name, model in models.items()
            if model.exits
        }
        """By key; changed by whoever has :attr:`_turn` and :attr:`_lock`."""
        self._turn = threading.Lock()
        """Held while a window ends, files are written, or a model is added or removed."""
        self._lock = threading.Lock()
        """Held while counts become a window, and while one is read; not while files are written."""

    def start(self) -> None:
        """Begin the first window, and start the thread."""
        self._begin_s = self._clock()
        for recorded in self._recorded.values():
            recorded.forecast = self._forecast(recorded)
        if self._recorded:
            self.begin()

    def stop(self) -> None:
        """Stop the loop; the window that is not over is lost. Blocks for seconds at most."""
        self.end()
        for recorded in self._recorded.values():
            _end(recorded)

    def add(self, key: str, name: str, model: ServedModel) -> None:
        """Record one more model, which the executor has; may block for a second.

        Where the model that it replaces keeps its profile in the same file, that is saved now, and
        the file is the new model's from here on.
        """
        if not model.exits:
            return
        with self._turn:
            file = _file_of(name, model)
            for other in self._sharing(file):
                _end(other)
                other.keeps_file = False
            recorded = _make(key, name, model, self._window_s, file)
            recorded.forecast = self._forecast(recorded)
            with self._lock:
                self._recorded[key] = recorded
            if not self.begun:
                self._begin_s = self._clock()
                self.begin()

    def retire(self, key: str) -> None:
        """Do nothing: what comes before a version is over is of use."""

    def remove(self, key: str, *, save: bool = True) -> None:
        """Forget a model; the window that is not over is lost. Blocks for moments.

        Without ``save``, a model that used the same file before has it again.
        """
        with self._turn:
            with self._lock:
                recorded = self._recorded.pop(key, None)
            if recorded is None:
                return
            recorded.keeps_file = recorded.keeps_file and save
            _end(recorded)
            for other in () if save else self._sharing(recorded.file):
                other.keeps_file = True

    def _sharing(self, file: ProfileFile | None) -> list[_Recorded]:
        """Return what is recorded in a file."""
        recorded = self._recorded.values()
        return [r for r in recorded if file and r.file and r.file.path == file.path]

    def status(self, model: str) -> ProfileStatus | None:
        """Give what is known of the last window; ``None`` of a model without exits to run."""
        recorded = self._recorded.get(model)
        return None if recorded is None else recorded.status

    def profile(self, model: str) -> BatchProfile | None:
        """Give the windows that are over; ``None`` of a model without exits to run."""
        if (recorded := self._recorded.get(model)) is None:
            return None
        with self._lock:
            return recorded.recorder.profile()

    def running(self, model: str) -> BatchProfile | None:
        """Give the window that is not over, alone; without any if nothing was decided in it."""
        if (recorded := self._recorded.get(model)) is None:
            return None
        with self._lock:
            running = BatchProfileRecorder(recorded.exits, window_s=self._window_s)
            running.add(self._epoch_s + self._begin_s, self._counted(recorded)[0])
            return running.profile()

    def pause_s(self) -> float:
        """Return the seconds until the window is over."""
        return max(self._begin_s + self._window_s - self._clock(), 0.0)

    def look(self) -> None:
        """End the window of every model."""
        begun_s, now_s = self._begin_s, self._clock()
        due_s = begun_s + self._window_s
        self._begin_s = due_s if now_s < due_s + self._window_s else now_s
        with self._turn:
            for recorded in self._recorded.values():
                try:
                    self._end_window_of(recorded, self._epoch_s + begun_s)
                except Exception:  # serving goes on, and so do the other models
                    _log.exception("%s: a window of the batch profile is lost", recorded.name)

    def _counted(
        self, recorded: _Recorded
    ) -> tuple[list[Departures], dict[tuple[int, ...], Departures]]:
        """Count since the end of the last window, and in all."""
        before, counted = recorded.seen, self._executor.snapshot(recorded.key).departures
        since = [now - before[now.exits] if now.exits in before else now for now in counted]
        return since, {now.exits: now for now in counted}

    def _end_window_of(self, recorded: _Recorded, start_s: float) -> None:
        recorder = recorded.recorder
        with self._lock:
            seen, recorded.seen = self._counted(recorded)
            added = recorder.add(start_s, seen)
        if not added:
            return  # nothing was decided: the forecast stands for the next window
        made, profile = recorded.forecast, recorder.profile()
        (*_, last) = profile.going_on().tolist()
        recorded.status = ProfileStatus(
            window_s=self._window_s,
            windows=len(profile.windows),
            going_on=tuple(None if math.isnan(share) else share for share in last),
            forecast=None if made is None else made.going_on,
            method="" if made is None else made.method,
        )
        recorded.kept = False
        _keep(recorded)
        recorded.forecast = self._forecast(recorded)

    def _forecast(self, recorded: _Recorded) -> ShareForecast | None:
        """Forecast the window that begins; ``None`` without any before it."""
        profile = recorded.recorder.profile()
        return forecast_next(profile, self._forecaster) if profile.windows else None


def _file_of(name: str, model: ServedModel) -> ProfileFile | None:
    return None if model.kept_beside is None else ProfileFile.of(model.kept_beside, name)


def _make(
    key: str, name: str, model: ServedModel, window_s: float, file: ProfileFile | None
) -> _Recorded:
    """Go on from what was kept of a model, if it was kept for the same."""
    past = None
    if file is not None:
        past = file.load(bundle=model.bundle, exits=model.exits, window_s=window_s)
        if past is not None:
            _log.info("%s: goes on from %d windows in %s", name, len(past.windows), file)
    recorder = BatchProfileRecorder(model.exits, window_s=window_s, past=past)
    windows = len(recorder.profile().windows)
    return _Recorded(
        key=key,
        name=name,
        bundle=model.bundle,
        exits=model.exits,
        file=file,
        recorder=recorder,
        status=ProfileStatus(window_s=window_s, windows=windows),
    )


def _end(recorded: _Recorded) -> None:
    """Keep the windows that are over, and leave the file to whoever comes next."""
    _keep(recorded)
    if recorded.file is not None:
        recorded.file.release()


def _keep(recorded: _Recorded) -> None:
    if recorded.file is not None and recorded.keeps_file and not recorded.kept:
        recorded.kept = recorded.file.save(recorded.recorder.profile(), recorded.bundle)
