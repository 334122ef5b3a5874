"""Learns exits for one model during serving: records, compiles, switches, and restarts."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from offramp.bundle import BundleError
from offramp.engine.answers.agreement import agreement_of
from offramp.engine.common.environment import available_cores
from offramp.engine.common.errors import DrainingError, EngineError, OptionsError
from offramp.engine.learning import words
from offramp.engine.learning.compilation import (
    Compilation,
    IdleShare,
    compile_arguments,
    describe_end,
    missing_packages,
    priority_for,
    read_progress,
    start_compilation,
)
from offramp.engine.learning.input_recorder import InputRecorder, RecordedCounts
from offramp.engine.learning.learning_engine import LearningEngine
from offramp.engine.learning.learning_folder import LearnFolder
from offramp.engine.learning.lifecycle import LearnAction, LifeCycle, Phase, RecordingProgress
from offramp.engine.learning.recording_file import RecordingError, RecordingHeader, sample_bytes
from offramp.engine.learning.recording_log import LIVE_SHARE, RecordingLog
from offramp.engine.learning.state import LearnState
from offramp.engine.models.learning_options import LearnOptions
from offramp.engine.requests.learning_status import LearningStatus
from offramp.engine.requests.results import ModelInfo
from offramp.engine.requests.statistics import ModelStatistics

_log = logging.getLogger(__name__)

COMPILE_REMEDY: Final = "pip install 'offramp[compile]'"
_TENTHS: Final = 10
"""Number of log lines about the progress of a recording."""


class ModelLearner:
    """The learning of one model; all methods except :meth:`prepare` run on the event loop."""

    def __init__(
        self,
        name: str,
        model: Path,
        folder: LearnFolder,
        state: LearnState,
        options: LearnOptions,
        *,
        arguments: Sequence[str],
        least: int,
    ) -> None:
        """Continue from a state.

        ``arguments`` are options of ``eecompile``; ``least`` is the smallest number of samples that
        can certify the promise.
        """
        self.name, self.model, self._folder, self._options = name, model, folder, options
        self._arguments, self._least = arguments, least
        self._start_process, self._clock = start_compilation, time.monotonic
        self._state = state
        self._life = LifeCycle(state.phase, failures=state.failures)
        self._life.reason = state.reason
        self._wanted = options.samples
        self._recorder: InputRecorder | None = None
        self._compilation: Compilation | None = None
        self._attempts = self._reported = self._reported_step = 0
        self._dropped = self._copies = self._unanswered = 0
        """Numbers of samples that closed recordings dropped, found to be copies, or found
        unanswered."""
        self._saved: LearnState | None = None
        served = folder.open_bundle(state.serving)
        self._certified = "" if served is None else words.describe_promise(served)
        self._engine: LearningEngine | None = None
        self._header: RecordingHeader | None = None
        self._failing = False
        self._idle = IdleShare()

    @property
    def path(self) -> Path:
        """Path to serve at the start: the learned bundle, or the model's file."""
        serving = self._state.serving
        return self._folder.bundle(serving) if serving else self.model

    @property
    def compiling(self) -> bool:
        """``True`` while a compilation runs."""
        return self._compilation is not None

    async def start(self, engine: LearningEngine) -> None:
        """Begin to learn; ``engine`` serves :attr:`path`. OptionsError if it cannot begin."""
        self._engine = engine
        info = engine.model(self.name)
        self._fit(info)
        read = [spec for spec in info.inputs if spec.name not in info.unread]
        self._header = RecordingHeader(
            model_sha256=self._state.model_sha256,
            inputs=tuple((spec.name, np.dtype(spec.dtype).name) for spec in read),
        )
        if missing := missing_packages():
            _log.warning(
                "%s: compiling needs %s: %s; inputs are recorded until then",
                self.name, ", ".join(missing), COMPILE_REMEDY,
            )  # fmt: skip
        if not self._life.phase.records and not self._options.keep:
            await asyncio.to_thread(self._folder.remove_recording)
        if self._life.phase.records:
            try:
                await self._record()
            except (OSError, RecordingError) as error:
                raise OptionsError(f"{self.name}: inputs cannot be recorded: {error}") from error
        kept = "are kept" if self._options.keep else "are removed once exits are compiled"
        _log.info(
            "%s: learning in %s, where recorded inputs %s: %s",
            self.name, self._folder.path, kept, self.status().text,
        )  # fmt: skip
        await self._save()

    async def poll(self, *, may_compile: bool) -> None:
        """Check once, and do the next action if one is due; errors do not stop serving."""
        try:
            await self._step(may_compile=may_compile)
        except Exception as error:
            if not self._failing:
                _log.exception("%s: learning failed; serving continues", self.name)
            self._failing = True
            if self._life.phase in (Phase.COMPILING, Phase.SWITCHING) and not self.compiling:
                self._life.failed(f"{type(error).__name__}: {error}", self._clock())
        else:
            self._failing = False

    def status(self) -> LearningStatus:
        """Return a snapshot of the learning's status."""
        counts, life = self._counts(), self._life
        progress = read_progress(self._folder.progress) if self.compiling else None
        return LearningStatus(
            phase=life.phase.value,
            text=self._text("" if progress is None else progress.describe()),
            recorded=counts.recorded,
            wanted=counts.wanted,
            dropped=self._dropped + counts.dropped,
            copies=self._copies + counts.copies,
            unanswered=self._unanswered + counts.unanswered,
            size_bytes=counts.size_bytes,
            attempts=self._attempts,
            failures=life.failures,
            step=progress.step if progress else 0,
            steps=progress.steps if progress else 0,
            reason=life.reason,
        )

    async def close(self) -> None:
        """End the compilation, write recorded samples, and release the folder."""
        if self._compilation is not None:
            await asyncio.to_thread(self._compilation.end)
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)
        self.release()

    def release(self) -> None:
        """Release the folder for another server."""
        self._folder.release()

    async def _step(self, *, may_compile: bool) -> None:
        assert self._engine is not None
        life = self._life
        if life.phase in (Phase.SERVING, Phase.RELEARNING, Phase.NOTHING_PAYS):
            self._look_at_exits(self._engine.statistics()[self.name])
        if self._compilation is not None:
            await self._look_after(self._compilation)
            return
        self._idle.update()
        counts = self._counts()
        self._tell(counts)
        if self._recorder is not None and counts.wanted < self._least:  # the size limit is reached
            await self._do(life.stop(self._too_large(counts)))
            return
        sample = RecordingProgress(recorded=counts.recorded, wanted=counts.wanted)
        before = life.phase
        action = life.step(self._clock(), sample, may_compile=may_compile)
        if action is not None:
            await self._do(action, drops=before is Phase.RELEARNING)

    async def _do(self, action: LearnAction, *, drops: bool = False) -> None:
        """Execute an action of the life cycle; ``drops`` discards the recording."""
        match action:
            case LearnAction.COMPILE:
                await self._compile()
            case LearnAction.SWITCH:
                await self._switch()
            case LearnAction.RECORD:
                _log.warning("%s: exits no longer answer requests; learning again", self.name)
                await asyncio.to_thread(self._folder.remove_recording)
                self._reported = 0
                try:
                    await self._record()
                except (OSError, RecordingError) as error:
                    await self._do(self._life.stop(f"inputs cannot be recorded: {error}"))
            case LearnAction.FORGET:
                await self._forget(keep=self._options.keep and not drops)
        await self._save()

    async def _record(self) -> None:
        """Record from now on, in addition to samples in the folder."""
        assert self._engine is not None
        assert self._header is not None
        limit = self._options.limit_bytes
        log = await asyncio.to_thread(
            RecordingLog, self._folder.path, self._header, limit_bytes=limit
        )
        if log.lost:
            _log.warning(
                "%s: %d records of %s were damaged or cut off, and are omitted",
                self.name, log.lost, log.path,
            )  # fmt: skip
        answer = self._engine.model(self.name).answer
        assert answer is not None, "ONNX files have one"
        agreement = agreement_of(answer)
        self._recorder = InputRecorder(
            log, samples=self._wanted, decided=agreement.decided, least=self._least
        )
        self._engine.observe_inputs(self.name, self._recorder.observe)

    async def _forget(self, *, keep: bool) -> None:
        assert self._engine is not None
        self._engine.observe_inputs(self.name, None)
        if (recorder := self._recorder) is not None:
            counts, self._recorder = recorder.counts(), None
            self._dropped += counts.dropped
            self._copies += counts.copies
            self._unanswered += counts.unanswered
            await asyncio.to_thread(recorder.close, remove=not keep)

    async def _compile(self) -> None:
        self._attempts += 1
        if missing := missing_packages():
            why = f"packages are missing: {', '.join(missing)}; {COMPILE_REMEDY}"
            await self._failed(why)
            return
        number = self._folder.next_number()
        self._state = replace(self._state, compiling=number)
        await self._save()  # if killed from here on, the next server finds finished bundles
        self._folder.progress.unlink(missing_ok=True)
        arguments = compile_arguments(
            model=self.model,
            data=self._folder.path,
            output=self._folder.bundle(number),
            progress=self._folder.progress,
            asked=self._arguments,
        )
        cores, priority = max(1, available_cores() // 2), priority_for(self._idle.share)
        try:
            await self._start_compilation(arguments, cores, priority)
        except OSError as error:
            await self._failed(f"no process can be started: {error}")
            return
        _log.info(
            "%s: compiling with %s recorded samples, by %d of %d cores, priority %s",
            self.name, f"{self._counts().recorded:,}", cores, available_cores(), priority,
        )  # fmt: skip

    async def _start_compilation(self, arguments: Sequence[str], cores: int, priority: str) -> None:
        """Start the process; if cancelled during the start, :meth:`close` ends it."""
        starting = asyncio.create_task(
            asyncio.to_thread(self._start_process, arguments, cores, priority)
        )
        try:
            self._compilation = await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._compilation = await starting
            raise

    async def _look_after(self, compilation: Compilation) -> None:
        status = compilation.poll()
        if status is None:
            self._tell_step()
            return
        said = compilation.last_words()
        await asyncio.to_thread(compilation.end)
        self._compilation = None
        self._reported_step = 0
        self._folder.progress.unlink(missing_ok=True)
        number = self._state.compiling
        bundle = await asyncio.to_thread(self._folder.open_bundle, number) if not status else None
        if bundle is None:
            await self._failed(describe_end(status, said))
        else:
            pays = bool(bundle.policy.active)
            self._certified = words.describe_promise(bundle) if pays else self._certified
            action = self._life.compiled(pays=pays, reason="" if pays else words.why_idle(bundle))
            if not pays:
                _log.warning("%s: %s", self.name, self._text())
                await asyncio.to_thread(self._folder.remove_others, self._state.serving, number)
            await self._save()
            await self._do(action)
        await self._save()

    async def _switch(self) -> None:
        assert self._engine is not None
        number = self._state.compiling
        try:
            await self._engine.replace(self.name, self._folder.bundle(number))
        except DrainingError:
            return  # the next server serves the bundle
        except (EngineError, BundleError, OSError) as error:
            await self._failed(f"the compiled bundle cannot be served: {error}")
            return
        self._state = self._state.served(number)
        self._life.switched()
        await self._save()
        _log.info("%s: %s", self.name, self._text())
        await self._forget(keep=self._options.keep)
        await asyncio.to_thread(self._folder.remove_others, number)

    async def _failed(self, reason: str) -> None:
        """Record a failed attempt, and remove its files."""
        self._life.failed(reason, self._clock())
        await asyncio.to_thread(self._folder.remove_others, self._state.serving)
        _log.warning("%s: %s", self.name, self._text())

    def _look_at_exits(self, statistics: ModelStatistics) -> None:
        *exits, end = statistics.stages
        early = sum(stage.answered for stage in exits)
        alarms = 0 if statistics.control is None else statistics.control.alarms
        self._life.exits.update(alarms=alarms, answered=early + end.answered, early=early)

    def _fit(self, info: ModelInfo) -> None:
        """Reduce the number of samples to fit the size limit; OptionsError if they are too few."""
        read = [spec for spec in info.inputs if spec.name not in info.unread]
        size = sample_bytes((spec.shape, spec.dtype) for spec in read)
        room = int(LIVE_SHARE * self._options.limit_bytes) // size if size else self._wanted
        if room < self._least:
            takes = math.ceil(100 * self._least * size / LIVE_SHARE / 2**30) / 100
            raise OptionsError(
                f"{self.name}: {self._options.max_gib:g} GiB hold {room:,} samples of "
                f"{size:,} bytes, but the promise needs at least {self._least:,}; use "
                f"--learn-gib {takes:g} or more"
            )
        if room < self._wanted:
            _log.warning(
                "%s: %g GiB (--learn-gib) hold %s samples; %s were requested",
                self.name, self._options.max_gib, f"{room:,}", f"{self._wanted:,}",
            )  # fmt: skip
            self._wanted = room

    def _too_large(self, counts: RecordedCounts) -> str:
        return (
            f"{self._options.max_gib:g} GiB hold {counts.recorded:,} of these samples, but the "
            f"promise needs at least {self._least:,}; start again with a larger --learn-gib"
        )

    def _counts(self) -> RecordedCounts:
        if self._recorder is None:
            return RecordedCounts(wanted=self._wanted)
        return self._recorder.counts()

    def _tell(self, counts: RecordedCounts) -> None:
        """Log the progress of a recording, at intervals."""
        tenth = _TENTHS * counts.recorded // max(counts.wanted, 1)
        if self._recorder is not None and tenth > self._reported:
            self._reported = tenth
            _log.info("%s: %s", self.name, self._text())

    def _tell_step(self) -> None:
        progress = read_progress(self._folder.progress)
        if progress is not None and progress.step > self._reported_step:
            self._reported_step = progress.step
            of = f" of {progress.steps}" if progress.steps else ""
            step = f"step {progress.step}{of}: {progress.title}"
            _log.info("%s: compiling, %s", self.name, step)

    def _text(self, progress: str = "") -> str:
        life, counts = self._life, self._counts()
        return words.describe_state(
            life,
            recorded=f"recorded {counts.recorded:,} of {counts.wanted:,}",
            progress=progress,
            certified=self._certified,
            since_unix_s=self._state.since_unix_s,
            retry_unix_s=time.time() + (life.retry_s or 0.0) - self._clock(),
            has_exits=self._state.serving > 0,
        )

    async def _save(self) -> None:
        """Save the state, if it has changed."""
        life = self._life
        state = replace(self._state, phase=life.phase, failures=life.failures, reason=life.reason)
        if state != self._saved:
            self._state = self._saved = state
            await asyncio.to_thread(state.save, self._folder.path)
