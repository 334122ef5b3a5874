"""Protocols of running stages on a GPU; TensorRT and ONNX Runtime's CUDA provider implement them.

::

    ExecutableFactory   one a backend: finds, checks and loads the engines or graphs of a stage
    └── PreparedStage   one a stage: loaded weights, and the sizes of its buffers
        └── Executable  one a stage and slot: enqueues the stage on the slot's stream

All methods are called within ``with driver.current():``. Addresses are of device memory, multiples
of 256; tensors are contiguous, the batch is their first dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from offramp.bundle import Bundle
from offramp.engine.cuda.driver import Driver, Stream
from offramp.engine.stages.backend_protocol import MissingEngine
from offramp.engine.stages.plan import StageSpec

Shape: TypeAlias = tuple[int, ...]
"""Shape of a tensor, with the batch first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """An input or output of a stage on the device."""

    name: str
    dtype: np.dtype[Any]
    """Type of the tensor on the device: see :meth:`ExecutableFactory.device_dtype`. bfloat16's bits
    are uint16."""
    sample_shape: Shape
    """Shape of one row, without the batch, at the largest expected size."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row at the largest size."""
        return math.prod(self.sample_shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotResources:
    """Resources that a slot gives to its executables; fixed for their lifetime."""

    driver: Driver
    stream: Stream
    """Stream for all of the slot's work, in order."""
    scratch_address: int
    """Memory that is valid only between the beginning and the end of one stage, so that all stages
    of a slot share it. If the scratch has to grow, a slot closes its executables and opens them
    again."""
    scratch_bytes: int
    """Size of the scratch, at least the largest :attr:`PreparedStage.scratch_bytes` opened with
    it."""


class Executable(Protocol):
    """A prepared stage in one slot; used by one thread at a time."""

    def output_shapes(self, inputs: Mapping[str, Shape]) -> Mapping[str, Shape]:
        """Return the shapes of the outputs before they are enqueued; fast for known shapes.

        BackendError if the stage does not take such inputs; the message has the valid ones.
        """

    def enqueue(
        self,
        inputs: Mapping[str, Shape],
        addresses: Mapping[str, int],
        stream: Stream,
        *,
        graph: int | None = None,
    ) -> None:
        """Enqueue the stage on the slot's stream; on failure only this batch fails.

        Shapes include at least the stage's inputs, which have equal numbers of rows; addresses also
        include its outputs. ``graph`` is the number of the graph that this is captured into, now or
        the next time; only for stages that are capturable. A graph is made by two calls with its
        number, shapes and addresses, between which the host waits. The first call may prepare; the
        second is captured: it neither allocates nor waits. The graph then stays valid until
        :meth:`forget`, regardless of later work.
        """

    def forget(self, graph: int) -> None:
        """Release the preparation for a graph, if any: the graph is not launched any more.

        The host has waited. Without this call, memory use grows with the number of shapes.
        """

    def close(self) -> None:
        """Release the executable; the host has waited for its work. May be called again."""


class PreparedStage(Protocol):
    """A loaded stage; thread-safe."""

    @property
    def spec(self) -> StageSpec:
        """Specification of the stage that was prepared."""

    @property
    def inputs(self) -> tuple[TensorInfo, ...]:
        """Tensors that the stage reads.

        They are among those of a batch, but may differ from ``spec.inputs``: an input that no node
        reads is missing, and a chain of segments includes those of exits inside it.
        """

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """Output tensors: answer and confidence if they exist, and the cut tensor.

        Other carried tensors are graph inputs, which pass through.
        """

    @property
    def scratch_bytes(self) -> int:
        """Largest scratch memory of one run, in bytes; 0 if the stage allocates its own memory."""

    @property
    def max_rows(self) -> int:
        """Largest number of rows of a batch."""

    @property
    def capturable(self) -> bool:
        """``True`` if capture of the stage into a CUDA graph should be tried."""

    @property
    def pads(self) -> bool:
        """``True`` if new batch sizes are so slow that batches are padded to few sizes.

        See :mod:`offramp.engine.cuda.batch_sizes`.
        """

    @property
    def missing(self) -> MissingEngine | None:
        """The engine that would run the stage faster, if it is not built; else ``None``."""

    def padding_limit(self, rows: int) -> int:
        """Return up to how many rows a batch of this size may be padded; at most ``max_rows``."""

    def open(self, slot: SlotResources) -> Executable:
        """Make the executable of a slot; may be called in several threads at the same time.

        BackendError if it cannot be made, for instance if memory is short.
        """

    def close(self) -> None:
        """Release the stage; its executables must be closed before."""


class ExecutableFactory(Protocol):
    """Prepares stages for one device; thread-safe."""

    @property
    def name(self) -> str:
        """Name of the backend, for messages and metrics: ``tensorrt``."""

    def device_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return the type of a graph input on the device: TensorRT 8.6 has int32 for int64."""

    def as_computed(self, bundle: Bundle) -> Bundle:
        """Return a bundle with the policy and records of the factory's arithmetic.

        BackendError if these are damaged.
        """

    def prepare(self, spec: StageSpec) -> PreparedStage:
        """Load a stage; may take seconds.

        BackendError if it cannot be loaded; the message has the stage, the reason and the remedy.
        """

    def close(self) -> None:
        """Release its resources; prepared stages must be closed before."""
