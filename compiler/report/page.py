"""The page as a whole: rows of the table of exits, and the template."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from offramp.bundle import Exit, ExitPolicy, Manifest, Measured, Profile
from offramp.calibration.limits import Limit
from offramp.calibration.records import ExitRecords
from offramp.calibration.rehearsal import Rehearsed
from offramp.compiler.report import numbers, words
from offramp.compiler.report.analysis import Analysis, analysis
from offramp.compiler.report.charts import latency_chart, latency_rows, savings_chart
from offramp.compiler.report.curves import exit_curves
from offramp.compiler.report.measured import judge, measured_view
from offramp.compiler.report.rehearsal import rehearsal_view
from offramp.compiler.report.route import route
from offramp.engine.control.costs import CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """A head that was trained to the end."""

    head: str
    chosen: bool
    agreement: float
    cost_ms: float
    net_savings: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRow:
    """A row of the table of exits."""

    index: int
    after_segment: int
    tensor: str
    head: str
    agreement: float
    accuracy: float | None
    cost_ms: float
    """Of bridge and head: profiled, per batch of the reference size."""
    border_ms: float
    """Of the border behind it, if it is in use: profiled likewise."""
    threshold: float | None
    """``None`` for an exit that is not in use."""
    share: float
    trials: tuple[TrialRow, ...]
    """Best first."""


def render_report(
    manifest: Manifest,
    policy: ExitPolicy,
    profile: Profile,
    certify: ExitRecords,
    rehearsed: Rehearsed | None = None,
    *,
    limit: Limit | None = None,
    measured: Measured | None = None,
) -> str:
    """Render the bundle's ``report.html``: one page that needs nothing beside it.

    Args:
        manifest: What was built.
        policy: What ships.
        profile: Times of the parts, on the device that the savings were predicted for.
        certify: What the exits say on the certify split.
        rehearsed: How the exits in use were chosen, if by a rehearsal.
        limit: What kept all exits out of use, if it is known.
        measured: What the policy brings, if it was measured.

    Raises:
        ValueError: The parts do not belong together.
    """
    found = analysis(manifest, policy, profile, certify)
    judged = None if measured is None else judge(found, measured)
    page = _template().render(
        found=found,
        manifest=manifest,
        summary=words.summary(found),
        promise=words.promise(found),
        promise_notes=words.promise_notes(found),
        warning=words.warning(found, limit, judged),
        headlines=words.headlines(found, judged),
        route=route(found),
        rows=exit_rows(found),
        curves=exit_curves(found),
        savings=savings_chart(found),
        latency=latency_chart(found),
        latency_rows=latency_rows(found),
        rehearsal=rehearsal_view(rehearsed),
        facts=words.facts(found, rehearsed),
        measured=None if judged is None else measured_view(judged),
    )
    # file names may hold bytes that are no text; the page is written as UTF-8
    return page.encode("utf-8", "replace").decode("utf-8")


def exit_rows(found: Analysis) -> list[ExitRow]:
    """Describe every exit that was built, in depth order."""
    cost = found.cost(found.reference)
    return [_row(found, exit_, cost) for exit_ in found.manifest.exits]


def _row(found: Analysis, exit_: Exit, cost: CostModel) -> ExitRow:
    trials = sorted(exit_.trials, key=lambda trial: -trial.net_savings)
    return ExitRow(
        index=exit_.index,
        after_segment=exit_.after_segment,
        tensor=exit_.inputs[0] if exit_.inputs else "",
        head=exit_.head.describe(),
        agreement=exit_.agreement,
        accuracy=exit_.accuracy,
        cost_ms=cost.exits_ms[exit_.index],
        border_ms=cost.stages_ms[exit_.index],
        threshold=found.thresholds.get(exit_.index),
        share=float(found.shares[exit_.index]),
        trials=tuple(
            TrialRow(
                head=trial.head.describe(),
                chosen=trial.head == exit_.head,
                agreement=trial.agreement,
                cost_ms=trial.cost_ms,
                net_savings=trial.net_savings,
            )
            for trial in trials
        ),
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("offramp.compiler"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        percent=numbers.percent,
        ms=numbers.milliseconds,
        threshold=numbers.threshold,
        count=numbers.count,
        plural=numbers.plural,
    )
    return environment.get_template("report.html")
