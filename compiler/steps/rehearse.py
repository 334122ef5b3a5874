"""``eecompile rehearse``: adapt a bundle to a changed workload (PAME 7.6).

The bundle's own graphs answer the new data. The profile is kept, because the hardware did not
change. One part of the data determines which exits are replaced by later ones and the smallest
thresholds of exits; the other part certifies the result. Heads are not trained again.
"""

from __future__ import annotations

import datetime
import itertools
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from offramp.bundle import Bundle, ExitPolicy, Manifest, Profile
from offramp.bundle.bundle import RECORDS, REPORT, bundle_name
from offramp.bundle.schema.compilation import COPIES_WITHIN, DistinctSamples
from offramp.calibration.choose.exit_records import ExitRecords, dump_records
from offramp.calibration.choose.selection import certifiable_errors
from offramp.calibration.data.data_sources import data_name
from offramp.calibration.data.dataset import DataError, Dataset, part, read_samples
from offramp.calibration.data.groups import Groups
from offramp.calibration.rehearsal import (
    REHEARSAL,
    ExitMove,
    Forecast,
    RehearsalSettings,
    Rehearsed,
    adapt,
    draw_load,
    raising_path,
)
from offramp.certify import samples_needed
from offramp.certify.binomial import CERTIFY_SHARE, TUNE_SHARE
from offramp.certify.learn_then_test import level_of_each
from offramp.compiler.blueprints.packing import judged, rewrite
from offramp.compiler.common.errors import CompileError
from offramp.compiler.common.options import DEFAULT_CONFIDENCE_LEVEL, RehearseOptions
from offramp.compiler.common.progress import SILENT, Progress
from offramp.compiler.exits.policy_choice import PolicyChoice, RehearsedPath, record_exits
from offramp.compiler.graphs.weights import WeightSizes
from offramp.compiler.report import render_report
from offramp.compiler.samples.grouping import distinct_samples, grouped
from offramp.engine.backends.custom_ops import open_runnable
from offramp.engine.common.environment import cpu_features

DEFAULT_BATCH = 32
"""Number of rows in a rehearsed batch, if that size was profiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsing:
    """A bundle's exit policy before and after it was adapted to a new load."""

    before: ExitPolicy
    before_forecast: Forecast
    """Forecast of the old policy for the new load, on the certify split."""
    after: ExitPolicy
    rehearsed: Rehearsed
    moves: tuple[ExitMove, ...]
    """Exits that made too many batches late, with the later exits that replaced them; empty if
    exits were searched from scratch."""
    written: Path | None
    """Path of the bundle; ``None`` after a dry run."""


def rehearse_bundle(options: RehearseOptions, progress: Progress = SILENT) -> Rehearsing:
    """Adapt a bundle to new data, and write it.

    Raises:
        BundleError, CompileError: There is no bundle, it has no exits, or it cannot be written.
        DataError: The data does not fit the model, or is too little.
    """
    bundle = open_runnable(options.bundle)
    if bundle.manifest.is_plain:
        raise CompileError(
            f"{bundle.path} has no exits to rehearse: it is the unmodified model; make one with "
            f"exits: eecompile {bundle.manifest.source.original_name} --data DATA"
        )
    if bundle.manifest.calibration.random_inputs:
        raise CompileError(
            f"{bundle.path} was compiled on random inputs, which its exits learned from; compile "
            f"the model on samples: eecompile {bundle.manifest.source.original_name} --data DATA"
        )
    if not bundle.manifest.exits:
        raise CompileError(
            f"{bundle.path} has no exits to rehearse: none was worth building when it was "
            "compiled; compile the model again on the new data"
        )
    if bundle.manifest.batch_effect is not None:
        raise CompileError(
            f"{bundle.path} is of a dynamically quantised model, whose answer to a sample depends "
            "on its batch; how often it does was counted only on the data of the compilation; "
            "compile the model again on the new data"
        )
    criterion = bundle.manifest.answer.criterion
    if criterion.depends_on_earlier:
        raise CompileError(
            f"{bundle.path}: with the criterion {criterion.name} exits depend on each other, but "
            "rehearsing moves them one by one; compile the model again on the new data"
        )
    searched = options.from_scratch or not bundle.policy.active
    if options.min_gain is not None and not searched:
        raise CompileError(
            f"--min-gain {options.min_gain:g} is for a search, and the {len(bundle.policy.active)} "
            f"exits of {bundle.path} are only moved; add --from-scratch, or leave it out"
        )
    target = options.target()
    settings, choice = _asked(bundle, options)
    dataset = read_samples(options.data, bundle.manifest, group=options.group)
    if dataset.sha256 == bundle.manifest.calibration.data_sha256:
        raise DataError(
            f"{data_name(options.data)}: {bundle.path} was compiled with these samples: its exits "
            "were trained on some of them, so that nothing about unseen data can be certified on "
            "them; give other samples, or compile the model again"
        )
    known = bundle.manifest.calibration.distinct
    within = COPIES_WITHIN if known is None else known.within
    if options.copies_within is not None:
        within = options.copies_within
    groups = grouped(dataset, options.data, within=within)
    for_tuning, for_certifying = _split(dataset, groups, settings, choice)
    parts = {"Rehearse the exits": for_tuning, "Certify the policy": for_certifying}
    tune, certify = (
        record_exits(bundle.manifest, bundle.read, part, title, progress)
        for title, part in parts.items()
    )
    if searched:
        path = choice.by_rehearsal(tune, settings)
    else:
        path = _adapted(bundle.policy, choice, tune, settings)
    policy = replace(choice.certify(path, certify), version=bundle.policy.version + 1)
    shipped = choice.forecast(policy, certify, settings)
    done = Rehearsing(
        before=bundle.policy,
        before_forecast=choice.forecast(bundle.policy, certify, settings),
        after=policy,
        rehearsed=Rehearsed(rehearsal=path.rehearsal, shipped=shipped, data_sha256=dataset.sha256),
        moves=path.moves,
        written=target,
    )
    if target is not None:
        manifest = renewed_manifest(
            bundle.manifest,
            target,
            tune=tune,
            certify=certify,
            distinct=distinct_samples(groups, key=options.group, within=within),
        )
        report = render_report(
            manifest,
            policy,
            bundle.profile(),
            certify,
            done.rehearsed,
            weights=WeightSizes.of(bundle),
        )
        changed = {RECORDS: dump_records(tune, certify), REPORT: report.encode()}
        changed[REHEARSAL] = done.rehearsed.dump()
        rewrite(bundle, target, manifest, policy, changed, overwrite=options.replaces)
    return done


