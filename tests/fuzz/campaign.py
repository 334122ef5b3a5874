"""Campaigns of fuzzing, and their list."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from random import Random
from typing import Final, Protocol


class WrongError(Exception):
    """Finding of a campaign: a result that no bytes may cause."""


class Campaign(Protocol):
    """Feeds one reader with cases; a case is bytes, so that it can be kept and tried again."""

    def seeds(self) -> Sequence[bytes]:
        """Cases that others are made of."""

    def mutate(self, case: bytes, random: Random) -> bytes:
        """A case like another one."""

    def check(self, case: bytes) -> str:
        """Feed a case; return the outcome in a word or two, for the count.

        Any exception is a finding, in particular a :class:`WrongError`.
        """

    def close(self) -> None:
        """Release all resources."""


CAMPAIGNS: Final[Mapping[str, str]] = {
    "config": "tests.fuzz.files:Config",
    "npz": "tests.fuzz.files:Npz",
    "data": "tests.fuzz.data:DataFiles",
    "onnx": "tests.fuzz.files:Onnx",
    "weights": "tests.fuzz.weights:Weights",
    "state": "tests.fuzz.state:State",
    "recording": "tests.fuzz.recordings:Recordings",
    "cluster": "tests.fuzz.planning:ClusterFiles",
    "plan": "tests.fuzz.planning:PlanningJson",
    "frames": "tests.fuzz.frames:WorkerFrames",
    "greetings": "tests.fuzz.greetings:Greetings",
    "messages": "tests.fuzz.messages:Messages",
}
"""Campaigns that a worker runs, by name; ``server`` and ``bundle`` are separate processes."""
KEPT: Final = 300
"""Number of cases with new outcomes that are mutated further, in addition to the seeds."""


def make_campaign(name: str) -> Campaign:
    """Create a campaign of :data:`CAMPAIGNS`, or of a class MODULE:NAME, with its resources."""
    module, _, kind = CAMPAIGNS.get(name, name).partition(":")
    made: Campaign = getattr(importlib.import_module(module), kind)()
    return made
