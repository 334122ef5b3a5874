"""The protocols of a backend: it prepares stages, and its slots execute them.

A *slot* executes one stage at a time, on the thread that owns it (on CUDA: a stream with its
contexts and buffers). The backend decides where a batch of tensors is stored; scheduler and
executor only know the batch's number of rows, and which rows go on.

Ownership: ``upload`` may alias the arrays passed to it; they must not change until the batch is
done. Results of ``run``, ``select`` and ``merge`` are valid until the slot's next ``upload`` or
``merge``, or until the stage after next. Results of ``buffer``, the answer and the confidence
arrays belong to the caller.

The protocols have only a few methods, like the backend trait of Hugging Face TEI. Any class that
passes ``tests/unit/engine/test_backend_conformance.py`` is a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Bundle
from offramp.bundle.engines import Precision
from offramp.engine.stages.plan import StageSpec

Rows: TypeAlias = NDArray[np.intp]
"""Row numbers of a batch, in ascending order."""

Stage: TypeAlias = Any
"""A prepared stage: the backend's own object for a :class:`StageSpec`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingEngine:
    """An engine that is not built yet; until it is, a chain of other engines runs its stage."""

    unit: str
    """Name, for instance ``00-03-exit1``."""
    bundle: Path
    device: str
    """Device, for instance ``cuda:0``."""
    precision: Precision
    is_built: Callable[[], bool] = field(compare=False, repr=False)
    """Function that returns whether the engine was built since; it reads only the index file."""


class TensorBatch(Protocol):
    """Tensors of a batch, on the backend's device; opaque to other code."""

    def __len__(self) -> int: ...


class StageResult(NamedTuple):
    """The result of a stage for a batch of b rows; a tuple, because it is created faster."""

    answer: NDArray[Any] | None
    """[b, classes]: the exit's or the model's answer, on the host; ``None`` if the stage has no
    exit."""
    confidence: NDArray[np.float32]
    """[b]: the answer's confidence, 0 to 1; empty without an answer."""
    carry: TensorBatch | None
    """Inputs of the next stage; ``None`` after the last."""


class Slot(Protocol):
    """Executes stages in order; used by one thread at a time."""

    def upload(self, tensors: Mapping[str, NDArray[Any]]) -> TensorBatch:
        """Take the model's inputs, all of equal first dimension."""

    def run(self, stage: Stage, batch: TensorBatch, threshold: float | None = None) -> StageResult:
        """Execute a stage, and wait for the result with the GIL released.

        Rows whose confidence is at or above ``threshold`` will probably not be selected next, so
        the slot may compact the other rows in the meantime; the answer does not depend on
        ``threshold``. ``None`` is the threshold of the prepared stage. BackendError if execution
        failed; the slot stays usable.
        """

    def select(self, batch: TensorBatch, rows: Rows) -> TensorBatch:
        """Return these rows of a batch, in their order (survivor compaction)."""

    def buffer(self, batch: TensorBatch, rows: Rows) -> TensorBatch:
        """Copy these rows out of the slot's buffers.

        The copy lasts until its last reference is gone, and any slot of the backend may
        :meth:`merge` it.
        """

    def merge(self, parts: Sequence[tuple[TensorBatch, Rows]]) -> TensorBatch:
        """Merge rows of buffered batches into one batch of this slot, part after part."""

    def close(self) -> None:
        """Release the slot's resources."""


@runtime_checkable
class DeviceSlot(Slot, Protocol):
    """A slot whose tensors are not on the host."""

    def download(self, batch: TensorBatch) -> Mapping[str, NDArray[Any]]:
        """Copy a batch's tensors to the host, by name, for the caller; may raise BackendError."""


class Backend(Protocol):
    """Prepares stages; thread-safe."""

    @property
    def name(self) -> str:
        """Name in messages and metrics, for instance ``onnxruntime-cpu``."""

    @property
    def on_cpu(self) -> bool:
        """True if stages run on the CPU.

        On a CPU the bundle's profile applies, and a warm-up of one slot applies to all slots. On
        other backends profiles are measured again, and every slot is warmed up before it serves.
        """

    def as_computed(self, bundle: Bundle) -> Bundle:
        """Return a bundle with the policy and records for the arithmetic of this backend.

        Bundles are certified in float32, or as a cascade; engines of other precisions have their
        own policy. BackendError if that policy is damaged.
        """

    def sizes(self, most: int) -> Sequence[int]:
        """Return the batch sizes up to ``most`` whose first run is slower than later runs.

        The sizes are in ascending order, for the currently prepared stages. Run them before
        measuring or serving.
        """

    def prepare(self, spec: StageSpec) -> Stage:
        """Load a stage; may take seconds, may run in the background.

        BackendError if it cannot be loaded; the message states which stage and why.
        """

    def missing(self, stage: Stage) -> MissingEngine | None:
        """Return the engine that would run a stage faster if it were built; otherwise ``None``.

        A stage that is prepared again after the build runs as that engine.
        """

    def open_slot(self) -> Slot:
        """Open a slot: buffers and execution contexts of one stream."""

    def close(self) -> None:
        """Release everything; slots must be closed before."""


@runtime_checkable
class SlotsByStream(Backend, Protocol):
    """A backend whose slots differ: each stream uses its own device."""

    def open_slot_of(self, stream: int) -> Slot:
        """Open a slot on a stream's device; a lost device is restarted. BackendError on failure."""
        ...


@runtime_checkable
class StreamBackend(SlotsByStream, Protocol):
    """A backend with one device for each stream; devices may be lost."""

    @property
    def device_types(self) -> tuple[str, ...]:
        """[streams]: name of the type of each stream's device."""
        ...

    @property
    def there(self) -> tuple[bool, ...]:
        """[streams]: whether each device is available, as far as is known."""
        ...

    @property
    def restarts(self) -> int:
        """Number of devices that were started to replace a lost one."""
        ...
