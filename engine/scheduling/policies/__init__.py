"""Scheduling policies, each a small class, and the table of their names."""

from offramp.engine.scheduling.policies.policy_names import (
    POLICIES,
    PlanPolicy,
    PolicyName,
    chooses_points,
    make_policy,
    make_scheduler,
    may_buffer,
    place,
    policy_for,
)

__all__ = [
    "POLICIES",
    "PlanPolicy",
    "PolicyName",
    "chooses_points",
    "make_policy",
    "make_scheduler",
    "may_buffer",
    "place",
    "policy_for",
]
