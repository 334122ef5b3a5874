"""The page: which lines are drawn, and what is marked."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.adapt.page import cards, write_page
from benchmarks.adapt.replay import ComparedController, ReplaySettings, ReplayTrace, replay
from benchmarks.adapt.report import Comparison, ControllerRun
from benchmarks.adapt.scores import course, hindsight, score
from tests.unit.tools.adapt_cases import COSTS, FOUR, Scripted, in_order, policy_of, repeated

from offramp.bundle import NEVER
from offramp.engine.control.controller import ControlEvent
from offramp.engine.stages.plan import Mode

SEQUENCE = in_order(("first", repeated(FOUR, 500)), ("second <b>", repeated(FOUR, 500)))


def comparison(label: str = "some <name>", **changed: Any) -> Comparison:
    """Exit 0 alone, which is wrong on one sample of four; a trace may be changed."""
    contender = ComparedController(
        label=label,
        description="made by hand",
        controller=Scripted(policy_of(1, {0: 0.5, 1: NEVER})),
        mode=Mode.RELEASE,
    )
    trace: ReplayTrace = replay(SEQUENCE, contender, COSTS, ReplaySettings())
    trace = replace(trace, **changed)
    run = ControllerRun(
        contender=contender,
        trace=trace,
        score=score(SEQUENCE, trace, max_disagreement=0.01),
        course=course(SEQUENCE, trace),
    )
    return Comparison(
        sequence=SEQUENCE, runs=(run,), hindsight=hindsight(SEQUENCE, COSTS, [0, 1], 0.01)
    )


def test_a_card_has_three_plots_over_the_segments() -> None:
    (card,) = cards(comparison(), 0.01)
    assert [plot.title for plot in card.plots] == [
        "Agreement with the source model",
        "Saved, predicted from profiled times",
        "Thresholds of the exits that answer",
    ]
    for plot in card.plots:
        assert plot.drawing.count('class="shade"') == 1  # the second segment
        assert ">first</text>" in plot.drawing
        assert ">second &lt;b&gt;</text>" in plot.drawing


def test_the_axis_reaches_down_to_the_worst_window() -> None:
    """A quarter is wrong: the next span below is a half."""
    agreement, _, _ = cards(comparison(), 0.01)[0].plots
    labels = re.findall(r'class="tick" text-anchor="end">([^<]+)<', agreement.drawing)
    assert labels == ["50%", "75%", "100%"]
    right = np.ones(len(SEQUENCE), np.bool_)
    agreement, _, _ = cards(comparison(agrees=right), 0.01)[0].plots
    labels = re.findall(r'class="tick" text-anchor="end">([^<]+)<', agreement.drawing)
    assert labels == ["98%", "99%", "100%"]


def test_alarms_are_marked_with_what_they_say() -> None:
    plain, _, _ = cards(comparison(events=()), 0.01)[0].plots
    assert "alarm" not in plain.drawing
    assert "alarm" not in [label for label, _ in plain.keys]
    events = (
        (2400, ControlEvent(kind="alarm", text="it > 1 %")),
        (9, ControlEvent(kind="policy", text="no")),
    )
    rung, _, _ = cards(comparison(events=events), 0.01)[0].plots
    assert rung.drawing.count('class="alarm"') == 1
    assert "<title>it &gt; 1 %</title>" in rung.drawing
    assert rung.keys[-1][0] == "alarm"


def test_only_exits_that_answer_have_a_threshold() -> None:
    _, _, thresholds = cards(comparison(), 0.01)[0].plots
    assert [label for label, _ in thresholds.keys] == ["exit 0"]
    assert thresholds.drawing.count('class="series"') == 1


def test_the_page_is_whole_and_escapes(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_page(
        path,
        title="A & B",
        comparisons=[comparison()],
        max_disagreement=0.01,
        environment={"cpu": "some <chip>", "tuning_delay": None},
    )
    page = path.read_text(encoding="utf-8")
    assert "<title>A &amp; B</title>" in page
    assert "some &lt;name&gt; <span>release mode</span>" in page
    assert "some &lt;chip&gt;" in page
    assert page.count('<td class="violates">') == 4  # both segments: measured, in the long run
    assert page.count("in hindsight") == 2
    assert page.rstrip().endswith("</html>")
