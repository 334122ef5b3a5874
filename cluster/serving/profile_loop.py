"""The loop that records batch profiles during serving (E3 3.1), on its own thread.

At the end of each window the thread reads the streams' counters, without making the streams wait.
Then it saves the windows next to the bundle, and forecasts the next window in the way in which a
plan would.
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
    """Key of the model in the executor."""
    name: str
    """Name of the model, for messages."""
    bundle: str
    """Hash of the bundle's manifest."""
    exits: int
    """Number of exits of the bundle."""
    file: ProfileFile | None
    keeps_file: bool = True
    """``True`` if this model owns its file; ``False`` if another version of the model owns it."""
    recorder: BatchProfileRecorder
    seen: dict[tuple[int, ...], Departures] = field(default_factory=dict)
    """Total counts at the end of the last window, by the set of exits in use."""
    kept: bool = True
    """``True`` if the file contains all finished windows."""
    forecast: ShareForecast | None = None
    """Shares that are forecast for the current window, if any."""
    status: ProfileStatus


class ProfileLoop(PeriodicLoop):
    """Records the batch profile of every model with active exits, until stopped.

    Models are identified by the executor's key, which is the name for models loaded at the start.
    ``wall`` returns the time since the epoch, ``clock`` a steady time.
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
        """Wall time minus steady time at the start; setting the wall clock must not split a
        window."""
        self._begin_s = clock()
        self._recorded = {
            name: _make(name, name, model, window_s, _file_of(name, model))
            for name, model in models.items()
            if model.exits
        }
        """Recorded models by key; changed while holding :attr:`_turn` and :attr:`_lock`."""
        self._turn = threading.Lock()
        """Held while a window ends, files are written, or a model is added or removed."""
        self._lock = threading.Lock()
        """Held while a window is made from counts, and while windows are read; not during
        writes."""

    def start(self) -> None:
        """Begin the first window, and start the thread."""
        self._begin_s = self._clock()
        for recorded in self._recorded.values():
            recorded.forecast = self._forecast(recorded)
        if self._recorded:
            self.begin()

    def stop(self) -> None:
        """Stop the loop; the current window is lost. Blocks for seconds at most."""
        self.end()
        for recorded in self._recorded.values():
            _end(recorded)

    def add(self, key: str, name: str, model: ServedModel) -> None:
        """Record one more model, which the executor must have already; may block for a second.

        If the new model replaces a model that uses the same file, the profile of the replaced model
        is saved now. From then on the new model owns the file.
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
        """Do nothing: a retired version is recorded until it is removed."""

    def remove(self, key: str, *, save: bool = True) -> None:
        """Remove a model; the current window is lost. Blocks for milliseconds.

        Without ``save``, a model that used the same file earlier owns the file again.
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
        """Return the records that use a file."""
        recorded = self._recorded.values()
        return [r for r in recorded if file and r.file and r.file.path == file.path]

    def status(self, model: str) -> ProfileStatus | None:
        """Return the status of the last window; ``None`` for a model without active exits."""
        recorded = self._recorded.get(model)
        return None if recorded is None else recorded.status

    def profile(self, model: str) -> BatchProfile | None:
        """Return the finished windows; ``None`` for a model without active exits."""
        if (recorded := self._recorded.get(model)) is None:
            return None
        with self._lock:
            return recorded.recorder.profile()

    def running(self, model: str) -> BatchProfile | None:
        """Return a profile of only the current window, without windows if nothing was decided."""
        if (recorded := self._recorded.get(model)) is None:
            return None
        with self._lock:
            running = BatchProfileRecorder(recorded.exits, window_s=self._window_s)
            running.add(self._epoch_s + self._begin_s, self._counted(recorded)[0])
            return running.profile()

    def pause_s(self) -> float:
        """Return the seconds until the window ends."""
        return max(self._begin_s + self._window_s - self._clock(), 0.0)

    def poll(self) -> None:
        """End the window of every model."""
        begun_s, now_s = self._begin_s, self._clock()
        due_s = begun_s + self._window_s
        self._begin_s = due_s if now_s < due_s + self._window_s else now_s
        with self._turn:
            for recorded in self._recorded.values():
                try:
                    self._end_window_of(recorded, self._epoch_s + begun_s)
                except Exception:  # serving and the other models continue
                    _log.exception("%s: a window of the batch profile is lost", recorded.name)

    def _counted(
        self, recorded: _Recorded
    ) -> tuple[list[Departures], dict[tuple[int, ...], Departures]]:
        """Return the counts since the end of the last window, and the total counts."""
        before, counted = recorded.seen, self._executor.snapshot(recorded.key).departures
        since = [now - before[now.exits] if now.exits in before else now for now in counted]
        return since, {now.exits: now for now in counted}

    def _end_window_of(self, recorded: _Recorded, start_s: float) -> None:
        recorder = recorded.recorder
        with self._lock:
            seen, recorded.seen = self._counted(recorded)
            added = recorder.add(start_s, seen)
        if not added:
            return  # nothing was decided: the forecast applies to the next window
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
        """Forecast the window that begins; ``None`` without an earlier window."""
        profile = recorded.recorder.profile()
        return forecast_next(profile, self._forecaster) if profile.windows else None


def _file_of(name: str, model: ServedModel) -> ProfileFile | None:
    return None if model.state_bundle is None else ProfileFile.of(model.state_bundle, name)


def _make(
    key: str, name: str, model: ServedModel, window_s: float, file: ProfileFile | None
) -> _Recorded:
    """Return a model's record, continued from its file if the file is for the same bundle."""
    past = None
    if file is not None:
        past = file.load(bundle=model.bundle, exits=model.exits, window_s=window_s)
        if past is not None:
            _log.info("%s: continues from %d windows in %s", name, len(past.windows), file)
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
    """Save the finished windows, and release the file."""
    _keep(recorded)
    if recorded.file is not None:
        recorded.file.release()


def _keep(recorded: _Recorded) -> None:
    if recorded.file is not None and recorded.keeps_file and not recorded.kept:
        recorded.kept = recorded.file.save(recorded.recorder.profile(), recorded.bundle)
