"""Sans-I/O scheduling: which stage runs on which samples, when."""

from offramp.engine.scheduling.base import (
    Decision,
    DropCause,
    Dropped,
    Idle,
    Run,
    Scheduler,
    SchedulerFullError,
    Submission,
    Transition,
    Wait,
)
from offramp.engine.scheduling.run_through import RunThroughScheduler

__all__ = [
    "Decision",
    "DropCause",
    "Dropped",
    "Idle",
    "Run",
    "RunThroughScheduler",
    "Scheduler",
    "SchedulerFullError",
    "Submission",
    "Transition",
    "Wait",
]
