"""An engine of generating models, with the interface that the server expects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing
from functools import reduce
from pathlib import Path
from typing import Any, Self

from numpy.typing import NDArray

from offramp.engine.common.errors import DrainingError, ModelNotServedError
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.requests.results import EngineResult, ModelInfo, ResultKind, StreamResult
from offramp.engine.requests.statistics import CountersSnapshot, ModelStatistics
from offramp.engine.requests.timeline import RequestTimeline
from offramp.engine.serving.opening import check_names, in_thread
from offramp.engine.serving.totals import add_counts
from offramp.generation.serving.served_text import PiecedToken, ServedText
from offramp.generation.serving.text_requests import text_result

_log = logging.getLogger(__name__)


class TextEngine:
    """Serves generating models; implements :class:`~offramp.server.common.served.ServedEngine`.

    Each model has its own thread and caches. All methods are called on the event loop.
    """

    def __init__(self, options: EngineOptions | None = None) -> None:
        """Create an engine without models; see :meth:`open`."""
        self._options = options or EngineOptions()
        self._served: dict[str, ServedText] = {}
        self._numbers: dict[str, int] = {}
        """Number of versions that each name has had so far."""
        self._earlier: dict[str, CountersSnapshot] = {}
        """Total counts of the closed versions of each served name."""
        self._before: dict[str, list[ServedText]] = {}
        """Earlier versions that still answer requests."""
        self._finishing: dict[ServedText, asyncio.Task[None]] = {}
        """Versions that accept no new requests."""
        self._leaving = self._draining = False

    @classmethod
    async def open(cls, models: Mapping[str, Path], options: EngineOptions | None = None) -> Self:
        """Load models under the names to serve; raise the errors of :meth:`load`."""
        engine = cls(options)
        try:
            for name, path in models.items():
                await engine.load(name, path)
        except BaseException:
            await engine.close()
            raise
        return engine

    async def load(self, name: str, path: Path, *, options: ModelOptions | None = None) -> None:
        """Serve a generating bundle under a new name, or replace the version of the name.

        The previous version finishes the requests that it has accepted.

        Raises:
            DrainingError: The engine is shutting down.
            OptionsError: Clients cannot use the name.
            BundleError: The bundle is absent, damaged or of another version.
            BackendError: One of its graphs cannot be loaded.
        """
        if self._draining:
            raise DrainingError("the server is shutting down; load the model into another one")
        check_names({name: path})
        of_model = options or self._options.of(name)
        _log.info("%s: loading %s", name, path)
        made = await in_thread(ServedText.load, name, path, self._options, of_model)
        self.put(name, await made.open())

    def put(self, name: str, served: ServedText) -> None:
        """Serve a model, which is open already, under a name from now on."""
        before = self._served.get(name)
        self._served[name] = served
        self._numbers[name] = self._numbers.get(name, 0) + 1
        if before is not None:
            self._before.setdefault(name, []).append(before)
            self._finish(before)

    async def unload(self, name: str) -> None:
        """Accept no more requests for a name; accepted requests are still answered."""
        served = self._named(name)
        if self._draining:
            raise DrainingError("the server is shutting down; it unloads all models itself")
        del self._served[name]
        self._earlier.pop(name, None)
        self._before.pop(name, None)
        self._finish(served)

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, NDArray[Any]],
        *,
        deadline_s: float | None = None,
        priority: int = 0,
        source: str = "",
        timeline: RequestTimeline | None = None,
    ) -> EngineResult:
        """Answer a prompt with a complete text; see :meth:`infer_stream`."""
        del source, timeline  # requests are neither recorded nor timed by stage
        served = self._named(model)
        given: list[PiecedToken] = []
        stream = served.tokens(inputs, deadline_s=deadline_s, priority=priority)
        async with aclosing(stream):
            given += [token async for token in stream]
        return self._result(served, given, ResultKind.ANSWER)

    async def infer_stream(
        self,
        model: str,
        inputs: Mapping[str, NDArray[Any]],
        *,
        deadline_s: float | None = None,
        priority: int = 0,
        source: str = "",
        timeline: RequestTimeline | None = None,
    ) -> AsyncGenerator[StreamResult, None]:
        """Answer a prompt with one result per token, as soon as it is available.

        Inputs are those of :mod:`.text_requests`. Results have an exit and a confidence for each
        token. Closing the iterator cancels the request at the next token. The deadline applies to
        the whole answer; tokens generated before it are yielded.

        Raises:
            ModelNotServedError: No model is served under this name.
            BadInputError: A tensor is invalid for the model, or the prompt is too long.
            QueueFullError: Too many sequences wait for a slot.
            DeadlineExceededError: The deadline passed.
            DrainingError: The engine is shutting down.
            BackendError: The model failed on the sequence.
        """
        del source, timeline
        served = self._named(model)
        stream = served.tokens(inputs, deadline_s=deadline_s, priority=priority)
        async with aclosing(stream):
            async for given in stream:
                last = given.token.end is not None
                yield self._result(served, [given], ResultKind.LAST if last else ResultKind.PART)

    def models(self) -> tuple[ModelInfo, ...]:
        """Return the descriptions of the served models."""
        return tuple(served.info for served in self._served.values())

    def model(self, name: str) -> ModelInfo:
        """Return the description of a model; ModelNotServedError if it is not served."""
        return self._named(name).info

    def ready(self, model: str | None = None) -> bool:
        """Return True if a model, or every model, accepts requests."""
        if self._leaving or self._draining:
            return False
        if model is None:
            return all(served.serves for served in self._served.values())
        return model in self._served and self._served[model].serves

    def live(self) -> bool:
        """Return True if some model accepts requests; a broken model needs a new process."""
        return not self._served or any(served.serves for served in self._served.values())

    def statistics(self) -> Mapping[str, ModelStatistics]:
        """Return a snapshot of every model."""
        return {
            name: served.statistics(version=self._numbers[name], earlier=self._counts_before(name))
            for name, served in self._served.items()
        }

    def leave(self) -> None:
        """Report not ready from now on, but still answer requests, until :meth:`drain`."""
        self._leaving = True

    def flush(self) -> None:
        """Do nothing: sequences never wait in order to share a step with later ones."""

    async def drain(self, timeout_s: float) -> bool:
        """Reject new requests, finish running requests; ``False`` if some did not end in time."""
        self._draining = True
        every = (*self._served.values(), *self._finishing)
        return all(await asyncio.gather(*(served.drain(timeout_s) for served in every)))

    async def close(self) -> None:
        """Stop all threads and release all caches; unfinished requests fail."""
        self._draining = True
        finishing = tuple(self._finishing.values())
        for task in finishing:
            task.cancel()
        await asyncio.gather(*finishing, return_exceptions=True)
        async with AsyncExitStack() as stack:
            for served in self._served.values():
                stack.push_async_callback(served.close)

    def _named(self, name: str) -> ServedText:
        served = self._served.get(name)
        if served is None:
            raise ModelNotServedError.of(name, self._served)
        return served

    def _result(
        self, served: ServedText, given: list[PiecedToken], kind: ResultKind
    ) -> StreamResult:
        return text_result(
            [each.token for each in given],
            "".join(each.piece for each in given),
            stages=served.stages,
            kind=kind,
            policy=served.info.policy.version,
            texts=served.codec is not None,
        )

    def _counts_before(self, name: str) -> CountersSnapshot | None:
        """Return the counts of all versions of a name that came before the served version."""
        closed = self._earlier.get(name)
        counts = [] if closed is None else [closed]
        counts += [each.statistics() for each in self._before.get(name, ())]
        return reduce(add_counts, counts) if counts else None

    def _finish(self, served: ServedText) -> None:
        """Close a version when its requests are answered."""
        task = asyncio.create_task(served.finish(), name=f"finishing {served.info.name}")
        self._finishing[served] = task
        task.add_done_callback(lambda _: self._finished(served))

    def _finished(self, served: ServedText) -> None:
        """Keep the counts of a closed version that a newer version of the same name replaced."""
        name = served.info.name
        del self._finishing[served]
        if served in self._before.get(name, ()):
            counts = served.statistics()
            earlier = self._earlier.get(name)
            self._earlier[name] = counts if earlier is None else add_counts(earlier, counts)
            self._before[name].remove(served)
