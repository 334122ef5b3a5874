"""Several engines with one interface: each model is answered by the engine of its kind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

from numpy.typing import NDArray

from offramp.engine.common.errors import DrainingError, ModelNotServedError
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.requests.results import EngineResult, ModelInfo, StreamResult
from offramp.engine.requests.statistics import ModelStatistics
from offramp.engine.requests.timeline import RequestTimeline
from offramp.server.common.served import ServedEngine


@runtime_checkable
class ModelOpener(Protocol):
    """A kind of model on disk, and the engine that serves it.

    The object ``EXTENSION`` of an extension's module ``for_server`` may be a ModelOpener.
    """

    def opens(self, path: Path) -> bool:
        """Return whether a path holds a model of this kind; false if the path is absent."""

    async def open_models(self, models: Mapping[str, Path], options: EngineOptions) -> ServedEngine:
        """Load models (none, one or more) by their names; raise the errors of ``Engine.open``."""


class JoinedEngine:
    """Engines of several kinds of models as one :class:`.ServedEngine`.

    The first engine serves all models without an opener. The other engines are opened when their
    first model is loaded.
    """

    def __init__(
        self, engine: ServedEngine, openers: Sequence[ModelOpener], options: EngineOptions
    ) -> None:
        self._first, self._openers, self._options = engine, tuple(openers), options
        self._opened: dict[int, ServedEngine] = {}
        """Engines by the number of their opener."""
        self._owners = {model.name: engine for model in engine.models()}
        """Engine that serves each model, by the model's name."""
        self._opening = asyncio.Lock()
        self._draining = False

    @classmethod
    async def open(
        cls,
        models: Mapping[str, Path],
        options: EngineOptions,
        openers: Sequence[ModelOpener],
        others: ModelOpener,
    ) -> Self:
        """Open each model with the first opener that accepts its path, or with ``others``."""
        found = await asyncio.to_thread(
            lambda: {name: opener_of(path, openers) for name, path in models.items()}
        )

        def share(number: int | None) -> dict[str, Path]:
            return {name: path for name, path in models.items() if found[name] == number}

        joined = cls(await others.open_models(share(None), options), openers, options)
        try:
            for number in range(len(openers)):
                if mine := share(number):
                    await joined._open(number, mine)
        except BaseException:
            await joined.close()
            raise
        return joined

    def infer(
        self,
        model: str,
        inputs: Mapping[str, NDArray[Any]],
        *,
        deadline_s: float | None = None,
        priority: int = 0,
        source: str = "",
        timeline: RequestTimeline | None = None,
    ) -> Coroutine[Any, Any, EngineResult]:
        """Answer a request with the model's engine."""
        return self._owner(model).infer(
            model,
            inputs,
            deadline_s=deadline_s,
            priority=priority,
            source=source,
            timeline=timeline,
        )

    def infer_stream(
        self,
        model: str,
        inputs: Mapping[str, NDArray[Any]],
        *,
        deadline_s: float | None = None,
        priority: int = 0,
        source: str = "",
        timeline: RequestTimeline | None = None,
    ) -> AsyncGenerator[StreamResult, None]:
        """Answer a request with the model's engine."""
        return self._owner(model).infer_stream(
            model,
            inputs,
            deadline_s=deadline_s,
            priority=priority,
            source=source,
            timeline=timeline,
        )

    def models(self) -> tuple[ModelInfo, ...]:
        """Return descriptions of the models of all engines."""
        return tuple(model for engine in self._engines for model in engine.models())

    def model(self, name: str) -> ModelInfo:
        """Return a description of one model, or raise ModelNotServedError."""
        return self._owner(name).model(name)

    def ready(self, model: str | None = None) -> bool:
        """Return whether a model, or every model, takes requests."""
        if model is None:
            return all(engine.ready() for engine in self._engines)
        return model in self._owners and self._owners[model].ready(model)

    def live(self) -> bool:
        """Return whether some model is served, or can be served again without a restart."""
        serving = [engine for engine in self._engines if engine.models()] or self._engines
        return any(engine.live() for engine in serving)

    def statistics(self) -> Mapping[str, ModelStatistics]:
        """Return a snapshot of every model's counters."""
        return {
            name: counts for engine in self._engines for name, counts in engine.statistics().items()
        }

    async def load(self, name: str, path: Path, *, options: ModelOptions | None = None) -> None:
        """Serve a model under a name; it may replace a model of another kind."""
        number = await asyncio.to_thread(opener_of, path, self._openers)
        engine = self._first if number is None else await self._open(number, {})
        await engine.load(name, path, options=options)
        before, self._owners[name] = self._owners.get(name, engine), engine
        if before is not engine:
            await before.unload(name)

    async def unload(self, name: str) -> None:
        """Accept no more requests under a name."""
        await self._owner(name).unload(name)
        self._owners.pop(name, None)

    def leave(self) -> None:
        """Report not ready from now on."""
        for engine in self._engines:
            engine.leave()

    def flush(self) -> None:
        """Run requests immediately from now on."""
        for engine in self._engines:
            engine.flush()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, and finish those of all engines at the same time."""
        self._draining = True
        return all(await asyncio.gather(*(engine.drain(timeout_s) for engine in self._engines)))

    async def close(self) -> None:
        """Close every engine, even if one fails to close."""
        self._draining = True
        async with AsyncExitStack() as stack:
            for engine in self._engines:
                stack.push_async_callback(engine.close)

    @property
    def _engines(self) -> Sequence[ServedEngine]:
        return self._first, *self._opened.values()

    def _owner(self, name: str) -> ServedEngine:
        engine = self._owners.get(name)
        if engine is None:
            raise ModelNotServedError.of(name, self._owners)
        return engine

    async def _open(self, number: int, models: Mapping[str, Path]) -> ServedEngine:
        """Open the engine of an opener with its first models, unless it is open already."""
        async with self._opening:
            if self._draining:
                raise DrainingError("the server is shutting down; load the model into another one")
            if number not in self._opened:
                opened = await self._openers[number].open_models(models, self._options)
                self._opened[number] = opened
                self._owners.update((model.name, opened) for model in opened.models())
        return self._opened[number]


def opener_of(path: Path, openers: Sequence[ModelOpener]) -> int | None:
    """Return the index of the first opener that accepts a path; ``None`` if none does."""
    return next((n for n, opener in enumerate(openers) if opener.opens(path)), None)
