"""Content of a bundle: the draft of its parts, the manifest, and every file."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from offramp.bundle import (
    Answer,
    Bundle,
    Exit,
    ExitPolicy,
    InputRanges,
    Manifest,
    Padding,
    Segment,
    SharingCost,
    TensorSpec,
    Variant,
    write_bundle,
)
from offramp.bundle.bundle import POLICY, RECORDS, REPORT, bundle_name
from offramp.bundle.files import FileContent, dump
from offramp.bundle.graph_weights import WEIGHTS
from offramp.bundle.schema.inputs import INPUT_RANGES
from offramp.bundle.schema.manifest import Calibration, Source
from offramp.bundle.schema.measured import MEASURED
from offramp.calibration.choose.exit_records import ExitRecords, dump_records
from offramp.calibration.choose.trade_offs import RecordedVariant
from offramp.calibration.data.dataset import Dataset
from offramp.calibration.data.running import run_over
from offramp.calibration.rehearsal import REHEARSAL
from offramp.compiler.common.rounding import fits_16_bits
from offramp.compiler.cuts.slicing import SOURCE, Sliced
from offramp.compiler.exits.endings import CONFIDENCE, exit_prefix
from offramp.compiler.graphs.part_sizes import sized_segments
from offramp.compiler.graphs.runtime import libraries_of
from offramp.compiler.graphs.weight_parts import in_parts
from offramp.compiler.graphs.weights import pack_weights
from offramp.compiler.report import render_report
from offramp.compiler.report.pictures import EarlyMap
from offramp.compiler.samples.checks import both_ranges
from offramp.compiler.samples.grouping import distinct_samples
from offramp.compiler.samples.staged_answers import AnsweringStages
from offramp.engine.answers.agreement import agreement_of
from offramp.engine.common.environment import cpu_features, package_version
from offramp.engine.stages.plan import Mode, Plan, plan_stages

if TYPE_CHECKING:  # imports torch, which writing a bundle without exits does not need
    from offramp.compiler.blueprints.blueprint import Certified
    from offramp.compiler.exits.exits import BuiltExit


PROFILE = "profiles/cpu.json"
"""Path in the bundle of the profile, which was measured on the machine that compiled."""
_TOOLS = ("offramp", "onnx", "onnx-graphsurgeon", "onnxslim", "onnxruntime", "torch", "numpy")
LOOKED_AT: Final = 64
"""Number of samples from which the shown examples are selected."""
_SHOWN: Final = 4
_MOST_CLASSES: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The model's parts before a manifest exists: enough to plan and run stages."""

    inputs: tuple[TensorSpec, ...]
    answer: Answer
    segments: tuple[Segment, ...]
    exits: tuple[Exit, ...]
    """Exits; their agreement is measured on the tuning split."""
    files: dict[str, bytes]
    """The graphs of segments and exits, by path in the bundle."""

    @classmethod
    def of(cls, sliced: Sliced, exits: Sequence[BuiltExit]) -> Draft:
        """Describe segments and exits."""
        answer = sliced.model.answer
        segments = tuple(segment.described() for segment in sliced.segments)
        described = tuple(_exit(index, exit_, answer.output) for index, exit_ in enumerate(exits))
        graphs = (*sliced.graphs, *(built.graph for built in exits))
        names = [*(s.file for s in segments), *(e.file for e in described)]
        files = dict(zip(names, graphs, strict=True))
        inputs = sliced.model.inputs
        return cls(inputs=inputs, answer=answer, segments=segments, exits=described, files=files)

    def read(self, file: str) -> bytes:
        """Return the content of a part's file."""
        return self.files[file]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltVariant:
    """A subnet of the model as a bundle stores it."""

    variant: Variant
    graphs: Mapping[str, bytes]
    """Graphs of segments and exits, by path in the bundle."""
    files: Mapping[str, bytes]
    """All other files, by path in the bundle."""
    recorded: RecordedVariant
    certify: ExitRecords
    """Answers of the variant's exits on the certify split."""


def make_manifest(
    certified: Certified,
    *,
    paddings: tuple[Padding, ...],
    variants: Sequence[BuiltVariant],
    sharing: tuple[SharingCost, ...],
) -> Manifest:
    """Describe the bundle; hashes are filled in when it is written."""
    chosen, certify = certified.chosen, certified.records
    sliced, draft, run = chosen.sliced, chosen.draft, chosen.timed.run
    options, parts = run.options, run.parts
    model, front, quantised = sliced.model, sliced.front, sliced.is_quantised
    truth, final = certify.labels, certify.final_prediction
    row = parts.train.take(slice(1))
    return Manifest(
        name=bundle_name(options.output),
        created_utc=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        tools=tool_versions(),
        source=Source(
            file=SOURCE,
            original_name=options.model.name,
            original_sha256=model.original_sha256,
            opset=model.opset,
        ),
        inputs=model.inputs,
        unread=model.unread,
        outputs=model.outputs,
        answer=model.answer,
        segments=sized_segments(draft, draft.read, row),
        exits=tuple(judged(exit_, certify) for exit_ in draft.exits),
        calibration=Calibration(
            data_sha256=parts.train.sha256,
            train_samples=len(parts.train),
            tune_samples=len(parts.tune),
            certify_samples=len(parts.certify),
            sample_shapes={name: array.shape[1:] for name, array in row.items()},
            reference_batch_size=options.choice.reference_batch_size,
            source_accuracy=None if truth is None else float((final == truth).mean()),
            random_inputs=options.is_dry_run,
            answer_ranges=both_ranges(model, certify.ranges),
            distinct=distinct_samples(
                parts.groups, key=options.promise.group, within=options.promise.copies_within
            ),
        ),
        verified_tolerance=sliced.tolerance(options),
        precision="int8" if quantised else "fp32",
        cpu=cpu_features() if quantised else None,
        weights_of_7_bits=quantised and fits_16_bits(front.proto),
        precision_reason=chosen.reason,
        training=chosen.training,
        custom_ops=libraries_of(model.proto),
        batch_effect=run.batch_effect,
        paddings=paddings,
        value_bounds=run.value_bounds,
        variants=tuple(built.variant for built in variants),
        weight_sharing=sharing,
        idle_reason=certified.limit or "",
    )


