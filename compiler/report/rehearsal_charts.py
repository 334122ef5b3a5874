"""Charts of a rehearsal (PAME figure 7): times and numbers of batches at each step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from markupsafe import Markup

from offramp.calibration.rehearsal import Candidate, Rehearsal, RehearsalStep, Rehearsed
from offramp.commands import svg
from offramp.commands.svg import Scale
from offramp.compiler.report import numbers

_ROW, _TOP, _BOTTOM, _LEFT, _WIDTH, _GAP, _RIGHT = 19.0, 26.0, 40.0, 44.0, 390.0, 30.0, 176.0
_SHADES = 12
"""Number of shades of the heat map; neighbouring cells of the same shade are one box."""
_FAINTEST = 0.12
"""Opacity of a cell with a value of almost 0."""


class StepView(NamedTuple):
    """One step of the search for exits, as the page shows it."""

    title: str
    caption: str
    drawing: Markup


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalView:
    """The page's section on the choice of exits by rehearsing batches."""

    summary: str
    outcome: str
    warning: str | None
    ending: str
    steps: tuple[StepView, ...]


def rehearsal_view(rehearsed: Rehearsed | None) -> RehearsalView | None:
    """Describe how exits were chosen; ``None`` without a rehearsal."""
    if rehearsed is None:
        return None
    rehearsal = rehearsed.rehearsal
    settings, shipped = rehearsal.settings, rehearsed.shipped
    late = shipped.violations > settings.max_violations
    tolerated = numbers.plain_percent(settings.max_violations)
    return RehearsalView(
        summary=(
            f"{numbers.plural(settings.batches, 'batch', 'batches')} of {settings.batch_size} "
            f"were drawn from {numbers.plural(rehearsal.samples, 'sample')} of the tuning split. "
            f"An exit may make {tolerated} of them later than without it; of the samples, "
            f"{numbers.count(rehearsal.allowed_errors)} may have other answers."
        ),
        outcome=(
            f"As shipped, for batches of the certify split: "
            f"{numbers.milliseconds(shipped.average_ms)} ms until an answer on average, "
            f"{numbers.milliseconds(shipped.tail_ms)} ms until a batch's last one, "
            f"{numbers.milliseconds(shipped.source_ms)} ms without exits; "
            f"{numbers.percent(shipped.violations)} of the batches are later than that."
        ),
        warning=f"More batches are late than the {tolerated} tolerated." if late else None,
        ending=_ENDINGS[rehearsal.ended],
        steps=tuple(
            StepView(
                f"Step {number}: from {_place(step)}", _caption(rehearsal, step), draw_step(step)
            )
            for number, step in enumerate(rehearsal.steps, start=1)
        ),
    )


_ENDINGS = {
    "precision": "The search ended: no later exit keeps the precision.",
    "latency": "The search ended: every later exit makes too many batches late.",
    "gain": "The search ended: no later exit that could be added shortens the average enough.",
    "all left": "The search ended: no sample goes on after the last exit.",
    "last exit": "The search ended at the last exit.",
    "kept": "No search: the exits that were in use were checked, and moved where needed.",
}


def _place(step: RehearsalStep) -> str:
    return "the model's start" if step.after_exit is None else f"E{step.after_exit}"


def _caption(rehearsal: Rehearsal, step: RehearsalStep) -> str:
    limit = numbers.milliseconds(step.limit_ms)
    brought = "come" if step.after_exit is None else "may come at most"
    start = f"{numbers.plural(step.rows, 'row')} {brought}; {limit} ms without an exit."
    if step.chosen is None:
        return f"{start} None was chosen."
    found = step.candidate(step.chosen)
    figure, name = found.tail_ms, "tail latency"
    if step.after_exit is None:
        figure, name = found.average_ms, "average latency"
    why = f"chosen: shortest {name} of those allowed" if rehearsal.ended != "kept" else "kept"
    return (
        f"{start} E{found.exit} {why} ({name} {numbers.milliseconds(figure)} ms, "
        f"{numbers.percent(found.violations)} of the batches late, "
        f"{numbers.percent(found.moving_on)} of the samples go on)."
    )


def draw_step(step: RehearsalStep) -> Markup:
    """Draw the inference time matrix and the batching pattern matrix side by side."""
    second = _LEFT + _WIDTH + _GAP
    width, bottom = second + _WIDTH + _RIGHT, _TOP + _ROW * len(step.candidates)
    times, pattern = _Grid(step, _LEFT), _Grid(step, second)
    rows = range(len(step.candidates))
    return svg.drawing(
        width,
        bottom + _BOTTOM,
        "Inference time matrix and batching pattern matrix by exit and rows that go on",
        times.headed("inference time, predicted from the profile"),
        *itertools.chain.from_iterable(map(times.times, rows)),
        times.boundary(),
        pattern.headed("batches of the load, counted"),
        *itertools.chain.from_iterable(map(pattern.batches, rows)),
        pattern.boundary(),
        *itertools.chain.from_iterable(_words(step, row, second + _WIDTH + 8) for row in rows),
    )


