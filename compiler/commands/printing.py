"""Output of the commands of ``eecompile`` when they are done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from offramp.bundle import Bundle, ExitPolicy, Manifest, Promise
from offramp.bundle.bundle import REPORT
from offramp.bundle.engines import ENGINES
from offramp.bundle.records import describe_harm, harmed, losses_on_records
from offramp.calibration.data.data_sources import DataSource, data_name
from offramp.calibration.data.scratch import ScratchSpace, describe_bytes
from offramp.calibration.rehearsal import Forecast
from offramp.certify import MODEL_END
from offramp.certify.learn_then_test import level_of_each
from offramp.compiler.common.resources import peak_bytes
from offramp.compiler.engines.build import UNKNOWN
from offramp.compiler.engines.build_options import SizeRange, describe_ranges
from offramp.compiler.engines.building import Building, Planned, PlannedEngine, UnitResult
from offramp.compiler.engines.units import Unit, segment_units, source_unit, stage_units
from offramp.compiler.export.export import Exported
from offramp.compiler.export.model_folder import LOST
from offramp.compiler.export.repositories import README
from offramp.compiler.report import numbers, words
from offramp.compiler.steps.bundle_check import BundleCheck
from offramp.engine.control.costs import CostModel
from offramp.engine.models.profile_check import predicted_savings
from offramp.engine.models.whole_promise import end_evidence, whole_policy
from offramp.engine.stages.plan import exit_label

if TYPE_CHECKING:
    from offramp.compiler.steps.profile import Profiled
    from offramp.compiler.steps.rehearse import Rehearsing


_MOST_CLASSES = 5
"""Largest number of classes that are listed. Classes that lose the largest share come first."""
_BROKEN = (
    "THE PROMISE DOES NOT HOLD on data like these: so many would be unlikely. Compile the model "
    "with samples of them, or serve with --mode audit, which detects it."
)
_VERDICTS = {
    "kept": ("green", "That contradicts nothing that was promised."),
    "contradicted": ("bold red", _BROKEN),
    "nothing promised": ("dim", "Nothing was promised: no exit is in use."),
}
_MIB = 2**20
_STYLES = {"built": "green", "fresh": "dim", "failed": "bold red"}


def print_bundle(bundle: Bundle, console: Console) -> None:
    """Print the result of ``eecompile``, in words."""
    policy, manifest = whole_policy(bundle.policy, end_evidence(bundle)), bundle.manifest
    say = partial(console.print, highlight=False, soft_wrap=True)
    path = escape(str(bundle.path))
    for line in _of_policy(bundle, policy):
        say(line)
    for line in _covered(manifest, promised=policy.promise is not None):
        say(escape(line))
    if (accuracy := manifest.calibration.source_accuracy) is not None:
        say(
            f"The unmodified model is right on {accuracy:.1%} of the labels; if you know it to be "
            "better, prepare the data as in training."
        )
    for line in (*_ranges(manifest), *_variants(bundle)):
        say(escape(line))
    for line in words.shared_weights(manifest):
        say(escape(f"With shared weights (--share-weights of eeserve), {line}"))
    if manifest.batch_effect is not None:
        say(escape(f"{manifest.batch_effect.describe()}."))
    alone = f"every sample runs in a batch of its own: {manifest.no_batching}"
    rules = [alone] if manifest.no_batching else [rule.describe() for rule in manifest.paddings]
    for told in (*rules, *(bound.describe() for bound in manifest.value_bounds)):
        say(escape(f"While serving {told}."))
    if manifest.precision != "fp32" or manifest.precision_reason:
        say(f"Precision {escape(words.precision(manifest))}")
    measured = bundle.measured()
    notes = bundle.profile().disturbed + (measured.disturbed if measured else ())
    if notes:
        parts = dict.fromkeys(note.partition(":")[0] for note in notes)
        say(
            f"[yellow]Disturbed while measuring[/yellow] {escape(', '.join(parts))}: "
            f"{numbers.plural(len(notes), 'note')} in the report"
        )
    for library in manifest.custom_ops:
        say(f"Needs the library {escape(library.describe())}: --custom-ops takes it")
    report = "none, as it was made without data" if manifest.is_plain else f"{path}/{REPORT}"
    say(f"Report: {report}")
    flags = "".join(f" --custom-ops {library.file}" for library in manifest.custom_ops)
    if manifest.calibration.random_inputs:
        flags += " --uncertified-exits --mode leave"
    say(f"Serve:  eeserve {path}{escape(flags)}")


def _of_policy(bundle: Bundle, policy: ExitPolicy) -> Iterator[str]:
    """Yield lines on the exits in use, their promise, and their savings."""
    manifest, promise = bundle.manifest, policy.promise
    if manifest.calibration.random_inputs:
        yield "[bold red]DRY RUN[/bold red]: compiled on random inputs, nothing is certified."
    exits = numbers.plural(len(manifest.exits), "exit")
    built = f"[bold]{escape(str(bundle.path))}[/bold]: {exits} built"
    if not policy.active:
        yield f"{built}, [bold red]none active[/bold red]: serves the unmodified model"
        if manifest.idle_reason:
            yield f"  Reason: {escape(manifest.idle_reason)}."
        return
    yield f"{built}, {len(policy.active)} active"
    for active in policy.active:
        exit_ = manifest.exits[active.exit]
        yield (
            f"  exit {exit_.index} after segment {exit_.after_segment}: "
            f"{exit_.head.describe()}; leaves at confidence ≥ {active.threshold:.3f}"
        )
    measured = bundle.measured()
    if promise is not None:
        yield _promised(promise, "the calibration set")
        yield from chain(_by_class(bundle, promise), _brought(bundle, promise))
    elif manifest.calibration.random_inputs and measured is not None:
        yield f"Thresholds let half leave at each exit. {words.measured_ratios(measured)}"


def _covered(manifest: Manifest, *, promised: bool) -> Iterator[str]:
    """Yield lines on the samples that a promise covers and on agreement, if not the default."""
    if manifest.calibration.distinct is not None:
        yield words.distinct_samples(manifest.calibration, promised=promised)
    task = manifest.answer.task
    if task.kind != "classification":
        yield f"Task: {task.kind} (--task names another); an answer agrees if {task.describe()}."


def print_use(scratch: ScratchSpace, console: Console) -> None:
    """Print a run's peak memory, and its peak of temporary disk space."""
    peak = peak_bytes()
    memory = "" if peak is None else f"{describe_bytes(peak)} of memory and "
    disk = f"{describe_bytes(scratch.peak_bytes)} of scratch in {escape(str(scratch.place))}"
    console.print(f"Took:   at most {memory}{disk}", highlight=False, soft_wrap=True)