def pack(
    manifest: Manifest,
    certified: Certified,
    ranges: InputRanges,
    variants: Sequence[BuiltVariant] = (),
) -> Mapping[str, FileContent]:
    """Return the content of every file except manifest and policy, by path.

    Graphs refer to their large weights in one file, which is returned in pieces.
    """
    chosen, policy, certify = certified.chosen, certified.policy, certified.records
    sliced, draft, profile = chosen.sliced, chosen.draft, chosen.choice.profile
    graphs = {**draft.files, manifest.source.file: sliced.model.as_declared().SerializeToString()}
    for variant in variants:
        graphs |= variant.graphs
    if variants:
        graphs = in_parts(graphs, sliced.weights)
    packed = pack_weights(graphs, sliced.weights)
    some = chosen.timed.run.parts.certify
    report = render_report(
        manifest,
        policy,
        profile,
        certify,
        certified.rehearsed,
        limit=certified.limit,
        measured=certified.measured,
        maps=early_maps(draft, policy, chosen.timed.timer.source, some),
        weights=packed.sizes,
        variants=[
            (RecordedVariant.of(manifest, policy, profile, chosen.tune), certify),
            *((variant.recorded, variant.certify) for variant in variants),
        ],
    )
    small = {
        PROFILE: dump(profile),
        RECORDS: dump_records(chosen.tune, certify),
        REPORT: report.encode(),
        INPUT_RANGES: dump(ranges),
    }
    if certified.rehearsed is not None:
        small[REHEARSAL] = certified.rehearsed.dump()
    if certified.measured is not None:
        small[MEASURED] = dump(certified.measured)
    for variant in variants:
        small |= variant.files
    weights = {WEIGHTS: packed.pieces()} if packed.sizes.file_bytes else {}
    return {**packed.graphs, **small, **weights}


def _exit(index: int, built: BuiltExit, answer: str) -> Exit:
    prefix = exit_prefix(built.candidate)
    return Exit(
        index=index,
        after_segment=built.candidate,
        file=f"exits/{index:02d}.onnx",
        inputs=built.reads,
        output=prefix + answer,
        confidence=prefix + CONFIDENCE,
        head=built.best.head,
        agreement=built.best.agreement,
        share=built.share,
        certainty=built.certainty,
        trials=built.heads,
    )


def judged(exit_: Exit, certify: ExitRecords) -> Exit:
    """Return the exit with its agreement and accuracy on the certify split."""
    agrees, truth = certify.agrees[exit_.index], certify.labels
    hits = None if truth is None else certify.prediction[exit_.index] == truth
    accuracy = None if hits is None else float(hits.mean())
    return replace(exit_, agreement=float(agrees.mean()), accuracy=accuracy)


def tool_versions() -> dict[str, str]:
    """Return the versions of the tools that write bundles."""
    versions = {name: package_version(name) or "not installed as a package" for name in _TOOLS}
    return {"python": platform.python_version(), **versions}


def rewrite(
    bundle: Bundle,
    target: Path,
    manifest: Manifest,
    policy: ExitPolicy,
    changed: Mapping[str, bytes],
    *,
    overwrite: bool,
) -> Bundle:
    """Write a bundle with the same graphs and engines, but other files and another policy.

    Measurements of the old policy are left out.
    """
    stale = (POLICY, MEASURED, *changed)
    names = [entry.path for entry in bundle.manifest.files if entry.path not in stale]
    kept = {name: bundle.stored(name) for name in names}  # read when it is written
    return write_bundle(
        target,
        manifest,
        policy,
        {**kept, **changed},
        overwrite=overwrite,
        engines_of=bundle.path,
    )


def early_maps(draft: Draft, policy: ExitPolicy, source: bytes, some: Dataset) -> list[EarlyMap]:
    """Select examples that leave early, from the most to the least similar to the model's map.

    The result is empty if the answer is not a map of at most 256 classes, or if no sample leaves
    early.
    """
    answer = draft.answer
    if answer.task.kind != "segmentation" or answer.classes > _MOST_CLASSES or not policy.active:
        return []
    stages = plan_stages(draft, draft.read, policy.active)
    plan = Plan(stages=stages, policy_version=policy.version, mode=Mode.LEAVE)
    few = some.subset(np.arange(min(LOOKED_AT, len(some)), dtype=np.intp))
    given = AnsweringStages(plan).run(few.take(slice(None)))
    ((_, (ends,)),) = run_over(source, [answer.output], few, threads=1, batch_size=LOOKED_AT)
    agreement = agreement_of(answer)
    sides = given.answer.shape[-2:]
    early, model = (
        agreement.reduce(values).reshape(-1, *sides).astype(np.uint8)
        for values in (given.answer, ends)
    )
    left = np.flatnonzero(given.exit >= 0)
    equal = (early[left] == model[left]).mean(axis=(1, 2))
    order = left[np.argsort(-equal)]
    places = np.unique(np.linspace(0, len(order) - 1, _SHOWN).round().astype(int))
    return [
        EarlyMap(exit=int(given.exit[row]), early=early[row], end=model[row])
        for row in (order[places] if len(order) else ())
    ]
