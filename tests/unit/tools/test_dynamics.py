"""The page: its content, omitted parts, and that it is self-contained."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offramp.certify.decision import MODEL_END
from offramp.tools.bench.common.dynamics import (
    RunView,
    figures,
    percentile_plot,
    plots,
    rate,
    write_page,
)
from offramp.tools.bench.common.outcomes import Outcomes, hdr_table, summarise, timeline

ALL = [
    "Requests per second",
    "Mean batch size",
    "Where answers came from",
    "Share of all answered within the objective",
    "Latency, ms",
    "Share like the source model",
]


def run(name: str = "steady", *, slo_ms: float | None = 50.0, **changed: Any) -> RunView:
    """Four windows of 1 s with ten requests each, the third without an answer."""
    size = 40
    status = np.zeros(size, np.uint8)
    status[20:30] = 2
    given = {
        "intended_s": np.arange(size) / 10,
        "latency_s": np.where(status == 0, 0.010, np.nan),
        "status": status,
        "exit": np.resize(np.array([1, MODEL_END], np.int16), size),
        "forced": np.zeros(size, bool),
        "agrees": np.ones(size, np.int8),
        "batch_size": np.full(size, 4, np.int16),
        **changed,
    }
    outcomes = Outcomes(**given, duration_s=4.0)
    return RunView(
        name,
        summarise(outcomes, slo_ms=slo_ms),
        timeline(outcomes, slo_ms=slo_ms, windows=4),
        hdr_table(outcomes.latency_s),
        {"cpu": "some <chip>", "packages": {"numpy": "2.0"}, "warm": True, "load_average": 0.5},
    )


def written(folder: Path, *runs: RunView, measured: bool = True) -> str:
    path = folder / "page.html"
    write_page(path, title="A & B", measured=measured, runs=runs)
    return path.read_text(encoding="utf-8")


class Tags(HTMLParser):
    """Checks nesting, and notes what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self.loads += [v for k, v in attrs if k in ("src", "href") and v and v[0] != "#"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_loads_nothing(tmp_path: Path) -> None:
    page = written(tmp_path, run(), run("other"))
    tags = Tags()
    tags.feed(page)
    assert (tags.open, tags.loads) == ([], [])
    assert "url(" not in page
    assert "@import" not in page
    assert "prefers-color-scheme: dark" in page


def test_no_drawing_holds_a_number_that_is_none(tmp_path: Path) -> None:
    drawn = re.findall(r'(?: d| x| y|x1|y1|cx|cy|width|height)="([^"]*)"', written(tmp_path, run()))
    assert len(drawn) > 100
    assert not any("nan" in value or "inf" in value for value in drawn)


@pytest.mark.parametrize(("measured", "label"), [(True, "measured"), (False, "simulated")])
def test_every_run_is_labelled(tmp_path: Path, measured: bool, label: str) -> None:
    page = written(tmp_path, run(), run("other"), measured=measured)
    other = "simulated" if measured else "measured"
    assert page.count(f'<em class="kind {label}">{label}</em>') == 3  # and the comparison
    assert f'<em class="kind {other}">' not in page
    assert ("<strong>Simulated.</strong>" in page) is not measured


def test_only_several_runs_are_compared(tmp_path: Path) -> None:
    assert "Comparison" not in written(tmp_path, run())
    page = written(tmp_path, run("first"), run("second", slo_ms=None))
    assert page.index("Comparison") < page.index('id="run-1"') < page.index('id="run-2"')
    assert '<a href="#run-2">second</a>' in page


def test_text_is_escaped(tmp_path: Path) -> None:
    page = written(tmp_path, run("<b>"))
    assert "<h1>A &amp; B</h1>" in page
    assert "some &lt;chip&gt;" in page
    assert "&lt;b&gt;" in page
    assert "<b>&" not in page


def test_the_environment_is_listed(tmp_path: Path) -> None:
    page = written(tmp_path, run())
    assert "<dt>packages</dt><dd>numpy 2.0</dd>" in page
    assert "<dt>warm</dt><dd>yes</dd>" in page
    assert "<dt>load average</dt><dd>0.5</dd>" in page


def test_a_page_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one run or more"):
        written(tmp_path)


def test_plots_are_those_that_have_something_to_show() -> None:
    assert [plot.title for plot in plots(run())] == ALL
    unknown = run(slo_ms=None, batch_size=None, agrees=np.full(40, -1, np.int8))
    assert [plot.title for plot in plots(unknown)] == [ALL[0], ALL[2], ALL[4]]
    nothing = run(status=np.full(40, 4, np.uint8), latency_s=np.full(40, math.nan), batch_size=None)
    assert [plot.title for plot in plots(nothing)] == [ALL[0], ALL[3]]
    assert percentile_plot(nothing) is None


def test_a_page_of_a_run_without_answers(tmp_path: Path) -> None:
    nothing = run(status=np.full(40, 4, np.uint8), latency_s=np.full(40, math.nan))
    page = written(tmp_path, nothing, nothing)
    assert "40 unanswered" in page
    assert "The same as a table" not in page


def test_lines_are_interrupted_where_a_window_has_no_value() -> None:
    """The third of 4 windows of 1 s has no answer: two stretches, 0 to 2 s and 3 to 4 s."""
    agreement = plots(run())[-1].wide
    paths = re.findall(r'<path d="M([^"]*)" class="series"', agreement)
    across = [[float(p.split(",")[0]) for p in path.split("L")] for path in paths]
    left, right = 52, 1030
    assert [(points[0], points[-1]) for points in across] == [
        (left, pytest.approx(left + (right - left) / 2)),
        (pytest.approx(left + (right - left) * 3 / 4), right),
    ]


def test_exit_shares_are_stacked_to_all() -> None:
    shares = plots(run())[2]
    assert [key.label for key in shares.keys] == ["exit 1", "final"]
    areas = re.findall(r'fill-opacity="([\d.]+)"><path d="M([^"]*)Z"', shares.wide)
    heights = [{float(p.split(",")[1]) for p in area.split("L")} for _, area in areas]
    assert [opacity for opacity, _ in areas] == ["0.15", "0.15", "1", "1"]
    # from 88 px (nothing) over 48 px (half) to 8 px (all)
    assert heights == [{88, 48}, {88, 48}, {48, 8}, {48, 8}]


def test_the_objective_is_drawn_unless_it_is_far_off() -> None:
    near, far = plots(run(slo_ms=50.0))[4], plots(run(slo_ms=500.0))[4]
    assert "objective, 50 ms" in [key.label for key in near.keys]
    assert 'class="threshold"' in near.wide
    assert [key.label for key in far.keys] == ["99th percentile", "median"]
    assert 'class="threshold"' not in far.wide


def labels(drawing: str, anchor: str) -> list[str]:
    return re.findall(rf'text-anchor="{anchor}">([^<]*)<', drawing)


def test_latency_is_logarithmic_over_more_than_a_decade() -> None:
    slow = np.where(np.arange(40) % 2, 0.004, 0.6)
    wide = plots(run(latency_s=slow, status=np.zeros(40, np.uint8)))[4].wide
    assert labels(wide, "end") == ["5", "10", "20", "50", "100", "200", "500"]
    steady = plots(run())[4].wide
    assert labels(steady, "end") == ["0", "20", "40"]


def test_percentiles_have_labels_that_do_not_touch() -> None:
    latency_s = np.arange(1, 40_001) / 1e6
    spread = run()._replace(percentiles=hdr_table(latency_s))
    plot = percentile_plot(spread)
    assert plot is not None
    assert labels(plot.wide, "middle") == ["0%", "50%", "90%", "99%", "99.9%", "99.99%"]
    assert labels(plot.narrow, "middle") == ["0%", "90%", "99%", "99.9%", "99.99%"]


def test_headline_figures() -> None:
    assert figures(run().summary) == [
        ("10/s", "offered"),
        ("7.5/s", "answered"),
        ("7.5/s", "answered within 50 ms"),
        ("75.00\u202f%", "of all within 50 ms"),
        ("10.0 ms", "median latency"),
        ("10.0 ms", "99th percentile"),
        ("50.0\u202f%", "left before the model's end"),
        ("100.00\u202f%", "agree with the source model"),
        ("4.0", "mean batch size"),
    ]


def test_rates_have_three_digits_or_all_before_the_point() -> None:
    assert [rate(v) for v in (0.1234, 12.34, 123.4, 12345.6)] == ["0.123", "12.3", "123", "12,346"]


def test_the_page_needs_nothing_of_the_compiler() -> None:
    """Serving installations have no onnx and no torch."""
    heavy = ("onnx", "onnx_graphsurgeon", "onnxslim", "torch")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({heavy!r}));"
        "from offramp.tools.bench.common import dynamics; dynamics._template()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
