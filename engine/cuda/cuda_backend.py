"""The backend of a GPU: prepared stages, slots, and the objects that they share."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack

from offramp.bundle import Bundle
from offramp.engine.common.errors import BackendError
from offramp.engine.cuda.driver import DeviceMemoryError, Driver
from offramp.engine.cuda.executable import ExecutableFactory
from offramp.engine.cuda.memory import MemoryPool, mib
from offramp.engine.cuda.prepared_stages import CudaStage, StageRegistry
from offramp.engine.cuda.slot import REMEDY, CudaSlot, SharedBySlots
from offramp.engine.cuda.stream import DeviceKernels
from offramp.engine.stages.backend_protocol import MissingEngine
from offramp.engine.stages.plan import StageSpec
from offramp.engine.stages.precision import require_plain


class CudaBackend:
    """Runs stages on a driver: a :class:`offramp.engine.stages.backend_protocol.Backend`.

    It owns and closes factory and driver. ``kernels`` is the machine code of
    :func:`offramp.engine.kernels.kernel_compilation.load_kernels`. BackendError if the kernels
    cannot be loaded: then the caller still owns factory and driver. ``graphs`` is whether stages
    are captured into CUDA graphs.
    """

    on_cpu = False

    def __init__(
        self, factory: ExecutableFactory, driver: Driver, *, kernels: bytes, graphs: bool = True
    ) -> None:
        self._driver = driver
        with driver.current():
            loaded = DeviceKernels(driver, kernels)
        self._shared = SharedBySlots(
            driver=driver,
            factory=factory,
            kernels=loaded,
            stages=StageRegistry(),
            pool=MemoryPool(driver),
            graphs=graphs,
        )
        self._slots = 0
        self._lock = threading.Lock()
        self._closed = False

    @property
    def name(self) -> str:
        """Name of the factory, for instance ``tensorrt``."""
        return self._shared.factory.name

    @property
    def driver(self) -> Driver:
        """The driver, which is closed with the backend; for checks outside of slots."""
        return self._driver

    @property
    def kernels(self) -> DeviceKernels:
        """Our kernels, which all slots launch."""
        return self._shared.kernels

    @property
    def graphs(self) -> bool:
        """``True`` if stages are captured into CUDA graphs, where possible."""
        return self._shared.graphs

    def as_computed(self, bundle: Bundle) -> Bundle:
        """Return a bundle with the policy and records of the factory's arithmetic."""
        return self._shared.factory.as_computed(bundle)

    def sizes(self, most: int) -> Sequence[int]:
        """Return all sizes up to ``most``; if all stages pad, only those that batches pad to."""
        return self._shared.stages.sizes(most)

    def prepare(self, spec: StageSpec) -> CudaStage:
        """Load a stage, which exists as long as the result is referenced.

        BackendError if the stage cannot be loaded, if its bundle is an int8 cascade, which is for
        CPUs, or if its criterion is computed on the host.
        """
        if spec.bundle is not None:
            require_plain(spec.bundle.manifest, spec.bundle.path)
        if spec.criterion.on_host:
            raise BackendError(
                f"criterion {spec.criterion.name} is computed by the host, not on GPUs; serve with "
                "--backend onnxruntime, or compile with --criterion entropy"
            )
        with self._driver.current():
            self._shared.stages.sweep()
            try:
                prepared = self._shared.factory.prepare(spec)
            except DeviceMemoryError as error:
                raise BackendError(
                    f"stage {spec.index} cannot be loaded: {error}; {REMEDY}, or serve fewer models"
                ) from error
            try:
                return self._shared.stages.add(prepared)
            except BackendError:
                prepared.close()
                raise

    def missing(self, stage: CudaStage) -> MissingEngine | None:
        """Return the engine that would run a stage faster, if it is not built."""
        return stage.facts.prepared.missing

    def open_slot(self) -> CudaSlot:
        """Open a slot with buffers for all prepared stages.

        BackendError if memory is short; the message has the needed and the free memory.
        """
        with self._driver.current():
            try:
                slot = CudaSlot(self._shared, closed=self._slot_closed)
            except DeviceMemoryError as error:
                raise self._too_large(error) from error
        with self._lock:
            self._slots += 1
        return slot

    def close(self) -> None:
        """Release everything, including stages that are still referenced.

        BackendError if slots are still open; nothing is released then.
        """
        with self._lock:
            if self._slots:
                raise BackendError(f"{self._slots} slots are still open")
            if self._closed:
                return
            self._closed = True
        shared = self._shared
        with ExitStack() as releases:  # last in, first out
            releases.callback(self._driver.close)
            releases.enter_context(self._driver.current())
            releases.callback(shared.factory.close)
            releases.callback(shared.pool.close)
            releases.callback(shared.stages.close_all)

    def _slot_closed(self) -> None:
        with self._lock:
            self._slots -= 1

    def _too_large(self, error: DeviceMemoryError) -> BackendError:
        needs = self._shared.stages.needs()
        free_bytes, _ = self._driver.memory()
        return BackendError(
            f"a stream needs {mib(needs.device_bytes)} of memory on {self._driver.device} "
            f"({needs.describe()}), {mib(free_bytes)} are free; {error}: {REMEDY}"
        )
