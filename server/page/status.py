"""The status page: what a person wants to know of every served model, in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from offramp import __version__
from offramp.bundle import NEVER
from offramp.bundle.records import describe_harm, harmed
from offramp.engine.common.extensions import extensions_for
from offramp.engine.requests.results import ModelInfo
from offramp.engine.requests.statistics import Histogram, ModelStatistics, StageStatistics
from offramp.server.page.agreement_view import (
    AgreementView,
    describe_promise,
    exits_in_use,
    percent,
    view_agreement,
)
from offramp.server.page.learning_view import LearningView, view_learning
from offramp.server.page.served import ServedEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitView:
    """A row of the exit table."""

    label: str
    threshold: str
    answered: int
    share: float
    """Of all answers, 0 to 1."""
    forced: int
    """Answers of samples that had to leave here."""
    runs: int
    """Of its stage; the means are over them, and shown if there are any."""
    mean_batch: float
    """Rows per run."""
    mean_run_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantView:
    """A row of the table of variants."""

    name: str
    answered: int
    share: float
    """Of all answers, 0 to 1."""
    forced: int
    calibrated: str
    """How often the whole subnet agreed with the full model at calibration."""
    audited: int
    agreed: str
    """How often its answers did while serving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """A model's part of the page."""

    name: str
    version: int
    """1 until the model is replaced; the counts are those of this version."""
    ready: bool
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    mode: str
    backend: str
    scheduling: str
    max_batch_size: int
    policy_version: int
    streams: str
    """How many of the device's streams are in service."""
    uptime: str
    exits: tuple[ExitView, ...]
    variants: tuple[VariantView, ...]
    learning: LearningView | None
    """``None`` where no exits are learned."""
    extensions: tuple[Markup, ...]
    """What extensions show."""
    promise: str | None
    """The agreement promise in words; ``None`` where none is in force, or more is known."""
    agreement: AgreementView | None
    """What is observed while serving; ``None`` where nothing is."""
    agrees: str | None
    """When an answer agrees with the model's, where that is more than an equal class."""
    by_class: str | None
    """Which class of the model loses most; ``None`` where none loses any."""
    warnings: tuple[str, ...]
    """Why no input leaves early, or leaves without a promise, or cannot be run."""
    forced: int
    """Answers of samples that had to leave early, for the promise does not hold for them."""
    counts: tuple[tuple[str, int], ...]
    failures: tuple[tuple[str, int], ...]
    """Samples that had to leave, those without an answer (all of them, then by cause), and what
    was tried again."""
    times: tuple[tuple[str, Histogram], ...]
    """What is timed, and its histogram in seconds."""


def render_status(engine: ServedEngine) -> str:
    """The page at ``/`` as HTML."""
    statistics = engine.statistics()
    models = [
        view_model(model, statistics[model.name], ready=engine.ready(model.name))
        for model in engine.models()
    ]
    return _template().render(models=models, version=__version__)


def view_model(model: ModelInfo, statistics: ModelStatistics, *, ready: bool) -> ModelView:
    """Put one model into the words and figures of the page."""
    task = model.answer.task
    return ModelView(
        name=model.name,
        version=statistics.version,
        ready=ready,
        inputs=tuple(tensor.describe() for tensor in model.inputs),
        outputs=tuple(tensor.describe() for tensor in model.outputs),
        mode=statistics.mode,
        backend=statistics.backend,
        scheduling=statistics.scheduling,
        max_batch_size=model.max_batch_size,
        policy_version=statistics.policy_version,
        streams=_describe_streams(statistics),
        uptime=describe_duration(statistics.uptime_s),
        exits=tuple(_view_exits(statistics)),
        variants=tuple(_view_variants(statistics)),
        learning=view_learning(statistics.learning),
        extensions=tuple(
            Markup(section)  # noqa: S704 - made by a template of ours
            for extension in extensions_for("server")
            for section in extension.sections(statistics)
        ),
        promise=_promise_in_force(model, statistics),
        agreement=view_agreement(statistics, model.policy.promise),
        agrees=None
        if task.kind == "classification"
        else f"An answer agrees where {task.describe()}",
        by_class=_worst_class(model),
        warnings=tuple(_warnings(model, statistics)),
        forced=_forced(statistics),
        counts=(
            ("requests", statistics.requests),
            ("samples", statistics.samples),
            ("answered", statistics.answered),
            ("queued", statistics.queued),
            ("in flight", statistics.in_flight),
            *_lengths(statistics),
        ),
        failures=(
            (f"forced ({_forced_share(statistics)})", _forced(statistics)),
            ("failed", sum(statistics.failed.values())),
            *((_describe_cause(cause), count) for cause, count in statistics.failed.items()),
            ("retried", statistics.retried),
            *((("resumed", statistics.resumed),) if statistics.workers else ()),
            ("stream restarts", statistics.restarts),
        ),
        times=(("request", statistics.latency_s), ("queue", statistics.queue_s)),
    )


