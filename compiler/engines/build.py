"""``eecompile build``: build engines for the GPU of this machine into the bundle."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from offramp.bundle import Bundle, BundleError
from offramp.bundle.engine_index import ROUNDED, model_digest
from offramp.bundle.engines import EngineStore, EngineTarget, list_targets, prune_targets
from offramp.calibration.data.data_sources import DataSource
from offramp.calibration.data.dataset import Dataset, read_samples
from offramp.calibration.precision.quantization import Ranges
from offramp.compiler.common.errors import EngineOptionsError, EnginesUnavailableError
from offramp.compiler.common.progress import SILENT, Progress
from offramp.compiler.engines.build_options import EngineBuildOptions
from offramp.compiler.engines.builder_protocol import EngineBuilder
from offramp.compiler.engines.building import Building, EngineWork, PlannedEngine, explain
from offramp.compiler.engines.engine_verification import (
    PrecisionData,
    Recertified,
    certify_engines,
    measure_precision,
    part_data,
)
from offramp.compiler.engines.existing_build_options import existing_build_options
from offramp.compiler.engines.profiles import ModelShapes, Sizes, profile_notes, profile_sizes
from offramp.compiler.engines.units import UnitGraphs, named_units, ranges_of, units_of
from offramp.engine.common.errors import BackendError
from offramp.engine.kernels.compilers import KernelCompilerNotFoundError
from offramp.engine.kernels.kernel_compilation import load_kernels, source_hash
from offramp.engine.tensorrt.probe import find_device, parse_device, require

UNKNOWN = "unknown"
"""Name of the GPU and of TensorRT's version in a dry run that finds none."""
_ASSUMED_VERSION = "10"
"""TensorRT version assumed in a dry run without TensorRT: the most common one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """Options of one run of ``eecompile build``."""

    bundle: Path
    engines: EngineBuildOptions
    data: Path | DataSource | None = None
    """Calibration data. Engines are verified on it. Value ranges for int8 are measured on one part
    of the data, and the effect of fp16 and int8 on answers on another part."""
    seed: int = 0
    """Seed of the compilation. With the seed, the certify split is found again in the data."""
    rebuild: bool = False
    """True to build engines again even if they are fresh (up to date)."""
    prune: bool = False
    """True to remove engines that this run does not ask for, including those of other targets."""
    dry_run: bool = False
    """True to build nothing."""
    while_serving: bool = False
    """True to build next to a server: for the sizes and settings of the existing engines, and in
    little GPU memory. TensorRT's timings are not kept, because other users of the GPU disturb
    them."""


class _Data(NamedTuple):
    dataset: Dataset | None = None
    parts: PrecisionData | None = None
    """Parts of the data set, if the effect of the precision on answers is measured."""
    ranges: Ranges | None = None
    """Ranges of the tensors' values, for int8; ``None`` for other precisions."""


class Reports(NamedTuple):
    """Outputs of a build: progress, and messages."""

    progress: Progress = SILENT
    print_line: Callable[[str], None] = lambda _: None
    """Function that prints a line while engines are built."""


SILENT_REPORTS = Reports()


def build_bundle(options: BuildOptions, reports: Reports = SILENT_REPORTS) -> Building:
    """Build the engines of a bundle that are missing or not fresh.

    Raises:
        CompileError: Options contradict each other, this machine cannot build, or data is missing.
            Failures of single engines are in the results.
        BundleError: There is no bundle, it is damaged, or engines cannot be written.
        DataError: The data does not fit the model.
    """
    check_options(options)
    with _builder(options, reports) as builder:
        bundle = Bundle.open(options.bundle)
        _check_buildable(bundle)
        target = _target(bundle, builder, options)
        data = _read_data(bundle, options, reports)
        engines, sizes = _asked(bundle, target, options, reports)
        options = replace(options, engines=engines)
        work = _prepare(bundle, target, options, data, sizes)
        if builder is None or options.dry_run:
            store = _open(bundle, target, reports)
            return _planned(work, store, options, reports)
        with EngineStore.empty(bundle.path, target).exclusively():
            store = _open(bundle, target, reports)
            store.clean()
            building = _planned(work, store, options, reports)
            judgement = _judge(building, store, data, options, reports)
            if not judgement.keep:
                store.put_evidence(None)
            _keep_kernels(store, options.engines.device, reports)
            results = work.build(building.planned, builder, store, reports.progress)
            found = judgement.found
            if found and not any(result.problem for result in results):
                store.put_evidence(found.evidence, found.records)
            if options.prune:
                _prune(store, building, reports)
        return replace(building, results=results)


