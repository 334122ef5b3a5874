"""The log of a load generator, one line per request, and the outcomes computed from it."""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offramp.certify.decision import MODEL_END
from offramp.proto.messages import ModelInferResponse
from offramp.proto.tensors import dtype_of
from offramp.tools.bench.common.outcomes import Outcomes, Status

UNKNOWN: Final = -1
"""Class of an answer that is not compared."""

_STATUSES: Final[Mapping[str, Status]] = {
    "DEADLINE_EXCEEDED": Status.EXPIRED,
    "RESOURCE_EXHAUSTED": Status.REJECTED,
    "UNAVAILABLE": Status.REJECTED,
}
"""Statuses by the name of the gRPC code."""

_MOST_CAUSES: Final = 20
_MOST_CHARS: Final = 300
_NUMBER: Final = re.compile(r"-?\d+(\.\d+)?")


class Reply(NamedTuple):
    """The answer to a request of one sample."""

    exit: int
    """Index of the exit that answered; ``MODEL_END`` if another server's response names no exit."""
    forced: bool
    """True if the exit had to answer below its threshold."""
    prediction: int
    """Index of the largest element of the answer, or ``UNKNOWN``."""


def read_reply(response: ModelInferResponse, answer: str | None) -> Reply:
    """Read the response to a request of one sample.

    ``answer`` is the name of the output with the answer; ``None`` leaves it unread. Raise
    ValueError for a malformed response.
    """
    parameters = response.parameters
    exit_, forced = MODEL_END, False
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
    """Return the status of a request whose call ended with a gRPC code, such as ``UNAVAILABLE``."""
    return _STATUSES.get(code, Status.FAILED)


class Causes:
    """Counts of failures by message; messages that differ only in numbers are counted together.

    The first of such messages is the key.
    """

    def __init__(self) -> None:
        self._examples: dict[str, str] = {}
        self._counts: Counter[str] = Counter()

    def count(self, cause: str, times: int = 1) -> None:
        """Count a failure; after many different messages, new ones count as ``others``."""
        kind = _NUMBER.sub("0", cause)
        if kind not in self._counts and len(self._counts) >= _MOST_CAUSES:
            kind = cause = "others"
        short = cause if len(cause) <= _MOST_CHARS else f"{cause[:_MOST_CHARS]}…"
        self._examples.setdefault(kind, short)
        self._counts[kind] += times

    def to_json(self) -> dict[str, int]:
        """Return the counts by message, the most frequent first."""
        return {self._examples[kind]: count for kind, count in self._counts.most_common()}

    @classmethod
    def merge(cls, parts: Iterable[Mapping[str, int]]) -> Causes:
        """Return the sum of the counts of several processes."""
        total = cls()
        for part in parts:
            for cause, times in part.items():
                total.count(cause, times)
        return total


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestRecords:
    """A load's requests and how they ended: arrays in the order of intended send times."""

    sample: NDArray[np.int64]
    """[n]: index into the data."""
    intended_s: NDArray[np.float64]
    """[n]: intended send time, in seconds from the start of the run."""
    sent_s: NDArray[np.float64]
    """[n]: actual send time; NaN if the request was never sent."""
    ended_s: NDArray[np.float64]
    """[n]: time of the answer or failure; NaN without either."""
    status: NDArray[np.uint8]
    """[n]: ``Status`` with which each request ended, as a number."""
    exit: NDArray[np.int16]
    """[n]: index of the exit that answered, or ``MODEL_END``."""
    forced: NDArray[np.bool_]
    """[n]: true if an exit had to answer below its threshold."""
    prediction: NDArray[np.int64]
    """[n]: predicted class, or ``UNKNOWN``."""

    def to_outcomes(self, reference: NDArray[np.int64] | None, duration_s: float) -> Outcomes:
        """Return the outcomes, with each answer compared with the reference.

        ``reference`` has the source model's class of each sample, or ``UNKNOWN``; ``None`` compares
        nothing.
        """
        answered = self.status == Status.OK
        agrees = np.full(len(self.sample), -1, np.int8)
        if reference is not None:
            truth = reference[self.sample]
            known = answered & (truth != UNKNOWN) & (self.prediction != UNKNOWN)
            agrees[known] = (self.prediction == truth)[known]
        return Outcomes(
            intended_s=self.intended_s,
            latency_s=np.where(answered, self.ended_s - self.intended_s, np.nan),
            status=self.status,
            exit=self.exit,
            forced=self.forced,
            agrees=agrees,
            duration_s=duration_s,
        )

    def lateness_s(self, warm_up_s: float) -> NDArray[np.float64]:
        """Return the seconds between due time and sending of requests, without the warm-up."""
        counted = np.isfinite(self.sent_s) & (self.intended_s >= warm_up_s)
        return (self.sent_s - self.intended_s)[counted]

    def peak_in_flight(self) -> int:
        """Return the largest number of concurrent requests."""
        sent = np.isfinite(self.sent_s)
        ends = np.nan_to_num(self.ended_s[sent], nan=math.inf)
        order = np.argsort(np.concatenate([ends, self.sent_s[sent]]), kind="stable")
        steps = np.concatenate([np.full(len(ends), -1), np.ones(len(ends), np.int64)])
        return int(np.cumsum(steps[order]).max(initial=0))


