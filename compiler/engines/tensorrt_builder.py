"""Engines built by TensorRT: the only module that makes a ``tensorrt.Builder``.

Differences between TensorRT 8.6, 10 and 11 are in :mod:`offramp.engine.tensorrt.compat`.

Types of graph inputs: all versions accept bool, and also uint8 if only a Cast to float32 or float16
reads the input. int64 is accepted from TensorRT 10 on; the parser of 8.6 converts int64 to int32.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from numpy.typing import NDArray

from offramp.bundle.engines import ShapeProfile
from offramp.compiler.common.errors import EngineBuildError
from offramp.compiler.engines.build_options import BuildSettings
from offramp.compiler.engines.builder_protocol import BuildProgress, Built, TimedEngine
from offramp.compiler.engines.halving import SUFFIX
from offramp.compiler.engines.lowering import node_of
from offramp.engine.common.errors import BackendError
from offramp.engine.cuda.primary_context import primary_context
from offramp.engine.tensorrt import compat, probe
from offramp.engine.tensorrt.standalone import run_plan, time_plans
from offramp.engine.tensorrt.tensorrt_messages import errors_of_tensorrt, logger

if TYPE_CHECKING:
    import tensorrt as trt


_LOG = logging.getLogger(__name__)
_MOST_GRAPH_BYTES = 2**31 - 1
"""Largest protobuf message in bytes. Larger graphs would have to be files with external data."""


class TensorRTBuilder:
    """Builds engines with TensorRT on one GPU. Only one thread may use the object."""

    def __init__(self, device: str) -> None:
        """Open a GPU, such as ``cuda:0``; BackendError if driver, GPU or libraries are missing."""
        found = probe.require(device)
        compat.load()
        self.gpu = found.name
        self.compute_capability = found.compute_capability
        self.version = compat.version()
        self._context = primary_context(found.index)
        self._builder: trt.Builder | None = None
        self._caches: list[trt.ITimingCache] = []
        """Timing caches that were used. They must not be freed before the builder."""
        self._measured = b""
        """Content of the last timing cache, as it was at the end of the last build."""

    def build(
        self,
        graph: bytes,
        profiles: Sequence[ShapeProfile],
        settings: BuildSettings,
        *,
        timing_cache: bytes,
        progress: BuildProgress,
    ) -> Built:
        """Build an engine.

        TensorRT runs in a separate thread, so that Ctrl-C is handled immediately: the build ends at
        its next step, then ``KeyboardInterrupt`` is raised. TensorRT 8.6 has no steps: there the
        build runs to its end. A second Ctrl-C ends the process.
        """
        watch = BuildWatch(progress)

        def work() -> Built:
            with self._context.current(), watch, errors_of_tensorrt() as errors:
                return self._build(
                    graph, profiles, settings, timing_cache, watch=watch, errors=errors
                )

        return _in_a_thread(work, on_interrupt=watch.interrupt)

    def run(
        self, plan: bytes, inputs: Mapping[str, NDArray[Any]], profile: int
    ) -> dict[str, NDArray[Any]]:
        """Run an engine once; with TensorRT 8.6, outputs that are int64 in the graph are int32."""
        try:
            with self._context.current():
                return run_plan(plan, inputs, profile)
        except BackendError as error:
            raise EngineBuildError(str(error)) from error

    def time(self, plans: Sequence[TimedEngine], *, rounds: int) -> list[float]:
        """Time engines in interleaved rounds, as :class:`.EngineBuilder` defines it."""
        try:
            with self._context.current():
                return time_plans(plans, rounds=rounds)
        except BackendError as error:
            raise EngineBuildError(str(error)) from error

    def close(self) -> None:
        """Release TensorRT's builder, then the timing caches."""
        with self._context.current():
            self._builder = None
            self._caches.clear()

    def _build(
        self,
        graph: bytes,
        profiles: Sequence[ShapeProfile],
        settings: BuildSettings,
        timing_cache: bytes,
        *,
        watch: BuildWatch,
        errors: list[str],
    ) -> Built:
        builder = self._open(errors)
        network = _parse(builder, graph)
        config, kept = _configure(builder, settings, watch)
        compat.keep_float32(config, network, settings.precision, SUFFIX)
        _add_profiles(builder, config, network, profiles)
        cache = self._set_timing_cache(config, timing_cache)
        plan: trt.IHostMemory | None = builder.build_serialized_network(network, config)
        held: trt.IHostMemory | None = cache.serialize()
        measured = b"" if held is None else bytes(held)
        del config, kept  # in this order: the monitor has to outlive the config
        if plan is None:
            raise _failed("build the engine", errors)
        self._measured = measured
        return Built(plan=bytes(plan), timing_cache=measured)

    def _set_timing_cache(self, config: trt.IBuilderConfig, data: bytes) -> trt.ITimingCache:
        """Attach earlier timings; if they are the last build's, its cache object is used again."""
        if self._caches and data == self._measured:
            cache = self._caches[-1]
            if config.set_timing_cache(cache, ignore_mismatch=False):
                return cache
        self._caches.append(_new_timing_cache(config, data))
        return self._caches[-1]

    def _open(self, errors: list[str]) -> trt.Builder:
        """Return TensorRT's builder, made once: making it loads kernels, which takes seconds."""
        import tensorrt as trt  # noqa: PLC0415

        if self._builder is None:
            try:
                self._builder = trt.Builder(logger())
            except TypeError as error:  # pybind11's error for a null pointer: CUDA did not start
                raise _failed("start", errors) from error
        return self._builder


