"""The engine interface that the server needs.

The services depend on this protocol, not on :class:`offramp.engine.core.Engine`. Both that class
and the fake engine of the tests satisfy it.
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
    """Methods of an engine that a server uses; :class:`.Engine` has guarantees and errors."""

    # A protocol repeats the signatures that it requires; Engine and FakeEngine have the same.
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
        """Yield one or two answers to a request; closing the iterator withdraws it."""

    def models(self) -> tuple[ModelInfo, ...]:
        """Return the descriptions of all models that are served now."""

    def model(self, name: str) -> ModelInfo:
        """Return the description of one model, or raise ModelNotServedError."""

    def ready(self, model: str | None = None) -> bool:
        """Return whether a model takes requests; without a name, whether every model does."""

    def live(self) -> bool:
        """Return whether some model is served, or can be served again without a restart."""

    def statistics(self) -> Mapping[str, ModelStatistics]:
        """Return a snapshot of each model's counters."""

    async def load(self, name: str, path: Path, *, options: ModelOptions | None = None) -> None:
        """Serve a model under a name that is new, or replace the model of that name."""

    async def unload(self, name: str) -> None:
        """Accept no more requests under a name; earlier requests are answered."""

    def leave(self) -> None:
        """Report not ready from now on, but answer requests until ``drain``."""

    def flush(self) -> None:
        """Run requests immediately from now on, without waiting to fill a batch."""

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and finish those in flight; ``False`` if some missed the timeout."""

    async def close(self) -> None:
        """Stop the executor threads and release the backends."""
