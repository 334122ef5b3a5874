"""Steps of ``eecompile``, which turns an ONNX model into a bundle."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path

from offramp.bundle import Bundle, InputRanges, Manifest, Padding, write_bundle
from offramp.bundle.files import check_space
from offramp.bundle.writing import check_target
from offramp.calibration.choose import limits
from offramp.calibration.data.data_sources import data_name, known_samples
from offramp.calibration.data.dataset import DataError, Dataset, read_dataset, sizes_of, split
from offramp.calibration.data.errors import UntrainableError
from offramp.calibration.data.groups import Groups
from offramp.calibration.data.key import GroupKey
from offramp.calibration.data.running import BATCH_SIZE
from offramp.calibration.data.scratch import ScratchSpace
from offramp.calibration.measure.measuring import (
    MEASURED_BATCH_SIZES,
    measure_policy,
    stages_of_samples,
)
from offramp.calibration.rehearsal import Rehearsed
from offramp.certify import samples_needed
from offramp.certify.learn_then_test import level_of_each
from offramp.compiler.blueprints.blueprint import Blueprint, Certified, draw
from offramp.compiler.blueprints.joint import JointFolder, choose_training
from offramp.compiler.blueprints.packing import BuiltVariant, make_manifest, pack
from offramp.compiler.blueprints.precision_choice import choose_precision
from offramp.compiler.blueprints.variants import (
    DrawnVariant,
    VariantFinder,
    build_variant,
    measure_sharing,
)
from offramp.compiler.common.errors import CompileError
from offramp.compiler.common.options import CompileOptions, check_options
from offramp.compiler.common.progress import SILENT, Progress
from offramp.compiler.common.resources import (
    MemoryReleasingProgress,
    find_scratch,
    give_back,
    sweep,
)
from offramp.compiler.common.rounding import warn_of_overflow
from offramp.compiler.cuts.slicing import VERIFIED_SAMPLES, Sliced, slice_model, verify
from offramp.compiler.data.made import RandomSource
from offramp.compiler.exits.bridges import check_bridges, find_bridged_exits, needs_bridges
from offramp.compiler.exits.exits import FoundExits, find_exits
from offramp.compiler.exits.policy_choice import FixedPath, RehearsedPath, record_exits
from offramp.compiler.exits.timed_model import CompileRun, TimedModel
from offramp.compiler.frontend.answer_tokens import check_lengths
from offramp.compiler.frontend.model import read_model
from offramp.compiler.graphs.graph import weight_bytes
from offramp.compiler.graphs.source_model import SourceModel
from offramp.compiler.graphs.weights import WeightFile, weight_file
from offramp.compiler.samples.batch_effect import left_for_exits, measure_batch_effect
from offramp.compiler.samples.checks import (
    check_answers_of,
    check_ranges,
    check_values,
    warn_of_answers,
)
from offramp.compiler.samples.grouping import grouped
from offramp.compiler.samples.padding import find_paddings, length_ranges, symbolic_sizes
from offramp.compiler.samples.value_bounds import find_value_bounds
from offramp.compiler.steps.dry_run import DRY_RUN_DISAGREEMENT, dry_run_policy, made_for
from offramp.compiler.steps.settling import check_teacher, resolve_task
from offramp.engine.common.environment import cpu_features
from offramp.engine.stages.plan import Mode, Plan, plan_stages

_log = logging.getLogger(__name__)


def compile_model(
    options: CompileOptions,
    progress: Progress = SILENT,
    *,
    scratch: ScratchSpace | None = None,
) -> Bundle:
    """Compile a model into a bundle: read, slice, verify, train exits, choose, certify, write.

    ``scratch`` counts the bytes of temporary files in the folder that the options name.

    Raises:
        CompileError: The model cannot be sliced, or options exclude each other.
        DataError: The calibration data does not fit the model, or is too little.
        ScratchError: There is no space for temporary files.
        BundleExistsError: ``options.output`` exists already.
        BundleWriteError: The output cannot be written, or the disk has too little space; as far as
            possible this is checked before training.
    """
    check_options(options)
    check_target(options.output, overwrite=options.overwrite)
    check_samples(options)
    sweep(find_scratch(options.scratch))
    scratch, progress = scratch or ScratchSpace(options.scratch), MemoryReleasingProgress(progress)
    with weight_file(scratch) as weights:
        model = _read_model(options, weights, progress)
        dataset, run = _read_data(model, options, scratch, progress)
        model, finder = _settle(model, dataset, run, weights)
        with progress.step("Slice and verify", 2) as advance, _naming(options.model):
            sliced = slice_model(model, run.options).stored(weights)
            del model  # its weights may have been stored in the weight file since it was read
            give_back()
            advance(1)
            run = replace(run, options=check_bridges(sliced, run.options))
            _verify(sliced, run)
        timed = _time(sliced.without_weights(), run)
        folder = JointFolder.of(timed) if run.options.copy.train == "joint" else None
        found = _train(timed, folder)
        chosen = _choose(timed, found, folder)
        drawn = () if finder is None else finder.find(chosen, timed.run)
        certified = _forecast(_measure(_certify(chosen)))
        certified = _find_limit(certified, found)
        variants = [build_variant(n, v, timed.run, len(drawn)) for n, v in enumerate(drawn, 1)]
        manifest, ranges = _describe(certified, drawn, variants)
        bundle = _write(certified, manifest, ranges, variants)
    if folder is not None:
        folder.remove()
    return bundle


def check_samples(options: CompileOptions) -> None:
    """Raise DataError if the data are known to be too few before they are read.

    Samples that depend on each other are only found in the data: :func:`_read_data` checks again.
    """
    samples, promise = known_samples(options.data), options.promise
    if samples is not None:
        least = samples_needed(promise.max_disagreement, promise.confidence_level)
        sizes_of(Groups.singletons(samples), least)


def _read_model(options: CompileOptions, weights: WeightFile, progress: Progress) -> SourceModel:
    """Read the model, and check that the disk has space for its bundle."""
    with progress.step("Read and simplify the model", 1):
        model = read_model(
            options.model,
            answer=options.reading.answer,
            task=options.reading.task_options,
            answer_tokens=options.reading.answer_tokens,
            simplify=options.reading.simplify,
            simplify_limit=options.reading.simplify_limit,
            weights=weights,
            max_cut_tensors=options.reading.max_cut_tensors,
        )
    warn_of_overflow(model.proto, cpu_features())
    check_space(options.output, weight_bytes(model.proto))
    return model


def _read_data(
    model: SourceModel, options: CompileOptions, scratch: ScratchSpace, progress: Progress
) -> tuple[Dataset, CompileRun]:
    """Read and split the data, and check that the model accepts it."""
    if isinstance(options.data, RandomSource):
        source = made_for(model, options.data, seed=options.seed)
        promise = replace(options.promise, max_disagreement=DRY_RUN_DISAGREEMENT)
        options = replace(options, data=source, promise=promise)
    with progress.step("Read the data", 1):
        dataset = read_dataset(
            options.data,
            model.inputs,
            unread=model.unread,
            answer=model.answer,
            group=None if options.promise.group is None else GroupKey(key=options.promise.group),
            scratch=scratch,
        )
        if options.reading.answer_tokens:
            check_lengths(model.inputs, dataset)
        groups = grouped(dataset, options.data, within=options.promise.copies_within)
    level = level_of_each(options.promise.confidence_level, copies=groups.repeats)
    least = samples_needed(options.promise.max_disagreement, level)
    parts = split(dataset, certify_at_least=least, seed=options.seed, groups=groups)
    bounds = find_value_bounds(model, dataset.take(slice(1)))
    check_values(bounds, dataset, options)
    check_answers_of(model, dataset, options)
    return dataset, CompileRun(
        options=options, parts=parts, progress=progress, scratch=scratch, value_bounds=bounds
    )


def _settle(
    model: SourceModel, dataset: Dataset, run: CompileRun, weights: WeightFile
) -> tuple[SourceModel, VariantFinder | None]:
    """Complete the model's task from its data, and prepare smaller variants if the user asked."""
    options = run.options
    with _naming(options.model):
        model = resolve_task(model, run.parts.train, options)
    check_teacher(dataset, model.answer, options)
    if options.variants is None:
        return model, None
    with _naming(options.model):
        whole = replace(model, proto=weights.whole(model.proto))
        finder: VariantFinder = options.variants.prepare(whole)
    return finder.model, finder


