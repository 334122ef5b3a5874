"""Both matrices as drawn: what is late is marked, and the chosen exit stands out."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from tests.unit.calibration.rehearsal.rehearsals import load, settings, times
from tests.unit.compiler.test_report import Page, make

from offramp.calibration.rehearsal import Rehearsed, rehearse
from offramp.compiler.report import render_report
from offramp.compiler.report.rehearsal_charts import draw_step, rehearsal_view

FOUND = rehearse(load(), times(), settings())
REHEARSED = Rehearsed(rehearsal=FOUND, shipped=FOUND.forecast, data_sha256="ef" * 32)


def page_of(rehearsed: Rehearsed | None) -> Page:
    parts = make(3)
    return Page(
        render_report(parts.manifest, parts.policy, parts.profile, parts.certify, rehearsed)
    )


def opacities(drawing: str, class_: str) -> list[float]:
    found = re.findall(rf'class="{class_}"(?: fill-opacity="([\d.]+)")?', drawing)
    return [float(opacity or 1) for opacity in found]


def test_the_first_step_by_hand() -> None:
    """In the first step 1, 1 and 3 configurations of exits 0, 1 and 2 are late; one batch never
    is.
    """
    drawing = str(draw_step(FOUND.steps[0]))
    assert opacities(drawing, "cell late") == [1, 1, 1]  # a box a row: neighbours are joined
    assert opacities(drawing, "cell none") == [1, 1, 1]
    titles = re.findall("<title>(.*?)</title>", drawing)
    assert "E0, 4 rows go on: 25.0 ms" in titles
    assert "E2, 2 to 4 rows go on: 25.0 to 27.0 ms" in titles
    batches = [title for title in titles if "batch" in title]
    assert batches == [
        "E0: of 1 batch, 1 row goes on",
        "E0: of 1 batch, 3 rows go on",
        "E1: of 1 batch, 0 rows go on",
        "E1: of 1 batch, 2 rows go on",
        "E2: of 1 batch, 0 rows go on",
        "E2: of 1 batch, 1 row goes on",
    ]
    # nothing beyond 3, 3, 1 rows: a cell is 390 / 5 wide, the first matrix begins at 44
    (left, _) = re.findall(r'd="(M[^"]*)" class="boundary"', drawing)
    xs = [float(point.split(",")[0]) for point in left[1:].split("L")]
    assert xs == pytest.approx([44 + 390 / 5 * n for n in (4, 4, 4, 4, 2, 2)])


def test_late_batches_are_marked() -> None:
    drawing = str(draw_step(FOUND.steps[1]))
    titles = re.findall("<title>(.*?)</title>", drawing)
    assert [t for t in titles if t.endswith(", late")] == ["E2: of 1 batch, 1 row goes on, late"]
    # late times of both exits, and the late batch, as faint as all that are one batch
    assert opacities(drawing, "cell late") == [1, 1, 1]
    assert "tail 16.0 ms · 50.0\u202f% late" in drawing


def test_only_the_chosen_exit_is_framed_in_both_matrices() -> None:
    frames = [str(draw_step(step)).count('class="picked"') for step in FOUND.steps]
    assert frames == [2, 2, 0]


def test_the_page_says_what_was_found() -> None:
    page = page_of(REHEARSED)
    assert "2 batches of 4 were drawn from 8 samples of the tuning split." in page.text
    assert "11.8 ms until an answer on average, 16.0 ms until a batch's last one" in page.text
    assert "Step 1: from the model's start" in page.text
    assert (
        "4 rows come; 24.0 ms without an exit. E0 chosen: shortest average latency of those "
        "allowed (average latency 13.8 ms, 0.0\u202f% of the batches late, 50.0\u202f% of the "
        "samples go on)." in page.text
    )
    assert "Step 2: from E0. 3 rows may come at most; 15.0 ms without an exit." in page.text
    assert "Step 3: from E1. 2 rows may come at most; 8.00 ms without an exit. None" in page.text
    assert "The search ended: every later exit makes too many batches late." in page.text
    assert "tolerated" not in page.text
    assert "Tuned and certified on " + "ef" * 32 in page.text


def test_without_a_rehearsal_there_is_no_such_section() -> None:
    assert rehearsal_view(None) is None
    assert "Rehearsal" not in page_of(None).text
    assert "Data SHA-256" in page_of(None).text


def test_data_of_the_compilation_is_named_once() -> None:
    page = page_of(replace(REHEARSED, data_sha256="cd" * 32))
    assert "Tuned and certified on" not in page.text


def test_too_many_late_batches_are_said_loudly() -> None:
    late = replace(REHEARSED, shipped=replace(FOUND.forecast, violations=0.03))
    assert "More batches are late than the 2\u202f% tolerated." in page_of(late).text


def test_a_policy_that_was_adapted_was_not_searched() -> None:
    page = page_of(replace(REHEARSED, rehearsal=replace(FOUND, ended="kept")))
    assert "E0 kept (average latency 13.8 ms" in page.text
    assert "No search: the exits that were in use were checked" in page.text


def test_no_exit_was_left_to_look_at() -> None:
    page = page_of(replace(REHEARSED, rehearsal=replace(FOUND, ended="kept", steps=())))
    assert "No search" in page.text


def test_drawings_stay_inside_their_boxes() -> None:
    drawing = str(draw_step(FOUND.steps[0]))
    width, height = map(float, re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawing)[0])
    boxes = re.findall(r'x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"', drawing)
    assert boxes
    for x, y, w, h in (map(float, box) for box in boxes):
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height
