"""Agreement on the status page while serving."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from offramp.bundle import NEVER
from offramp.engine.control.controller import ControlStatus, Evidence
from offramp.engine.stages.plan import Mode
from offramp.server.pages.status import AgreementView, exits_in_use, percent, view_agreement
from offramp.testing.engine import FakeEngine, fake_control, fake_model


def statistics(control: ControlStatus | None, **changes: Any) -> Any:
    engine = FakeEngine(mode=Mode.AUDIT, control=control)
    return dataclasses.replace(engine.statistics()["fake"], **changes)


def view(control: ControlStatus, **changes: Any) -> AgreementView:
    seen = view_agreement(statistics(control, **changes), fake_model().policy.promise)
    assert seen is not None
    return seen


def figures(seen: AgreementView) -> dict[str, str]:
    return {figure.label: figure.value for figure in seen.figures}


def test_nothing_is_said_where_nothing_is_observed() -> None:
    assert view_agreement(statistics(None), fake_model().policy.promise) is None


@pytest.mark.parametrize(
    ("evidence", "heading", "statement", "alarming"),
    [
        (
            Evidence.CERTIFIED,
            "Certified while serving",
            (
                "disagreement with the unmodified model is at most 0.83 % with 95 % confidence "
                "on samples like those observed, copies counted once (constraint: 1 %). 12,400 "
                "samples were observed so far, 412 early answers among them audited."
            ),
            False,
        ),
        (
            Evidence.CALIBRATED,
            "Promised by calibration",
            (
                "disagreement with the unmodified model ≤ 1 % on data like the calibration set, "
                "certified with 95 % confidence on 5,000 samples (12 answered otherwise); not yet "
                "confirmed by what is served. 310 samples were observed so far, 14 early answers "
                "among them audited."
            ),
            False,
        ),
        (
            Evidence.CONSERVATIVE,
            "No exit answers",
            (
                "the whole model answers every sample until there is evidence for exits "
                "(constraint: disagreement ≤ 1 % with 95 % confidence). 12,400 samples were "
                "observed so far, 412 early answers among them audited."
            ),
            True,
        ),
        (
            Evidence.SUSPICIOUS,
            "Suspicious",
            (
                "more audited answers disagreed than the constraint of 1 % allows, too few for an "
                "alarm so far; nothing is promised until this is resolved. 12,400 samples were "
                "observed so far, 412 early answers among them audited."
            ),
            True,
        ),
        (
            Evidence.NONE,
            "Nothing is promised",
            (
                "the exits in use are tuned for disagreement ≤ 1 %, and no certificate covers "
                "them. 12,400 samples were observed so far, 412 early answers among them audited."
            ),
            True,
        ),
    ],
)
def test_the_statement_says_what_the_evidence_carries(
    evidence: Evidence, heading: str, statement: str, alarming: bool
) -> None:
    seen = view(fake_control(evidence))
    assert (seen.heading, seen.statement, seen.alarming) == (heading, statement, alarming)


def test_caution_without_an_alarm_is_not_alarming() -> None:
    calm = dataclasses.replace(fake_control(Evidence.CONSERVATIVE), alarms=0)
    assert not view(calm).alarming


def test_a_certificate_says_no_more_than_its_constraint() -> None:
    loose = dataclasses.replace(fake_control(Evidence.CERTIFIED), disagreement_upper_bound=0.02)
    assert "is at most 1 % with 95 % confidence" in view(loose).statement


def test_without_a_promise_calibration_speaks_of_the_constraint() -> None:
    control = dataclasses.replace(fake_control(Evidence.CALIBRATED), confidence_level=0.9)
    seen = view_agreement(statistics(control), None)
    assert seen is not None
    assert seen.statement.startswith(
        "disagreement with the unmodified model ≤ 1 % with 90 % confidence; not yet confirmed"
    )


def test_figures() -> None:
    seen = view(fake_control(Evidence.CERTIFIED), auditing=5, lost_feedback=3)
    assert figures(seen) == {
        "disagreement measured": "0.24 %",
        "at most, with 95 % confidence": "0.83 %",
        "constraint": "1 %",
        "controller, by name": "certified",
        "of early answers are audited": "5 %",
        "audited": "412",
        "disagreed": "1",
        "being audited": "5",
        "audits lost": "3",
        "with inputs out of range": "0",
        "copies, no evidence": "0",
        "drift alarms": "0",
        "tunings": "3",
        "changes of exits": "2",
    }
    assert not any(figure.alarming for figure in seen.figures)


def test_what_is_not_known_yet_is_no_number() -> None:
    known = figures(view(fake_control(Evidence.CALIBRATED)))
    assert known["disagreement measured"] == "–"
    assert known["at most, with 95 % confidence"] == "–"


def test_a_drift_alarm_is_conspicuous() -> None:
    seen = view(fake_control(Evidence.CONSERVATIVE))
    assert [f.label for f in seen.figures if f.alarming] == ["drift alarms"]
    assert seen.state == "recovering: 312 samples so far, at least 480 needed"


def test_exits_that_look_on_are_not_in_use() -> None:
    first, last = statistics(None).stages
    assert exits_in_use(statistics(None))
    assert not exits_in_use(statistics(None, stages=(last,)))
    onlooker = dataclasses.replace(first, threshold=NEVER)
    assert not exits_in_use(statistics(None, stages=(onlooker, last)))


@pytest.mark.parametrize(
    ("share", "words"),
    [(0.0, "0 %"), (0.0083, "0.83 %"), (0.01, "1 %"), (1.0, "100 %"), (0.00012345, "0.0123 %")],
)
def test_shares_in_words(share: float, words: str) -> None:
    assert percent(share) == words
