"""A worker without a model that Ray runs: it answers by script."""

from __future__ import annotations

from offramp.engine.backends.base import Backend
from offramp.engine.ray.actor import WorkerActor
from offramp.engine.remote.wire import Hello
from offramp.testing.worker import SCRIPTED, ScriptedBackend


class ScriptedActor(WorkerActor):
    """What Ray runs where tests need no model; real backends are made as ever."""

    any_graph = True

    def make(self, hello: Hello) -> Backend:
        """Make the backend by script if that is what is asked for."""
        return ScriptedBackend() if hello.backend == SCRIPTED else super().make(hello)