def check_options(options: BuildOptions) -> None:
    """Check the device's name, without a bundle or a GPU."""
    try:
        parse_device(options.engines.device)
    except BackendError as error:
        raise EngineOptionsError(f"--device: {error}") from error


def _check_buildable(bundle: Bundle) -> None:
    if bundle.manifest.precision != "fp32":
        raise EngineOptionsError(
            f"{bundle.path} is of precision {bundle.manifest.precision}, which is for CPUs, but "
            "TensorRT engines of all precisions are built from a float32 bundle: compile it with "
            "--precision fp32"
        )
    if bundle.manifest.is_cascade:
        raise EngineOptionsError(
            f"{bundle.path} has a copy of the model that was trained with its exits, but TensorRT "
            "engines are built from the unmodified model: compile it with --train frozen"
        )
    if bundle.manifest.custom_ops:
        told = "; ".join(library.describe() for library in bundle.manifest.custom_ops)
        raise EngineOptionsError(
            f"{bundle.path} needs custom operators, which TensorRT engines cannot contain: {told}; "
            "serve it on the CPU with --backend onnxruntime"
        )


def check_device(device: str) -> None:
    """Raise EnginesUnavailableError if engines cannot be built here; the GPU is not used."""
    try:
        require(device)
    except BackendError as error:
        raise EnginesUnavailableError(str(error)) from error


def make_builder(device: str) -> EngineBuilder:
    """Make TensorRT's builder for a device; raises the errors of :func:`check_device`."""
    check_device(device)
    from offramp.compiler.engines.tensorrt_builder import TensorRTBuilder  # noqa: PLC0415

    try:
        return TensorRTBuilder(device)
    except BackendError as error:
        raise EnginesUnavailableError(str(error)) from error


@contextlib.contextmanager
def _builder(options: BuildOptions, reports: Reports) -> Iterator[EngineBuilder | None]:
    """Make the builder, and close it at the end; a dry run continues without a builder."""
    try:
        builder = make_builder(options.engines.device)
    except EnginesUnavailableError as error:
        if not options.dry_run:
            raise
        reports.print_line(f"{error}; listing what is known without it")
        yield None
        return
    with contextlib.closing(builder):
        yield builder


def _target(bundle: Bundle, builder: EngineBuilder | None, options: BuildOptions) -> EngineTarget:
    """Return the target: this machine's, else the only one that the bundle has engines for."""
    precision = options.engines.precision
    if builder is not None:
        return EngineTarget(
            gpu=builder.gpu,
            compute_capability=builder.compute_capability,
            tensorrt=builder.version,
            precision=precision,
        )
    known = [target for target in list_targets(bundle.path) if target.precision == precision]
    if len(known) == 1:
        return known[0]
    return EngineTarget(
        gpu=UNKNOWN, compute_capability=(0, 0), tensorrt=UNKNOWN, precision=precision
    )


def _read_data(bundle: Bundle, options: BuildOptions, reports: Reports) -> _Data:
    if options.data is None:
        return _Data()
    dataset = read_samples(options.data, bundle.manifest)
    if options.engines.precision not in ROUNDED:
        return _Data(dataset)
    parts = part_data(bundle, dataset, seed=options.seed, threads=_threads())
    if options.engines.precision != "int8":
        return _Data(dataset, parts)
    with reports.progress.step("Measure the ranges of int8", 1):
        ranges = ranges_of(bundle, parts.ranges, threads=_threads())
    return _Data(dataset, parts, ranges)


def _asked(
    bundle: Bundle, target: EngineTarget, options: BuildOptions, reports: Reports
) -> tuple[EngineBuildOptions, tuple[Sizes, ...]]:
    """Return the settings and sizes of the engines to build."""
    engines, manifest = options.engines, bundle.manifest
    if options.while_serving:
        return existing_build_options(manifest, EngineStore.open(bundle.path, target), engines)
    buckets = dict(engines.buckets)
    sizes = profile_sizes(manifest, engines.batches, buckets)
    for note in profile_notes(manifest, sizes, buckets):
        reports.print_line(note)
    return engines, sizes


def _prepare(
    bundle: Bundle,
    target: EngineTarget,
    options: BuildOptions,
    data: _Data,
    sizes: tuple[Sizes, ...],
) -> EngineWork:
    version = _ASSUMED_VERSION if target.tensorrt == UNKNOWN else target.tensorrt
    return EngineWork(
        bundle=bundle,
        graphs=UnitGraphs(bundle, target.precision, ranges=data.ranges, tensorrt_version=version),
        settings=options.engines,
        sizes=sizes,
        shapes=ModelShapes(bundle),
        samples=data.dataset,
        keep_timings=not options.while_serving,
    )


