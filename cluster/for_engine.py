"""Background tasks that clusters add to an engine: they record batch profiles, and plan again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from offramp.cluster.planning.forecasting import METHODS
from offramp.cluster.planning.replanning import PAUSE_WINDOWS, ReplanRules
from offramp.cluster.remote.worker_backend import RemoteBackend
from offramp.cluster.serving.cluster_options import cluster_options
from offramp.cluster.serving.cluster_statistics import PLAN, PROFILE
from offramp.cluster.serving.plan_loop import PlanLoop
from offramp.cluster.serving.profile_loop import ProfileLoop
from offramp.cluster.serving.split_change import SplitServing
from offramp.engine.models.options import EngineOptions
from offramp.engine.models.served_model import ServedModel
from offramp.engine.serving.executor import Executor
from offramp.engine.serving.extension import BackgroundTask
from offramp.engine.stages.backend_protocol import Backend


class _Extension:
    """Adds batch profiles, and plans while serving (:class:`.EngineExtension`)."""

    def background_tasks(
        self,
        models: Mapping[str, ServedModel],
        executor: Executor,
        backend: Backend,
        options: EngineOptions,
    ) -> Mapping[str, BackgroundTask]:
        """Return the loop of batch profiles, and the plan loop if a model is split."""
        cluster_settings = cluster_options(options)
        window_s, forecaster = (
            cluster_settings.profile_window_s,
            METHODS[cluster_settings.forecast](),
        )
        profiles = ProfileLoop(executor, models, window_s=window_s, forecaster=forecaster)
        split = [name for name, model in models.items() if model.split_by is not None]
        if not split or not isinstance(backend, RemoteBackend):
            return {PROFILE: profiles}
        (name,) = split  # only a single model can be split
        deployments = models[name].split_by
        assert deployments is not None
        served = SplitServing(
            name=name,
            executor=executor,
            deployments=deployments,
            workers=backend,
            scheduling=models[name].options.scheduling,
        )
        rules = ReplanRules(window_s=window_s, pause_s=PAUSE_WINDOWS * window_s)
        return {
            PROFILE: profiles,
            PLAN: PlanLoop(served, profiles, rules=rules, forecaster=forecaster),
        }


EXTENSION: Final = _Extension()
