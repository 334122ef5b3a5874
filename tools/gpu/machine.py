"""Backends of this machine's GPU for measurements: plain, or with timed parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Bundle
from offramp.bundle.engines import Precision
from offramp.calibration.measure.paired import BatchRunner
from offramp.compiler.engines.build_options import SizeRange, parse_batches
from offramp.engine.backends.factory import kernels_for, make_backend
from offramp.engine.cuda.cuda_backend import CudaBackend
from offramp.engine.cuda.driver import Driver
from offramp.engine.cuda.executable import ExecutableFactory
from offramp.engine.stages.pipeline import Departure
from offramp.engine.stages.plan import Mode, make_plan
from offramp.engine.tensorrt import probe
from offramp.tools.gpu.timing import PyCudaTimer, TimedDriver, TimedFactory, Timer

Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendParts:
    """Parts of a backend on a GPU."""

    driver: Driver
    timer: Timer
    """Timer of the driver's streams."""
    factory: Callable[[Driver], ExecutableFactory]
    """Function that makes the factory of executables for a driver."""
    kernels: bytes

    def backend(self, *, graphs: bool) -> CudaBackend:
        """Return the backend that serving would use."""
        return CudaBackend(
            self.factory(self.driver), self.driver, kernels=self.kernels, graphs=graphs
        )

    def timed(self, *, graphs: bool) -> tuple[CudaBackend, TimedDriver]:
        """Return a backend whose driver takes times; do not use it for times of the host."""
        driver = TimedDriver(self.driver, self.timer)
        factory = TimedFactory(self.factory(driver), driver.spans)
        return CudaBackend(factory, driver, kernels=self.kernels, graphs=graphs), driver


class Machine(Protocol):
    """Machine for measurements; a fake one is enough for rehearsals."""

    def ingredients(self, bundle: Path, *, graphs: bool, max_rows: int) -> BackendParts:
        """Create the parts of a backend for a bundle, new on each call.

        Raises:
            BackendError: Something is missing; the message is one line.
        """
        ...

    def build(self, bundle: Path, batches: Sequence[int]) -> Mapping[str, float]:
        """Build the files in the bundle that the backend needs; return seconds by file.

        Raises:
            CompileError: A file cannot be built.
        """
        ...

    def bare(
        self, bundle: Bundle, batches: Sequence[int]
    ) -> AbstractContextManager[BatchRunner] | None:
        """Return the source model without our runtime, or ``None`` if that is not possible."""
        ...

    def free_bytes(self) -> int:
        """Unused device memory."""
        ...


class GpuMachine:
    """The machine's own GPU."""

    def __init__(
        self,
        backend: str,
        *,
        precision: Precision = "fp32",
        index: int = 0,
        optimization_level: int = 3,
    ) -> None:
        """Measure a backend.

        Args:
            backend: ``tensorrt`` or ``cuda``.
            precision: Precision of TensorRT's engines. A bundle with several is served in the
                lowest one, so use separate bundles.
            index: Index of the GPU.
            optimization_level: Level of TensorRT's builder, 0 to 5.
        """
        self.backend = backend
        self._precision = precision
        self._index = index
        self._optimization_level = optimization_level

    def ingredients(self, bundle: Path, *, graphs: bool, max_rows: int) -> BackendParts:
        """See :class:`Machine`."""
        make_backend(
            self.backend,
            devices=(self._index,),
            graphs=graphs,
            max_rows=max_rows,
            bundles=(bundle,),
        ).close()  # raises if a part is missing, as in a server
        from offramp.engine.cuda.pycuda_driver import PyCudaDriver  # noqa: PLC0415

        driver = PyCudaDriver(self._index)

        def factory(used: Driver) -> ExecutableFactory:
            if self.backend == "tensorrt":
                from offramp.engine.backends.tensorrt import TensorRTFactory  # noqa: PLC0415

                return TensorRTFactory(used, self._device, graphs=graphs)
            from offramp.engine.backends.onnxruntime_cuda import (  # noqa: PLC0415
                OnnxRuntimeCudaFactory,
            )

            return OnnxRuntimeCudaFactory(device=self._index, max_rows=max_rows)

        return BackendParts(
            driver=driver,
            timer=PyCudaTimer(),
            factory=factory,
            kernels=kernels_for(probe.find_device(self._index), (bundle,)),
        )

    def build(self, bundle: Path, batches: Sequence[int]) -> Mapping[str, float]:
        """Build TensorRT's engines of source model and stages, as ``eecompile build`` does.

        Each engine is kept when it is built, and is not built again: so an interrupted run can
        resume.
        """
        if self.backend != "tensorrt":
            return {}
        from offramp.compiler.common.errors import EngineBuildError  # noqa: PLC0415
        from offramp.compiler.engines.build import BuildOptions, build_bundle  # noqa: PLC0415
        from offramp.compiler.engines.build_options import EngineBuildOptions  # noqa: PLC0415

        engines = EngineBuildOptions(
            device=self._device,
            precision=self._precision,
            batches=parse_batches(profiles_of(batches)),
            parts=("source", "stages"),
            optimization_level=self._optimization_level,
        )
        building = build_bundle(BuildOptions(bundle=bundle, engines=engines))
        assert building.results is not None
        for failed in building.failed:
            raise EngineBuildError(f"{bundle.name}, {failed.unit.name}: {failed.problem}")
        return {r.unit.name: r.entry.build_s for r in building.results if r.entry is not None}

    def bare(
        self, bundle: Bundle, batches: Sequence[int]
    ) -> AbstractContextManager[BatchRunner] | None:
        """Return TensorRT's engine in the shortest possible loop."""
        return _bare_engine(bundle, self._index, batches) if self.backend == "tensorrt" else None

    def free_bytes(self) -> int:
        """Return the unused device memory that CUDA reports."""
        from offramp.engine.cuda.pycuda_driver import PyCudaDriver  # noqa: PLC0415

        driver = PyCudaDriver(self._index)
        with driver.current():
            free, _ = driver.memory()
        driver.close()
        return free

    @property
    def _device(self) -> str:
        return f"cuda:{self._index}"


