"""A worker without a model that Ray runs: it answers by script."""

from __future__ import annotations

from offramp.cluster.ray.actor import WorkerActor
from offramp.cluster.remote.worker_messages import Hello
from offramp.engine.stages.backend_protocol import Backend
from offramp.testing.scripted_worker import SCRIPTED, ScriptedBackend


class ScriptedActor(WorkerActor):
    """What Ray runs where tests need no model; real backends are made as ever."""

    any_graph = True

    def make(self, hello: Hello) -> Backend:
        """Make the backend by script if that is what is asked for."""
        return ScriptedBackend() if hello.backend == SCRIPTED else super().make(hello)
