"""The choice of a backend, by name or automatically; heavy imports are made only here."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Final, NamedTuple

from offramp.bundle import Bundle
from offramp.bundle.bundle import read_manifest
from offramp.bundle.engines import EngineStore, Precision, list_targets
from offramp.bundle.schema.compilation import OperatorLibrary
from offramp.bundle.schema.errors import BundleError
from offramp.engine.common.errors import BackendError
from offramp.engine.kernels.kernel_compilation import load_kernels, source_hash
from offramp.engine.stages.backend_protocol import Backend
from offramp.engine.stages.precision import is_rounded, require_plain
from offramp.engine.tensorrt import probe
from offramp.engine.tensorrt.lookup import EnginePlace

if TYPE_CHECKING:
    from offramp.engine.cuda.driver import Driver
    from offramp.engine.cuda.executable import ExecutableFactory

_LOG = logging.getLogger(__name__)

CPU = "onnxruntime-cpu"
"""Name of the default backend; bundles are compiled and certified with it."""
CPU_RUNTIMES: Final = frozenset({CPU, "openvino-cpu"})
"""Names of the backends whose streams run on the machine's cores."""
_NO_DRIVER: Final = "models run on the CPU, because this machine has no NVIDIA driver"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    threads: int
    streams: int
    devices: tuple[int, ...]
    precision: Precision | None
    graphs: bool
    max_rows: int
    bundles: Sequence[Path]


def make_backend(
    name: str = "auto",
    *,
    threads: int = 1,
    streams: int = 1,
    devices: Sequence[int] = (0,),
    precision: Precision | None = None,
    graphs: bool = True,
    max_rows: int = 32,
    bundles: Sequence[Path] = (),
) -> Backend:
    """Make a backend, and log the choice and its reason.

    BackendError if there is no such backend, or it cannot run here; one line states what is
    missing.

    Args:
        name: One of :data:`BACKENDS`.
        threads: Intra-op threads of each running stage, on the CPU.
        streams: Number of stages that run at the same time, for runtimes that must know it early.
        devices: Numbers of the GPUs, which must be of one model; streams are assigned to them in
            turn. With none, ``auto`` chooses a backend on the CPU.
        precision: Precision of TensorRT's engines; ``None`` is the lowest that a bundle has.
        graphs: Whether stages are captured into CUDA graphs, on a GPU.
        max_rows: Largest batch (rows) that will be run, where no engine limits it.
        bundles: Bundles to serve. ``auto`` chooses TensorRT only if all have engines for the GPU;
            kernels that were compiled with engines are not compiled again.
    """
    options = _Options(
        threads=threads,
        streams=streams,
        devices=tuple(devices),
        precision=precision,
        graphs=graphs,
        max_rows=max_rows,
        bundles=bundles,
    )
    needed = _operator_libraries(bundles)
    if name == "auto":
        return _best(options, needed)
    if name not in _ENTRIES:
        raise BackendError(f"there is no backend {name!r}; choose one of {', '.join(BACKENDS)}")
    _refuse_operators(name, needed)
    backend = _ENTRIES[name].make(options)
    _LOG.info("backend: %s (asked for by name)", backend.name)
    return backend


def _best(options: _Options, needed: Sequence[OperatorLibrary]) -> Backend:
    reasons = [] if options.devices else ["no GPU is to be used"]
    several = len(options.devices) > 1  # the user named devices: no CPU instead
    try:
        for device in options.devices:
            probe.find_device(device)
    except BackendError as error:  # one reason that excludes all backends on GPUs
        if several:
            raise
        no_driver = isinstance(error, probe.NoDriverError)
        reasons.append(_NO_DRIVER if no_driver else str(error))
    has_gpu = not reasons
    for name, entry in _ENTRIES.items():
        wanted = has_gpu if entry.needs_gpu else not several
        if not wanted or not entry.is_candidate(options):
            continue
        try:
            _refuse_operators(name, needed)
            entry.require(options)
            backend = entry.make(options)
        except BackendError as error:
            reasons.append(str(error))
            continue
        why = "; ".join(reasons) or "the fastest, and nothing is missing"
        _LOG.info("backend: %s (%s)", backend.name, why)
        return backend
    raise BackendError("; ".join(reasons))


def _on_each(make: Callable[[_Options, int], Backend]) -> Callable[[_Options], Backend]:
    """Return a factory that makes a backend on every GPU of the options."""

    def make_all(options: _Options) -> Backend:
        if not options.devices:
            raise BackendError("that backend runs on a GPU, and none is named; name cuda:0, …")
        if len(options.devices) == 1:
            return make(options, options.devices[0])
        from offramp.engine.backends.several_devices import SeveralDevices  # noqa: PLC0415

        _require_alike(options.devices)
        with ExitStack() as failed:
            backends: dict[str, Backend] = {}
            for device in options.devices:
                backend = backends[f"cuda:{device}"] = make(options, device)
                failed.callback(backend.close)
            failed.pop_all()
        return SeveralDevices(backends)

    return make_all


