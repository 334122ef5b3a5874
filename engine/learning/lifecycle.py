"""The life cycle of learning, without I/O: when to record, compile, switch, and restart.

    recording      requests are sampled and recorded until there are enough
    compiling      a process compiles the model with the recorded inputs
    waiting        compiling failed; it is repeated after a while, with the inputs of that time
    switching      the compiled bundle has exits that pay: it is loaded and then answers
    serving        exits answer; nothing is recorded
    relearning     control has switched the exits off: current requests are recorded
    nothing_pays   no exit pays: the unmodified model continues to serve
    stopped        inputs cannot be recorded; an operator has to change something

The driver calls :meth:`LifeCycle.step` now and then, does what it returns, and reports the
outcome.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

FIRST_RETRY_S: Final = 10.0
"""Seconds from the first failure to the next attempt; then 60, doubled each time."""
_RETRY_S: Final = 60.0
_LONGEST_RETRY_S: Final = 3600.0
_JUDGED_ANSWERS: Final = 1000
"""Number of answers after which :class:`ExitWatch` decides whether exits still answer."""
_WITHHELD_SHARE: Final = 0.01
"""Exits count as not answering if they gave less than this share of the answers."""


class Phase(StrEnum):
    """Phase of ``--learn`` for one model."""

    RECORDING = "recording"
    COMPILING = "compiling"
    WAITING = "waiting"
    SWITCHING = "switching"
    SERVING = "serving"
    RELEARNING = "relearning"
    NOTHING_PAYS = "nothing_pays"
    STOPPED = "stopped"

    @property
    def records(self) -> bool:
        """``True`` in phases that record; failed attempts are repeated with newer inputs."""
        return self in (Phase.RECORDING, Phase.COMPILING, Phase.WAITING, Phase.RELEARNING)


class LearnAction(StrEnum):
    """Action that the driver of the life cycle has to take next."""

    COMPILE = "compile"
    SWITCH = "switch"
    RECORD = "record"
    """Begin a new recording."""
    FORGET = "forget"
    """Stop recording; recorded inputs are not needed any more."""


def retry_delay_s(failures: int) -> float:
    """Return the seconds to wait after this number of consecutive failures, at least one."""
    if failures <= 1:
        return FIRST_RETRY_S
    return float(min(_RETRY_S * 2 ** min(failures - 2, 16), _LONGEST_RETRY_S))


class ExitWatch:
    """Detects from counters of a served bundle whether its exits still answer.

    A drift alarm switches them off until thresholds are certified again. If inputs are far outside
    the calibration range, the model's end answers them, and no alarm is raised.
    """

    def __init__(self) -> None:
        """Begin; the first :meth:`update` sets the counters to compare with."""
        self._alarms: int | None = None
        self._answered = self._early = 0
        self.alarmed = False
        """``True`` if there was an alarm since the last :meth:`begin`."""
        self.withheld: bool | None = None
        """``True`` if exits answered almost none of the last 1,000 requests; ``None`` before."""

    def begin(self) -> None:
        """Consider only requests that are answered from now on."""
        self.alarmed, self.withheld = False, None

    def update(self, *, alarms: int, answered: int, early: int) -> None:
        """Update from the counters: drift alarms, all answers, and answers by exits."""
        if self._alarms is None or alarms > self._alarms:
            self.alarmed = self._alarms is not None
            self._alarms, self._answered, self._early = alarms, answered, early
            self.withheld = None
        elif answered - self._answered >= _JUDGED_ANSWERS:
            share = (early - self._early) / (answered - self._answered)
            self.withheld = share < _WITHHELD_SHARE
            self._answered, self._early = answered, early


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingProgress:
    """Number of samples that a recording has, and the number that it needs."""

    recorded: int
    wanted: int

    @property
    def full(self) -> bool:
        """``True`` if there are enough samples."""
        return self.recorded >= self.wanted


class LifeCycle:
    """Decides the next action; times are seconds of one steady clock."""

    def __init__(self, phase: Phase = Phase.RECORDING, *, failures: int = 0) -> None:
        """Continue from a phase; compiling and switching restart."""
        again = (Phase.COMPILING, Phase.WAITING, Phase.SWITCHING, Phase.STOPPED)
        self.phase = Phase.RECORDING if phase in again else phase
        self.failures = failures
        """Number of consecutive failed attempts to compile."""
        self.retry_s: float | None = None
        """Time of the next attempt to compile; ``None`` except in phase waiting."""
        self.reason = ""
        """Reason why learning waits, has stopped, or found no useful exit."""
        self.exits = ExitWatch()

    def step(
        self, now_s: float, sample: RecordingProgress, *, may_compile: bool = True
    ) -> LearnAction | None:
        """Return the next action; ``may_compile`` is ``False`` while another model compiles."""
        exits, enough, action = self.exits, sample.full and may_compile, None
        match self.phase:
            case Phase.RECORDING if enough:
                action = self._compile()
            case Phase.WAITING if enough and self.retry_s is not None and now_s >= self.retry_s:
                action = self._compile()
            case Phase.SERVING if exits.alarmed or exits.withheld:
                action = self._relearn()
            case Phase.NOTHING_PAYS if exits.alarmed:
                action = self._relearn()
            case Phase.RELEARNING if exits.withheld is False:
                self.phase, action = Phase.SERVING, LearnAction.FORGET
                exits.begin()
            case Phase.RELEARNING if exits.withheld and enough:
                action = self._compile()
        return action

    def compiled(self, *, pays: bool, reason: str = "") -> LearnAction:
        """Record that there is a bundle; ``reason`` is why none of its exits saves time."""
        self.failures, self.reason = 0, reason
        self.phase = Phase.SWITCHING if pays else Phase.NOTHING_PAYS
        self.exits.begin()
        return LearnAction.SWITCH if pays else LearnAction.FORGET

    def switched(self) -> None:
        """Record that the bundle serves; recorded inputs are not needed any more."""
        self.phase, self.exits = Phase.SERVING, ExitWatch()

    def failed(self, reason: str, now_s: float) -> None:
        """Record that an attempt to compile or to switch failed."""
        self.failures += 1
        self.phase, self.reason = Phase.WAITING, reason
        self.retry_s = now_s + retry_delay_s(self.failures)

    def stop(self, reason: str) -> LearnAction:
        """Stop until a person has changed the cause."""
        self.phase, self.reason = Phase.STOPPED, reason
        return LearnAction.FORGET

    def _compile(self) -> LearnAction:
        self.phase, self.retry_s = Phase.COMPILING, None
        return LearnAction.COMPILE

    def _relearn(self) -> LearnAction:
        self.phase, self.reason = Phase.RELEARNING, ""
        self.exits.begin()
        return LearnAction.RECORD
