"""Availability: the models that accept requests, given the streams in service."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from offramp.engine.common.errors import EngineError
from offramp.engine.serving.model_runtime import ModelRuntime
from offramp.engine.serving.stream_health import StreamHealth

NOT_LIVE_AFTER_S: Final = 60.0
"""Seconds without any model in service after which the process should be restarted."""


class Availability:
    """Availability of the executor's models, by key; the caller holds the executor's lock.

    :meth:`serves` and :attr:`live` may be used without the lock. ``models`` is the executor's
    mapping, which changes when models are added or removed.
    """

    def __init__(
        self, streams: int, models: Mapping[str, ModelRuntime], clock: Callable[[], float]
    ) -> None:
        self.health = StreamHealth(streams)
        self._models = models
        self._clock = clock
        self.stopped = False
        """True once requests are refused permanently."""
        self.refusal: EngineError | None = None
        """Reason why no request is accepted at the moment (permanently once ``stopped``)."""
        self.refusals: dict[str, EngineError] = {}
        """Reasons why a model accepts no request at the moment, by model."""
        self._out_since_s = math.inf
        """Time since which no model is served; infinity while a model is served."""

    def serves(self, key: str) -> bool:
        """Return whether requests are accepted, and streams in service can run every stage."""
        served = (
            any(self.health.serves(stream, key) for stream in streams)
            for streams in self._needed(key)
        )
        return self.refusal is None and key not in self.refusals and all(served)

    def is_warm(self, key: str) -> bool:
        """Return whether each stream in service has tried an added model, and any runs it.

        Also True while no stream is in service: streams warm up all models when they start.
        """
        there = [s for s in range(self.health.streams) if self.health.serves(s)]
        ready = any(self.health.serves(s, key) for s in there) or not there
        return ready and not any(self.health.is_cold(s, key) for s in there)

    @property
    def live(self) -> bool:
        """True if a model is served, or was served less than :data:`NOT_LIVE_AFTER_S` ago."""
        return self._clock() - self._out_since_s < NOT_LIVE_AFTER_S

    def end(self) -> None:
        """Set all models out of service, permanently."""
        self.stopped = True
        self._out_since_s = -math.inf

    def note(self) -> None:
        """Record since when no model is served."""
        if self.stopped:
            return
        if not self._models or any(map(self.serves, self._models)):
            self._out_since_s = math.inf
        elif self._out_since_s == math.inf:
            self._out_since_s = self._clock()

    def take_requests(self) -> None:
        """Accept requests again for models that streams in service can run."""
        if not self.stopped and not any(map(self.is_given_up, self._models)):
            self.refusal = None
        for key in [k for k in self.refusals if not self.is_given_up(k, k)]:
            del self.refusals[key]
        self.note()

    def is_given_up(self, needed_by: str, key: str = "") -> bool:
        """Return whether requests should not wait for a stage's streams, or for a model on them."""
        return any(self.health.given_up(s, key) for s in self._needed(needed_by))

    def forget(self, key: str) -> None:
        """Remove a model from the records."""
        self.refusals.pop(key, None)
        self.health.forget(key)
        self.take_requests()

    def _needed(self, key: str) -> Iterator[Sequence[int]]:
        """Yield groups of streams; to run every stage, each group needs one stream in service."""
        placed = self._models[key].scheduler.placed
        if placed is None:
            yield range(self.health.streams)
        else:
            yield from placed.holders()
