"""Activation of a policy: its deployment is made, and new batches start with this deployment."""

from __future__ import annotations

from offramp.bundle import ExitPolicy
from offramp.engine.models.deployment import Deployment, DeploymentMaker
from offramp.engine.models.devices import ModelSplits
from offramp.engine.scheduling.policies import PolicyName
from offramp.engine.serving.executor import Executor


def activate(
    executor: Executor,
    model: str,
    deployments: DeploymentMaker,
    policy: ExitPolicy,
    scheduling: PolicyName,
) -> Deployment:
    """Start a model's batches under a policy, with prepared stages.

    ValueError if the stages do not fit the scheduling policy; then nothing changes.
    """
    with deployments.swapping:
        deployment = deployments.make(policy, executor.deployment(model))
        chosen = deployment.scheduled_by(
            scheduling, executor.health.streams, executor.placed(model)
        )
        executor.hot_swap(model, deployment, chosen)
        return deployment


def serve_by(
    executor: Executor,
    model: str,
    deployments: DeploymentMaker,
    splits: ModelSplits,
    scheduling: PolicyName,
) -> Deployment:
    """Start a model's batches with other splits, under the active policy.

    ValueError if the splits do not fit the policy's stages, or if the stages do not fit the
    scheduling policy; then nothing changes.
    """
    with deployments.swapping:
        before, deployments.splits = deployments.splits, splits
        try:
            policy = executor.deployment(model).policy
            return activate(executor, model, deployments, policy, scheduling)
        except BaseException:
            deployments.splits = before
            raise
