"""Putting a policy in force: its deployment is made, and batches start under it from then on."""

from __future__ import annotations

from offramp.bundle import ExitPolicy
from offramp.engine.models.deployment import Deployment, DeploymentMaker
from offramp.engine.models.devices import ModelSplits
from offramp.engine.scheduling.policies import PolicyName
from offramp.engine.serving.executor import Executor


def put_in_force(
    executor: Executor,
    model: str,
    deployments: DeploymentMaker,
    policy: ExitPolicy,
    scheduling: PolicyName,
) -> Deployment:
    """Start a model's batches under a policy, on stages that are prepared.

    ValueError if they do not suit the scheduling policy; then all stays as it is.
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
    """Start a model's batches by other splits, under the policy that is in force.

    ValueError if the splits do not suit its stages, or these the scheduling policy; then all stays
    as it is.
    """
    with deployments.swapping:
        before, deployments.splits = deployments.splits, splits
        try:
            policy = executor.deployment(model).policy
            return put_in_force(executor, model, deployments, policy, scheduling)
        except BaseException:
            deployments.splits = before
            raise
