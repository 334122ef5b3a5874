"""Loops of extensions that run next to the streams of an engine."""

from __future__ import annotations

from offramp.cluster.serving.plan_loop import PlanLoop
from offramp.cluster.serving.profile_loop import ProfileLoop
from offramp.engine.core import Engine


def profiles_of(engine: Engine) -> ProfileLoop:
    loop = engine._background["batch_profile"]
    assert isinstance(loop, ProfileLoop)
    return loop


def plans_of(engine: Engine) -> PlanLoop:
    loop = engine._background["plan"]
    assert isinstance(loop, PlanLoop)
    return loop
