"""What goes into the bundle: the manifest, and the content of every file."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

from offramp.bundle import (
    Answer,
    Exit,
    ExitPolicy,
    Manifest,
    Measured,
    Profile,
    Segment,
    TensorSpec,
)
from offramp.bundle.bundle import RECORDS, REPORT, dump_profile
from offramp.bundle.files import dump
from offramp.bundle.manifest import SCHEMA_VERSION, Calibration, Source
from offramp.bundle.measured import MEASURED
from offramp.calibration.dataset import Parts
from offramp.calibration.families import mask_of
from offramp.calibration.limits import Limit
from offramp.calibration.records import ExitRecords, dump_records
from offramp.calibration.rehearsal import REHEARSAL, Rehearsed
from offramp.compiler.exits import ExitTrials, exit_prefix
from offramp.compiler.heads import CONFIDENCE
from offramp.compiler.options import CompileOptions
from offramp.compiler.report import render_report
from offramp.compiler.slicing import Sliced

_TOOLS = ("offramp", "onnx", "onnx-graphsurgeon", "onnxslim", "onnxruntime", "torch", "numpy")


def make_manifest(
    sliced: Sliced,
    structure: Draft,
    certify: ExitRecords,
    parts: Parts,
    options: CompileOptions,
) -> Manifest:
    """Describe the bundle; hashes are filled in when it is written."""
    model = sliced.model
    truth, final = certify.labels, certify.final_prediction
    return Manifest(
        schema_version=SCHEMA_VERSION,
        name=options.output.name.removesuffix(".ee"),
        created_utc=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        tools=_tools(),
        source=Source(
            file="source.onnx",
            original_name=options.model.name,
            original_sha256=model.original_sha256,
            opset=model.opset,
        ),
        inputs=model.inputs,
        outputs=model.outputs,
        answer=model.answer,
        segments=structure.segments,
        exits=tuple(judged(exit_, certify) for exit_ in structure.exits),
        calibration=Calibration(
            data_sha256=parts.train.sha256,
            train_samples=len(parts.train),
            tune_samples=len(parts.tune),
            certify_samples=len(parts.certify),
            sample_shapes={n: a.shape[1:] for n, a in parts.train.inputs.items()},
            reference_batch_size=options.reference_batch_size,
            source_accuracy=None if truth is None else float((final == truth).mean()),
        ),
        verified_tolerance=options.tolerance,
    )


def pack(
    manifest: Manifest,
    policy: ExitPolicy,
    sliced: Sliced,
    files: Mapping[str, bytes],
    *,
    profile: Profile,
    tune: ExitRecords,
    certify: ExitRecords,
    rehearsed: Rehearsed | None,
    limit: Limit | None = None,
    measured: Measured | None = None,
) -> dict[str, bytes]:
    """Give the content of every file but manifest and policy, by path.

    ``files`` are those of segments and exits; ``rehearsed`` is how exits were chosen, if so, and
    ``limit`` what kept all of them out of use, if so; ``measured`` is what the policy brings.
    """
    report = render_report(
        manifest, policy, profile, certify, rehearsed, limit=limit, measured=measured
    )
    return {
        manifest.source.file: sliced.model.proto.SerializeToString(),
        **files,
        "profiles/cpu.json": dump_profile(profile),
        RECORDS: dump_records(tune, certify),
        REPORT: report.encode(),
        **({} if rehearsed is None else {REHEARSAL: rehearsed.dump()}),
        **({} if measured is None else {MEASURED: dump(measured)}),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The model's parts before there is a manifest: enough to plan and run stages."""

    inputs: tuple[TensorSpec, ...]
    answer: Answer
    segments: tuple[Segment, ...]
    exits: tuple[Exit, ...]
    """Their agreement is that on the tuning split."""


def draft(sliced: Sliced, exits: Sequence[ExitTrials]) -> tuple[Draft, dict[str, bytes]]:
    """Describe segments and exits; gives their files too, by path."""
    structure = Draft(
        inputs=sliced.model.inputs,
        answer=sliced.model.answer,
        segments=tuple(segment.described() for segment in sliced.segments),
        exits=tuple(
            _exit(index, trials, sliced.model.answer.output) for index, trials in enumerate(exits)
        ),
    )
    segments = {s.file: g for s, g in zip(structure.segments, sliced.graphs, strict=True)}
    built = {e.file: t.graph for e, t in zip(structure.exits, exits, strict=True)}
    return structure, {**segments, **built}


def _exit(index: int, trials: ExitTrials, answer: str) -> Exit:
    prefix, mask = exit_prefix(trials.candidate), mask_of(trials.cut, trials.head)
    return Exit(
        index=index,
        after_segment=trials.candidate,
        file=f"exits/{index:02d}.onnx",
        inputs=(trials.cut.name, mask) if mask else (trials.cut.name,),
        output=prefix + answer,
        confidence=prefix + CONFIDENCE,
        head=trials.head,
        agreement=trials.trials[trials.best].agreement,
        trials=trials.trials,
    )


def judged(exit_: Exit, certify: ExitRecords) -> Exit:
    """The exit with what the certify split says of it."""
    agrees, truth = certify.agrees[exit_.index], certify.labels
    accuracy = None
    if truth is not None:
        accuracy = float((certify.prediction[exit_.index] == truth).mean())
    return replace(exit_, agreement=float(agrees.mean()), accuracy=accuracy)


def _tools() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _TOOLS:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed as a package"
    return versions
