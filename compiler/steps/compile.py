"""ONNX in, bundle out: the steps of ``eecompile``."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path

from offramp.bundle import (
    Bundle,
    ExitPolicy,
    InputRanges,
    Measured,
    Padding,
    SharingCost,
    write_bundle,
)
from offramp.bundle.files import check_space
from offramp.bundle.writing import check_target
from offramp.calibration.choose import limits
from offramp.calibration.choose.records import ExitRecords
from offramp.calibration.data.data_sources import data_name
from offramp.calibration.data.dataset import DataError, DataSplit, read_dataset, split
from offramp.calibration.data.errors import UntrainableError
from offramp.calibration.data.key import GroupKey
from offramp.calibration.data.running import BATCH_SIZE
from offramp.calibration.data.scratch import ScratchSpace
from offramp.calibration.measure.estimates import BackboneTimes
from offramp.calibration.measure.measuring import (
    MEASURED_BATCH_SIZES,
    measure_policy,
    stages_of_samples,
)
from offramp.calibration.rehearsal import Rehearsed
from offramp.certify import samples_needed
from offramp.certify.learn_then_test import level_of_each
from offramp.compiler.blueprints.blueprint import Blueprint, CompileRun, draw, timer_of
from offramp.compiler.blueprints.joint import JointFolder, choose_training
from offramp.compiler.blueprints.packing import early_maps, make_manifest, pack
from offramp.compiler.blueprints.precision import Quantise, choose_precision, on_copy
from offramp.compiler.blueprints.variants import (
    DrawnVariant,
    VariantFinder,
    build_variant,
    measure_sharing,
    packed_bytes,
)
from offramp.compiler.common.errors import CompileError
from offramp.compiler.common.options import CompileOptions, check_options
from offramp.compiler.common.progress import SILENT, Progress
from offramp.compiler.common.resources import GivingBack, find_scratch, give_back, sweep
from offramp.compiler.common.rounding import warn_of_overflow
from offramp.compiler.cuts.slice_verification import VERIFIED_SAMPLES, verify
from offramp.compiler.cuts.slicing import Sliced, slice_model
from offramp.compiler.data.made import RandomSource
from offramp.compiler.exits.bridges import (
    check_bridges,
    find_bridged_exits,
    needs_bridges,
)
from offramp.compiler.exits.exits import FoundExits, Samples, find_exits
from offramp.compiler.exits.policy import FixedPath, record_exits
from offramp.compiler.frontend.model import read_model
from offramp.compiler.frontend.prompts import check_lengths
from offramp.compiler.graphs.graph import weight_bytes
from offramp.compiler.graphs.weights import weight_file
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
from offramp.compiler.steps.settling import check_teacher, settle_task
from offramp.engine.common.environment import cpu_features
from offramp.engine.stages.plan import Mode, Plan, plan_stages

_log = logging.getLogger(__name__)


def compile_model(
    options: CompileOptions,
    progress: Progress = SILENT,
    *,
    quantise: Quantise | None = None,
    scratch: ScratchSpace | None = None,
) -> Bundle:
    """Compile a model into a bundle.

    ``quantise`` makes the copy that goes before the model, faster or not, where one is asked for;
    without it the fastest kind on this machine is chosen. ``scratch``, of the folder that the
    options name, counts what is taken there.

    Raises:
        CompileError: The model cannot be sliced, or options exclude each other.
        DataError: The calibration data does not fit the model, or is too little.
        ScratchError: There is no room for temporary files.
        BundleExistsError: There is something at ``options.output`` already.
        BundleWriteError: Nothing can be written there, or the disk has too little space; that is
            found out before training, as far as it can be.
    """
    check_options(options)
    scratch, progress = scratch or ScratchSpace(options.scratch), GivingBack(progress)
    check_target(options.output, overwrite=options.overwrite)
    sweep(find_scratch(options.scratch))
    with progress.step("Read and simplify the model", 1):
        model = read_model(
            options.model,
            answer=options.answer,
            task=options.asked_task,
            answer_tokens=options.answer_tokens,
            simplify=options.simplify,
            simplify_limit=options.simplify_limit,
            scratch=scratch,
            max_cut_tensors=options.max_cut_tensors,
        )
    if isinstance(options.data, RandomSource):
        source = made_for(model, options.data, seed=options.seed)
        options = replace(options, data=source, max_disagreement=DRY_RUN_DISAGREEMENT)
    warn_of_overflow(model.proto, cpu_features())
    check_space(options.output, weight_bytes(model.proto))
    with progress.step("Read the data", 1):
        key = None if options.group is None else GroupKey(key=options.group)
        dataset = read_dataset(
            options.data,
            model.inputs,
            unread=model.unread,
            answer=model.answer,
            group=key,
            scratch=scratch,
        )
        if options.answer_tokens:
            check_lengths(model.inputs, dataset)
        groups = grouped(dataset, options.data, within=options.copies_within)
    parts = split(
        dataset,
        certify_at_least=samples_needed(
            options.max_disagreement,
            level_of_each(options.confidence_level, copies=groups.repeats),
        ),
        seed=options.seed,
        groups=groups,
    )
    bounds = find_value_bounds(model, dataset.take(slice(1)))
    check_values(bounds, dataset, options)
    check_answers_of(model, dataset, options)
    with _naming(options.model):
        model = settle_task(model, parts.train, options)
    check_teacher(dataset, model.answer, options)
    finder: VariantFinder | None = None
    if options.variants is not None:
        with _naming(options.model):
            finder = options.variants.prepare(model)
        assert finder is not None
        model = finder.model
    with weight_file(model.proto, scratch) as weights:
        with progress.step("Slice and verify", 2) as advance:
            with _naming(options.model):
                sliced = slice_model(model, options).stored(weights)
            del model  # from here on its weights are in the file alone
            give_back()
            advance(1)
            with _naming(options.model):
                options = check_bridges(sliced, options)
                _verify(sliced, parts, options)
            sliced = sliced.without_weights()
        run = CompileRun(
            options=options, parts=parts, progress=progress, scratch=scratch, value_bounds=bounds
        )
        return _compile_sliced(sliced, run, quantise, finder)


def _compile_sliced(
    sliced: Sliced, run: CompileRun, quantise: Quantise | None, finder: VariantFinder | None
) -> Bundle:
    """Find exits for a model in pieces, choose those in use, and write the bundle."""
    parts = run.parts
    effect = measure_batch_effect(sliced.model, parts, run.options, run.progress)
    if effect is not None:
        run = replace(run, options=left_for_exits(effect, run.options), batch_effect=effect)
    options = run.options
    timer = timer_of(sliced, run)
    times = timer.backbone()
    folder = JointFolder.of(sliced, run) if options.train == "joint" else None
    if folder is not None:
        folder.check()
    found = None if folder is None else folder.exits(sliced)
    if found is None:
        found = _find_exits(sliced, run, times, timer.samples)
        if folder is not None:
            folder.keep(found)
    chosen = draw(sliced, found.exits, run, timer=timer, times=times)
    if options.precision != "fp32" and quantise is not None:
        copy = quantise(sliced.whole_model(), parts.train)
        chosen = on_copy(chosen, found.exits, copy, run)
    elif options.precision != "fp32":
        chosen = choose_precision(chosen, found.exits, run)
    if folder is not None:
        chosen = choose_training(chosen, found, run, folder)
    variants = () if finder is None else finder.find(chosen, run)
    bundle = _certify_and_write(chosen, found, run, variants)
    if folder is not None:
        folder.remove()
    return bundle


def _find_exits(
    sliced: Sliced, run: CompileRun, times: BackboneTimes, samples: Samples
) -> FoundExits:
    """Train the heads of the families that are asked for."""
    parts, options, progress = run.parts, run.options, run.progress
    bridged = None
    if needs_bridges(sliced.model.answer, options):
        bridged = find_bridged_exits(
            sliced, parts, options, times, samples=samples, progress=progress
        )
        if options.heads != "both":
            return bridged
    pooled = find_exits(
        sliced, parts, options, times, samples=samples, progress=progress, scratch=run.scratch
    )
    return pooled if bridged is None else pooled.or_better(bridged)


def _certify_and_write(
    chosen: Blueprint, found: FoundExits, run: CompileRun, drawn: Sequence[DrawnVariant] = ()
) -> Bundle:
    """Look at the certify split, which decides what is promised, and write what comes of it."""
    options, parts, progress = run.options, run.parts, run.progress
    draft, choice, path = chosen.draft, chosen.choice, chosen.path
    sizes = (BATCH_SIZE,) if run.batch_effect is None else run.batch_effect.batch_sizes[::-1]
    title = "Certify the policy"
    certify = record_exits(draft, draft.read, parts.certify, title, progress, batch_sizes=sizes)
    if options.is_dry_run:
        policy = dry_run_policy(chosen.tune, whole=draft.answer.criterion.depends_on_earlier)
    else:
        warn_of_answers(draft.answer, certify)
        policy = choice.certify(path, certify)
    assert certify.ranges is not None
    slack = chosen.sliced.tolerance(options)
    check_ranges(chosen.sliced.model, certify.ranges, [e.exit for e in policy.active], slack=slack)
    if chosen.frozen is not None and not policy.active:
        return _certify_and_write(_withheld(chosen.frozen), found, run)
    limit = chosen.limit
    measured = _measured(chosen, policy, certify, run) if policy.active else None
    size = options.reference_batch_size
    loss = None if measured is None else limits.measured_loss(measured, size)
    if loss is not None and not options.is_dry_run:
        limit, measured = loss, None
        policy = replace(policy, active=(), promise=None)
    rehearsed = None
    if path.rehearsal is not None:
        shipped = choice.forecast(policy, certify, path.rehearsal.settings)
        rehearsed = Rehearsed(
            rehearsal=path.rehearsal, shipped=shipped, data_sha256=parts.train.sha256
        )
    variants = [build_variant(n, variant, run, len(drawn)) for n, variant in enumerate(drawn, 1)]
    sharing = _measure_sharing(chosen, drawn, run)
    if not policy.active:
        limit = limit or _limit(chosen, found, options, certify)
        nothing = "NO EXIT IS ACTIVE, the bundle will serve the unmodified model: %s."
        _log.warning(nothing, limit.message)
    for note in choice.profile.disturbed:
        _log.warning("The machine was disturbed while it was measured: %s.", note)
    if rehearsed is not None and (late := rehearsed.too_late):
        _log.warning("%s", late)

    with progress.step("Look at the range of the data", 1):
        ranges = InputRanges.over(chain(parts.train.batches(), parts.tune.batches()))
    paddings = _paddings(chosen, run, ranges)
    seen = length_ranges(draft.inputs, paddings, (parts.train, parts.tune))
    manifest = make_manifest(
        chosen.sliced,
        draft,
        certify,
        parts,
        options,
        reason=chosen.reason,
        training=chosen.training,
    )
    manifest = replace(
        manifest,
        batch_effect=run.batch_effect,
        paddings=paddings,
        value_bounds=run.value_bounds,
        variants=tuple(built.variant for built in variants),
        weight_sharing=sharing,
        idle_reason="" if limit is None else limit.message,
    )
    with progress.step("Write the bundle", 1):
        content = pack(
            manifest,
            policy,
            chosen.sliced,
            draft,
            profile=choice.profile,
            tune=chosen.tune,
            certify=certify,
            rehearsed=rehearsed,
            limit=limit,
            measured=measured,
            ranges=replace(ranges, lengths=seen),
            maps=early_maps(draft, policy, chosen.timer.source, parts.certify),
            variants=variants,
        )
        return write_bundle(options.output, manifest, policy, content, overwrite=options.overwrite)


def _measured(
    chosen: Blueprint, policy: ExitPolicy, certify: ExitRecords, run: CompileRun
) -> Measured:
    """Run the policy beside the unmodified model."""
    stages = plan_stages(chosen.draft, chosen.draft.read, policy.active)
    with run.progress.step("Measure the policy", len(MEASURED_BATCH_SIZES)) as advance:
        return measure_policy(
            chosen.timer.source,
            Plan(stages=stages, policy_version=policy.version, mode=Mode.LEAVE),
            run.parts.certify,
            stages_of_samples(policy, certify),
            answer=chosen.draft.answer,
            threads=run.options.threads,
            progress=advance,
        )


def _measure_sharing(
    chosen: Blueprint, drawn: Sequence[DrawnVariant], run: CompileRun
) -> tuple[SharingCost, ...]:
    """Measure what it costs the full model and its variants to share weights, if there are any."""
    protos = [chosen.sliced.model.proto, *(variant.proto for variant in drawn)]
    if not drawn or not packed_bytes(protos[0]):
        return ()
    return measure_sharing(protos, chosen.sliced.weights, run)


def _withheld(frozen: Blueprint) -> Blueprint:
    """Give the frozen model without exits: what was trained with them is not covered.

    The certify split can be asked about one path alone.
    """
    reason = (
        "the copy that was trained with its exits is not covered by the certificate, and is left "
        "out; compile with --train frozen"
    )
    limit = limits.BindingLimit("agreement", reason)
    return replace(frozen, path=FixedPath.of(frozen.tune, ()), reason=reason, limit=limit)


def _paddings(chosen: Blueprint, run: CompileRun, ranges: InputRanges) -> tuple[Padding, ...]:
    """Find where samples may be padded, with every exit that was built; where any size is free."""
    draft = chosen.draft
    if not symbolic_sizes(draft.inputs):
        return ()
    with run.progress.step("Try padding", 1):
        return find_paddings(
            chosen.sliced.model,
            draft,
            draft.read,
            run.parts.train.take(slice(VERIFIED_SAMPLES)),
            ranges,
            mask=run.options.mask,
            threads=run.options.threads,
        )


def _limit(
    chosen: Blueprint, found: FoundExits, options: CompileOptions, certify: ExitRecords
) -> limits.BindingLimit:
    choice, path = chosen.choice, chosen.path
    if not chosen.draft.exits:
        profile, asked = choice.profile, choice.terms(options.max_overhead)
        source_ms = profile.source_ms[profile.column(asked.batch_size)]
        return limits.limit_of_heads(found.best, source_ms, asked)
    if not path.active and options.selection == "pame":
        return limits.limit_of_rehearsal(options.max_violations)
    return choice.limit(path, chosen.tune, certify, options.max_overhead)


@contextmanager
def _naming(model: Path) -> Iterator[None]:
    """Have errors about the model name its file, as those of reading it do."""
    try:
        yield
    except (CompileError, UntrainableError) as error:
        raise type(error)(f"{model}: {error}") from error


def _verify(sliced: Sliced, parts: DataSplit, options: CompileOptions) -> None:
    try:
        verify(
            sliced.model,
            sliced.segments,
            parts.train.take(slice(VERIFIED_SAMPLES)),
            tolerance=sliced.tolerance(options),
            batch_sizes=(1, 7, VERIFIED_SAMPLES),
        )
    except RuntimeError as error:
        raise DataError(
            f"{data_name(options.data)}: the model fails on the first samples: {error}"
        ) from error
