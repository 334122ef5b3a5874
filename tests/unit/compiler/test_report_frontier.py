"""The report's joint frontier: what it says, and when it says nothing."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from tests.unit.calibration.test_trade_offs import OF_FULL, OF_SUBNET, full, subnet
from tests.unit.compiler.test_report import make

from offramp.calibration.choose.trade_offs import Judged
from offramp.compiler.report import render_report
from offramp.compiler.report.frontier import FrontierView, frontier_view

JUDGED: Judged = [(full(), OF_FULL), (subnet(), OF_SUBNET)]


def view(judged: Judged = JUDGED, promised: float | None = None) -> FrontierView:
    found = frontier_view(judged, promised)
    assert found is not None
    return found


def test_the_sentence_has_the_best_time_of_each_way_at_the_promised_agreement() -> None:
    """All samples leave at exit 1 of the full model at 80 %: 4 + 1 ms of 10, or 4.2 by both of its
    exits; the subnet agrees in 60 %, so subnets alone are the full model.
    """
    told = view(promised=0.8).sentence
    assert told.startswith("At 80\u202f% agreement with the full model: exits alone take 0.42 of")
    assert "subnets alone 1.00, subnets with exits 0.42;" in told
    assert "(predicted)" in told


def test_what_combining_brings_is_said_either_way() -> None:
    """The full model's exit 0 is the cheapest at 60 %; if it is slower, the subnet's is."""
    assert view(promised=0.6).sentence.endswith("beyond the better one alone.")
    slow = full()
    slow = replace(slow, cost=replace(slow.cost, segments_ms=(6.0, 2.0, 2.0)))
    told = view([(slow, OF_FULL), (subnet(), OF_SUBNET)], 0.6).sentence
    assert re.search(r"Together they take \d+\u202f% less than the better one alone\.$", told)


def test_the_table_says_what_runs() -> None:
    slow = full()
    slow = replace(slow, cost=replace(slow.cost, segments_ms=(6.0, 2.0, 2.0)))
    rows = {r.level: r for r in view([(slow, OF_FULL), (subnet(), OF_SUBNET)], 0.6).levels}
    assert rows[0.6].what == "S1 (half), 40\u202f% leave at E0"
    assert list(rows) == sorted(rows, reverse=True)
    assert [r.mark for r in view().subnets] == ["full", "S1"]


def test_shapes_tell_the_ways_apart() -> None:
    chart = str(view().chart)
    for way, tag in (("exits", "circle"), ("subnets", "rect"), ("both", "path")):
        assert re.search(rf'<{tag} [^>]*class="way-mark {way}"', chart), way


def test_there_is_no_frontier_without_subnets_or_on_other_samples() -> None:
    other = replace(OF_SUBNET, final_prediction=np.zeros(5, np.int32))
    assert frontier_view(JUDGED[:1], None) is None
    assert frontier_view((), None) is None
    assert frontier_view([JUDGED[0], (subnet(), other)], None) is None


@pytest.mark.parametrize("labels", [True, False])
def test_the_page_has_the_section_only_where_there_are_subnets(*, labels: bool) -> None:
    parts = make()
    given = parts.manifest, parts.policy, parts.profile, parts.certify
    assert "Exits × subnets" not in render_report(*given)
    judged = JUDGED
    if not labels:
        judged = [(v, replace(r, labels=None)) for v, r in JUDGED]
    page = render_report(*given, variants=judged)
    assert "Exits × subnets" in page
    assert ("<small>time · accuracy</small>" in page) is labels
    assert "predicted and counted" in page
