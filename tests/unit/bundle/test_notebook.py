"""Display of bundles in notebooks."""

from __future__ import annotations

import html
import re
from dataclasses import replace

import pytest
from tests.small import compile_small

from offramp.bundle import Bundle


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return compile_small(tmp_path_factory.mktemp("notebook") / "<b>&")[0]


def test_a_report_is_a_document_in_a_frame_of_its_own(small: Bundle) -> None:
    report = small.report()
    assert report.path == small.path / "report.html"
    assert report.html == report.path.read_text(encoding="utf-8")
    shown = report._repr_html_()
    (document,) = re.findall(r'^<iframe srcdoc="([^"]*)" sandbox="" ', shown)
    assert html.unescape(document) == report.html
    assert "<style" not in shown  # it is within the attribute


def test_a_bundle_is_a_line_elsewhere(small: Bundle) -> None:
    promise = small.policy.promise
    assert promise is not None
    assert str(small) == (
        f"<Bundle {small.path}: 1 of {len(small.manifest.exits)} exits in use; certified: at most "
        "5.00% of answers differ from the unmodified model's, with 95% confidence; predicted to "
        f"save {promise.predicted_savings:.0%} of its time>"
    )


def test_a_line_says_why_no_exit_is_in_use(small: Bundle) -> None:
    count = len(small.manifest.exits)
    idle = replace(
        small,
        policy=replace(small.policy, active=(), promise=None),
        manifest=replace(small.manifest, idle_reason="no exit pays"),
    )
    assert repr(idle) == (
        f"<Bundle {small.path}: 0 of {count} exits in use; the unmodified model answers: "
        "no exit pays>"
    )


def test_exits_of_a_dry_run_promise_nothing(small: Bundle) -> None:
    dry = replace(small, policy=replace(small.policy, promise=None))
    assert repr(dry).endswith(" exits in use; nothing is certified>")


def test_a_bundle_shows_its_exits_and_its_promise(small: Bundle) -> None:
    (active,) = small.policy.active
    shown = small._repr_html_()
    assert shown.startswith("<div><b>small</b><div>")
    assert "x: float32 [batch, 16] → logits: float32 [batch, 3]" in shown
    assert f"<tr><td>exit {active.exit}</td>" in shown
    assert f"<td>{active.threshold:.3f}</td>" in shown
    assert "certified: at most 5.00% of answers differ from the unmodified model&#x27;s" in shown
    assert "&lt;b&gt;&amp;" in shown  # the path, of which nothing is markup
    assert "<b>&" not in shown
