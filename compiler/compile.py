"""ONNX in, bundle out: the steps of ``eecompile``."""

from __future__ import annotations

import logging

from offramp.bundle import Bundle, write_bundle
from offramp.bundle.bundle import check_target
from offramp.calibration.dataset import read_dataset, split
from offramp.calibration.errors import DataError
from offramp.calibration.rehearsal import Rehearsed
from offramp.certify import samples_needed
from offramp.compiler.compilation import Compilation
from offramp.compiler.model import read_model
from offramp.compiler.options import CompileOptions
from offramp.compiler.packing import draft, make_manifest, pack
from offramp.compiler.progress import Progress, SilentProgress
from offramp.compiler.segments import verify
from offramp.compiler.slicing import slice_model

_log = logging.getLogger(__name__)

VERIFIED_SAMPLES = 64
"""Calibration samples that chained segments and source must agree on."""

_SILENT = SilentProgress()


def compile_model(options: CompileOptions, progress: Progress = _SILENT) -> Bundle:
    """Compile a model into a bundle.

    Raises:
        CompileError: The model cannot be sliced; the message says why and what to do.
        DataError: The calibration data does not fit the model, or is too little.
        BundleExistsError: There is something at ``options.output`` already.
    """
    check_target(options.output, overwrite=options.overwrite)
    with progress.step("Read and simplify the model", 1):
        model = read_model(options.model, answer=options.answer, simplify=options.simplify)
    dataset = read_dataset(options.data, model.inputs)
    parts = split(
        dataset,
        certify_at_least=samples_needed(options.max_disagreement, options.confidence),
        seed=options.seed,
    )
    sliced = slice_model(model, options)
    try:
        with progress.step("Slice and verify", 1):
            samples = parts.train.take(slice(VERIFIED_SAMPLES))
            verify(
                model,
                sliced.segments,
                samples,
                tolerance=options.tolerance,
                batch_sizes=(1, 7, VERIFIED_SAMPLES),
            )
    except RuntimeError as error:
        raise DataError(f"{options.data}: the model fails on the first samples: {error}") from error

    compilation = Compilation(sliced, parts, options, progress)
    times = compilation.measure_times()
    found = compilation.find_exits(times)
    exits = found.exits
    structure, files = draft(sliced, exits)
    profile = compilation.profile(exits, times, structure, files)
    tune = compilation.record_answers("Tune the exits", exits, parts.tune)
    path = compilation.fix_path(exits, tune, profile)
    certify = compilation.record_answers("Certify the policy", exits, parts.certify)
    policy = compilation.certify(path, certify)
    rehearsed = compilation.forecast(path, policy, certify, profile)
    measured = compilation.measure(policy, certify, structure, files)
    limit = None
    if not policy.active:
        limit = compilation.limit(found, path, profile=profile, tune=tune, certify=certify)
        _log.warning(
            "NO EXIT IS ACTIVE, the bundle will serve the unmodified model: %s.", limit.message
        )
    for note in profile.disturbed:
        _log.warning("The machine was disturbed while it was measured: %s.", note)
    warn_of_violations(rehearsed)

    manifest = make_manifest(sliced, structure, certify, parts, options)
    content = pack(
        manifest,
        policy,
        sliced,
        files,
        profile=profile,
        tune=tune,
        certify=certify,
        rehearsed=rehearsed,
        limit=limit,
        measured=measured,
    )
    return write_bundle(options.output, manifest, policy, content, overwrite=options.overwrite)


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