def _asked(bundle: Bundle, options: RehearseOptions) -> tuple[RehearsalSettings, PolicyChoice]:
    """Fill in options that were not set with the bundle's values."""
    profile, promise = bundle.profile(), bundle.policy.promise
    kept = _kept_settings(bundle, profile)
    promised = kept.max_disagreement if promise is None else promise.max_disagreement
    level = DEFAULT_CONFIDENCE_LEVEL if promise is None else promise.confidence_level
    of_classes = None if promise is None else promise.max_class_disagreement
    bound, violations = options.max_disagreement or promised, options.max_violations
    settings = replace(
        kept,
        batch_size=options.rehearsal_batch or kept.batch_size,
        max_disagreement=bound,
        max_violations=kept.max_violations if violations is None else violations,
        min_gain=kept.min_gain if options.min_gain is None else options.min_gain,
    )
    return settings, PolicyChoice.again(
        bundle,
        max_disagreement=bound,
        confidence_level=options.confidence_level or level,
        max_class_disagreement=options.max_class_disagreement or of_classes,
        seed=options.seed,
    )


def _split(
    dataset: Dataset, groups: Groups, settings: RehearsalSettings, choice: PolicyChoice
) -> tuple[Dataset, Dataset]:
    """Split new data at random into parts for tuning and certifying; DataError if it is too small.

    Each group of rows counts once.
    """
    level = level_of_each(choice.confidence_level, copies=groups.repeats)
    least = samples_needed(choice.max_disagreement, level)
    tune = _tune_samples(len(groups), least)
    if tune < settings.batch_size:
        more = itertools.count(len(groups) + 1)
        needed = next(n for n in more if _tune_samples(n, least) >= settings.batch_size)
        distinct = "distinct " if groups.joins else ""
        raise DataError(
            f"{len(groups)} {distinct}samples are too few: the promise alone needs {least}, and a "
            f"batch of {settings.batch_size} others must be rehearsed; use at least "
            f"{needed} (2,000 serve well), or relax --max-disagreement or --confidence"
        )
    parts = part(dataset, groups, (0, tune), seed=choice.seed)
    return parts.tune, parts.certify


def _adapted(
    policy: ExitPolicy, choice: PolicyChoice, tune: ExitRecords, settings: RehearsalSettings
) -> RehearsedPath:
    """Replace exits that make batches late, and find the order in which thresholds rise (7.6)."""
    load = draw_load(tune, settings, seed=choice.seed)
    allowed = certifiable_errors(load.samples, choice.max_disagreement, choice.confidence_level)
    found = adapt(load, choice.times, policy.active, settings, allowed_errors=allowed)
    return RehearsedPath(
        active=tuple(a.exit for a in found.least),
        thresholds=raising_path(load, found.least) if found.least else np.empty((0, 0)),
        rehearsal=found.rehearsal,
        moves=found.moves,
    )


def renewed_manifest(
    manifest: Manifest,
    target: Path,
    *,
    tune: ExitRecords,
    certify: ExitRecords,
    distinct: DistinctSamples | None,
) -> Manifest:
    """Describe the same exits by their results on the new data.

    ``data_sha256`` stays the hash of the data that trained the heads; the hash of the new data is
    in ``rehearsal.json``.
    """
    hits = None if certify.labels is None else certify.final_prediction == certify.labels
    return replace(
        manifest,
        name=bundle_name(target),
        created_utc=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        exits=tuple(judged(exit_, certify) for exit_ in manifest.exits),
        calibration=replace(
            manifest.calibration,
            tune_samples=len(tune.final_prediction),
            certify_samples=len(certify.final_prediction),
            source_accuracy=None if hits is None else float(hits.mean()),
            distinct=distinct,
        ),
        cpu=None if manifest.precision == "fp32" else cpu_features(),
    )


def _kept_settings(bundle: Bundle, profile: Profile) -> RehearsalSettings:
    """Return the settings of the bundle's last rehearsal, or the defaults."""
    if REHEARSAL in {entry.path for entry in bundle.manifest.files}:
        return Rehearsed.parse(bundle.read(REHEARSAL)).rehearsal.settings
    profiled = [size for size in profile.batch_sizes if size <= DEFAULT_BATCH]
    return RehearsalSettings(batch_size=max(profiled, default=DEFAULT_BATCH))


def _tune_samples(samples: int, certify_at_least: int) -> int:
    """Return the number of samples to tune with, in the same proportion as when compiling."""
    share = CERTIFY_SHARE / (TUNE_SHARE + CERTIFY_SHARE)
    return samples - max(round(samples * share), certify_at_least)