def _verify(sliced: Sliced, run: CompileRun) -> None:
    """Compare the chained segments with the model on real data."""
    try:
        verify(
            sliced.model,
            sliced.segments,
            run.parts.train.take(slice(VERIFIED_SAMPLES)),
            tolerance=sliced.tolerance(run.options),
            batch_sizes=(1, 7, VERIFIED_SAMPLES),
        )
    except RuntimeError as error:
        name = data_name(run.options.data)
        raise DataError(f"{name}: the model fails on the first samples: {error}") from error


def _time(sliced: Sliced, run: CompileRun) -> TimedModel:
    """Subtract the effect of the batch from the promise, and time the model and its segments."""
    effect = measure_batch_effect(sliced.model, run.parts, run.options, run.progress)
    if effect is not None:
        run = replace(run, options=left_for_exits(effect, run.options), batch_effect=effect)
    return TimedModel.of(sliced, run)


def _train(timed: TimedModel, folder: JointFolder | None) -> FoundExits:
    """Train exits, or load those of an earlier run that was interrupted in joint training."""
    if folder is None:
        return _find_exits(timed)
    found = folder.exits(timed.sliced)
    if found is None:
        found = _find_exits(timed)
        folder.keep(found)
    return found


def _find_exits(timed: TimedModel) -> FoundExits:
    """Record the features that heads learn from, and train heads of the requested kinds."""
    options = timed.run.options
    if not needs_bridges(timed.sliced.model.answer, options):
        return find_exits(timed)
    bridged = find_bridged_exits(timed)
    return find_exits(timed).or_better(bridged) if options.building.heads == "both" else bridged


