"""The protocols that make a backend: a backend prepares stages, its slots execute them.

A *slot* executes one stage at a time, on the thread that owns it (on CUDA: a stream with its
contexts and buffers). A batch of tensors lives wherever the backend keeps it; scheduler and
executor only know how many rows it has and which of them go on.

Ownership: ``upload`` may alias the arrays it is given; they must not change until the batch is
done. What ``run``, ``select`` and ``merge`` return is valid until the slot's next ``upload`` or
``merge``, or until the stage after next. What ``buffer`` returns, the answer and the confidence
arrays belong to the caller.

Kept to a handful of methods on purpose (the trait of Hugging Face TEI was the model): whatever
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
"""Row numbers of a batch, rising."""

Stage: TypeAlias = Any
"""A prepared stage: whatever the backend made of a :class:`StageSpec`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingEngine:
    """An engine that a stage would run as, were it built; a chain of others runs it meanwhile."""

    unit: str
    """Its name, for instance ``00-03-exit1``."""
    bundle: Path
    device: str
    """For instance ``cuda:0``."""
    precision: Precision
    is_built: Callable[[], bool] = field(compare=False, repr=False)
    """Tells whether it was built since, by the index alone; reads a file."""


class TensorBatch(Protocol):
    """Tensors of a batch, on the backend's device; opaque to all but the backend."""

    def __len__(self) -> int: ...


class StageResult(NamedTuple):
    """The result of a stage for a batch of b rows. A tuple, since one is made every stage."""

    answer: NDArray[Any] | None
    """[b, classes]: the exit's or the model's answer, on the host; ``None`` where the stage
    has no exit."""
    confidence: NDArray[np.float32]
    """[b]: the answer's confidence, 0 to 1; empty where there is no answer."""
    carry: TensorBatch | None
    """What the next stage takes; ``None`` after the last."""


class Slot(Protocol):
    """Executes stages in order; used by one thread at a time."""

    def upload(self, tensors: Mapping[str, NDArray[Any]]) -> TensorBatch:
        """Take the model's inputs, all of equal first dimension."""

    def run(self, stage: Stage, batch: TensorBatch, threshold: float | None = None) -> StageResult:
        """Execute; waits for the result with the GIL released.

        From ``threshold`` on rows will probably not be among those selected next, so that the
        others can be brought together meanwhile; the answer does not depend on it. ``None`` is the
        threshold that the stage was prepared with. BackendError if execution failed: the slot stays
        usable.
        """

    def select(self, batch: TensorBatch, rows: Rows) -> TensorBatch:
        """Keep the given rows, in their order (survivor compaction)."""

    def buffer(self, batch: TensorBatch, rows: Rows) -> TensorBatch:
        """Copy the given rows out of the slot's buffers.

        The copy lasts until the last reference to it is gone, and any slot of the backend may
        :meth:`merge` it.
        """

    def merge(self, parts: Sequence[tuple[TensorBatch, Rows]]) -> TensorBatch:
        """Merge rows of buffered batches into one batch of this slot, part after part."""

    def close(self) -> None:
        """Release what the slot holds."""


@runtime_checkable
class DeviceSlot(Slot, Protocol):
    """A slot whose tensors are not on the host."""

    def download(self, batch: TensorBatch) -> Mapping[str, NDArray[Any]]:
        """Copy the tensors of a batch to the host, by name; they are the caller's. BackendError."""


class Backend(Protocol):
    """Prepares stages; thread-safe."""

    @property
    def name(self) -> str:
        """For messages and metrics, for instance ``onnxruntime-cpu``."""

    @property
    def on_cpu(self) -> bool:
        """Whether stages run on the CPU.

        There bundles are profiled, and what one slot has warmed up is warm for all. Elsewhere
        profiles are measured anew, and every slot is warmed up before it serves.
        """

    def as_computed(self, bundle: Bundle) -> Bundle:
        """Give a bundle with the policy and records of the arithmetic that it is run in here.

        Bundles are certified in float32, or as a cascade; engines of other precisions bring a
        policy of their own. BackendError if that is damaged.
        """

    def sizes(self, most: int) -> Sequence[int]:
        """List the batch sizes up to ``most`` whose first run takes longer than later ones, rising.

        Of the stages that are prepared now; whoever measures or serves runs them before.
        """

    def prepare(self, spec: StageSpec) -> Stage:
        """Load a stage; may take seconds, may run in the background.

        BackendError if it cannot be loaded; the message says which and why.
        """

    def missing(self, stage: Stage) -> MissingEngine | None:
        """Name the engine that would run a stage faster, were it built; ``None``: there is none.

        Whoever prepares the stage again once it is built has it run as that.
        """

    def open_slot(self) -> Slot:
        """Open a slot."""

    def close(self) -> None:
        """Release everything; slots must be closed before."""


@runtime_checkable
class SlotsByStream(Backend, Protocol):
    """A backend whose slots differ: a stream keeps to the device that runs it."""

    def open_slot_of(self, stream: int) -> Slot:
        """Open a slot of the device of a stream; started anew if it is lost. BackendError."""
        ...


@runtime_checkable
class StreamBackend(SlotsByStream, Protocol):
    """A backend with a device of its own for each stream, which may be lost."""

    @property
    def device_types(self) -> tuple[str, ...]:
        """[streams] the type of device of each."""
        ...

    @property
    def there(self) -> tuple[bool, ...]:
        """[streams] whether each can be asked, as far as is known."""
        ...

    @property
    def restarts(self) -> int:
        """Devices that were started in place of one that was lost."""
        ...