def _promised(promise: Promise, like: str) -> str:
    disagreed = f"{promise.certify_errors} of {promise.certify_samples} certify samples disagreed"
    return (
        f"Disagreement with the unmodified model ≤ {100 * promise.max_disagreement:g}% on unseen "
        f"data like {like}, with {100 * promise.confidence_level:g}% confidence ({disagreed})."
    )


def _by_class(bundle: Bundle, promise: Promise) -> Iterator[str]:
    """Yield lines on the class that loses most answers on certify samples, and on class bounds."""
    answer, records = bundle.manifest.answer, bundle.records()
    losses = losses_on_records(answer, bundle.policy, records)
    if losses and losses[0].lost:
        worst = losses[0]
        yield (
            f"By class of the model: class {worst.number} loses most, {worst.lost:,} of its "
            f"{worst.samples:,} certify samples ({worst.share:.2%}) have another answer."
        )
    bound = promise.max_class_disagreement
    if bound is not None:
        level = level_of_each(promise.confidence_level, copies="copies" in records)
        yield words.class_bound(answer, losses, bound, level)
    for loss in harmed(losses, promise.max_disagreement) if bound is None else ():
        yield f"[bold red]HARM[/bold red]: {describe_harm(loss, promise.max_disagreement)}."


def _brought(bundle: Bundle, promise: Promise) -> Iterator[str]:
    """Yield lines on the savings by exits: measured, or predicted if they were not measured."""
    measured, profile = bundle.measured(), bundle.profile()
    if measured is None:
        yield (
            f"Predicted savings of time: {promise.predicted_savings:.1%} (from profiled times; "
            "measure with eebench compare)."
        )
        yield f"Where nothing exits, an answer comes later by {_added(bundle)} (profiled)."
        return
    at = measured.nearest(bundle.manifest.calibration.reference_batch_size)
    saved = predicted_savings(bundle, profile, at.batch_size)
    judged = words.SavingsCheck(measured=measured, at=at, predicted_savings=saved, profile=profile)
    yield words.measured_ratios(measured)
    yield judged.describe()
    if judged.difference:
        yield f"[yellow]{judged.difference}[/yellow]"
    if judged.warning:
        yield f"[bold red]THE EXITS IN USE SAVE NOTHING HERE[/bold red]: {judged.warning}"


