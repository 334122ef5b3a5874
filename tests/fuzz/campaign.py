"""What a campaign is, and which there are."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from random import Random
from typing import Final, Protocol


class WrongError(Exception):
    """What a campaign found: something that no bytes may bring about."""


class Campaign(Protocol):
    """Feeds one reader with cases; a case is bytes, so that it can be kept and tried again."""

    def seeds(self) -> Sequence[bytes]:
        """Cases that others are made of."""

    def mutate(self, case: bytes, random: Random) -> bytes:
        """A case like another one."""

    def check(self, case: bytes) -> str:
        """Feed it; gives the outcome in a word or two, for the count.

        Whatever it raises is a finding, a :class:`WrongError` above all.
        """

    def close(self) -> None:
        """Give back what it holds."""


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
"""Those that a worker runs, by name; ``server`` and ``bundle`` are processes of their own."""
KEPT: Final = 300
"""Cases of new outcomes that are mutated further, beside the seeds."""


def make_campaign(name: str) -> Campaign:
    """Make a campaign of :data:`CAMPAIGNS`, or of a class MODULE:NAME, with whatever it needs."""
    module, _, kind = CAMPAIGNS.get(name, name).partition(":")
    made: Campaign = getattr(importlib.import_module(module), kind)()
    return made
