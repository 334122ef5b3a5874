"""What became of a request: read from its response, or from the status of its call."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import numpy as np

from offramp.proto.datatypes import dtype_of
from offramp.proto.messages import ModelInferResponse
from offramp.tools.bench.outcomes import FINAL, Status

UNKNOWN: Final = -1
"""The class of an answer that is not looked at."""

_STATUSES: Final[Mapping[str, Status]] = {
    "DEADLINE_EXCEEDED": Status.EXPIRED,
    "RESOURCE_EXHAUSTED": Status.REJECTED,
    "UNAVAILABLE": Status.REJECTED,
}
"""By gRPC's name of the code."""

_MOST_CAUSES: Final = 20
_MOST_CHARS: Final = 300
_NUMBER: Final = re.compile(r"-?\d+(\.\d+)?")


class Reply(NamedTuple):
    """What a response says of its one sample."""

    exit: int
    """Index of the exit that answered; ``FINAL`` where the response, of another server, says
    nothing of exits."""
    forced: bool
    """It had to take the exit, below its threshold."""
    prediction: int
    """Index of the largest element of the answer, or ``UNKNOWN``."""


def read_reply(response: ModelInferResponse, answer: str | None) -> Reply:
    """Read the response to a request of one sample.

    Args:
        response: As it came.
        answer: Name of the output that is the answer; ``None`` leaves it unread.

    Raises:
        ValueError: It is malformed; the message says how.
    """
    parameters = response.parameters
    exit_, forced = FINAL, False
    if "offramp_exits" in parameters:
        exit_ = int(parameters["offramp_exits"].string_param)
    if "offramp_forced" in parameters:
        forced = parameters["offramp_forced"].string_param == "1"
    return Reply(exit_, forced, UNKNOWN if answer is None else _prediction(response, answer))


def _prediction(response: ModelInferResponse, answer: str) -> int:
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.name == answer:
            return int(np.frombuffer(raw, dtype_of(output.datatype, answer)).argmax())
    raise ValueError(f"the response has no output {answer!r}, which is the model's answer")


def status_of(code: str) -> Status:
    """How a request ended whose call ended with this status code, for instance ``UNAVAILABLE``."""
    return _STATUSES.get(code, Status.FAILED)


class Causes:
    """Why requests failed: counts by message, where messages that differ only in numbers are one.

    The first of them is kept as it was.
    """

    def __init__(self) -> None:
        self._examples: dict[str, str] = {}
        self._counts: Counter[str] = Counter()

    def count(self, cause: str, times: int = 1) -> None:
        """Count it; once there are many different ones, new ones count as ``others``."""
        kind = _NUMBER.sub("0", cause)
        if kind not in self._counts and len(self._counts) >= _MOST_CAUSES:
            kind = cause = "others"
        short = cause if len(cause) <= _MOST_CHARS else f"{cause[:_MOST_CHARS]}…"
        self._examples.setdefault(kind, short)
        self._counts[kind] += times

    def to_json(self) -> dict[str, int]:
        """Counts by message, the most frequent first."""
        return {self._examples[kind]: count for kind, count in self._counts.most_common()}

    @classmethod
    def merge(cls, parts: Iterable[Mapping[str, int]]) -> Causes:
        """Add up what several processes counted."""
        total = cls()
        for part in parts:
            for cause, times in part.items():
                total.count(cause, times)
        return total
