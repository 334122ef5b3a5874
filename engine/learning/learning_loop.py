"""Learning for all models of an engine: the paths served at the start, and one loop for all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, Self

from offramp.engine.backends.custom_ops import libraries
from offramp.engine.common.errors import OptionsError
from offramp.engine.learning.learner import ModelLearner
from offramp.engine.learning.learning_engine import LearningEngine
from offramp.engine.learning.learning_folder import LearnFolder, folder_of, model_sha256
from offramp.engine.learning.lifecycle import Phase
from offramp.engine.learning.state import LearnState
from offramp.engine.learning.words import why_idle
from offramp.engine.models.learning_options import DEFAULT_DISAGREEMENT, LearnOptions, least_samples
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.onnx_files import is_onnx_file
from offramp.engine.requests.learning_status import LearningStatus
from offramp.engine.stages.plan import Mode

_log = logging.getLogger(__name__)

PERIOD_S: Final = 0.5
"""Seconds between two checks of a model."""


class Learning:
    """The learners of an engine's models; used on the event loop, except :meth:`prepare`."""

    def __init__(
        self, learners: Mapping[str, ModelLearner], options: EngineOptions | None = None
    ) -> None:
        """Use :meth:`prepare`; ``options`` are for models that are loaded later."""
        self._learners = dict(learners)
        self._options = options
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def prepare(cls, models: Mapping[str, Path], options: EngineOptions) -> Self:
        """Lock the learn folders of ONNX files.

        OptionsError if a folder cannot be locked; then no folder stays locked. If ``options`` have
        no learning options, nothing is locked and nothing is learned.
        """
        learners: dict[str, ModelLearner] = {}
        if (learning := options.learning) is None:
            return cls(learners)
        if options.mode is Mode.OFF:
            raise OptionsError(
                "mode is off, in which no exit answers, and learning makes exits; omit one "
                "of the two"
            )
        try:
            for name, model in models.items():
                if (learner := _learner_of(name, model, options.of(name), learning)) is not None:
                    learners[name] = learner
        except BaseException:
            for learner in learners.values():
                learner.release()
            raise
        if models and not learners:
            raise OptionsError(
                "there is nothing to learn: all models are bundles, which have exits "
                "already; name the ONNX file that one was compiled from, or omit --learn"
            )
        return cls(learners, options)

    def paths(self, models: Mapping[str, Path]) -> dict[str, Path]:
        """Return the paths to serve at the start: for learned models, their bundles."""
        learned = {name: learner.path for name, learner in self._learners.items()}
        return {**models, **learned}

    async def start(self, engine: LearningEngine) -> None:
        """Begin to learn; ``engine`` serves :meth:`paths`. OptionsError if it cannot begin."""
        for learner in self._learners.values():
            await learner.start(engine)
        if self._options is not None:
            self._task = asyncio.create_task(self._work(), name="learning")

    @asynccontextmanager
    async def changed(
        self, engine: LearningEngine, name: str, model: Path, options: ModelOptions | None
    ) -> AsyncIterator[Path]:
        """Yield the path to load for a new or replaced model.

        Its learning begins after it is loaded. If loading fails, learning of the earlier model
        continues.
        """
        if self._options is None or self._options.learning is None:
            yield model
            return
        before = self._learners.pop(name, None)
        if before is not None:
            await before.close()  # releases the folder
        of_model, learning = options or self._options.of(name), self._options.learning
        learner = None
        try:
            learner = await asyncio.to_thread(_learner_of, name, model, of_model, learning)
            yield model if learner is None else learner.path
        except BaseException:
            if learner is not None:
                learner.release()
            if before is not None:
                of_name = self._options.of(name)
                again = await asyncio.to_thread(
                    prepare_learner, name, before.model, of_name, learning
                )
                await self._begin(engine, name, again)
            raise
        if learner is not None:
            await self._begin(engine, name, learner)

    async def forget(self, name: str) -> None:
        """Stop learning for a model; recorded inputs are kept."""
        if (learner := self._learners.pop(name, None)) is not None:
            await learner.close()

    async def _begin(self, engine: LearningEngine, name: str, learner: ModelLearner) -> None:
        await learner.start(engine)
        self._learners[name] = learner

    def status(self, model: str) -> LearningStatus | None:
        """Return the learning status of a model; ``None`` if it does not learn."""
        learner = self._learners.get(model)
        return None if learner is None else learner.status()

    async def close(self) -> None:
        """Stop, save recorded inputs, and release the folders."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        for learner in self._learners.values():
            await learner.close()

    async def _work(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            for learner in tuple(self._learners.values()):
                busy = any(other.compiling for other in self._learners.values())
                await learner.poll(may_compile=not busy)


def _learner_of(
    name: str, model: Path, options: ModelOptions, learning: LearnOptions
) -> ModelLearner | None:
    """Return the learner of a model; ``None`` if it is a bundle, or must not learn."""
    if not options.learn:
        return None
    if not is_onnx_file(model):
        _log.warning("%s: not learned, because %s is a bundle", name, model)
        return None
    return prepare_learner(name, model, options, learning)


def prepare_learner(
    name: str, model: Path, options: ModelOptions, learning: LearnOptions
) -> ModelLearner:
    """Lock the folder of a model, and continue from its state; OptionsError if that fails."""
    bound = options.max_disagreement or DEFAULT_DISAGREEMENT
    least = least_samples(bound, options.confidence)
    if learning.samples < least:
        raise OptionsError(
            f"{name}: {learning.samples:,} samples are too few to learn from: the promise of "
            f"{100 * bound:g} % at {100 * options.confidence:g} % needs at least {least:,}; use "
            f"--learn-samples {least} or more (10,000 are a good number)"
        )
    try:
        digest = model_sha256(model)
    except OSError as error:
        raise OptionsError(f"{model}: cannot be read: {error.strerror}") from error
    asked = _compile_arguments(options, bound)
    folder = LearnFolder(folder_of(model, name, learning.folder))
    try:
        state = _found_state(name, folder, digest, (*asked, f"samples={learning.samples}"))
    except BaseException:
        folder.release()
        raise
    return ModelLearner(name, model, folder, state, learning, arguments=asked, least=least)


def _compile_arguments(options: ModelOptions, bound: float) -> tuple[str, ...]:
    """Return the options that ``eecompile`` gets because of the serving options."""
    asked = [f"--max-disagreement={bound:g}", f"--confidence={options.confidence:g}"]
    if options.answer is not None:
        asked.append(f"--answer={options.answer}")
    if options.task is not None:
        asked.append(f"--task={options.task}")
    return (*asked, *(f"--custom-ops={each.path.absolute()}" for each in libraries()))


def _found_state(name: str, folder: LearnFolder, digest: str, asked: Sequence[str]) -> LearnState:
    """Return the state to continue from, and remove files that do not belong to it."""
    state = LearnState.load(folder.path)
    new = LearnState(model_sha256=digest, asked=tuple(asked))
    if state is not None and state.model_sha256 != digest:
        _log.warning(
            "%s: the model differs from that of %s; the results for the old model are removed",
            name,
            folder.path,
        )
        folder.remove_recording()
        state = None
    if state is None:
        folder.remove_others()
        return new
    state = _checked(name, folder, state)
    if state.phase is Phase.NOTHING_PAYS and state.asked != new.asked:
        _log.info("%s: options have changed since no exit was useful; learning again", name)
        state = replace(state, phase=Phase.RECORDING, reason="")
    folder.remove_others(state.serving, state.compiling)
    return replace(state, asked=new.asked)


def _checked(name: str, folder: LearnFolder, state: LearnState) -> LearnState:
    """Return the state, updated if its last bundle was finished, or if a bundle is damaged."""
    if state.phase in (Phase.COMPILING, Phase.SWITCHING):
        finished = folder.open_bundle(state.compiling)
        if finished is not None and finished.policy.active:
            _log.info("%s: %s was finished, and is served now", name, finished.path)
            return state.served(state.compiling)
        if finished is not None:
            return replace(state, phase=Phase.NOTHING_PAYS, reason=why_idle(finished))
    if state.serving and folder.open_bundle(state.serving) is None:
        _log.warning(
            "%s: %s cannot be used any more; the unmodified model is served, and learning starts "
            "again",
            name,
            folder.bundle(state.serving),
        )
        return replace(state, serving=0, compiling=0, phase=Phase.RECORDING, reason="")
    return state
