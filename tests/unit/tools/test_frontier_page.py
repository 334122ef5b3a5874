"""The frontier's page: its marks, and that it is self-contained."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.frontier.page import plots, tooltip, write_page
from benchmarks.frontier.policies import BOTH, EXITS, INT8_CERTIFIED
from tests.unit.tools.frontier_cases import certified, frontier, point
from tests.unit.tools.test_dynamics import Tags

ENVIRONMENT = {
    "data_is_calibration_data": False,
    "data": "test <data>.npz",
    "confidence": 0.95,
    "seed": 3,
    "command": "python -m benchmarks.frontier a.ee b.ee",
}


def written(folder: Path, **changes: object) -> str:
    path = folder / "frontier.html"
    write_page(
        path,
        title="A & B",
        frontier=frontier(disturbed=("it was busy",)),
        environment={**ENVIRONMENT, **changes},
    )
    return path.read_text(encoding="utf-8")


def test_there_is_a_mark_for_each_system_and_bound() -> None:
    """Two systems at the lower bound, where exits have no policy, and three at the other."""
    one, sixteen = plots(frontier())
    assert (one.batch_size, sixteen.batch_size) == (1, 16)
    for plot in (one, sixteen):
        marks = re.findall(r'<circle [^>]*class="(\w+) (?:mark|ring)"', plot.drawing)
        assert sorted(marks) == ["both", "both", "copy", "copy", "exits", "int8", "source"]
        assert plot.drawing.count(' series"') == 3
        assert plot.drawing.count('class="bound"') == 2
        assert len(plot.rows) == 8


def test_places_are_those_of_the_figures() -> None:
    """Time begins at zero, and axes are the same at all batch sizes."""
    one, sixteen = (
        {
            name: (float(x), float(y))
            for x, y, name in re.findall(
                r'<circle cx="([\d.]+)" cy="([\d.]+)" r="5" class="(\w+) ring"', plot.drawing
            )
        }
        for plot in plots(frontier())
    )
    assert one["source"] == sixteen["source"] == (58.0, one["source"][1])
    assert one["int8"][0] == sixteen["int8"][0] > 58.0
    base = 330 - 40.0
    assert (base - one["int8"][1]) / (base - one["source"][1]) == pytest.approx(0.5, abs=1e-3)


def test_marks_in_one_place_have_one_label() -> None:
    """The copy that is certified for one bound is often the same as for another."""
    same = [
        certified(name, bound, point(1, 0.5, 0.003))
        for bound in (0.005, 0.01)
        for name in (INT8_CERTIFIED, EXITS, BOTH)
    ]
    systems = (*(replace(s, measured=s.measured[:1]) for s in frontier().systems[:2]), *same)
    (plot,) = plots(frontier(systems=systems, gains=()))
    labels = re.findall(r'class="\w+ note"[^>]*>([^<]+)<', plot.drawing)
    assert labels == ["0.5\u202f%, 1\u202f%"] * 3
    labels = re.findall(r'class="\w+ note"[^>]*>([^<]+)<', plots(frontier())[0].drawing)
    assert labels == ["0.5\u202f%", "2\u202f%", "2\u202f%", "0.5\u202f%", "2\u202f%"]


def test_a_mark_says_what_it_is() -> None:
    found = frontier()
    both = found.find("both", 0.02)
    assert tooltip(both, both.measured[0]) == (
        "both, certified for 2\u202f%: busy 0.30 ± 0.01 of the source model's time, "
        "1.50\u202f% disagree (measured)"
    )


def test_a_frontier_without_any_policy_is_drawn() -> None:
    found = frontier()
    alone = frontier(systems=found.systems[:2], gains=())
    (one, _) = plots(alone)
    assert ' series"' not in one.drawing


def test_the_page_is_whole_and_needs_nothing(tmp_path: Path) -> None:
    page = written(tmp_path)
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.loads == []
    assert "A &amp; B" in page
    assert "test &lt;data&gt;.npz" in page
    assert "too &lt;few&gt; samples" in page
    assert "exits at 0.5\u202f%: not certified." in page
    assert "The machine was disturbed: it was busy." in page
    assert "Not unseen data" not in page
    assert page.count('<td class="above">2.20\u202f%</td>') == 2  # exits at 2 %, by chance
    assert "predicted</em>" in page
    assert "0.75 ± 0.00" in page


def test_it_warns_of_calibration_data(tmp_path: Path) -> None:
    assert "Not unseen data" in written(tmp_path, data_is_calibration_data=True)
