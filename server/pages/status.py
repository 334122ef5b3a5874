"""The status page: the state of every served model, in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any

from jinja2 import Template
from markupsafe import Markup

from offramp import __version__
from offramp.bundle import NEVER, Promise
from offramp.bundle.records import describe_harm, harmed
from offramp.commands.pages import page_template
from offramp.engine.common.extensions import extensions_for
from offramp.engine.control.controller import ControlStatus, Evidence
from offramp.engine.learning.lifecycle import Phase
from offramp.engine.requests.learning_status import LearningStatus
from offramp.engine.requests.results import ModelInfo
from offramp.engine.requests.statistics import ModelStatistics, StageStatistics
from offramp.server.common.served import ServedEngine
from offramp.server.pages.curves import describe_age, draw_model, draw_refused, short_number
from offramp.server.pages.history import History, IntervalPoint, ModelHistory


def render_status(
    engine: ServedEngine, history: History | None = None, *, refresh_s: int | None = None
) -> str:
    """Return the page at ``/`` as HTML; browsers reload it every ``refresh_s`` seconds, if set."""
    statistics = engine.statistics()
    history = history or History()
    models = [
        view_model(model, statistics[model.name], ready=engine.ready(model.name), history=history)
        for model in engine.models()
    ]
    return _template().render(
        models=models, version=__version__, refresh_s=refresh_s, refused=draw_refused(history)
    )


def read_refresh(text: str) -> int | None:
    """Return the seconds of ``/?refresh=SECONDS``, 1 to 3600; ``None`` for any other text."""
    seconds = int(text) if text.isascii() and text.isdecimal() and len(text) <= 4 else 0
    return seconds if 1 <= seconds <= 3600 else None


def view_model(
    model: ModelInfo, statistics: ModelStatistics, *, ready: bool, history: History | None = None
) -> dict[str, Any]:
    """Return one model's words and figures for the page, by the names in its template.

    ``model`` and ``statistics`` are passed on. ``counts`` are those of the version served now.
    ``failures`` are forced samples, samples without an answer (in total, then by cause), and
    retries. ``tiles``, ``charts`` and ``events`` come from the history.
    """
    task = None if model.answer is None else model.answer.task
    return {
        "model": model,
        "statistics": statistics,
        "ready": ready,
        "streams": _describe_streams(statistics),
        "uptime": describe_duration(statistics.uptime_s),
        "exits": _view_exits(statistics),
        "variants": _view_variants(statistics),
        "learning": view_learning(statistics.learning),
        "extensions": [
            Markup(section)  # noqa: S704 - rendered by our own template
            for extension in extensions_for("server")
            for section in extension.sections(statistics)
        ],
        "promise": _active_promise(model, statistics),
        "agreement": view_agreement(statistics, model.policy.promise),
        "agrees": None
        if task is None or task.kind == "classification"
        else f"An answer agrees where {task.describe()}",
        "by_class": _worst_class(model),
        "warnings": [*_warnings(model, statistics)],
        "forced": _forced(statistics),
        "counts": (
            ("requests", statistics.requests),
            ("samples", statistics.samples),
            ("answered", statistics.answered),
            ("queued", statistics.queued),
            ("in flight", statistics.in_flight),
            *_lengths(statistics),
        ),
        "failures": (
            (f"forced ({_forced_share(statistics)})", _forced(statistics)),
            ("failed", sum(statistics.failed.values())),
            *((_describe_cause(cause), count) for cause, count in statistics.failed.items()),
            ("retried", statistics.retried),
            *((("resumed", statistics.resumed),) if statistics.workers else ()),
            ("stream restarts", statistics.restarts),
        ),
        "times": (("request", statistics.latency_s), ("queue", statistics.queue_s)),
        **_view_history(model.name, statistics, history or History()),
    }


def _view_history(name: str, statistics: ModelStatistics, history: History) -> dict[str, Any]:
    """Return charts of the last minutes, tiles of the latest interval, and the events."""
    kept = history.models.get(name) or ModelHistory(statistics, ready=True, now_s=history.taken_s)
    return {
        "tiles": _tiles(kept.points[-1], statistics) if kept.points else (),
        "charts": draw_model(kept, statistics.mode, history.taken_s),
        "events": [
            {
                "age": describe_age(history.taken_s - event.time_s),
                "time": f"{datetime.fromtimestamp(history.unix_s(event.time_s), UTC):%H:%M:%S}",
                "change": event.change,
            }
            for event in reversed(kept.events)
        ],
    }


def _tiles(point: IntervalPoint, statistics: ModelStatistics) -> tuple[Figure, ...]:
    """Return figures of the latest interval."""
    p50, p99 = (
        "–" if seconds is None else f"{seconds * 1000:.2f} ms"
        for seconds in (point.latency_p50_s, point.latency_p99_s)
    )
    late = point.share(statistics.stages[-1].label)
    return (
        Figure(value=f"{short_number(point.requests_per_s)}/s", label="requests"),
        Figure(value=f"{short_number(point.samples_per_s)}/s", label="samples"),
        Figure(value=p50, label="latency, p50"),
        Figure(value=p99, label="latency, p99"),
        Figure(value="–" if late is None else f"{100 * (1 - late):.1f} %", label="answered early"),
        Figure(
            value=f"{short_number(point.failed_per_s)}/s",
            label="unanswered samples",
            alarming=point.failed_per_s > 0,
        ),
    )


def _lengths(statistics: ModelStatistics) -> Iterable[tuple[str, int]]:
    """Return the counts of different input lengths that are not 0; most models have one length."""
    counts = {
        "padded to share a batch": statistics.padded,
        "of lengths unseen in calibration": statistics.unseen_lengths,
    }
    return ((label, count) for label, count in counts.items() if count)


def describe_duration(seconds: float) -> str:
    """Return a duration such as ``42 s``, ``3 min 5 s`` or ``4 d 1 h``."""
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    rest, parts = int(seconds), []
    for unit, size in units:
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2]) or "0 s"


def _view_exits(statistics: ModelStatistics) -> list[dict[str, Any]]:
    """Return the rows of the table of exits; ``share`` is a share of all answers, 0 to 1."""
    answered = max(statistics.answered, 1)
    return [
        {
            "threshold": _describe_threshold(stage, last=stage is statistics.stages[-1]),
            "share": stage.answered / answered,
            "stage": stage,
        }
        for stage in statistics.stages
    ]


def _view_variants(statistics: ModelStatistics) -> list[dict[str, Any]]:
    """Return the rows of the table of variants, with agreement at calibration and in service."""
    return [
        {
            "share": variant.answered / max(statistics.answered, 1),
            "calibrated": percent(variant.agreement),
            "agreed": percent(1 - variant.disagreed / variant.audited) if variant.audited else "–",
            "variant": variant,
        }
        for variant in statistics.variants
    ]


def _describe_threshold(stage: StageStatistics, *, last: bool) -> str:
    if last:
        return "everything left"
    return "nothing now" if stage.threshold >= NEVER else f"confidence ≥ {stage.threshold:.4f}"


def _active_promise(model: ModelInfo, statistics: ModelStatistics) -> str | None:
    promise = model.policy.promise
    if statistics.control is not None or not exits_in_use(statistics):
        return None
    return model.promise if promise is None else describe_promise(promise)


def _describe_streams(statistics: ModelStatistics) -> str:
    if statistics.workers:
        return f"{statistics.workers_in_service} of {statistics.workers} workers in service"
    if statistics.streams == statistics.streams_in_service == 1:
        return "1 stream in service"
    return f"{statistics.streams_in_service} of {statistics.streams} streams in service"


def _describe_cause(cause: str) -> str:
    return {"hopeless": "dropped early", "expired": "too late"}.get(cause, cause.replace("_", " "))


def _forced(statistics: ModelStatistics) -> int:
    return sum(stage.forced for stage in statistics.stages)


def _forced_share(statistics: ModelStatistics) -> str:
    return f"{100 * _forced(statistics) / max(statistics.answered, 1):.1f} %"


def _worst_class(model: ModelInfo) -> str | None:
    worst = next(iter(model.class_losses), None)
    if worst is None or not worst.lost:
        return None
    return (
        f"By class of the model, class {worst.number} loses most: {percent(worst.share)} of its "
        f"{worst.samples:,} samples of the calibration data are answered differently"
    )


def _warnings(model: ModelInfo, statistics: ModelStatistics) -> Iterator[str]:
    if statistics.streams_in_service < statistics.streams:
        yield (
            f"Streams out of service: {statistics.streams - statistics.streams_in_service} of "
            f"{statistics.streams}. They failed and are being restarted; the log has the reasons."
        )
    if forced := _forced(statistics):
        yield (
            f"Exits are being forced: {forced:,} answers ({_forced_share(statistics)}) came from "
            "an exit that was not sure enough, because the scheduling policy "
            f"({statistics.scheduling}) forced them to leave there. The promise does not hold for "
            "these answers; --forbid-forced-exits prevents them."
        )
    promise = model.policy.promise
    if promise is not None and promise.max_class_disagreement is None and statistics.mode != "off":
        for loss in harmed(model.class_losses, promise.max_disagreement):
            harm = describe_harm(loss, promise.max_disagreement)
            yield f"On the calibration data, {harm}."
    if statistics.learning is None:
        yield from (f"{note[0].upper()}{note[1:]}." for note in model.notes)
    if statistics.mode == "off" and not model.notes:
        yield "Exits are switched off (--mode off): every answer is the unmodified model's."
    elif statistics.mode == "off" or statistics.control is not None:
        return  # the section on agreement covers this
    elif not exits_in_use(statistics):
        yield (
            "No exit is active: every answer is the unmodified model's, and no time is saved. "
            "The compiler found no thresholds that save time within the requested agreement; "
            "its report.html in the bundle has the reasons."
        )
    elif model.policy.promise is None and model.promise is None:
        yield (
            "Exits are active without a promise: their agreement with the unmodified model "
            "was not certified on any data."
        )


@cache
def _template() -> Template:
    return page_template("status.html", "offramp.server.pages")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure of the status page: a value with its label."""

    value: str
    label: str
    alarming: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementView:
    """A controller's findings as text and figures."""

    heading: str
    """Strength of the evidence, in two or three words."""
    statement: str
    """Statement about the answers, as one or more sentences."""
    alarming: bool
    """True if no evidence supports the exits in use, audits contradict them, or the data
    drifted."""
    state: str
    """State of the controller, in a few words."""
    figures: tuple[Figure, ...]


