"""The interface of an engine that the server needs.

The services depend on this, not on :class:`offramp.engine.core.Engine`, which satisfies it; so
does the stub that the tests serve.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from offramp.engine.models.options import ModelOptions
from offramp.engine.requests.results import EngineResult, ModelInfo, StreamResult
from offramp.engine.requests.statistics import ModelStatistics
from offramp.engine.requests.timeline import RequestTimeline


class ServedEngine(Protocol):
    """See :class:`offramp.engine.core.Engine` for what each method promises and raises."""

    # A protocol repeats the signatures that it asks for; Engine and FakeEngine have the same.
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
        """Answer a request; cancelling the awaiting task withdraws it."""

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
        """Answer a request once or twice; closing the iterator withdraws it."""

    def models(self) -> tuple[ModelInfo, ...]:
        """The served models."""

    def model(self, name: str) -> ModelInfo:
        """Give one served model, or raise ModelNotServedError."""

    def ready(self, model: str | None = None) -> bool:
        """Whether the model (or every model) takes requests."""

    def live(self) -> bool:
        """Whether some model is served, or may be again without a new process."""

    def statistics(self) -> Mapping[str, ModelStatistics]:
        """A snapshot per model."""

    async def load(self, name: str, path: Path, *, options: ModelOptions | None = None) -> None:
        """Serve a model under a name, new or in the place of what it has."""

    async def unload(self, name: str) -> None:
        """Take no more requests under a name; those submitted before are answered."""

    def leave(self) -> None:
        """Be not ready from now on, but answer requests all the same, until ``drain``."""

    def flush(self) -> None:
        """From now on run requests at once, without waiting for others to share a batch with."""

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, finish those in flight; ``False`` if some did not in time."""

    async def close(self) -> None:
        """Stop the executor threads and release the backends."""
