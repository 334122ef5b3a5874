"""What an extension adds to an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from offramp.engine.models.options import EngineOptions
from offramp.engine.models.served_model import ServedModel
from offramp.engine.serving.executor import Executor
from offramp.engine.stages.backend_protocol import Backend


class BackgroundTask(Protocol):
    """Goes on beside the streams of an engine, for all of its models; never blocks a stream.

    Models are known by the executor's key; that of the first ones is their name.
    """

    def start(self) -> None:
        """Begin; the executor has started."""
        ...

    def stop(self) -> None:
        """End, and keep what was learned; blocks for seconds at most."""
        ...

    def add(self, key: str, name: str, model: ServedModel) -> None:
        """Look after one more model, which the executor has; may block for a second."""
        ...

    def retire(self, key: str) -> None:
        """Note that another model answers the requests to a model's name from now on."""
        ...

    def remove(self, key: str, *, save: bool = True) -> None:
        """Forget a model; blocks for moments.

        Without ``save``, a model that kept things in the same files before has them again.
        """
        ...

    def status(self, key: str) -> object | None:
        """Return what there is to say of a model, for statistics; ``None`` if nothing is."""
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
        """Return an engine's, by the names that statistics have for what they say."""
        ...