class _Judgement(NamedTuple):
    """Decision about the stored evidence for a precision (:class:`.PrecisionEvidence`)."""

    keep: bool
    """True to keep the existing evidence, because it fits the bundle and nothing newer is known."""
    found: Recertified | None = None
    """New evidence, to be stored once all engines are built."""


def _judge(
    building: Building, store: EngineStore, data: _Data, options: BuildOptions, reports: Reports
) -> _Judgement:
    """Certify the promise again in the precision, before engines are built in it.

    This also happens if all engines exist, because they may have been built without data. If there
    is no promise, or if the data is not recognised as that of the compilation, the effect of the
    precision on answers is only measured and reported. VerificationError if the promise cannot be
    kept, unless ``accept_disagreement`` is set.
    """
    engines, bundle = options.engines, building.bundle
    precision, known = engines.precision, store.index.evidence
    if precision not in ROUNDED:
        return _Judgement(keep=False)
    fits = known is not None and known.model == model_digest(bundle.manifest)
    stale = any(isinstance(plan, PlannedEngine) and plan.stale for plan in building.planned)
    # Fresh int8 engines have the ranges of the same data, and so does the existing evidence.
    if fits and not stale and not engines.accept_disagreement:
        return _Judgement(keep=True)
    if data.parts is None:
        if not fits and (stale or known is not None):
            reports.print_line(
                f"{precision}: what it costs in answers is not measured, and the promise holds for "
                "fp32 only; add --data DATA, best the data that the bundle was compiled with"
            )
        return _Judgement(keep=fits)
    parts = data.parts
    with reports.progress.step(f"Compare {precision} with fp32", 1):
        if bundle.policy.promise and parts.certifies and not engines.accept_disagreement:
            found = certify_engines(bundle, precision, data.ranges, parts, threads=_threads())
            reports.print_line(found.describe())
            return _Judgement(keep=False, found=found)
        check = measure_precision(
            bundle, precision, data.ranges, parts.judged, unseen=parts.unseen, threads=_threads()
        )
    reports.print_line(check.describe())
    if engines.accept_disagreement:
        return _Judgement(keep=False)
    check.demand()
    return _Judgement(keep=fits and precision != "int8")


def _open(bundle: Bundle, target: EngineTarget, reports: Reports) -> EngineStore:
    """Open the store of engines; a damaged store, only a cache, is replaced by an empty one."""
    try:
        return EngineStore.open(bundle.path, target)
    except BundleError as error:
        reports.print_line(f"{error}; all engines of this target are built again")
        return EngineStore.empty(bundle.path, target)


def _planned(
    work: EngineWork, store: EngineStore, options: BuildOptions, reports: Reports
) -> Building:
    engines, manifest = options.engines, work.bundle.manifest
    named = named_units(manifest, engines.units)
    units = named or units_of(work.bundle, engines.parts)
    if engines.precision in ROUNDED and any(unit.variant for unit in units):
        reports.print_line(
            f"variants are certified in float32, so none is built in {engines.precision}"
        )
        units = tuple(unit for unit in units if not unit.variant)
    planned = []
    with reports.progress.step("Compare with what is there", len(units)) as advance:
        for plan in work.plan(units, store, rebuild=options.rebuild):
            planned.append(plan)
            advance(1)
    for line in explain(planned, store):
        reports.print_line(line)
    return Building(bundle=work.bundle, target=store.index.target, planned=tuple(planned))


def _prune(store: EngineStore, building: Building, reports: Reports) -> None:
    removed = store.prune([plan.unit.name for plan in building.planned])
    others = prune_targets(store.bundle_path, [store.index.target])
    for name in (*removed, *others.removed):
        reports.print_line(f"removed {name}")
    for name in others.busy:
        reports.print_line(f"{name} is not removed: another build is at work in it")


def _keep_kernels(store: EngineStore, device: str, reports: Reports) -> None:
    """Compile our own kernels for the GPU, so that serving needs no compiler.

    If compiling fails, the kernels of the last build are kept if their sources are the same.
    """
    capability, source = store.index.target.compute_capability, source_hash()
    driver = None
    with contextlib.suppress(BackendError):
        driver = find_device(parse_device(device)).driver_version
    try:
        cubin = load_kernels(capability, driver_version=driver)
    except BackendError as error:
        with contextlib.suppress(BundleError):
            if store.read_kernels(source) is not None:
                return
        store.drop_kernels()
        missing = "no CUDA compiler, so the server will have to find one"
        if not isinstance(error, KernelCompilerNotFoundError):
            missing = "the kernels are not in the bundle"
        reports.print_line(f"warning: {missing}: {error}")
        return
    store.put_kernels(cubin, source=source)


def _threads() -> int:
    return os.cpu_count() or 1