def _choose(timed: TimedModel, found: FoundExits, folder: JointFolder | None) -> Blueprint:
    """Choose the exits in use, and decide whether they follow a copy of the model."""
    chosen = draw(timed, found.exits)
    if timed.run.options.copy.precision != "fp32":
        chosen = choose_precision(chosen, found.exits)
    return chosen if folder is None else choose_training(chosen, found, folder)


def _certify(chosen: Blueprint) -> Certified:
    """Certify the choice. If a copy cannot be certified, use the model without exits instead."""
    certified = _certify_path(chosen)
    if chosen.frozen is None or certified.policy.active:
        return certified
    reason = (
        "the copy that was trained with its exits is not covered by the certificate, and is left "
        "out; compile with --train frozen"
    )
    path = FixedPath.of(chosen.frozen.tune, ())
    return _certify_path(replace(chosen.frozen, path=path, reason=reason, limit=reason))


def _certify_path(chosen: Blueprint) -> Certified:
    """Record answers on the certify split, and find the thresholds for which the promise holds."""
    run, draft = chosen.timed.run, chosen.draft
    sizes = (BATCH_SIZE,) if run.batch_effect is None else run.batch_effect.batch_sizes[::-1]
    certify = record_exits(
        draft, draft.read, run.parts.certify, "Certify the policy", run.progress, batch_sizes=sizes
    )
    if run.options.is_dry_run:
        policy = dry_run_policy(chosen.tune, whole=draft.answer.criterion.depends_on_earlier)
    else:
        warn_of_answers(draft.answer, certify)
        policy = chosen.choice.certify(chosen.path, certify)
    slack = chosen.sliced.tolerance(run.options)
    check_ranges(chosen.sliced.model, certify.ranges, [e.exit for e in policy.active], slack=slack)
    return Certified(chosen=chosen, records=certify, policy=policy, limit=chosen.limit)


def _measure(certified: Certified) -> Certified:
    """Time the policy next to the unmodified model; use no exits if exits cost time."""
    chosen, policy = certified.chosen, certified.policy
    if not policy.active:
        return certified
    run, options = chosen.timed.run, chosen.timed.run.options
    stages = plan_stages(chosen.draft, chosen.draft.read, policy.active)
    with run.progress.step("Measure the policy", len(MEASURED_BATCH_SIZES)) as advance:
        measured = measure_policy(
            chosen.timed.timer.source,
            Plan(stages=stages, policy_version=policy.version, mode=Mode.LEAVE),
            run.parts.certify,
            stages_of_samples(policy, certified.records),
            answer=chosen.draft.answer,
            threads=options.threads,
            progress=advance,
        )
    loss = limits.measured_loss(measured, options.choice.reference_batch_size)
    if loss is None or options.is_dry_run:
        return replace(certified, measured=measured)
    return replace(certified, policy=replace(policy, active=(), promise=None), limit=loss)


