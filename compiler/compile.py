"""ONNX in, bundle out: the steps of ``eecompile``."""

from __future__ import annotations

import logging

import numpy as np

from offramp.bundle import Bundle, InputRanges, write_bundle
from offramp.bundle.bundle import check_space, check_target
from offramp.calibration import limits
from offramp.calibration.dataset import DataError, DataSplit, read_dataset, split
from offramp.calibration.measuring import MEASURED_BATCH_SIZES, measure_policy, stages_of_samples
from offramp.calibration.profiling import BATCH_SIZES
from offramp.calibration.records import ExitRecords
from offramp.calibration.rehearsal import RehearsalSettings, Rehearsed
from offramp.certify import samples_needed
from offramp.compiler.cascade import slice_cascade, verify_front
from offramp.compiler.exits import FoundExits, find_exits, time_heads
from offramp.compiler.feature_folder import sweep
from offramp.compiler.model import SourceModel, read_model
from offramp.compiler.options import CompileOptions
from offramp.compiler.packing import Draft, make_manifest, pack
from offramp.compiler.policy import FixedPath, PolicyChoice, record_exits
from offramp.compiler.profile import ProfileTimer
from offramp.compiler.progress import SILENT, Progress
from offramp.compiler.quantised_copy import Quantise, fastest_copy
from offramp.compiler.slicing import Sliced, slice_model, verify
from offramp.engine.plan import Mode, Plan, plan_stages

_log = logging.getLogger(__name__)

VERIFIED_SAMPLES = 64
"""Calibration samples that chained segments and source must agree on."""
_COPIES = 2
"""Of the model that a bundle holds at least: the source, and its segments."""


def compile_model(
    options: CompileOptions, progress: Progress = SILENT, *, quantise: Quantise | None = None
) -> Bundle:
    """Compile a model into a bundle.

    ``quantise`` makes the copy that precision int8 begins with; default: what is fastest here.

    Raises:
        CompileError: The model cannot be sliced.
        DataError: The calibration data does not fit the model, or is too little.
        BundleExistsError: There is something at ``options.output`` already.
        BundleWriteError: Nothing can be written there, or the disk has too little space; that is
            found out before training, as far as it can be.
    """
    check_target(options.output, overwrite=options.overwrite)
    sweep()
    with progress.step("Read and simplify the model", 1):
        model = read_model(options.model, answer=options.answer, simplify=options.simplify)
    check_space(options.output, _COPIES * model.proto.ByteSize())
    dataset = read_dataset(options.data, model.inputs)
    parts = split(
        dataset,
        certify_at_least=samples_needed(options.max_disagreement, options.confidence_level),
        seed=options.seed,
    )
    copy = None
    if options.precision == "int8":
        if quantise is None:
            copy = fastest_copy(model, parts, options, progress)
        else:
            copy = quantise(model, parts.train)
    with progress.step("Slice and verify", 1):
        sliced = _slice(model, copy, parts, options)

    timer = _timer(sliced, parts, options, progress)
    times = timer.backbone()
    found = find_exits(sliced, parts, options, times, samples=timer.samples, progress=progress)
    built = Draft.of(sliced, found.exits)
    graphs = {exit_.candidate: [exit_.graph] for exit_ in found.exits}
    times_ms = time_heads(
        sliced, graphs, timer.samples, threads=options.threads, batch_sizes=times.batch_sizes
    )
    exits_ms = [tuple(head_ms) for (head_ms,) in times_ms]
    profile = timer.finish(times, exits_ms, built, built.read)
    choice = PolicyChoice(
        structure=built,
        profile=profile,
        max_disagreement=options.max_disagreement,
        confidence_level=options.confidence_level,
        batch_size=options.reference_batch_size,
        seed=options.seed,
    )
    tune = record_exits(built, built.read, parts.tune, "Tune the exits", progress)
    path = _fix_path(choice, tune, options)
    certify = record_exits(built, built.read, parts.certify, "Certify the policy", progress)
    policy = choice.certify(path, certify)
    rehearsed = None
    if path.rehearsal is not None:
        shipped, digest = choice.forecast(policy, certify, path.rehearsal.settings), dataset.sha256
        rehearsed = Rehearsed(rehearsal=path.rehearsal, shipped=shipped, data_sha256=digest)
    measured = None
    if policy.active:
        stages = plan_stages(built, built.read, policy.active)
        with progress.step("Measure the policy", len(MEASURED_BATCH_SIZES)) as advance:
            measured = measure_policy(
                timer.source,
                Plan(stages=stages, policy_version=policy.version, mode=Mode.LEAVE),
                parts.certify,
                stages_of_samples(policy, certify),
                answer=model.answer,
                threads=options.threads,
                progress=advance,
            )
    limit = None
    if not policy.active:
        limit = _limit(choice, found, path, options, tune=tune, certify=certify)
        nothing = "NO EXIT IS ACTIVE, the bundle will serve the unmodified model: %s."
        _log.warning(nothing, limit.message)
    for note in profile.disturbed:
        _log.warning("The machine was disturbed while it was measured: %s.", note)
    warn_of_violations(rehearsed)

    manifest = make_manifest(sliced, built, certify, parts, options)
    content = pack(
        manifest,
        policy,
        sliced,
        built,
        profile=profile,
        tune=tune,
        certify=certify,
        rehearsed=rehearsed,
        limit=limit,
        measured=measured,
        ranges=InputRanges.of(parts.train.inputs, parts.tune.inputs),
    )
    return write_bundle(options.output, manifest, policy, content, overwrite=options.overwrite)


