"""The output of ``eecompile plan``: the plan as a table, the unmodified model, and the reasons."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from offramp.cluster.command.page import devices_of, exits_of, render_plan
from offramp.cluster.command.plan_command import PlannedBundle
from offramp.cluster.planning.cluster_plan import ClusterPlan, PlannedSplit

LABEL = "PREDICTED from profiles and shares of exits, without queues; nothing ran on these devices."

_NUMBERS = ("rows", "batch ms", "fill ms", "link ms", "busy")


def print_plan(planned: PlannedBundle, console: Console) -> None:
    """Print a plan, and the reasons for it."""
    plan = planned.result.plan
    console.print(_table(plan))
    for line in (*_compared(planned), *reasons(planned)):
        console.print(escape(line), highlight=False, soft_wrap=True)


def render_page(planned: PlannedBundle, name: str) -> str:
    """Render the same content as a self-contained page."""
    result = planned.result
    return render_plan(
        name,
        result.plan,
        result.baseline,
        planned.model,
        reasons=list(reasons(planned)),
        label=LABEL,
    )


def _table(plan: ClusterPlan) -> Table:
    table = Table(
        title=f"PREDICTED: batches of {plan.batch_size}",
        title_justify="left",
        caption=LABEL,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    columns = ("split", "segments", "exits on", "devices", *_NUMBERS)
    for name in columns:
        table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=True)
    for number, split in enumerate(plan.splits):
        table.add_row(
            str(number),
            f"{split.first_segment}–{split.last_segment}",
            exits_of(split.replicas),
            escape(devices_of(split)),
            f"{split.share:.1%}",
            " | ".join(f"{1e3 * replica.stage_s:.3g}" for replica in split.replicas),
            f"{1e3 * split.fill_s:.3g}",
            f"{1e3 * split.link_s:.3g}",
            f"{split.period_s / plan.period_s:.0%}",
        )
    return table


def _compared(planned: PlannedBundle) -> Iterator[str]:
    plan, baseline = planned.result.plan, planned.result.baseline
    yield f"Plan:            {figures(plan)}"
    if baseline is None:
        yield "Model as it is:  meets no such goal on these devices"
        return
    yield f"Model as it is:  {figures(baseline)}, batches of {baseline.batch_size}"
    if planned.goal.rate_rps is None:
        yield f"                 the plan serves × {plan.rate_rps / baseline.rate_rps:.2f} as much"
    elif baseline.cost_per_hour:
        saved = 1 - plan.cost_per_hour / baseline.cost_per_hour
        yield f"                 the plan costs {saved:.0%} less"


def figures(plan: ClusterPlan) -> str:
    """Return a plan's rate, latency and cost in one line."""
    return (
        f"{plan.rate_rps:,.0f} rows/s, {1e3 * plan.latency_s:,.1f} ms at worst without queues, "
        f"{plan.cost_per_hour:,.2f} an hour"
    )


def reasons(planned: PlannedBundle) -> Iterator[str]:
    """Yield the binding constraints, and the source of the exits' shares."""
    plan, goal = planned.result.plan, planned.goal
    if planned.slo_binds and planned.without_slo is not None:
        free = planned.without_slo.plan
        yield (
            f"Limit: the SLO of {1e3 * goal.slo_s:,.4g} ms less {goal.slack:.0%}; without it, "
            f"batches of {free.batch_size}: {figures(free)}."
        )
    slowest = max(range(len(plan.splits)), key=lambda k: _period(plan.splits[k]))
    split = plan.splits[slowest]
    if goal.rate_rps is not None:
        spare = plan.rate_rps / goal.rate_rps - 1
        yield (
            f"Limit: the rate of {goal.rate_rps:,.4g} rows/s, which nothing cheaper serves; "
            f"this could serve {spare:.0%} more."
        )
    elif split.link_period_s >= split.period_s:
        yield f"Limit: the link to split {slowest}, which is always busy at that rate."
    else:
        yield f"Limit: the devices of split {slowest}, which are always busy at that rate."
    off = sorted(
        set(planned.model.exit_names)
        - {exit_ for s in plan.splits for replica in s.replicas for exit_ in replica.exits}
    )
    if off:
        yield f"Exits that are off, as they save no time here: {', '.join(map(str, off))}."
    yield f"Shares of rows that continue: from {planned.shares_from}."


def _period(split: PlannedSplit) -> float:
    return max(split.period_s, split.link_period_s)
