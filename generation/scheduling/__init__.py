"""Sans-I/O scheduling of text: it decides which stage runs next, and for which sequences.

The serving thread, the simulator and the tests use the same objects.
"""

from offramp.generation.scheduling.counts import TextCounter, TextCounts
from offramp.generation.scheduling.policies import RefillPolicy, StepPolicy, TogetherPolicy
from offramp.generation.scheduling.scheduler import TextScheduler
from offramp.generation.scheduling.simulation import (
    RecordedText,
    SimulatedText,
    StepSeconds,
    simulate_text,
)
from offramp.generation.scheduling.steps import (
    EndedSequence,
    GivenToken,
    NeverFitsError,
    NewSequence,
    PrefillStep,
    SequenceEnd,
    TextDecision,
    TextLimits,
    TextOutcome,
    TextQueueFullError,
    TokenStep,
)
from offramp.generation.scheduling.thresholds import TokenThresholds

__all__ = [
    "EndedSequence",
    "GivenToken",
    "NeverFitsError",
    "NewSequence",
    "PrefillStep",
    "RecordedText",
    "RefillPolicy",
    "SequenceEnd",
    "SimulatedText",
    "StepPolicy",
    "StepSeconds",
    "TextCounter",
    "TextCounts",
    "TextDecision",
    "TextLimits",
    "TextOutcome",
    "TextQueueFullError",
    "TextScheduler",
    "TogetherPolicy",
    "TokenStep",
    "TokenThresholds",
    "simulate_text",
]