def view_agreement(statistics: ModelStatistics, promise: Promise | None) -> AgreementView | None:
    """Return a model's observed agreement as text; ``None`` if nothing is observed."""
    control = statistics.control
    if control is None:
        return None
    headings = {
        Evidence.CERTIFIED: "Certified while serving",
        Evidence.CALIBRATED: "Promised by calibration",
        Evidence.CONSERVATIVE: "No exit answers",
        Evidence.SUSPICIOUS: "Suspicious",
        Evidence.NONE: "Nothing is promised",
    }
    return AgreementView(
        heading=headings[control.evidence],
        statement=_statement(control, promise),
        alarming=control.evidence in (Evidence.NONE, Evidence.SUSPICIOUS)
        or (control.evidence is Evidence.CONSERVATIVE and control.alarms > 0),
        state=control.state,
        figures=_figures(statistics, control),
    )


def exits_in_use(statistics: ModelStatistics) -> bool:
    """Return whether any exit answers; exits in shadow mode and retired ones do not."""
    return any(stage.threshold < NEVER for stage in statistics.stages[:-1])


def percent(share: float) -> str:
    """Return a percentage such as ``0.83 %``."""
    return f"{share * 100:.3g} %"


def describe_promise(promise: Promise) -> str:
    """Return the certificate as one sentence, without the full stop."""
    of_classes = promise.max_class_disagreement
    each = f", ≤ {of_classes * 100:g} % within each class of enough samples," if of_classes else ""
    return (
        f"disagreement with the unmodified model ≤ {promise.max_disagreement * 100:g} %{each} "
        f"on data like the calibration set, "
        f"certified with {promise.confidence_level * 100:g} % confidence "
        f"on {promise.certify_samples:,} samples ({promise.certify_errors:,} answered otherwise)"
    )