def _ranges(manifest: Manifest) -> Iterator[str]:
    """Yield a line on exits that end in a copy of the model's own end: its operators and range."""
    if manifest.calibration.answer_ranges:
        ended = ", ".join(manifest.answer.tail)
        ranges = manifest.calibration.describe_ranges()
        yield f"Exits end as the model does ({ended}): {ranges}."


def _variants(bundle: Bundle) -> Iterator[str]:
    """Yield a line on each variant: its time, its agreement and its promise."""
    size = bundle.manifest.calibration.reference_batch_size
    for variant, shown in zip(bundle.manifest.variants, bundle.variants()[1:], strict=True):
        profile = shown.profile()
        column = profile.column(size)
        took = sum(row[column] for row in profile.segments_ms[:-1]) / profile.source_ms[column]
        promise = shown.policy.promise
        covered = "no exit of it is certified"
        if promise is not None:
            covered = (
                f"{len(shown.policy.active)} exits certified, {promise.predicted_savings:.1%} of "
                "the full model's time saved (predicted)"
            )
        yield (
            f"Variant {variant.index}, {variant.name}: {took:.0%} of the full model's time at "
            f"batch {size} (profiled), agrees in {variant.agreement:.1%}; {covered}"
        )


def _added(bundle: Bundle) -> str:
    """Return the time that exits add for a sample that leaves at none, by batch size."""
    profile, active = bundle.profile(), [a.exit for a in bundle.policy.active]
    sizes = sorted({profile.batch_sizes[0], bundle.manifest.calibration.reference_batch_size})
    costs = {size: CostModel.of(bundle.manifest, profile, size) for size in sizes}
    return ", ".join(f"{c.overhead(active):.1%} at batch {size}" for size, c in costs.items())


def print_profiled(done: Profiled, console: Console) -> None:
    """Print the result of ``eecompile profile``, and the savings that it predicts."""
    active = [a.exit for a in done.bundle.policy.active]
    titles = ("batch", "model, ms", "before", "exits add", "± ", "saved", "before", "rounds")
    table = Table(*(Column(title, justify="right") for title in titles))
    for index, size in enumerate(done.after.batch_sizes):
        cost = CostModel.of(done.bundle.manifest, done.after, size)
        spread = done.after.spread
        table.add_row(
            str(size),
            f"{done.after.source_ms[index]:.3g}",
            f"{done.before.source_ms[index]:.3g}",
            f"{cost.overhead(active):.1%}",
            f"{cost.unsure:.1%}",
            f"{predicted_savings(done.bundle, done.after, size):.1%}",
            f"{predicted_savings(done.bundle, done.before, size):.1%}",
            str(spread.rounds[index]) if spread else "",
        )
    console.print(table)
    say = partial(console.print, markup=False, soft_wrap=True)
    for note in done.after.disturbed:
        say(f"Disturbed while profiling: {note}")
    say(_advice(done, active))
    say("Dry run: nothing was written." if done.written is None else f"Written: {done.written}")


def _advice(done: Profiled, active: list[int]) -> str:
    size = done.bundle.manifest.calibration.reference_batch_size
    saved = predicted_savings(done.bundle, done.after, size)
    if not active:
        return "No exit is in use: the bundle serves the unmodified model."
    if saved <= 0:
        return (
            f"The exits in use do not pay on this machine: at batch {size} answers are predicted "
            f"to come {-saved:.1%} later in the mean; compile the model here."
        )
    return (
        f"The policy stays; it is predicted to save {saved:.1%} of the model's time at batch "
        f"{size} (profiled times; measure with eebench compare). Other exits might save more here: "
        "compiling again chooses them."
    )


