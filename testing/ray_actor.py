"""A worker that Ray runs, without a model, with scripted answers."""

from __future__ import annotations

from offramp.cluster.ray.actor import WorkerActor
from offramp.cluster.remote.worker_messages import Hello
from offramp.engine.stages.backend_protocol import Backend
from offramp.testing.scripted_worker import SCRIPTED, ScriptedBackend


class ScriptedActor(WorkerActor):
    """Ray actor for tests without a model; real backends work as usual."""

    any_graph = True

    def make(self, hello: Hello) -> Backend:
        """Return the scripted backend if ``hello`` names it, else a real backend."""
        return ScriptedBackend() if hello.backend == SCRIPTED else super().make(hello)
