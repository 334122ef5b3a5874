"""What a controller has found of agreement, on the status page: in words and figures."""

from __future__ import annotations

from dataclasses import dataclass

from offramp.bundle import NEVER, Promise
from offramp.engine.control.controller import ControlStatus, Evidence
from offramp.engine.requests.statistics import ModelStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A value and what it is of."""

    value: str
    label: str
    alarming: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementView:
    """A controller's findings in words."""

    heading: str
    """Two or three words: how far to rely on the statement."""
    statement: str
    """What holds of the answers; sentences."""
    alarming: bool
    """Whether nothing stands behind the exits in use, or audits speak against them, or the data
    drifted."""
    state: str
    """What the controller is at; in a few words."""
    figures: tuple[Figure, ...]


def view_agreement(statistics: ModelStatistics, promise: Promise | None) -> AgreementView | None:
    """Put what is observed of a model into words; ``None`` where nothing is."""
    control = statistics.control
    if control is None:
        return None
    headings = {
        Evidence.CERTIFIED: "Certified while serving",
        Evidence.CALIBRATED: "Promised by calibration",
        Evidence.CONSERVATIVE: "No exit answers",
        Evidence.SUSPICIOUS: "Suspicious",
        Evidence.NONE: "Nothing is promised",
    }
    return AgreementView(
        heading=headings[control.evidence],
        statement=_statement(control, promise),
        alarming=control.evidence in (Evidence.NONE, Evidence.SUSPICIOUS)
        or (control.evidence is Evidence.CONSERVATIVE and control.alarms > 0),
        state=control.state,
        figures=_figures(statistics, control),
    )


def exits_in_use(statistics: ModelStatistics) -> bool:
    """Whether any exit answers; those in shadow mode, or retired, do not."""
    return any(stage.threshold < NEVER for stage in statistics.stages[:-1])


def percent(share: float) -> str:
    """``0.83 %``."""
    return f"{share * 100:.3g} %"


def describe_promise(promise: Promise) -> str:
    """The certificate in one sentence, without its full stop."""
    of_classes = promise.max_class_disagreement
    each = f", ≤ {of_classes * 100:g} % within each class of enough samples," if of_classes else ""
    return (
        f"disagreement with the unmodified model ≤ {promise.max_disagreement * 100:g} %{each} "
        f"on data like the calibration set, "
        f"certified with {promise.confidence_level * 100:g} % confidence "
        f"on {promise.certify_samples:,} samples ({promise.certify_errors:,} answered otherwise)"
    )


def _statement(control: ControlStatus, promise: Promise | None) -> str:
    sure = f"with {percent(control.confidence_level)} confidence"
    constraint = percent(control.max_disagreement)
    match control.evidence:
        case Evidence.CERTIFIED:
            bound = min(control.disagreement_upper_bound, control.max_disagreement)
            return (
                f"disagreement with the unmodified model is at most {percent(bound)} {sure} "
                "on samples like those observed, copies counted once "
                f"(constraint: {constraint}). {_seen(control)}"
            )
        case Evidence.CALIBRATED:
            promised = f"disagreement with the unmodified model ≤ {constraint} {sure}"
            words = promised if promise is None else describe_promise(promise)
            return f"{words}; not yet confirmed by what is served. {_seen(control)}"
        case Evidence.CONSERVATIVE:
            return (
                "every answer is given by the whole model, until there is evidence for more "
                f"(constraint: disagreement ≤ {constraint} {sure}). {_seen(control)}"
            )
        case Evidence.SUSPICIOUS:
            return (
                f"more audited answers disagreed than the constraint of {constraint} allows, too "
                f"few for an alarm so far; nothing is promised until that is settled. "
                f"{_seen(control)}"
            )
        case Evidence.NONE:
            return (
                "the exits in use are tuned for disagreement ≤ "
                f"{constraint}, and no certificate covers them. {_seen(control)}"
            )


def _seen(control: ControlStatus) -> str:
    samples = f"{control.observed:,} samples were observed so far"
    return f"{samples}, {control.audited:,} early answers among them audited."


def _figures(statistics: ModelStatistics, control: ControlStatus) -> tuple[Figure, ...]:
    measured = "–" if control.disagreement is None else percent(control.disagreement)
    known = control.disagreement_upper_bound < 1
    bound = percent(control.disagreement_upper_bound) if known else "–"
    return (
        Figure(value=measured, label="disagreement measured"),
        Figure(value=bound, label=f"at most, with {percent(control.confidence_level)} confidence"),
        Figure(value=percent(control.max_disagreement), label="constraint"),
        Figure(value=control.controller, label="controller, by name"),
        Figure(value=percent(control.audit_probability), label="of early answers are audited"),
        *(
            Figure(value=f"{count:,}", label=label, alarming=alarming and count > 0)
            for label, count, alarming in (
                ("audited", control.audited, False),
                ("disagreed", control.disagreed, False),
                ("being audited", statistics.auditing, False),
                ("audits lost", statistics.lost_feedback, False),
                ("with inputs out of range", statistics.out_of_range, False),
                ("copies, no evidence", statistics.discounted, False),
                ("drift alarms", control.alarms, True),
                ("tunings", control.tunings, False),
                ("changes of exits", control.adjustments, False),
            )
        ),
    )