def _require_alike(devices: Sequence[int]) -> None:
    """Refuse GPUs of different models: times and engines are valid for one GPU model only."""
    models = {f"cuda:{index}": probe.find_device(index).name for index in devices}
    if len(set(models.values())) > 1:
        told = ", ".join(f"{device} is {model}" for device, model in models.items())
        raise BackendError(
            f"{told}, expected GPUs of one model, for which engines and times are the same; name "
            "GPUs of one model, or run workers on both models (eeserve --cluster), each with "
            "its own profile"
        )


def _tensorrt(options: _Options, index: int) -> Backend:
    device = probe.require(f"cuda:{index}")
    _tensorrt_version()  # loads it
    from offramp.engine.backends.tensorrt import TensorRTFactory  # noqa: PLC0415

    return _on_gpu(
        device,
        options,
        lambda driver: TensorRTFactory(
            driver, device.device, precision=options.precision, graphs=options.graphs
        ),
    )


def _cuda(options: _Options, index: int) -> Backend:
    try:
        device = probe.find_device(index)
        from offramp.engine.backends import onnxruntime_cuda  # noqa: PLC0415
        from offramp.engine.cuda.pycuda_driver import require_pycuda  # noqa: PLC0415

        onnxruntime_cuda.require_provider()
        require_pycuda()
        onnxruntime_cuda.try_provider(device.index)
    except BackendError as error:
        raise BackendError(f"CUDA cannot be used on cuda:{index}: {error}") from error
    return _on_gpu(
        device,
        options,
        lambda _: onnxruntime_cuda.OnnxRuntimeCudaFactory(
            device=device.index, max_rows=options.max_rows
        ),
    )


def _cpu(options: _Options) -> Backend:
    from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend  # noqa: PLC0415

    return OnnxRuntimeBackend(threads=options.threads)


def _openvino(options: _Options) -> Backend:
    from offramp.engine.backends.openvino import OpenVinoBackend  # noqa: PLC0415

    return OpenVinoBackend(threads=options.threads, streams=options.streams)


def _on_gpu(
    device: probe.Device, options: _Options, factory: Callable[[Driver], ExecutableFactory]
) -> Backend:
    from offramp.engine.cuda.pycuda_driver import PyCudaDriver  # noqa: PLC0415

    cubins = _cubins(device, options.bundles)
    first = next(cubins)  # before any GPU memory is allocated
    with ExitStack() as failed:
        driver = PyCudaDriver(device.index)
        failed.callback(driver.close)
        made = factory(driver)
        try:
            backend = _with_kernels(made, driver, options, chain([first], cubins))
        except BaseException:
            with driver.current():
                made.close()
            raise
        failed.pop_all()
    return backend


def _with_kernels(
    factory: ExecutableFactory, driver: Driver, options: _Options, cubins: Iterator[bytes]
) -> Backend:
    """Make a backend with the first machine code that the driver can load."""
    from offramp.engine.cuda.cuda_backend import CudaBackend  # noqa: PLC0415
    from offramp.engine.cuda.driver import DeviceLostError  # noqa: PLC0415

    refused = BackendError("there is no machine code of our kernels")
    for cubin in cubins:
        try:
            return CudaBackend(factory, driver, graphs=options.graphs, kernels=cubin)
        except DeviceLostError:
            raise
        except BackendError as error:
            _LOG.warning("the driver does not load our kernels as they were compiled: %s", error)
            refused = error
    raise refused


def kernels_for(device: probe.Device, bundles: Sequence[Path]) -> bytes:
    """Return our kernels' machine code, from the bundles' engines if available, else compiled.

    Only code compiled from exactly these sources is used. BackendError if they cannot be compiled.
    """
    return next(_cubins(device, bundles))


def _cubins(device: probe.Device, bundles: Sequence[Path]) -> Iterator[bytes]:
    """Yield different machine codes of our kernels; the code compiled here comes last.

    A bundle's code may come from a newer CUDA than this driver supports; the driver then refuses
    it. Bundles do not record the CUDA version.
    """
    source = source_hash()
    given: set[bytes] = set()
    for path in bundles:
        for target in list_targets(path):
            if target.compute_capability != device.compute_capability:
                continue
            try:
                cubin = EngineStore.open(path, target).read_kernels(source)
            except BundleError as error:
                _LOG.warning("%s", error)
                continue
            if cubin is not None and cubin not in given:
                given.add(cubin)
                yield cubin
    cubin = load_kernels(device.compute_capability, driver_version=device.driver_version)
    if cubin not in given:
        yield cubin