def print_rehearsing(done: Rehearsing, console: Console) -> None:
    """Print the policy before and after ``eecompile rehearse``, with a forecast for each."""
    say = partial(console.print, highlight=False, soft_wrap=True)
    for move in done.moves:
        where = "no longer in use" if move.to is None else f"moved to exit {move.to}"
        late = numbers.percent(move.violations)
        say(f"exit {move.exit} {where}: it would make {late} of the batches late")
    console.print(_rehearsed_table(done))
    settings = done.rehearsed.rehearsal.settings
    load = f"batches of {settings.batch_size} of the new load"
    say(f"Predicted for {load}, from profiled times; not measured.")
    if done.after.promise is None:
        say(
            "[bold red]No exit is in use:[/bold red] no policy kept the promise and saved time on "
            "the new data. More of it helps most; so does compiling the model again on it."
        )
    else:
        say(_promised(done.after.promise, "the new"))
    if done.rehearsed.shipped.violations > settings.max_violations:
        say(
            "[bold red]Too many batches are late[/bold red]: more than the "
            f"{numbers.plain_percent(settings.max_violations)} tolerated. Thresholds that could "
            "be certified let more samples go on than those rehearsed; more data helps."
        )
    where = f"Written: {escape(str(done.written))}"
    say("Dry run: nothing was written." if done.written is None else where)


def _rehearsed_table(done: Rehearsing) -> Table:
    table = Table("", box=box.SIMPLE_HEAD)
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    before, after = _thresholds(done.before), _thresholds(done.after)
    for exit_ in sorted({*before, *after}):
        thresholds = (policy.get(exit_, "not in use") for policy in (before, after))
        table.add_row(f"exit {exit_}: least confidence", *thresholds)
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


def print_exported(done: Exported, data: Path | DataSource, console: Console) -> None:
    """Print the files that ``eecompile export`` wrote, and how they were verified."""
    say = partial(console.print, highlight=False, soft_wrap=True)
    count = len(done.names.thresholds)
    folders = [place.folder for place in done.repositories]
    for path in (*([done.path] if done.path else []), *folders):
        say(
            f"[bold]{escape(str(path))}[/bold]: {done.size_bytes / 2**20:.1f} MiB, "
            f"{count} {'exit' if count == 1 else 'exits'}"
        )
    for stage, name in zip(done.plan.stages, done.names.thresholds, strict=False):
        say(
            f"  {exit_label(stage.answered_by)}: leaves at confidence ≥ {stage.threshold:.3f}; "
            f"to override, feed {escape(name)} (float32)"
        )
    if done.with_exits:
        say(f"  further outputs: {escape(done.names.exit)}, {escape(done.names.confidence)}")
    verified = done.verified
    apart = verified.largest_difference
    how = f"within {apart:.1e} of their scale" if apart else "bit for bit"
    say(
        f"Verified on {verified.samples} samples of {escape(data_name(data))}: the bundle's exits, "
        f"its answers {how}; {1 - verified.exit_shares.get(-1, 0.0):.1%} left early."
    )
    if not done.calibration_data:
        say("This is not the data that the bundle was compiled with.")
    for place in done.repositories:
        say(
            f"For {escape(place.describe_servers())}. Features of eeserve that they lack: "
            f"{', '.join(LOST)}; {escape(str(place.folder / README))} explains it."
        )


def print_check(check: BundleCheck, path: Path, console: Console) -> None:
    """Print the result of ``eecompile verify``."""
    say = partial(console.print, highlight=False, soft_wrap=True)
    like = "samples"
    if check.distinct_samples < check.samples:
        like = (
            f"samples, {check.distinct_samples:,} of them distinct, which alone count as evidence"
        )
    if check.on_calibration_data:
        like = "samples that it was made with, which prove little"
    say(f"[bold]{escape(str(path))}[/bold]: {check.samples:,} {like}")
    for place, share in check.shares.items():
        where = "the model's end" if place == MODEL_END else exit_label(place)
        say(f"  {where} answered {share:.1%}")
    if MODEL_END in check.shares:
        say(
            "The model's end is the unmodified model's (largest difference "
            f"{check.end_difference:.1e} of a value's scale)."
        )
    share = check.disagreements / check.samples
    say(
        f"{check.disagreements:,} answers ({share:.2%}) do not agree with the unmodified "
        f"model's; on data like these at most {check.at_most:.2%}."
    )
    for line in _lost_by_class(check):
        say(line)
    if check.accuracy is not None:
        say(f"Accuracy {check.accuracy:.2%}, of the unmodified model {check.source_accuracy:.2%}.")
    style, said = _VERDICTS[check.verdict]
    say(f"[{style}]{said}[/{style}]")


