"""Sans-I/O scheduling: which stage runs on which samples, when.

May import: certify, bundle.

The server's executor, the simulator and the tests drive the very same objects.
"""

from offramp.engine.scheduling.base import (
    DropCause,
    Dropped,
    Idle,
    Run,
    SchedulerFullError,
    Submission,
    Transition,
    Wait,
)
from offramp.engine.scheduling.device import Assignment, DeviceScheduler
from offramp.engine.scheduling.factory import (
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
from offramp.engine.scheduling.latency import Latencies, stage_seconds
from offramp.engine.scheduling.parallel import ParallelLimit
from offramp.engine.scheduling.placed import PlacedPlan
from offramp.engine.scheduling.placement import (
    DeviceKind,
    DeviceLink,
    Placement,
    StreamPlacement,
)
from offramp.engine.scheduling.points import (
    OperatingPoint,
    OperatingPoints,
    going_on,
    operating_points,
    pareto_front,
)
from offramp.engine.scheduling.policy import Policy
from offramp.engine.scheduling.queue import SampleQueue
from offramp.engine.scheduling.scheduler import ModelScheduler
from offramp.engine.scheduling.stage_table import StageTable

__all__ = [
    "POLICIES",
    "Assignment",
    "DeviceKind",
    "DeviceLink",
    "DeviceScheduler",
    "DropCause",
    "Dropped",
    "Idle",
    "Latencies",
    "ModelScheduler",
    "OperatingPoint",
    "OperatingPoints",
    "ParallelLimit",
    "PlacedPlan",
    "Placement",
    "PlanPolicy",
    "Policy",
    "PolicyName",
    "Run",
    "SampleQueue",
    "SchedulerFullError",
    "StageTable",
    "StreamPlacement",
    "Submission",
    "Transition",
    "Wait",
    "chooses_points",
    "going_on",
    "make_policy",
    "make_scheduler",
    "may_buffer",
    "operating_points",
    "pareto_front",
    "place",
    "policy_for",
    "stage_seconds",
]