def _forecast(certified: Certified) -> Certified:
    """Forecast times with the final policy, if a rehearsal chose its exits."""
    chosen, path = certified.chosen, certified.chosen.path
    if not isinstance(path, RehearsedPath):
        return certified
    settings = path.rehearsal.settings
    shipped = chosen.choice.forecast(certified.policy, certified.records, settings)
    sha256 = chosen.timed.run.parts.train.sha256
    done = Rehearsed(rehearsal=path.rehearsal, shipped=shipped, data_sha256=sha256)
    return replace(certified, rehearsed=done)


def _find_limit(certified: Certified, found: FoundExits) -> Certified:
    """Find the reason why no exit is in use, unless exits are."""
    if certified.policy.active or certified.limit is not None:
        return certified
    chosen = certified.chosen
    choice, path, options = chosen.choice, chosen.path, chosen.timed.run.options
    if not chosen.draft.exits:
        profile, asked = choice.profile, choice.terms(options.choice.max_overhead)
        source_ms = profile.source_ms[profile.column(asked.batch_size)]
        limit = limits.limit_of_heads(found.best, source_ms, asked)
    elif not path.active and options.choice.selection == "pame":
        limit = limits.limit_of_rehearsal(options.choice.max_violations, options.choice.min_gain)
    else:
        limit = choice.limit(path, chosen.tune, certified.records, options.choice.max_overhead)
    return replace(certified, limit=limit)


def _warn(certified: Certified) -> None:
    """Log warnings about a bundle before it is written."""
    if not certified.policy.active and certified.limit is not None:
        nothing = "NO EXIT IS ACTIVE, the bundle will serve the unmodified model: %s."
        _log.warning(nothing, certified.limit)
    for note in certified.chosen.choice.profile.disturbed:
        _log.warning("The machine was disturbed while it was measured: %s.", note)
    if certified.rehearsed is not None and (late := certified.rehearsed.too_late):
        _log.warning("%s", late)


def _describe(
    certified: Certified, drawn: Sequence[DrawnVariant], variants: Sequence[BuiltVariant]
) -> tuple[Manifest, InputRanges]:
    """Return the manifest, and the value ranges of the data that the bundle was made with."""
    chosen, run = certified.chosen, certified.chosen.timed.run
    sharing = measure_sharing(chosen.sliced, drawn, run)
    _warn(certified)
    learned = (run.parts.train, run.parts.tune)
    with run.progress.step("Look at the range of the data", 1):
        ranges = InputRanges.over(chain.from_iterable(part.batches() for part in learned))
    paddings = _paddings(chosen, ranges)
    lengths = length_ranges(chosen.draft.inputs, paddings, learned)
    manifest = make_manifest(certified, paddings=paddings, variants=variants, sharing=sharing)
    return manifest, replace(ranges, lengths=lengths)


def _paddings(chosen: Blueprint, ranges: InputRanges) -> tuple[Padding, ...]:
    """Find the sizes in which samples may be padded, for the model and every exit."""
    run, draft = chosen.timed.run, chosen.draft
    if not symbolic_sizes(draft.inputs):
        return ()
    with run.progress.step("Try padding", 1):
        return find_paddings(
            chosen.sliced.model,
            draft,
            draft.read,
            run.parts.train.take(slice(VERIFIED_SAMPLES)),
            ranges,
            mask=run.options.building.mask,
            threads=run.options.threads,
        )


def _write(
    certified: Certified, manifest: Manifest, ranges: InputRanges, variants: Sequence[BuiltVariant]
) -> Bundle:
    """Write all files of the bundle."""
    run, policy = certified.chosen.timed.run, certified.policy
    with run.progress.step("Write the bundle", 1):
        content, to = pack(manifest, certified, ranges, variants), run.options.output
        return write_bundle(to, manifest, policy, content, overwrite=run.options.overwrite)


@contextmanager
def _naming(model: Path) -> Iterator[None]:
    """Add the model's file name to errors about the model, as reading does."""
    try:
        yield
    except (CompileError, UntrainableError) as error:
        raise type(error)(f"{model}: {error}") from error