def _lost_by_class(check: BundleCheck) -> Iterator[str]:
    """Yield lines on the classes and labels that lose most answers, and warnings of harm."""
    for losses, whose in ((check.by_class, "that the model gives class"),
                          (check.by_label, "with label")):  # fmt: skip
        shown = [loss for loss in losses if loss.lost][:_MOST_CLASSES]
        for loss in shown:
            yield (
                f"  of {loss.samples:,} samples {whose} {loss.number}, {loss.lost:,} "
                f"({loss.share:.2%}) do not agree"
            )
    if check.max_disagreement is not None:
        for loss in harmed(check.by_class, check.max_disagreement):
            yield f"[bold red]HARM[/bold red]: {describe_harm(loss, check.max_disagreement)}."


def print_building(building: Building, console: Console) -> None:
    """Print a line for each unit to build, and a summary."""
    if building.results is None:
        table, line = _plan_table(building), _plan_line(building)
    else:
        table = _result_table(building, building.results)
        line = _result_line(building, building.results)
    console.print(table)
    console.print(line, highlight=False, soft_wrap=True)


def _result_table(building: Building, results: Sequence[UnitResult]) -> Table:
    table = _table("profiles", "size", "build", "difference")
    for result in results:
        entry = result.entry if result.status != "failed" else None
        table.add_row(
            result.unit.name,
            part_of(result.unit, building.bundle),
            str(len(entry.profiles)) if entry else "–",
            f"{entry.size_bytes / _MIB:.1f} MiB" if entry else "–",
            f"{entry.build_s:.1f} s" if entry else "–",
            "–" if result.error is None else f"{result.error:.1e}",
            f"[{_STYLES[result.status]}]{result.status}[/]",
        )
    return table


def _result_line(building: Building, results: Sequence[UnitResult]) -> str:
    counts = [
        f"{sum(r.status == status for r in results)} {status}"
        for status in ("built", "fresh", "failed")
        if status != "failed" or building.failed
    ]
    entries = [r.entry for r in results if r.entry and r.status != "failed"]
    size = sum(entry.size_bytes for entry in entries) / _MIB
    path = f"{building.bundle.path}/{ENGINES}/{building.target.folder}"
    line = f"{escape(building.target.describe())}: {', '.join(counts)}"
    if not entries:
        return line
    ranges = {SizeRange(p.first_batch, p.last_batch) for e in entries for p in e.profiles}
    batches = describe_ranges(sorted(ranges))
    return (
        f"{line}, {size:.1f} MiB for batches {batches} in [bold]{escape(path)}[/bold]\n"
        "Measured: the build time, and the largest difference from ONNX Runtime on the CPU, "
        "relative to the scale of each value."
    )


def _plan_table(building: Building) -> Table:
    table = _table("profiles")
    table.add_column("why")
    for plan in building.planned:
        profiles = str(len(plan.profiles)) if isinstance(plan, PlannedEngine) else "–"
        part = part_of(plan.unit, building.bundle)
        table.add_row(plan.unit.name, part, profiles, *_intention(plan))
    return table


def _table(*numbers: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("engine", no_wrap=True)
    table.add_column("of", no_wrap=True)
    for title in numbers:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("")
    return table


def _intention(plan: Planned) -> tuple[str, str]:
    if isinstance(plan, UnitResult):
        return "[bold red]refused[/]", escape(plan.problem)
    return ("build", escape(plan.stale)) if plan.stale else ("[dim]keep[/]", "")


def _plan_line(building: Building) -> str:
    stale = [p for p in building.planned if not isinstance(p, PlannedEngine) or p.stale]
    target = building.target
    unknown = f"an unknown GPU, {target.precision}"
    there = unknown if target.gpu == UNKNOWN else target.describe()
    return (
        f"{len(stale)} of {len(building.planned)} engines would be built for {escape(there)}; "
        "nothing was written"
    )


def part_of(unit: Unit, bundle: Bundle) -> str:
    """Return the part or parts of the bundle that a unit is built from."""
    if unit.variant:
        shown = bundle.variant(unit.variant)
        own = part_of(unit._replace(variant=0), shown)
        return f"{own} of variant {shown.manifest.subnet}"
    parts = {
        "source model": [source_unit(bundle.manifest)],
        "stage": stage_units(bundle),
        "segment": segment_units(bundle.manifest),
    }
    return ", ".join(part for part, units in parts.items() if unit in units)
