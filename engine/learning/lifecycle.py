"""The life cycle of learning, sans I/O: when to record, compile, switch, and begin again.

    recording      a sample of what is asked is recorded until it is full
    compiling      a process compiles the model with it
    waiting        that failed; it is tried again after a while, with the sample as it is by then
    switching      the compiled bundle has exits that pay: it is loaded, and takes over
    serving        exits answer; nothing is recorded
    relearning     they answer nothing any more: what is asked now is recorded
    nothing_pays   no exit pays: the unmodified model goes on serving
    stopped        the sample cannot be recorded; a person has to change something

The driver calls :meth:`LifeCycle.step` now and then, does what it returns, and reports the
outcome.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

FIRST_RETRY_S: Final = 10.0
"""From the first failure to the next attempt; then a minute, doubled each time."""
_RETRY_S: Final = 60.0
_LONGEST_RETRY_S: Final = 3600.0
_JUDGED_ANSWERS: Final = 1000
"""Answers that tell whether exits answer."""
_WITHHELD_SHARE: Final = 0.01
"""Share of answers below which exits answer nothing to speak of."""


class Phase(StrEnum):
    """Where learning is."""

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
        """Whether inputs are recorded: until there is a bundle, attempts go on with newer ones."""
        return self in (Phase.RECORDING, Phase.COMPILING, Phase.WAITING, Phase.RELEARNING)


class LearnAction(StrEnum):
    """What the driver has to do next."""

    COMPILE = "compile"
    SWITCH = "switch"
    RECORD = "record"
    """Begin a new recording."""
    FORGET = "forget"
    """Stop recording; what was recorded is of no more use."""


def retry_delay_s(failures: int) -> float:
    """Return how long to wait after so many failures in a row, at least one."""
    if failures <= 1:
        return FIRST_RETRY_S
    return float(min(_RETRY_S * 2 ** min(failures - 2, 16), _LONGEST_RETRY_S))


class ExitWatch:
    """Tells from counters of a served bundle whether its exits still answer.

    A drift alarm switches them off until thresholds are certified again. Inputs far outside of
    what calibration saw are answered by the model's end without an alarm.
    """

    def __init__(self) -> None:
        """Begin with the first counters that are shown."""
        self._alarms: int | None = None
        self._answered = self._early = 0
        self.alarmed = False
        """Whether there was an alarm since the last :meth:`begin`."""
        self.withheld: bool | None = None
        """Whether exits answered almost nothing of the last 1,000 answers; ``None`` before."""

    def begin(self) -> None:
        """Judge only what is answered from now on."""
        self.alarmed, self.withheld = False, None

    def look(self, *, alarms: int, answered: int, early: int) -> None:
        """Look at the counters: drift alarms, all answers, and those by exits."""
        if self._alarms is None or alarms > self._alarms:
            self.alarmed = self._alarms is not None
            self._alarms, self._answered, self._early = alarms, answered, early
            self.withheld = None
        elif answered - self._answered >= _JUDGED_ANSWERS:
            share = (early - self._early) / (answered - self._answered)
            self.withheld = share < _WITHHELD_SHARE
            self._answered, self._early = answered, early


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """What is known of a recording, at a step."""

    recorded: int
    wanted: int

    @property
    def full(self) -> bool:
        """Whether there are enough samples."""
        return self.recorded >= self.wanted


class LifeCycle:
    """Decides what comes next; times are seconds of one steady clock."""

    def __init__(self, phase: Phase = Phase.RECORDING, *, failures: int = 0) -> None:
        """Go on from a phase; what was compiling or switching is begun again."""
        again = (Phase.COMPILING, Phase.WAITING, Phase.SWITCHING, Phase.STOPPED)
        self.phase = Phase.RECORDING if phase in again else phase
        self.failures = failures
        """Attempts to compile that failed in a row."""
        self.retry_s: float | None = None
        """When the next attempt is due; ``None`` unless waiting."""
        self.reason = ""
        """Why learning waits, stopped, or found nothing that pays."""
        self.exits = ExitWatch()

    def step(
        self, now_s: float, sample: Progressed, *, may_compile: bool = True
    ) -> LearnAction | None:
        """Decide what to do; ``may_compile`` is whether another model's compilation allows it."""
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
        """Note that there is a bundle; ``reason`` is why no exit of it pays."""
        self.failures, self.reason = 0, reason
        self.phase = Phase.SWITCHING if pays else Phase.NOTHING_PAYS
        self.exits.begin()
        return LearnAction.SWITCH if pays else LearnAction.FORGET

    def switched(self) -> None:
        """Note that the bundle serves; what was recorded is of no more use."""
        self.phase, self.exits = Phase.SERVING, ExitWatch()

    def failed(self, reason: str, now_s: float) -> None:
        """Note that an attempt to compile or to switch failed."""
        self.failures += 1
        self.phase, self.reason = Phase.WAITING, reason
        self.retry_s = now_s + retry_delay_s(self.failures)

    def stop(self, reason: str) -> LearnAction:
        """Give up, until a person has changed something."""
        self.phase, self.reason = Phase.STOPPED, reason
        return LearnAction.FORGET

    def _compile(self) -> LearnAction:
        self.phase, self.retry_s = Phase.COMPILING, None
        return LearnAction.COMPILE

    def _relearn(self) -> LearnAction:
        self.phase, self.reason = Phase.RELEARNING, ""
        self.exits.begin()
        return LearnAction.RECORD