class _Grid:
    """Cells of a matrix: rows are candidates, columns are numbers of samples left in the batch."""

    def __init__(self, step: RehearsalStep, left: float) -> None:
        self._step = step
        self._x = Scale(low=0, high=len(step.columns), start=left, end=left + _WIDTH)
        self._most = max((max(c.pattern) for c in step.candidates), default=1) or 1

    def headed(self, title: str) -> Markup:
        """Draw the title of the matrix, and the axis below it."""
        columns = self._step.columns
        bottom = _TOP + _ROW * len(self._step.candidates)
        every = max(1, -(-len(columns) // 9))
        shown = range(0, len(columns), every)
        middle = (self._x.start + self._x.end) / 2
        head = svg.text(self._x.start, 11, title, "label")
        axis = svg.text(middle, bottom + 31, "rows that go on after the exit", "label", "middle")
        ticks = (
            svg.text(self._x(i + 0.5), bottom + 15, str(columns[i]), "tick", "middle")
            for i in shown
        )
        return svg.join([head, axis, *ticks])

    def times(self, row: int) -> Iterator[Markup]:
        """Shade cells by time, as a share of the limit; cells of one shade are one box."""
        candidate, limit_ms = self._step.candidates[row], self._step.limit_ms
        shades = [
            (_SHADES, "cell late")
            if self._late(row, place)
            else (min(_SHADES, round(ms / limit_ms * _SHADES)), "cell")
            for place, ms in enumerate(candidate.times_ms)
        ]
        place = 0
        for (shade, class_), run in itertools.groupby(shades):
            length = len(list(run))
            times = candidate.times_ms[place : place + length]
            going_on = _going_on(self._step.columns, place, length)
            title = f"E{candidate.exit}, {going_on}: {_range(times)} ms"
            opacity = _FAINTEST + (1 - _FAINTEST) * shade / _SHADES
            yield self._box(row, place, length, (class_, opacity, title))
            place += length
        yield self._frame(row)

    def batches(self, row: int) -> Iterator[Markup]:
        """Shade cells by their number of batches; cells of late batches are marked."""
        candidate = self._step.candidates[row]
        yield self._box(row, 0, len(self._step.columns), ("cell none", 1.0, None))
        for place, count in enumerate(candidate.pattern):
            if not count:
                continue
            late, batches = self._late(row, place), numbers.plural(count, "batch", "batches")
            going_on = _going_on(self._step.columns, place, 1)
            title = f"E{candidate.exit}: of {batches}, {going_on}" + (", late" if late else "")
            opacity = _FAINTEST + (1 - _FAINTEST) * (count / self._most) ** 0.5
            yield self._box(row, place, 1, ("cell late" if late else "cell", opacity, title))
        yield self._frame(row)

    def boundary(self) -> Markup:
        """Draw the line beyond which batches are late."""
        points = []
        for row, candidate in enumerate(self._step.candidates):
            allowed = sum(rows <= candidate.allowed_rows for rows in self._step.columns)
            points += [(self._x(allowed), _top(row)), (self._x(allowed), _top(row) + _ROW)]
        return svg.path(points, "boundary") if points else Markup("")

    def _late(self, row: int, place: int) -> bool:
        return self._step.columns[place] > self._step.candidates[row].allowed_rows

    def _box(
        self, row: int, place: int, length: int, look: tuple[str, float, str | None]
    ) -> Markup:
        class_, opacity, title = look
        return svg.element(
            "rect",
            svg.titled(title),
            x=self._x(place) + 0.5,
            y=_top(row) + 1,
            width=self._x(place + length) - self._x(place) - 1,
            height=_ROW - 2,
            class_=class_,
            fill_opacity=opacity if opacity < 1 else None,
        )

    def _frame(self, row: int) -> Markup:
        if self._step.candidates[row].exit != self._step.chosen:
            return Markup("")
        return svg.box(self._x.start - 1, _top(row) - 0.5, _WIDTH + 2, _ROW + 1, class_="picked")


def _words(step: RehearsalStep, row: int, right: float) -> Iterator[Markup]:
    """Write an exit's name on the left, and the result of judging it on the right."""
    candidate = step.candidates[row]
    base = _top(row) + _ROW - 5.5
    chosen = candidate.exit == step.chosen
    name = "number strong" if chosen else "number"
    yield svg.text(_LEFT - 8, base, f"E{candidate.exit}", name, "end")
    yield svg.text(right, base, _against(step, candidate), "tick strong" if chosen else "tick")


def _against(step: RehearsalStep, candidate: Candidate) -> str:
    ms = candidate.average_ms if step.after_exit is None else candidate.tail_ms
    kind = "mean" if step.after_exit is None else "tail"
    latency = f"{kind} {numbers.milliseconds(ms)} ms"
    late = f"{numbers.percent(candidate.violations)} late"
    if candidate.verdict == "precision":
        return "not precise enough"
    said = {"latency": f" · {late}", "gain": " · gains little", "chosen": " · chosen"}
    return latency + said.get(candidate.verdict, "")


def _top(row: int) -> float:
    return _TOP + _ROW * row


def _going_on(columns: tuple[int, ...], place: int, length: int) -> str:
    first, last = columns[place], columns[place + length - 1]
    if first < last:
        return f"{first} to {last} rows go on"
    return f"{numbers.plural(first, 'row')} {'goes' if first == 1 else 'go'} on"


def _range(times_ms: tuple[float, ...]) -> str:
    first, last = numbers.milliseconds(times_ms[0]), numbers.milliseconds(times_ms[-1])
    return first if first == last else f"{first} to {last}"