def _fix_path(choice: PolicyChoice, tune: ExitRecords, options: CompileOptions) -> FixedPath:
    if options.selection == "pame" and choice.structure.exits:
        settings = RehearsalSettings(
            batch_size=options.rehearsal_batch,
            max_disagreement=options.max_disagreement,
            max_violations=options.max_violations,
        )
        return choice.by_rehearsal(tune, settings)
    return choice.by_savings(tune, options.max_overhead)


def _limit(
    choice: PolicyChoice,
    found: FoundExits,
    path: FixedPath,
    options: CompileOptions,
    *,
    tune: ExitRecords,
    certify: ExitRecords,
) -> limits.BindingLimit:
    if not found.exits:
        profile, asked = choice.profile, choice.terms(options.max_overhead)
        source_ms = profile.source_ms[profile.column(asked.batch_size)]
        return limits.limit_of_heads(found.best, source_ms, asked)
    if not path.active and options.selection == "pame":
        return limits.limit_of_rehearsal(options.max_violations)
    return choice.limit(path, tune, certify, options.max_overhead)


def warn_of_violations(rehearsed: Rehearsed | None) -> None:
    """Say if the certified thresholds, higher than those rehearsed, make too many batches late."""
    if rehearsed is None:
        return
    late, tolerated = rehearsed.shipped.violations, rehearsed.rehearsal.settings.max_violations
    if late > tolerated:
        _log.warning(
            "%.1f %% of the batches are predicted to be later than without exits, more than the "
            "%g %% of --max-violations: thresholds that could be certified let more samples go on "
            "than those rehearsed. More calibration data helps; so does a larger "
            "--max-disagreement.",
            100 * late,
            100 * tolerated,
        )


def _verify(sliced: Sliced, parts: DataSplit, options: CompileOptions) -> None:
    try:
        verify(
            sliced.model,
            sliced.segments,
            parts.train.take(slice(VERIFIED_SAMPLES)),
            tolerance=options.tolerance,
            batch_sizes=(1, 7, VERIFIED_SAMPLES),
        )
    except RuntimeError as error:
        raise DataError(f"{options.data}: the model fails on the first samples: {error}") from error


def _slice(
    model: SourceModel, copy: bytes | None, parts: DataSplit, options: CompileOptions
) -> Sliced:
    """Cut the model, or its quantised copy, and verify the pieces."""
    if copy is None:
        sliced = slice_model(model, options)
        _verify(sliced, parts, options)
        return sliced
    sliced = slice_cascade(model, copy, options)
    verify_front(
        sliced,
        copy,
        parts.train.take(slice(VERIFIED_SAMPLES)),
        tolerance=sliced.tolerance(options),
        batch_sizes=(1, 7, VERIFIED_SAMPLES),
    )
    return sliced


def _timer(
    sliced: Sliced, parts: DataSplit, options: CompileOptions, progress: Progress
) -> ProfileTimer:
    """Time on the training part, which is repeated if it is too short for a batch."""
    train = parts.train
    sizes = {*BATCH_SIZES, options.reference_batch_size}
    if options.selection == "pame":
        sizes.add(options.rehearsal_batch)
    return ProfileTimer(
        source=sliced.model.proto.SerializeToString(),
        segments=sliced.graphs,
        samples=lambda size: train.take(np.arange(size) % len(train)),
        threads=options.threads,
        batch_sizes=sorted(sizes),
        progress=progress,
        quantised=None if sliced.front is None else sliced.front.proto.SerializeToString(),
    )