def _operator_libraries(bundles: Sequence[Path]) -> list[OperatorLibrary]:
    """Return the libraries that bundles need; BackendError if one was not given."""
    found: list[OperatorLibrary] = []
    for path in bundles:
        with contextlib.suppress(BundleError):  # reported when the bundle is opened
            manifest = read_manifest(path)
            if manifest.custom_ops:
                from offramp.engine.backends.custom_ops import require_libraries  # noqa: PLC0415

                require_libraries(manifest, path)
            found += manifest.custom_ops
    return found


def _refuse_operators(name: str, needed: Sequence[OperatorLibrary]) -> None:
    """Raise BackendError if operators of libraries are needed and a backend supports none."""
    if needed and not _ENTRIES[name].custom_ops:
        told = "; ".join(library.describe() for library in needed)
        raise BackendError(
            f"backend {name} does not support custom operators; the model needs {told}: serve it "
            "on the CPU with --backend onnxruntime"
        )


def _require_plain(options: _Options) -> None:
    """Refuse bundles whose precision is for CPUs only, before any bundle is loaded."""
    for path in options.bundles:
        with contextlib.suppress(BundleError):  # reported when the bundle is opened
            require_plain(read_manifest(path), path)


def _require_engines(options: _Options) -> None:
    """Refuse bundles without engines for this GPU, TensorRT and precision, before any is loaded."""
    _require_plain(options)
    device = probe.require(f"cuda:{options.devices[0]}")  # all are of one model
    place = EnginePlace(
        gpu=device.name,
        compute_capability=device.compute_capability,
        tensorrt=_tensorrt_version(),
        device=device.device,
        precision=options.precision,
    )
    for path in options.bundles:
        if not place.served(path):
            raise BackendError(
                f"{path} has no engines for {place.describe()}; {place.remedy(path)}"
            )


def _compares_openvino(options: _Options) -> bool:
    """Return whether OpenVINO is installed and there is a bundle to compare on."""
    return bool(options.bundles) and find_spec("openvino") is not None


def _require_faster(options: _Options) -> None:
    """Raise BackendError unless OpenVINO is significantly faster than ONNX Runtime."""
    from offramp.engine.backends.cpu_choice import LEAST_GAIN, relative_time  # noqa: PLC0415
    from offramp.engine.stages.loaded import TOGETHER_BYTES, fits_together  # noqa: PLC0415

    try:
        for path in options.bundles:  # before bundles are read whole and runtimes start
            if is_rounded(read_manifest(path)):
                raise BackendError(
                    f"{path} is not entirely float32, and was certified with ONNX Runtime's kernels"
                )
        bundles = [Bundle.open(path) for path in options.bundles]
        for bundle in bundles:
            if not fits_together(bundle.graph(bundle.manifest.source.file)):
                raise BackendError(
                    f"{bundle.path} has more than {TOGETHER_BYTES >> 20} MiB of weights, too many "
                    "to be loaded by both runtimes and compared; --backend openvino serves it by "
                    "OpenVINO"
                )
    except BundleError as error:  # opening it to serve it raises the same error
        raise BackendError(str(error)) from error
    ours, other = _cpu(options), _openvino(options)
    found = [relative_time(b, ours, other, max_rows=options.max_rows) for b in bundles]
    ratio = fmean(ratio for ratio, _ in found)
    width = fmean(width for _, width in found)
    said = f"OpenVINO takes {ratio:.2f} ± {width:.2f} of ONNX Runtime's time here"
    if ratio + width > 1 - LEAST_GAIN:
        raise BackendError(said)
    _LOG.info("%s", said)


def _tensorrt_version() -> str:
    from offramp.engine.tensorrt import compat  # noqa: PLC0415

    compat.load()
    return compat.version()


class _Entry(NamedTuple):
    make: Callable[[_Options], Backend]
    """Factory that imports what the backend needs; a :class:`BackendError` states what is
    missing."""
    needs_gpu: bool = False
    """``True`` if ``auto`` skips the backend on machines without an NVIDIA GPU."""
    is_candidate: Callable[[_Options], bool] = lambda _: True
    """Returns whether ``auto`` considers the backend; if not, it is skipped without a message."""
    require: Callable[[_Options], None] = lambda _: None
    """Additional check of ``auto``: raises a :class:`BackendError` if another backend is better."""
    custom_ops: bool = False
    """``True`` if the backend takes libraries of custom operators."""


_ENTRIES: Final[Mapping[str, _Entry]] = {
    "tensorrt": _Entry(_on_each(_tensorrt), needs_gpu=True, require=_require_engines),
    "cuda": _Entry(_on_each(_cuda), needs_gpu=True, require=_require_plain),
    "openvino": _Entry(_openvino, is_candidate=_compares_openvino, require=_require_faster),
    "onnxruntime": _Entry(_cpu, custom_ops=True),
}
"""Backends by name, in the order in which ``auto`` tries them."""

BACKENDS: Final = ("auto", *_ENTRIES)
"""Values of ``--backend``; ``auto`` is the best backend of this machine."""
