"""Protocols for what an extension adds to an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from offramp.engine.models.options import EngineOptions
from offramp.engine.models.served_model import ServedModel
from offramp.engine.serving.executor import Executor
from offramp.engine.stages.backend_protocol import Backend


class BackgroundTask(Protocol):
    """A task in parallel with the streams of an engine, for all its models; never blocks a stream.

    Models are identified by the executor's key; the key of the models at the start is their name.
    """

    def start(self) -> None:
        """Start the task; the executor has already started."""
        ...

    def stop(self) -> None:
        """Stop, and save what was learned; blocks for seconds at most."""
        ...

    def add(self, key: str, name: str, model: ServedModel) -> None:
        """Add a model to the task; the executor already has it. May block for a second."""
        ...

    def retire(self, key: str) -> None:
        """Record that another model has taken over this model's name."""
        ...

    def remove(self, key: str, *, save: bool = True) -> None:
        """Remove a model; blocks briefly.

        If not ``save``, the files go back to the model that used them before.
        """
        ...

    def status(self, key: str) -> object | None:
        """Return statistics of a model; ``None`` if there are none."""
        ...


class EngineExtension(Protocol):
    """The object ``EXTENSION`` of an extension's module ``for_engine``."""

    def background_tasks(
        self,
        models: Mapping[str, ServedModel],
        executor: Executor,
        backend: Backend,
        options: EngineOptions,
    ) -> Mapping[str, BackgroundTask]:
        """Return the background tasks for an engine, by the names of their statistics."""
        ...
