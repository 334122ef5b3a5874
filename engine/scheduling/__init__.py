"""Scheduling without I/O: decides which stage runs on which samples, and when.

The server's executor, the simulator and the tests drive the same objects.
"""

from offramp.engine.scheduling.decisions import (
    DropCause,
    Dropped,
    Idle,
    Run,
    SchedulerFullError,
    StepOutcome,
    Submission,
    Wait,
)
from offramp.engine.scheduling.device import DeviceScheduler
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
from offramp.engine.scheduling.policy_protocol import Policy
from offramp.engine.scheduling.queue import SampleQueue
from offramp.engine.scheduling.scheduler import ModelScheduler
from offramp.engine.scheduling.stage_table import StageTable

__all__ = [
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
    "Policy",
    "Run",
    "SampleQueue",
    "SchedulerFullError",
    "StageTable",
    "StepOutcome",
    "StreamPlacement",
    "Submission",
    "Wait",
    "going_on",
    "operating_points",
    "pareto_front",
    "stage_seconds",
]