def _statement(control: ControlStatus, promise: Promise | None) -> str:
    sure = f"with {percent(control.confidence_level)} confidence"
    constraint = percent(control.max_disagreement)
    match control.evidence:
        case Evidence.CERTIFIED:
            bound = min(control.disagreement_upper_bound, control.max_disagreement)
            return (
                f"disagreement with the unmodified model is at most {percent(bound)} {sure} "
                "on samples like those observed, copies counted once "
                f"(constraint: {constraint}). {_seen(control)}"
            )
        case Evidence.CALIBRATED:
            promised = f"disagreement with the unmodified model ≤ {constraint} {sure}"
            words = promised if promise is None else describe_promise(promise)
            return f"{words}; not yet confirmed by what is served. {_seen(control)}"
        case Evidence.CONSERVATIVE:
            return (
                "the whole model answers every sample until there is evidence for exits "
                f"(constraint: disagreement ≤ {constraint} {sure}). {_seen(control)}"
            )
        case Evidence.SUSPICIOUS:
            return (
                f"more audited answers disagreed than the constraint of {constraint} allows, too "
                f"few for an alarm so far; nothing is promised until this is resolved. "
                f"{_seen(control)}"
            )
        case Evidence.NONE:
            return (
                "the exits in use are tuned for disagreement ≤ "
                f"{constraint}, and no certificate covers them. {_seen(control)}"
            )