def _lengths(statistics: ModelStatistics) -> Iterable[tuple[str, int]]:
    """Count by lengths what there was of it: most models take one length."""
    counts = {
        "padded to share a batch": statistics.padded,
        "of lengths unseen in calibration": statistics.unseen_lengths,
    }
    return ((label, count) for label, count in counts.items() if count)


def describe_duration(seconds: float) -> str:
    """``42 s``, ``3 min 5 s``, ``2 h 10 min``, ``4 d 1 h``."""
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    rest, parts = int(seconds), []
    for unit, size in units:
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2]) or "0 s"


def _view_exits(statistics: ModelStatistics) -> Iterable[ExitView]:
    answered = max(statistics.answered, 1)
    return (
        ExitView(
            label=stage.label,
            threshold=_describe_threshold(stage, last=stage is statistics.stages[-1]),
            answered=stage.answered,
            share=stage.answered / answered,
            forced=stage.forced,
            runs=stage.run_s.count,
            mean_batch=stage.batch_size.mean,
            mean_run_ms=stage.run_s.mean * 1e3,
        )
        for stage in statistics.stages
    )


def _view_variants(statistics: ModelStatistics) -> Iterator[VariantView]:
    for variant in statistics.variants:
        agreed = "–"
        if variant.audited:
            agreed = percent(1 - variant.disagreed / variant.audited)
        yield VariantView(
            name=variant.name,
            answered=variant.answered,
            share=variant.answered / max(statistics.answered, 1),
            forced=variant.forced,
            calibrated=percent(variant.agreement),
            audited=variant.audited,
            agreed=agreed,
        )


def _describe_threshold(stage: StageStatistics, *, last: bool) -> str:
    if last:
        return "everything left"
    return "nothing now" if stage.threshold >= NEVER else f"confidence ≥ {stage.threshold:.4f}"


def _promise_in_force(model: ModelInfo, statistics: ModelStatistics) -> str | None:
    promise = model.policy.promise
    if promise is None or statistics.control is not None or not exits_in_use(statistics):
        return None
    return describe_promise(promise)


def _describe_streams(statistics: ModelStatistics) -> str:
    if statistics.workers:
        return f"{statistics.workers_in_service} of {statistics.workers} workers in service"
    if statistics.streams == statistics.streams_in_service == 1:
        return "1 stream in service"
    return f"{statistics.streams_in_service} of {statistics.streams} streams in service"


def _describe_cause(cause: str) -> str:
    return {"hopeless": "given up early", "expired": "too late"}.get(cause, cause.replace("_", " "))


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
        f"{worst.samples:,} samples of the calibration data are answered otherwise"
    )


def _warnings(model: ModelInfo, statistics: ModelStatistics) -> Iterator[str]:
    if statistics.streams_in_service < statistics.streams:
        yield (
            f"Streams out of service: {statistics.streams - statistics.streams_in_service} of "
            f"{statistics.streams}. They failed, and are tried again; the log has the reasons."
        )
    if forced := _forced(statistics):
        yield (
            f"Exits are being forced: {forced:,} answers ({_forced_share(statistics)}) came from "
            "an exit that was not sure enough, because the scheduling policy "
            f"({statistics.scheduling}) had them leave there. The promise does not hold for "
            "these; --forbid-forced-exits rules them out."
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
        return  # the view of agreement says what there is to say
    elif not exits_in_use(statistics):
        yield (
            "No exit is active: every answer is the unmodified model's, and no time is saved. "
            "The compiler found no thresholds that save time within the agreement asked for; "
            "its report.html in the bundle has the reasons."
        )
    elif model.policy.promise is None:
        yield (
            "Exits are active without a promise: their agreement with the unmodified model "
            "was not certified on any data."
        )


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("offramp.server"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("status.html")
