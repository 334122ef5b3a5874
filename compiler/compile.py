"""ONNX in, bundle out: the steps of ``eecompile``."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Bundle, ExitPolicy, Profile, write_bundle
from offramp.bundle.bundle import check_target
from offramp.calibration.dataset import Dataset, Parts, read_dataset, split
from offramp.calibration.errors import DataError
from offramp.calibration.families import family_of
from offramp.calibration.features import record
from offramp.calibration.profiling import (
    BATCH_SIZES,
    BackboneTimes,
    profile_backbone,
)
from offramp.calibration.records import ExitRecords, record_answers
from offramp.calibration.selection import (
    CostModel,
    certified_policy,
    choose_active,
    tuning_path,
)
from offramp.calibration.training import TrainedHead, count_steps, train_heads
from offramp.compiler.exits import (
    ExitTrials,
    Samples,
    exit_prefix,
    time_exits,
    try_heads,
)
from offramp.compiler.model import read_model
from offramp.compiler.options import CompileOptions
from offramp.compiler.packing import make_manifest, pack
from offramp.compiler.poolings import attach_poolings
from offramp.compiler.progress import Progress, SilentProgress
from offramp.compiler.segments import verify
from offramp.compiler.slicing import Sliced, slice_model
from offramp.engine.assembly import assemble
from offramp.engine.control.certify import samples_needed

_log = logging.getLogger(__name__)

_SILENT = SilentProgress()


def compile_model(options: CompileOptions, progress: Progress = _SILENT) -> Bundle:
    """Compile a model into a bundle.

    Raises:
        CompileError: The model cannot be sliced; the message says why and what to do.
        DataError: The calibration data does not fit the model, or is too little.
        BundleExistsError: There is something at ``options.output`` already.
    """
    check_target(options.output, overwrite=options.overwrite)
    model = read_model(options.model, answer=options.answer, simplify=options.simplify)
    dataset = read_dataset(options.data, model.inputs)
    parts = split(
        dataset,
        certify_at_least=samples_needed(options.max_disagreement, options.confidence),
        seed=options.seed,
    )
    sliced = slice_model(model, options)
    try:
        verify(model, sliced.segments, dataset.take(slice(16)), tolerance=options.tolerance)
    except RuntimeError as error:
        raise DataError(f"{options.data}: the model fails on the first samples: {error}") from error

    times = _measure_times(sliced, dataset, options, progress)
    trained, truth = _train(sliced, parts, options, progress)
    exits = _choose_heads(sliced, trained, truth, times, dataset, options, progress)
    profile = _profile(sliced, exits, times, dataset, options)
    costs = _cost_models(exits, profile)
    cost = costs[profile.column(options.reference_batch_size)]

    tune = _record_answers("Tune the exits", sliced, exits, parts.tune, progress)
    active, path = _fix_path(tune, cost, costs, options)
    certify = _record_answers("Certify the policy", sliced, exits, parts.certify, progress)
    policy = certified_policy(
        active,
        path,
        certify.confidence,
        certify.agrees,
        cost,
        max_disagreement=options.max_disagreement,
        confidence_level=options.confidence,
    )
    _warn_without_exits(policy, options)

    manifest = make_manifest(sliced, exits, certify, parts, options)
    files = pack(manifest, policy, sliced, exits, profile, tune, certify)
    return write_bundle(options.output, manifest, policy, files, overwrite=options.overwrite)


def _measure_times(
    sliced: Sliced, dataset: Dataset, options: CompileOptions, progress: Progress
) -> BackboneTimes:
    sizes = _batch_sizes(options)
    with progress.step("Profile the segments", len(sizes)) as advance:
        return profile_backbone(
            sliced.model.proto.SerializeToString(),
            sliced.graphs,
            _sampler(dataset),
            classes=sliced.model.answer.classes,
            threads=options.threads,
            batch_sizes=sizes,
            progress=advance,
        )


def _train(
    sliced: Sliced,
    parts: Parts,
    options: CompileOptions,
    progress: Progress,
) -> tuple[list[TrainedHead], NDArray[np.int32]]:
    """Train all heads; gives them, and the source's predictions on the tuning split."""
    model, answer = sliced.model, sliced.model.answer
    graph, outputs = attach_poolings(model, sliced.graphs, sliced.cuts)
    families = [family_of(cut) for cut in sliced.cuts]
    with tempfile.TemporaryDirectory(prefix="offramp-features-") as directory:
        samples = len(parts.train) + len(parts.tune)
        with progress.step("Record features", samples) as advance:
            train, tune = (
                record(
                    graph,
                    outputs,
                    answer,
                    part,
                    threads=all_threads(),
                    directory=Path(directory) / name,
                    progress=advance,
                )
                for name, part in (("train", parts.train), ("tune", parts.tune))
            )
        probabilities = _probabilities(train.answers, answer.form)
        steps = count_steps(len(parts.train), options.training)
        heads = sum(map(len, families))
        with progress.step(f"Train {heads} heads", steps) as advance:
            trained = train_heads(
                train,
                tune,
                sliced.cuts,
                families,
                probabilities,
                options.training,
                progress=advance,
            )
        truth = tune.answers.argmax(axis=1).astype(np.int32)
    return trained, truth


