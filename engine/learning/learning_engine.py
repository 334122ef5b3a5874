"""The part of the engine that learning uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from numpy.typing import NDArray

from offramp.engine.requests.results import ModelInfo
from offramp.engine.requests.statistics import ModelStatistics

Observer: TypeAlias = Callable[[Mapping[str, NDArray[Any]], NDArray[Any]], None]
"""Function that is called with the inputs of an answered request, and its answers [n, …]."""


class LearningEngine(Protocol):
    """The methods of an engine that learning uses."""

    def model(self, name: str) -> ModelInfo:
        """Describe a served model."""

    def statistics(self) -> Mapping[str, ModelStatistics]:
        """Return a snapshot of every model's counters."""

    def observe_inputs(self, name: str, observer: Observer | None) -> None:
        """Show the observer all requests that are answered from now on."""

    async def replace(self, name: str, path: Path) -> None:
        """Serve another bundle under a name from now on."""