class BuildWatch:
    """Reports the progress of a build, and ends it on request.

    TensorRT calls this object from other threads, and must never see an exception. So an exception
    of the progress callback is stored and ends the build; it is raised when this context ends.
    """

    def __init__(self, progress: BuildProgress) -> None:
        self._progress = progress
        self._steps: dict[str, int] = {}
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._interrupted = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Raise the progress callback's stored exception, which caused any later exception."""
        if self._failure is not None:
            raise self._failure

    def interrupt(self) -> None:
        """Request the end of the build, from any thread."""
        self._interrupted = True

    def started(self, phase: str, steps: int) -> None:
        """Report that a phase of TensorRT's build begins."""
        self._steps[phase] = steps
        self._report(phase, 0)

    def stepped(self, phase: str, step: int) -> bool:
        """Report that a step is done; returns false to end the build."""
        self._report(phase, step + 1)
        return not self._interrupted and self._failure is None

    def finished(self, phase: str) -> None:
        """Report that a phase is done, or ended early."""
        if not self._interrupted:
            self._report(phase, self._steps.get(phase, 0))
        self._steps.pop(phase, None)

    def _report(self, phase: str, done: int) -> None:
        steps = self._steps.get(phase, done)
        try:
            with self._lock:
                if self._failure is None:
                    self._progress(phase, min(done, steps), steps)
        except BaseException as error:  # raised again by __exit__
            self._failure = error


def _in_a_thread(work: Callable[[], Built], *, on_interrupt: Callable[[], None]) -> Built:
    """Run the work in a thread, and wait until the work ends, even if the user interrupts.

    Python handles signals only in the main thread, and not while that thread runs TensorRT.
    """
    future: Future[Built] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised by future.result()
            future.set_exception(error)

    try:
        threading.Thread(target=run, name="tensorrt-build", daemon=True).start()
        return future.result()
    except KeyboardInterrupt:
        on_interrupt()
        when = "at its next step" if compat.has_progress() else "when this engine is done"
        _LOG.warning("the build ends %s; press Ctrl-C again to end it immediately", when)
        with _next_interrupt_kills():
            wait([future])
        raise


@contextmanager
def _next_interrupt_kills() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _configure(
    builder: trt.Builder, settings: BuildSettings, watch: BuildWatch
) -> tuple[trt.IBuilderConfig, object]:
    """Return the build's config, and an object that must exist as long as the config."""
    import tensorrt as trt  # noqa: PLC0415

    config: trt.IBuilderConfig = builder.create_builder_config()
    config.builder_optimization_level = settings.optimization_level
    # Stages overlap on our streams; additional streams of an engine would compete with them.
    config.max_aux_streams = 0
    if settings.workspace_bytes is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, settings.workspace_bytes)
    compat.allow_precision(config, settings.precision)
    compat.use_own_kernels_only(config)
    compat.share_profiles(config)
    return config, compat.watch_progress(
        config, started=watch.started, stepped=watch.stepped, finished=watch.finished
    )


def _parse(builder: trt.Builder, graph: bytes) -> trt.INetworkDefinition:
    import tensorrt as trt  # noqa: PLC0415

    if len(graph) > _MOST_GRAPH_BYTES:
        raise EngineBuildError(
            f"its graph has {len(graph)} bytes, more than the 2 GB of one ONNX message; "
            "cut the model into smaller stages"
        )
    network: trt.INetworkDefinition = builder.create_network(compat.network_flags())
    parser: trt.OnnxParser = trt.OnnxParser(network, logger())
    if not parser.parse(graph):
        raise _failed("read the graph", compat.parser_errors(parser, partial(node_of, graph)))
    return network


def _add_profiles(
    builder: trt.Builder,
    config: trt.IBuilderConfig,
    network: trt.INetworkDefinition,
    profiles: Sequence[ShapeProfile],
) -> None:
    tensors = map(network.get_input, range(network.num_inputs))
    inputs = {tensor.name: tuple(tensor.shape) for tensor in tensors}
    for number, shapes in enumerate(profiles):
        _check_shapes(inputs, shapes, number)
        profile: trt.IOptimizationProfile = builder.create_optimization_profile()
        for name in inputs:
            range_ = shapes.inputs[name]
            profile.set_shape(name, range_.least, range_.best, range_.most)
        if config.add_optimization_profile(profile) != number:
            raise EngineBuildError(f"TensorRT refuses profile {number}: {shapes.inputs}")


def _check_shapes(
    inputs: Mapping[str, tuple[int, ...]], profile: ShapeProfile, number: int
) -> None:
    """Raise EngineBuildError if shapes do not fit; TensorRT's later error is less clear."""
    if set(inputs) != set(profile.inputs):
        raise EngineBuildError(
            f"profile {number} has shapes of {sorted(profile.inputs)}, but the graph's inputs are "
            f"{sorted(inputs)}"
        )
    for name, shape in inputs.items():
        range_ = profile.inputs[name]
        for given in (range_.least, range_.best, range_.most):
            fit = (size in (-1, wanted) for size, wanted in zip(shape, given, strict=False))
            if len(given) != len(shape) or not all(fit):
                raise EngineBuildError(
                    f"profile {number} has the shape {given} for {name}, but the graph has {shape} "
                    "(-1 is any size)"
                )


def _new_timing_cache(config: trt.IBuilderConfig, data: bytes) -> trt.ITimingCache:
    """Attach earlier timings; timings of another device or TensorRT version are ignored."""
    for content in (data, b""):
        cache: trt.ITimingCache | None = config.create_timing_cache(content)
        if cache is not None and config.set_timing_cache(cache, ignore_mismatch=False):
            return cache
        _LOG.debug("the timing cache does not fit this device or TensorRT: beginning a new one")
    raise EngineBuildError("TensorRT could not begin a timing cache")


def _failed(what: str, errors: Sequence[str]) -> EngineBuildError:
    said = "; ".join(errors) or "it reports no reason"
    return EngineBuildError(f"TensorRT could not {what}: {said}")
