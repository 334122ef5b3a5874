"""Availability: for which models requests are taken, given the streams that are in service."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from offramp.engine.common.errors import EngineError
from offramp.engine.serving.model_runtime import ModelRuntime
from offramp.engine.serving.stream_health import StreamHealth

NOT_LIVE_AFTER_S: Final = 60.0
"""Time without any model in service after which the process should be restarted."""


class Availability:
    """Availability of the executor's models, by key; the caller holds the executor's lock.

    :meth:`serves` and :attr:`live` may be read without it. ``models`` is the executor's mapping,
    which changes when models are added or removed.
    """

    def __init__(
        self, streams: int, models: Mapping[str, ModelRuntime], clock: Callable[[], float]
    ) -> None:
        self.health = StreamHealth(streams)
        self._models = models
        self._clock = clock
        self.stopped = False
        """Whether requests are refused for good."""
        self.refusal: EngineError | None = None
        """Why no request is taken, for now; or for good, once ``stopped``."""
        self.refusals: dict[str, EngineError] = {}
        """Why no request for a model is taken, for now."""
        self._out_since_s = math.inf
        """Time since which no model is served; infinity while one is."""

    def serves(self, key: str) -> bool:
        """Return whether requests are taken, and streams are there to run every stage."""
        served = (
            any(self.health.serves(stream, key) for stream in streams)
            for streams in self._needed(key)
        )
        return self.refusal is None and key not in self.refusals and all(served)

    def is_warm(self, key: str) -> bool:
        """Return whether streams run a model that was added, each that is in service tried once.

        True as well while no stream is in service: streams warm up all models when they start.
        """
        there = [s for s in range(self.health.streams) if self.health.serves(s)]
        ready = any(self.health.serves(s, key) for s in there) or not there
        return ready and not any(self.health.is_cold(s, key) for s in there)

    @property
    def live(self) -> bool:
        """Whether a model is served, or may be again: false once none was for too long."""
        return self._clock() - self._out_since_s < NOT_LIVE_AFTER_S

    def end(self) -> None:
        """Count all models as out of service for good."""
        self.stopped = True
        self._out_since_s = -math.inf

    def note(self) -> None:
        """Note since when no model is served."""
        if self.stopped:
            return
        if not self._models or any(map(self.serves, self._models)):
            self._out_since_s = math.inf
        elif self._out_since_s == math.inf:
            self._out_since_s = self._clock()

    def take_requests(self) -> None:
        """Stop refusing requests wherever there are streams to run them."""
        if not self.stopped and not any(map(self.is_given_up, self._models)):
            self.refusal = None
        for key in [k for k in self.refusals if not self.is_given_up(k, k)]:
            del self.refusals[key]
        self.note()

    def is_given_up(self, needed_by: str, key: str = "") -> bool:
        """Return whether nobody should wait for the streams of a stage, or for a model on them."""
        return any(self.health.given_up(s, key) for s in self._needed(needed_by))

    def forget(self, key: str) -> None:
        """Forget a model that was removed."""
        self.refusals.pop(key, None)
        self.health.forget(key)
        self.take_requests()

    def _needed(self, key: str) -> Iterator[Sequence[int]]:
        """Yield groups of streams, of each of which one must be there to serve every stage."""
        placed = self._models[key].scheduler.placed
        if placed is None:
            yield range(self.health.streams)
        else:
            yield from placed.holders()
