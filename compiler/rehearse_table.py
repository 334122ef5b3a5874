"""What ``eecompile rehearse`` prints: the policy before and after, and what both bring."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from offramp.bundle import ExitPolicy
from offramp.calibration.rehearsal import Forecast, Move
from offramp.compiler.rehearse import Rehearsing
from offramp.compiler.report import numbers


def print_rehearsing(done: Rehearsing, console: Console) -> None:
    """Print a table, the promise, and where the bundle is."""
    say = partial(console.print, highlight=False, soft_wrap=True)
    for line in _moves(done.moves):
        say(line)
    console.print(_table(done))
    settings = done.rehearsed.rehearsal.settings
    say(
        f"Predicted for batches of {settings.batch_size} of the new load, from profiled times; "
        "not measured."
    )
    for line in _verdict(done):
        say(line)
    if done.written is None:
        say("Dry run: nothing was written.")
    else:
        say(f"Written: {escape(str(done.written))}")


def _moves(moves: Sequence[Move]) -> list[str]:
    lines = []
    for move in moves:
        where = "no longer in use" if move.to is None else f"moved to exit {move.to}"
        late = numbers.percent(move.violations)
        lines.append(f"exit {move.exit} {where}: it would make {late} of the batches late")
    return lines


def _table(done: Rehearsing) -> Table:
    table = Table("", box=box.SIMPLE_HEAD)
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    before, after = _thresholds(done.before), _thresholds(done.after)
    for exit_ in sorted({*before, *after}):
        table.add_row(
            f"exit {exit_}: least confidence",
            before.get(exit_, "not in use"),
            after.get(exit_, "not in use"),
        )
    old, new = _figures(done.before_forecast), _figures(done.rehearsed.shipped)
    table.add_section()
    for name in old:
        table.add_row(name, old[name], new[name])
    return table


def _thresholds(policy: ExitPolicy) -> dict[int, str]:
    return {a.exit: numbers.threshold(a.threshold) for a in policy.active}


def _figures(forecast: Forecast) -> dict[str, str]:
    return {
        "average latency, ms": numbers.milliseconds(forecast.average_ms),
        "last answer of a batch, ms": numbers.milliseconds(forecast.tail_ms),
        "the same without exits, ms": numbers.milliseconds(forecast.source_ms),
        "batches later than that": numbers.percent(forecast.violations),
        "disagreement, certify split": numbers.percent(forecast.disagreement, 2),
    }


def _verdict(done: Rehearsing) -> list[str]:
    """What is promised, and what is not kept."""
    lines = []
    promise = done.after.promise
    if promise is None:
        lines.append(
            "[bold red]No exit is in use:[/bold red] no policy kept the promise and saved time on "
            "the new data. More of it helps most; so does compiling the model again on it."
        )
    else:
        lines.append(
            f"Disagreement with the unmodified model ≤ {100 * promise.max_disagreement:g}% on "
            f"unseen data like the new, with {100 * promise.confidence:g}% confidence "
            f"({promise.certify_errors} of {promise.certify_samples} certify samples disagreed)."
        )
    tolerated = done.rehearsed.rehearsal.settings.max_violations
    if done.rehearsed.shipped.violations > tolerated:
        lines.append(
            "[bold red]Too many batches are late[/bold red]: more than the "
            f"{numbers.plain_percent(tolerated)} tolerated. Thresholds that could be certified "
            "let more samples go on than those rehearsed; more data helps."
        )
    return lines