class RequestLog:
    """The log of one sending process; a request without a further entry counts as unanswered."""

    def __init__(self) -> None:
        self._sample, self._prediction = array("q"), array("q")
        self._intended_s, self._sent_s, self._ended_s = array("d"), array("d"), array("d")
        self._status, self._exit, self._forced = array("B"), array("h"), array("b")

    def open(self, *, sample: int, intended_s: float) -> int:
        """Add a line for a request; return the line's number."""
        self._sample.append(sample)
        self._intended_s.append(intended_s)
        self._sent_s.append(math.nan)
        self._ended_s.append(math.nan)
        self._status.append(Status.UNANSWERED)
        self._exit.append(MODEL_END)
        self._forced.append(0)
        self._prediction.append(UNKNOWN)
        return len(self._sample) - 1

    def sent(self, line: int, at_s: float) -> None:
        """Record that a request was sent."""
        self._sent_s[line] = at_s

    def answered(self, line: int, at_s: float, reply: Reply) -> None:
        """Record the time and the content of the answer to a request."""
        self._ended_s[line] = at_s
        self._status[line] = Status.OK
        self._exit[line], self._forced[line], self._prediction[line] = reply

    def failed(self, line: int, at_s: float, status: Status) -> None:
        """Record that a request ended without an answer."""
        self._ended_s[line] = at_s
        self._status[line] = status

    def close(self) -> RequestRecords:
        """Return all lines as arrays."""
        return RequestRecords(
            sample=np.array(self._sample, np.int64),
            intended_s=np.array(self._intended_s, np.float64),
            sent_s=np.array(self._sent_s, np.float64),
            ended_s=np.array(self._ended_s, np.float64),
            status=np.array(self._status, np.uint8),
            exit=np.array(self._exit, np.int16),
            forced=np.array(self._forced, np.bool_),
            prediction=np.array(self._prediction, np.int64),
        )


def merge(parts: list[RequestRecords]) -> RequestRecords:
    """Merge the records of a run's processes, in the order of intended send times."""
    order = np.argsort(np.concatenate([part.intended_s for part in parts]), kind="stable")
    return RequestRecords(
        **{
            field.name: np.concatenate([getattr(part, field.name) for part in parts])[order]
            for field in fields(RequestRecords)
        }
    )


def percentiles_ms(lateness_s: NDArray[np.float64]) -> dict[str, float]:
    """Return ``p50``, ``p99`` and ``max`` of how late requests were sent, in milliseconds."""
    p50, p99 = np.quantile(lateness_s, (0.5, 0.99)) * 1e3
    return {"p50": float(p50), "p99": float(p99), "max": float(lateness_s.max()) * 1e3}