def _seen(control: ControlStatus) -> str:
    samples = f"{control.observed:,} samples were observed so far"
    return f"{samples}, {control.audited:,} early answers among them audited."


def _figures(statistics: ModelStatistics, control: ControlStatus) -> tuple[Figure, ...]:
    measured = "–" if control.disagreement is None else percent(control.disagreement)
    known = control.disagreement_upper_bound < 1
    bound = percent(control.disagreement_upper_bound) if known else "–"
    return (
        Figure(value=measured, label="disagreement measured"),
        Figure(value=bound, label=f"at most, with {percent(control.confidence_level)} confidence"),
        Figure(value=percent(control.max_disagreement), label="constraint"),
        Figure(value=control.controller, label="controller, by name"),
        Figure(value=percent(control.audit_probability), label="of early answers are audited"),
        *(
            Figure(value=f"{count:,}", label=label, alarming=alarming and count > 0)
            for label, count, alarming in (
                ("audited", control.audited, False),
                ("disagreed", control.disagreed, False),
                ("being audited", statistics.auditing, False),
                ("audits lost", statistics.lost_feedback, False),
                ("with inputs out of range", statistics.out_of_range, False),
                ("copies, no evidence", statistics.discounted, False),
                ("drift alarms", control.alarms, True),
                ("tunings", control.tunings, False),
                ("changes of exits", control.adjustments, False),
            )
        ),
    )


def view_learning(status: LearningStatus | None) -> dict[str, Any] | None:
    """Return the state of learning as text and figures; ``None`` if the model does not learn.

    The state is alarming if an attempt failed or learning stopped.
    """
    if status is None:
        return None
    counts = (
        ("recorded inputs", status.recorded, False),
        ("wanted", status.wanted, False),
        ("drawn, but not recorded", status.dropped, True),
        ("drawn, but recorded already", status.copies, False),
        ("answered with NaN or infinity, left out", status.unanswered, False),
        ("compilations started", status.attempts, False),
        ("failed in a row", status.failures, True),
    )
    return {
        "text": status.text,
        "alarming": status.phase in (Phase.WAITING, Phase.STOPPED),
        "figures": (
            *(
                Figure(value=f"{count:,}", label=label, alarming=alarming and count > 0)
                for label, count, alarming in counts
            ),
            Figure(value=f"{status.size_bytes / 2**20:,.1f} MiB", label="of recorded inputs"),
        ),
    }