def _choose_heads(
    sliced: Sliced,
    trained: Sequence[TrainedHead],
    truth: NDArray[np.int32],
    times: BackboneTimes,
    dataset: Dataset,
    options: CompileOptions,
    progress: Progress,
) -> list[ExitTrials]:
    """Pick the head that nets most at each candidate; exits that net nothing are not built."""
    sizes = _batch_sizes(options)
    with progress.step("Choose heads", len(sliced.cuts)) as advance:
        tried = try_heads(
            trained,
            sliced.cuts,
            sliced.model,
            sliced.graphs,
            times,
            sizes,
            sizes.index(options.reference_batch_size),
            _sampler(dataset),
            truth,
            max_disagreement=options.max_disagreement,
            threads=options.threads,
            progress=advance,
        )
    return [trials for trials in tried if trials.net_savings > 0]


def _record_answers(
    title: str,
    sliced: Sliced,
    exits: Sequence[ExitTrials],
    dataset: Dataset,
    progress: Progress,
) -> ExitRecords:
    """Answer a data set at every exit, with the graphs that will be served."""
    answer = sliced.model.answer
    outputs = [exit_prefix(e.candidate) + answer.output for e in exits]
    graph = assemble([*sliced.graphs, *(e.graph for e in exits)], [*outputs, answer.output])
    with progress.step(title, len(dataset)) as advance:
        return record_answers(
            graph, outputs, answer, dataset, threads=all_threads(), progress=advance
        )


def _profile(
    sliced: Sliced,
    exits: Sequence[ExitTrials],
    times: BackboneTimes,
    dataset: Dataset,
    options: CompileOptions,
) -> Profile:
    sizes = _batch_sizes(options)
    exits_ms = time_exits(
        exits,
        sliced.model,
        sliced.graphs,
        _sampler(dataset),
        batch_sizes=sizes,
        threads=options.threads,
    )
    return Profile(
        device="cpu",
        threads=options.threads,
        batch_sizes=tuple(sizes),
        source_ms=times.source_ms,
        segments_ms=times.segments_ms,
        exits_ms=tuple(exits_ms),
        stages_ms=times.stages_ms,
    )


def _cost_models(exits: Sequence[ExitTrials], profile: Profile) -> list[CostModel]:
    """By profiled batch size."""
    after = [e.candidate for e in exits]
    return [
        CostModel.at(profile, size, after, [row[column] for row in profile.exits_ms])
        for column, size in enumerate(profile.batch_sizes)
    ]


def _fix_path(
    tune: ExitRecords, cost: CostModel, everywhere: Sequence[CostModel], options: CompileOptions
) -> tuple[tuple[int, ...], NDArray[np.float64]]:
    """Choose active exits and the path of their thresholds, by the tuning split alone."""
    active = choose_active(
        tune.confidence,
        tune.agrees,
        cost,
        max_disagreement=options.max_disagreement,
        confidence_level=options.confidence,
        max_overhead=options.max_overhead,
        everywhere=everywhere,
    )
    rows = list(active)
    if not rows:
        return active, np.empty((0, 0))
    return active, tuning_path(tune.confidence[rows], tune.agrees[rows])


def _warn_without_exits(policy: ExitPolicy, options: CompileOptions) -> None:
    if not policy.active:
        _log.warning(
            "NO EXIT IS ACTIVE: no policy kept disagreement within %g with confidence %g and "
            "saved time. The bundle will serve the unmodified model. More calibration data "
            "helps most; a larger --max-disagreement allows more.",
            options.max_disagreement,
            options.confidence,
        )


def _batch_sizes(options: CompileOptions) -> list[int]:
    return sorted({*BATCH_SIZES, options.reference_batch_size})


def _sampler(dataset: Dataset) -> Samples:
    """Give batches of any size from the data, repeating it where it is too short."""
    return lambda size: dataset.take(np.arange(size) % len(dataset))


def _probabilities(answers: NDArray[np.float32], form: str) -> NDArray[np.float32]:
    if form == "probabilities":
        return answers
    shifted = np.exp(answers - answers.max(axis=1, keepdims=True))
    result: NDArray[np.float32] = shifted / shifted.sum(axis=1, keepdims=True)
    return result


def all_threads() -> int:
    """Every core: what is recorded does not depend on how many compute it."""
    return os.cpu_count() or 1
