"""``eecompile profile``: measure a bundle's profile again, on this machine.

Graphs, exits in use, thresholds and the certificate stay the same: they do not depend on times. The
predicted savings of the policy change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import onnx

from offramp.bundle import Bundle, Exit, ExitPolicy, Profile
from offramp.bundle.bundle import REPORT, bundle_name
from offramp.bundle.files import dump
from offramp.bundle.records import CERTIFY, TUNE
from offramp.calibration.choose.exit_records import ExitRecords
from offramp.calibration.choose.trade_offs import RecordedVariant, kept_variants
from offramp.calibration.heads.cut_tensors import CutTensor
from offramp.calibration.rehearsal import REHEARSAL, Rehearsed
from offramp.compiler.blueprints.packing import PROFILE, rewrite
from offramp.compiler.common.options import ProfileOptions
from offramp.compiler.common.progress import SILENT, Progress
from offramp.compiler.exits.heads import build_empty
from offramp.compiler.exits.timed_model import ProfileTimer
from offramp.compiler.graphs.graph import default_opset
from offramp.compiler.graphs.weights import WeightSizes
from offramp.compiler.report import render_report
from offramp.engine.backends import make_backend
from offramp.engine.backends.custom_ops import open_runnable
from offramp.engine.graphs.assembly import assemble
from offramp.engine.graphs.external_weights import graphs_of
from offramp.engine.models.device_profile import measure_profile
from offramp.engine.models.profile_check import predicted_savings
from offramp.engine.stages.pipeline import zeros
from offramp.engine.tensorrt.probe import parse_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """A bundle's profile before and after measuring it again."""

    bundle: Bundle
    """The bundle as it was before the new measurement."""
    before: Profile
    after: Profile
    written: Path | None
    """Path of the bundle or of the profile's file; ``None`` after a dry run."""


def profile_bundle(options: ProfileOptions, progress: Progress = SILENT) -> Profiled:
    """Measure a bundle's profile on this machine, and write the profile.

    BundleError if the bundle cannot be read or written, BackendError if the GPU cannot be used.
    """
    bundle = open_runnable(options.bundle)
    before = bundle.profile()
    if options.json is not None:
        if options.backend == "onnxruntime":
            after = measure(bundle, options.threads or before.threads, before.batch_sizes, progress)
        else:
            after = measure_on_gpu(bundle, options)
        options.json.write_bytes(dump(after))
        return Profiled(bundle=bundle, before=before, after=after, written=options.json)
    target = options.target()
    after = measure(bundle, options.threads or before.threads, before.batch_sizes, progress)
    if target is not None:
        _write(bundle, options, target, after)
    return Profiled(bundle=bundle, before=before, after=after, written=target)


def measure_on_gpu(bundle: Bundle, options: ProfileOptions) -> Profile:
    """Time a bundle's model and segments on a GPU, in fp32, as cluster workers run them."""
    before = bundle.profile()
    most = max(before.batch_sizes)
    backend = make_backend(
        options.backend,
        devices=(parse_device(options.device),),
        precision="fp32" if options.backend == "tensorrt" else None,
        max_rows=most,
        bundles=(options.bundle,),
    )
    try:
        return measure_profile(bundle, backend, before, max_batch_size=most)
    finally:
        backend.close()


def measure(
    bundle: Bundle, threads: int, batch_sizes: tuple[int, ...], progress: Progress = SILENT
) -> Profile:
    """Time a bundle's parts on inputs of zeros, with the methods that compiling uses."""
    manifest = bundle.manifest
    with graphs_of(bundle) as read:
        quantised = None
        if begins := manifest.source_begins:
            front = manifest.segments[:begins]
            quantised = assemble([read(s.file) for s in front], [front[-1].output])
        timer = ProfileTimer(
            source=read(manifest.source.file),
            segments=[read(segment.file) for segment in manifest.segments],
            samples=partial(zeros, manifest),
            threads=threads,
            batch_sizes=batch_sizes,
            progress=progress,
            quantised=quantised,
        )
        times = timer.backbone()
        graphs = [read(exit_.file) for exit_ in manifest.exits]
        given = [spec.name for spec in manifest.inputs]
        empty = [_empty(e, g, given) for e, g in zip(manifest.exits, graphs, strict=True)]
        heads = timer.heads([[graph] for graph in graphs], empty, batch_sizes)
        return timer.finish(times, [tuple(of_exit) for (of_exit,) in heads], manifest, read)


def _empty(exit_: Exit, graph: bytes, model_inputs: Sequence[str]) -> bytes:
    """Make a graph that reads the same cut tensors as an exit and does almost nothing."""
    model = onnx.load_from_string(graph)
    names = [name for name in exit_.inputs if name not in model_inputs]
    read = [_described(info) for info in model.graph.input if info.name in names]
    opset = default_opset(model)
    return build_empty(read, "offramp_empty/", opset=opset, ir_version=model.ir_version)


def _described(info: onnx.ValueInfoProto) -> CutTensor:
    tensor = info.type.tensor_type
    shape = tuple(d.dim_param or d.dim_value or "?" for d in tensor.shape.dim)
    dtype = str(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    return CutTensor(name=info.name, dtype=dtype, shape=shape)


def _write(bundle: Bundle, options: ProfileOptions, target: Path, profile: Profile) -> None:
    kept = {entry.path for entry in bundle.manifest.files}
    rehearsed = Rehearsed.parse(bundle.read(REHEARSAL)) if REHEARSAL in kept else None
    policy = with_predicted_savings(bundle, profile)
    manifest = replace(bundle.manifest, name=bundle_name(target))
    certify = ExitRecords.kept_by(bundle, CERTIFY)
    sizes = WeightSizes.of(bundle)
    full = RecordedVariant.of(manifest, policy, profile, ExitRecords.kept_by(bundle, TUNE))
    report = render_report(
        manifest,
        policy,
        profile,
        certify,
        rehearsed,
        weights=sizes,
        variants=[(full, certify), *kept_variants(bundle)[1:]],
    )
    changed = {PROFILE: dump(profile), REPORT: report.encode()}
    rewrite(bundle, target, manifest, policy, changed, overwrite=options.replaces)


def with_predicted_savings(bundle: Bundle, profile: Profile) -> ExitPolicy:
    """Return the bundle's policy with the savings that another profile predicts."""
    policy = bundle.policy
    if policy.promise is None:
        return policy
    saved = predicted_savings(bundle, profile, bundle.manifest.calibration.reference_batch_size)
    return replace(policy, promise=replace(policy.promise, predicted_savings=saved))
