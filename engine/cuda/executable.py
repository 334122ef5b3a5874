"""Protocols of what runs stages on a GPU; TensorRT and ONNX Runtime's CUDA provider fill them.

::

    ExecutableFactory   one a backend: finds, checks and loads what runs a stage
    └── PreparedStage   one a stage: loaded weights, and what buffers it takes
        └── Executable  one a stage and slot: enqueues the stage on the slot's stream

All of it is called within ``with driver.current():``. Addresses are of device memory, multiples
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
"""Of a tensor, the batch first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """An input or output of a stage, as it lies on the device."""

    name: str
    dtype: np.dtype[Any]
    """Of the tensor on the device: see :meth:`ExecutableFactory.device_dtype`. bfloat16's bits
    are uint16."""
    sample_shape: Shape
    """Of one row, without the batch, at the largest size that is foreseen."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row at the largest size."""
        return math.prod(self.sample_shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotResources:
    """Resources that a slot gives to its executables; fixed for their life."""

    driver: Driver
    stream: Stream
    """All of the slot's work is enqueued on it, in order."""
    scratch_address: int
    """Memory that only holds between the beginning and the end of one stage, so that all stages
    of a slot share it. A slot whose scratch has to grow closes its executables and opens them
    anew."""
    scratch_bytes: int
    """At least the largest :attr:`PreparedStage.scratch_bytes` of what is opened with it."""


class Executable(Protocol):
    """A prepared stage in one slot; used by one thread at a time."""

    def output_shapes(self, inputs: Mapping[str, Shape]) -> Mapping[str, Shape]:
        """Tell the shapes of the outputs before they are enqueued; quick where known before.

        BackendError if the stage does not take such inputs; the message has what it takes.
        """

    def enqueue(
        self,
        inputs: Mapping[str, Shape],
        addresses: Mapping[str, int],
        stream: Stream,
        *,
        graph: int | None = None,
    ) -> None:
        """Enqueue the stage on the slot's stream; if it cannot be, this batch fails only.

        Shapes are of at least the stage's inputs, which have as many rows; addresses of its outputs
        too. ``graph`` is the number of the graph that this is captured into, now or the next time;
        only for stages that are capturable. It is made by two calls with its number, shapes and
        addresses, between which the host waits. The first may prepare; the second is captured: it
        neither allocates nor waits. The graph then stays valid, whatever is enqueued later, until
        :meth:`forget`.
        """

    def forget(self, graph: int) -> None:
        """Release what was prepared for a graph, if anything was: it is not launched any more.

        The host has waited. Without it a slot that meets ever new shapes takes ever more memory.
        """

    def close(self) -> None:
        """Release it; the host has waited for what was enqueued. May be called again."""


class PreparedStage(Protocol):
    """A loaded stage; thread-safe."""

    @property
    def spec(self) -> StageSpec:
        """The spec that was prepared."""

    @property
    def inputs(self) -> tuple[TensorInfo, ...]:
        """Tensors that it reads.

        They are among those of a batch, but not always ``spec.inputs``: an input that nothing
        reads is missing, and a chain of segments has those of exits inside it.
        """

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """Tensors that it gives: answer and confidence where there are any, and the cut tensor.

        Carried tensors that are not among them are graph inputs, which pass through.
        """

    @property
    def scratch_bytes(self) -> int:
        """Memory between its beginning and its end, at the most; 0 if it has its own."""

    @property
    def max_rows(self) -> int:
        """Most rows of a batch."""

    @property
    def capturable(self) -> bool:
        """Whether it is worth trying to capture it into a CUDA graph."""

    @property
    def pads(self) -> bool:
        """Whether new batch sizes cost it so much that batches are filled up to few sizes.

        See :mod:`offramp.engine.cuda.batch_sizes`.
        """

    @property
    def missing(self) -> MissingEngine | None:
        """The engine that would run it faster, were it built; ``None`` where there is none."""

    def room(self, rows: int) -> int:
        """Tell up to how many rows a batch of so many may be filled up; ``max_rows`` at most."""

    def open(self, slot: SlotResources) -> Executable:
        """Make what runs it in a slot; may be called in several threads at the same time.

        BackendError if it cannot be made, for instance for want of memory.
        """

    def close(self) -> None:
        """Release the stage; its executables must have been closed before."""


class ExecutableFactory(Protocol):
    """Prepares stages for one device; thread-safe."""

    @property
    def name(self) -> str:
        """Name of the backend, for messages and metrics: ``tensorrt``."""

    def device_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Tell the type of a graph input on the device: TensorRT 8.6 has int32 for int64."""

    def as_computed(self, bundle: Bundle) -> Bundle:
        """Give a bundle with the policy and records of the arithmetic that it is run in.

        BackendError if these are damaged.
        """

    def prepare(self, spec: StageSpec) -> PreparedStage:
        """Load a stage; may take seconds.

        BackendError if it cannot be loaded; the message says which, why, and the remedy.
        """

    def close(self) -> None:
        """Release what it holds; prepared stages must have been closed before."""
