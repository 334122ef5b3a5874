"""The bundle's ``report.html`` for users: rendering of all its sections with the template."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from jinja2 import Template

from offramp.bundle import ExitPolicy, Manifest, Measured, Profile
from offramp.calibration.choose.exit_records import ExitRecords
from offramp.calibration.choose.trade_offs import Judged
from offramp.calibration.rehearsal import Rehearsed
from offramp.commands.pages import page_template
from offramp.compiler.report import numbers, words
from offramp.compiler.report.charts import (
    exit_curves,
    latency_chart,
    latency_rows,
    savings_chart,
    training_view,
)
from offramp.compiler.report.figures import PolicyFigures
from offramp.compiler.report.frontier import NAMES, frontier_view
from offramp.compiler.report.pictures import EarlyMap, views
from offramp.compiler.report.rehearsal_charts import rehearsal_view
from offramp.compiler.report.route import route

if TYPE_CHECKING:
    from offramp.compiler.graphs.weights import WeightSizes

__all__ = ["render_report"]

_MOST_CLASSES = 20
"""Largest number of rows in the table of classes."""


def render_report(
    manifest: Manifest,
    policy: ExitPolicy,
    profile: Profile,
    certify: ExitRecords,
    rehearsed: Rehearsed | None = None,
    *,
    limit: str | None = None,
    measured: Measured | None = None,
    maps: Sequence[EarlyMap] = (),
    weights: WeightSizes | None = None,
    variants: Judged = (),
) -> str:
    """Render the bundle's ``report.html``: a page that needs no other files.

    ``profile`` is for the device for which savings were predicted. ``rehearsed`` is the rehearsal
    that chose the exits in use, if there was one. ``limit`` is the reason why no exit is in use, if
    that is so. ``maps`` are a few example answers, ``weights`` the sizes of large weights,
    ``variants`` the model and its subnets, if it has any. ValueError if the parts do not belong
    together.
    """
    found = PolicyFigures.of(manifest, policy, profile, certify)
    judged = None if measured is None else words.SavingsCheck.of(found, measured)
    promised = None if policy.promise is None else 1 - policy.promise.max_disagreement
    page = _template().render(
        found=found,
        manifest=manifest,
        summary=words.summary(found),
        promise=words.promise(found),
        warning=words.warning(found, limit, judged),
        headlines=words.headlines(found, judged),
        route=route(found),
        exits=manifest.exits,
        cost=found.cost(found.reference),
        curves=exit_curves(found),
        savings=savings_chart(found),
        latency=latency_chart(found),
        latency_rows=latency_rows(found),
        rehearsal=rehearsal_view(rehearsed),
        facts=words.facts(found, rehearsed, weights),
        judged=judged,
        maps=views(maps),
        by_class=found.by_class if found.active else (),
        by_label=found.by_label,
        harms=words.harms(found),
        class_bound=words.own_bounds(found),
        most_classes=_MOST_CLASSES,
        frontier=frontier_view(variants, promised),
        ways=NAMES,
        training=training_view(manifest),
    )
    # file names may have bytes that are not text; the page is written as UTF-8
    return page.encode("utf-8", "replace").decode("utf-8")


@cache
def _template() -> Template:
    return page_template(
        "report.html",
        "offramp.compiler",
        percent=numbers.percent,
        ms=numbers.milliseconds,
        bare=numbers.plain_percent,
        threshold=numbers.threshold,
        count=numbers.count,
        plural=numbers.plural,
        ratio=words.ratio,
    )