def profiles_of(batches: Sequence[int]) -> str:
    """Return ``1,2-16,17-32`` for 1, 16 and 32: disjoint profiles that end at each size."""
    firsts = [1, *(batch + 1 for batch in batches[:-1])]
    ranges = map(SizeRange, firsts, batches)
    return ",".join(map(str, ranges))


class BareEngine:
    """The source model's engine: copy in, run, copy out; a :class:`BatchRunner`."""

    def __init__(self, engine: Any, answer: str, stack: ExitStack, batches: Sequence[int]) -> None:
        """Use an engine.

        Args:
            engine: Loaded engine (:class:`offramp.engine.tensorrt.standalone.StandaloneEngine`).
            answer: Name of its output.
            stack: Exit stack that releases the engine's contexts when it is closed.
            batches: Measured batch sizes; each is the end of a profile.
        """
        self._engine = engine
        self._answer = answer
        self._stack = stack
        self._batches = list(batches)
        self._prepared: dict[int, Any] = {}

    def run(self, tensors: Tensors) -> Iterator[Departure]:
        """Answer a batch of one of the sizes; all rows leave at the end."""
        rows = len(next(iter(tensors.values())))
        answer = self._of(rows, tensors).run(tensors)[self._answer]
        yield Departure(0, np.arange(rows), answer, np.empty(0, np.float32))

    def warm_up(self, tensors: Tensors) -> None:
        """Create the context of a batch size, if it is a measured one."""
        rows = len(next(iter(tensors.values())))
        if rows in self._batches:
            self._of(rows, tensors).run(tensors)

    def _of(self, rows: int, tensors: Tensors) -> Any:
        if rows not in self._prepared:
            profile = next(i for i, last in enumerate(self._batches) if rows <= last)
            shapes = {name: tensors[name].shape for name in self._engine.inputs}
            prepared = self._stack.enter_context(self._engine.prepare(profile, shapes))
            self._prepared[rows] = prepared
        return self._prepared[rows]


@contextmanager
def _bare_engine(bundle: Bundle, index: int, batches: Sequence[int]) -> Iterator[BatchRunner]:
    from offramp.engine.cuda.primary_context import primary_context  # noqa: PLC0415
    from offramp.engine.tensorrt import compat  # noqa: PLC0415
    from offramp.engine.tensorrt.lookup import EnginePlace, find_engines  # noqa: PLC0415
    from offramp.engine.tensorrt.standalone import StandaloneEngine  # noqa: PLC0415

    device = probe.find_device(index)
    place = EnginePlace(
        gpu=device.name,
        compute_capability=device.compute_capability,
        tensorrt=compat.version(),
        device=device.device,
    )
    (stage,) = make_plan(bundle, mode=Mode.OFF).stages
    plan = find_engines(stage, place)[0].read()
    with ExitStack() as stack:
        stack.enter_context(primary_context(index).current())
        engine = stack.enter_context(StandaloneEngine(plan))
        yield BareEngine(engine, bundle.manifest.answer.output, stack, batches)
