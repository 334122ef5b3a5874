"""What a process writes down of each request, and the outcomes that are made of it."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from offramp.tools.bench.load.replies import UNKNOWN, Reply
from offramp.tools.bench.outcomes import FINAL, Outcomes, Status


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Records:
    """One element a request, in the order of intended sending."""

    sample: NDArray[np.int64]
    """[n]: index into the data."""
    intended_s: NDArray[np.float64]
    """[n]: when it was to be sent, from the start of the run."""
    sent_s: NDArray[np.float64]
    """[n]: when it was; NaN where it never was."""
    ended_s: NDArray[np.float64]
    """[n]: when its answer, or its failure, was there; NaN where there was neither."""
    status: NDArray[np.uint8]
    """[n]: a ``Status``."""
    exit: NDArray[np.int16]
    """[n]: index, or ``FINAL``."""
    forced: NDArray[np.bool_]
    """[n]"""
    prediction: NDArray[np.int64]
    """[n]: class, or ``UNKNOWN``."""

    def to_outcomes(self, reference: NDArray[np.int64] | None, duration_s: float) -> Outcomes:
        """Judge the answers.

        Args:
            reference: [samples]: the source model's class of each; ``UNKNOWN`` where it was not
                asked, ``None`` where it never was.
            duration_s: Of the offered load.
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
        """From when a request was to be sent until it was; of those sent after the warm-up."""
        counted = np.isfinite(self.sent_s) & (self.intended_s >= warm_up_s)
        return (self.sent_s - self.intended_s)[counted]

    def peak_in_flight(self) -> int:
        """Most requests that were under way at once."""
        sent = np.isfinite(self.sent_s)
        ends = np.nan_to_num(self.ended_s[sent], nan=math.inf)
        order = np.argsort(np.concatenate([ends, self.sent_s[sent]]), kind="stable")
        steps = np.concatenate([np.full(len(ends), -1), np.ones(len(ends), np.int64)])
        return int(np.cumsum(steps[order]).max(initial=0))


class Ledger:
    """Grows by a line a request; a request that nothing more is heard of stays unanswered."""

    def __init__(self) -> None:
        self._sample, self._prediction = array("q"), array("q")
        self._intended_s, self._sent_s, self._ended_s = array("d"), array("d"), array("d")
        self._status, self._exit, self._forced = array("B"), array("h"), array("b")

    def open(self, *, sample: int, intended_s: float) -> int:
        """Enter a request; gives its line."""
        self._sample.append(sample)
        self._intended_s.append(intended_s)
        self._sent_s.append(math.nan)
        self._ended_s.append(math.nan)
        self._status.append(Status.UNANSWERED)
        self._exit.append(FINAL)
        self._forced.append(0)
        self._prediction.append(UNKNOWN)
        return len(self._sample) - 1

    def sent(self, line: int, at_s: float) -> None:
        """It is on its way."""
        self._sent_s[line] = at_s

    def answered(self, line: int, at_s: float, reply: Reply) -> None:
        """Its answer is there."""
        self._ended_s[line] = at_s
        self._status[line] = Status.OK
        self._exit[line], self._forced[line], self._prediction[line] = reply

    def failed(self, line: int, at_s: float, status: Status) -> None:
        """It ended without an answer."""
        self._ended_s[line] = at_s
        self._status[line] = status

    def close(self) -> Records:
        """All lines as arrays."""
        return Records(
            sample=np.array(self._sample, np.int64),
            intended_s=np.array(self._intended_s, np.float64),
            sent_s=np.array(self._sent_s, np.float64),
            ended_s=np.array(self._ended_s, np.float64),
            status=np.array(self._status, np.uint8),
            exit=np.array(self._exit, np.int16),
            forced=np.array(self._forced, np.bool_),
            prediction=np.array(self._prediction, np.int64),
        )


def merge(parts: list[Records]) -> Records:
    """One run's records out of its processes', in the order of intended sending."""
    order = np.argsort(np.concatenate([part.intended_s for part in parts]), kind="stable")
    return Records(
        **{
            field.name: np.concatenate([getattr(part, field.name) for part in parts])[order]
            for field in fields(Records)
        }
    )
