"""Several devices of one kind as one backend; each stream stays on one device.

Stream *s* runs on device *s* modulo the number of devices, with the slots, memory and engines of
the device's own backend. Stages are prepared on every device. Rows that were buffered on one device
may be merged on another, which copies them through the host
(:meth:`offramp.engine.cuda.slot.CudaSlot.merge`).

If a device fails, the health checks (:mod:`offramp.engine.serving.stream_health`) take its streams
out of service; the other devices continue. Its streams are tried again after pauses. A lost CUDA
context stays lost until the process ends; to recover a device without a restart of the server, give
it to a worker, which is a separate process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from offramp.bundle import Bundle
from offramp.engine.common.errors import BackendError, WorkerLostError
from offramp.engine.cuda.driver import DeviceLostError
from offramp.engine.stages.backend_protocol import (
    Backend,
    MissingEngine,
    Rows,
    Slot,
    Stage,
    StageResult,
    TensorBatch,
)
from offramp.engine.stages.plan import StageSpec

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class _Device:
    name: str
    """Name of the device, for instance ``cuda:0``."""
    backend: Backend
    open_slots: int = 0
    failed: bool = False
    """``True`` if the last stage or start there failed; other devices are then preferred."""


@dataclass(slots=True, kw_only=True, eq=False)
class _SharedStage:
    """A stage as prepared on each device."""

    spec: StageSpec
    parts: dict[str, Stage]
    """Prepared stages by device. A device that could not prepare the stage is missing here; it
    tries again later."""


class SeveralDevices:
    """Runs stages on several devices: a :class:`.Backend`, and a :class:`.SlotsByStream`.

    It owns and closes ``backends``, by name of the device. They are of one kind and on equal
    devices, so that predictions and thresholds hold for all.
    """

    on_cpu = False

    def __init__(self, backends: Mapping[str, Backend]) -> None:
        self._devices = [_Device(name=n, backend=backend) for n, backend in backends.items()]
        self._lock = threading.Lock()
        """Guards the counts of open slots."""
        _log.info("streams are assigned to %s in turn", ", ".join(backends))

    @property
    def name(self) -> str:
        """The backend's name on each device, for instance ``tensorrt``."""
        return self._devices[0].backend.name

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices, in the order in which streams are assigned."""
        return tuple(device.name for device in self._devices)

    def as_computed(self, bundle: Bundle) -> Bundle:
        """Return a bundle as the first device computes it; the others are equal."""
        return self._devices[0].backend.as_computed(bundle)

    def sizes(self, most: int) -> Sequence[int]:
        """Return the sizes of all devices, ascending."""
        return sorted({size for device in self._devices for size in device.backend.sizes(most)})

    def prepare(self, spec: StageSpec) -> _SharedStage:
        """Load a stage on every device.

        BackendError if no device can load it. A device that cannot load it, while another device
        can, tries again when one of its own streams is to run the stage.
        """
        with ThreadPoolExecutor(len(self._devices)) as pool:
            found = list(pool.map(lambda device: _try(device.backend.prepare, spec), self._devices))
        stage = _SharedStage(spec=spec, parts={})
        failures: list[BackendError] = []
        for device, part in zip(self._devices, found, strict=True):
            if isinstance(part, BackendError):
                failures.append(part)
                _log.warning("%s runs without stage %d: %s", device.name, spec.index, part)
            else:
                stage.parts[device.name] = part
        if not stage.parts:
            raise failures[0]
        return stage

    def missing(self, stage: _SharedStage) -> MissingEngine | None:
        """Return the missing engine of the first device that lacks one, else ``None``."""
        for device in self._devices:
            part = stage.parts.get(device.name)
            lacking = None if part is None else device.backend.missing(part)
            if lacking is not None:
                return lacking
        return None

    def open_slot(self) -> SlotOnDevice:
        """Open a slot on the device with the fewest slots; devices that failed are tried last.

        BackendError if no device can open one.
        """
        with self._lock:
            ordered = sorted(self._devices, key=lambda device: (device.failed, device.open_slots))
        for device in ordered[:-1]:
            try:
                return self._open(device)
            except BackendError as error:
                _log.warning("%s: no slot can be opened: %s", device.name, error)
        return self._open(ordered[-1])

    def open_slot_of(self, stream: int) -> SlotOnDevice:
        """Open a slot on a stream's device; BackendError if there is not enough memory."""
        return self._open(self._devices[stream % len(self._devices)])

    def close(self) -> None:
        """Close every device's backend, even if closing another one fails."""
        with ExitStack() as releases:
            for device in self._devices:
                releases.callback(device.backend.close)

    def _open(self, device: _Device) -> SlotOnDevice:
        with self._lock:
            device.open_slots += 1
        try:
            return SlotOnDevice(device, device.backend.open_slot(), lambda: self._leave(device))
        except BaseException as error:
            self._leave(device)
            device.failed = True
            if isinstance(error, BackendError):
                raise BackendError(f"{device.name}: {error}") from error
            raise

    def _leave(self, device: _Device) -> None:
        with self._lock:
            device.open_slots -= 1


class SlotOnDevice:
    """A slot of one of several devices: a :class:`.Slot`.

    ``closed`` is called after the slot is closed.
    """

    def __init__(self, device: _Device, slot: Slot, closed: Callable[[], None]) -> None:
        self._device = device
        self._slot = slot
        self._closed = closed

    @property
    def device(self) -> str:
        """Name of the slot's device."""
        return self._device.name

    def upload(self, tensors: Mapping[str, NDArray[Any]]) -> TensorBatch:
        """Copy the inputs to the device."""
        return self._slot.upload(tensors)

    def run(
        self, stage: _SharedStage, batch: TensorBatch, threshold: float | None = None
    ) -> StageResult:
        """Execute the device's copy of a stage; load the stage if the device lacks it.

        WorkerLostError if the device is lost: the batch is not at fault, and goes on elsewhere.
        """
        device = self._device
        try:
            part = stage.parts.get(device.name)
            if part is None:
                part = stage.parts[device.name] = device.backend.prepare(stage.spec)
            result = self._slot.run(part, batch, threshold)
        except DeviceLostError as error:
            device.failed = True
            raise WorkerLostError(f"{device.name} was lost: {error}") from error
        except BackendError:
            device.failed = True
            raise
        device.failed = False
        return result

    def select(self, batch: TensorBatch, rows: Rows) -> TensorBatch:
        """Return a batch of the given rows, on the device."""
        return self._slot.select(batch, rows)

    def buffer(self, batch: TensorBatch, rows: Rows) -> TensorBatch:
        """Copy the given rows, for any slot of any of the devices."""
        return self._slot.buffer(batch, rows)

    def merge(self, parts: Sequence[tuple[TensorBatch, Rows]]) -> TensorBatch:
        """Join buffered rows on the device."""
        return self._slot.merge(parts)

    def close(self) -> None:
        """Close the slot; may be called again."""
        closed, self._closed = self._closed, lambda: None
        try:
            self._slot.close()
        finally:
            closed()


def _try(prepare: Callable[[StageSpec], Stage], spec: StageSpec) -> Stage | BackendError:
    try:
        return prepare(spec)
    except BackendError as error:
        return error
