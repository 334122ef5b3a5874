"""``eecompile profile``: measure a bundle's profile anew, on this machine.

Graphs, exits in use and thresholds stay, and so does what was certified: it does not depend on
times. What the policy is predicted to save does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from offramp.bundle import NEVER, ActiveExit, Bundle, Exit, ExitPolicy, Profile, write_bundle
from offramp.bundle.bundle import CERTIFY, POLICY, REPORT, check_target, dump_profile
from offramp.bundle.measured import MEASURED
from offramp.calibration.families import CutTensor
from offramp.calibration.profiling import profile_backbone, profile_heads, profile_stages
from offramp.calibration.records import ExitRecords
from offramp.calibration.rehearsal import REHEARSAL, Rehearsed
from offramp.compiler.compilation import profile_of
from offramp.compiler.heads import build_empty
from offramp.compiler.progress import Progress, SilentProgress
from offramp.compiler.report import render_report
from offramp.engine.control.costs import CostModel
from offramp.engine.deployment import zeros
from offramp.engine.plan import plan_stages
from offramp.engine.profile_check import predicted_savings
from offramp.engine.timing import Effort

_SILENT = SilentProgress()
PROFILE = "profiles/cpu.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """One run of ``eecompile profile``."""

    bundle: Path
    output: Path | None = None
    """``None`` replaces the bundle."""
    overwrite: bool = False
    """Whether ``output`` may replace another bundle."""
    dry_run: bool = False
    """Write nothing."""
    threads: int | None = None
    """Of ONNX Runtime; ``None`` is as the bundle was profiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """What came of it."""

    bundle: Bundle
    """As it was."""
    before: Profile
    after: Profile
    written: Path | None
    """Where the bundle is; ``None`` after a dry run."""


def profile_bundle(options: ProfileOptions, progress: Progress = _SILENT) -> Profiled:
    """Measure a bundle's profile on this machine, and write it.

    Raises:
        BundleError: There is no bundle, it is damaged, or it cannot be written.
    """
    bundle = Bundle.open(options.bundle)
    target = None
    if not options.dry_run:
        target = options.output or options.bundle.resolve()  # a link to the bundle stays one
        if options.output is not None:
            check_target(target, overwrite=options.overwrite)
    before = bundle.profile()
    after = measure(bundle, options.threads or before.threads, before.batch_sizes, progress)
    if target is not None:
        overwrite = options.output is None or options.overwrite
        _write(bundle, target, after, overwrite=overwrite)
    return Profiled(bundle=bundle, before=before, after=after, written=target)


def measure(
    bundle: Bundle, threads: int, batch_sizes: tuple[int, ...], progress: Progress = _SILENT
) -> Profile:
    """Time a bundle's parts as compiling does, on zeros."""
    manifest = bundle.manifest
    source, segments = bundle.read(manifest.source.file), [
        bundle.read(segment.file) for segment in manifest.segments
    ]  # fmt: skip

    def samples(size: int) -> dict[str, NDArray[Any]]:
        return zeros(manifest, size)

    least = Effort().least
    with progress.step("Profile the segments", least) as advance:
        times = profile_backbone(
            source, segments, samples, threads=threads, batch_sizes=batch_sizes, progress=advance
        )
    graphs = [bundle.read(exit_.file) for exit_ in manifest.exits]
    with progress.step("Profile the heads", len(graphs)) as advance:
        heads = profile_heads(
            [[graph] for graph in graphs],
            [_empty(e, g) for e, g in zip(manifest.exits, graphs, strict=True)],
            segments,
            samples,
            threads=threads,
            batch_sizes=batch_sizes,
            progress=advance,
        )
    exits_ms = [tuple(of_exit) for (of_exit,) in heads]
    with progress.step("Profile the stages", least) as advance:
        stages = profile_stages(
            source,
            lambda used: plan_stages(
                manifest, bundle.read, [ActiveExit(exit=e, threshold=NEVER) for e in used]
            ),
            samples,
            exits_ms=exits_ms,
            threads=threads,
            batch_sizes=batch_sizes,
            progress=advance,
        )
    return profile_of(times, exits_ms, stages, threads=threads)


def _empty(exit_: Exit, graph: bytes) -> bytes:
    """A graph that reads what an exit reads and does next to nothing."""
    model = onnx.load_from_string(graph)
    (read,) = [i for i in model.graph.input if i.name == exit_.inputs[0]]
    tensor = read.type.tensor_type
    shape = tuple(d.dim_param or d.dim_value or "?" for d in tensor.shape.dim)
    dtype = str(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    cut = CutTensor(name=read.name, dtype=dtype, shape=shape)
    opset = max(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
    return build_empty(cut, "offramp_empty/", opset=opset, ir_version=model.ir_version)


def _write(bundle: Bundle, target: Path, profile: Profile, *, overwrite: bool) -> None:
    # What was measured belongs to the times that are replaced, and there is no data to measure on.
    stale = (POLICY, MEASURED)
    names = [entry.path for entry in bundle.manifest.files if entry.path not in stale]
    files = {name: bundle.read(name) for name in names}
    rehearsed = Rehearsed.parse(files[REHEARSAL]) if REHEARSAL in files else None
    policy = predicted_anew(bundle, profile)
    manifest = replace(bundle.manifest, name=target.name.removesuffix(".ee"))
    report = render_report(manifest, policy, profile, certify_records(bundle), rehearsed)
    files |= {PROFILE: dump_profile(profile), REPORT: report.encode()}
    write_bundle(target, manifest, policy, files, overwrite=overwrite, engines_of=bundle.path)


def predicted_anew(bundle: Bundle, profile: Profile) -> ExitPolicy:
    """The bundle's policy, with what it is predicted to save by another profile."""
    policy = bundle.policy
    if policy.promise is None:
        return policy
    saved = predicted_savings(bundle, profile, bundle.manifest.calibration.reference_batch_size)
    return replace(policy, promise=replace(policy.promise, predicted_savings=saved))


def certify_records(bundle: Bundle) -> ExitRecords:
    """What a bundle keeps of its certify split."""
    kept = bundle.records()
    rows = kept["split"] == CERTIFY
    return ExitRecords(
        confidence=kept["confidence"][:, rows],
        prediction=kept["prediction"][:, rows],
        final_prediction=kept["final_prediction"][rows],
        final_confidence=kept["final_confidence"][rows],
        labels=kept["label"][rows] if "label" in kept else None,
    )


def print_profiled(done: Profiled, console: Console) -> None:
    """Print what was measured, and what the policy is predicted to save now."""
    active = [a.exit for a in done.bundle.policy.active]
    table = Table("batch", "model, ms", "before", "exits add", "± ", "saved", "before", "rounds")
    for column in table.columns:
        column.justify = "right"
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
    for note in done.after.disturbed:
        console.print(f"Disturbed while profiling: {note}", markup=False, soft_wrap=True)
    console.print(_verdict(done, active), markup=False, soft_wrap=True)
    written = (
        "Dry run: nothing was written." if done.written is None else f"Written: {done.written}"
    )
    console.print(written, markup=False, soft_wrap=True)


def _verdict(done: Profiled, active: list[int]) -> str:
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
