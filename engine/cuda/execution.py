"""Execution of a stage in a slot: its shapes and CUDA graph, and the parts of each batch."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.engine.cuda.device_batch import Layout, RowPart
from offramp.engine.cuda.driver import Driver, Graph, Stream
from offramp.engine.cuda.executable import Executable, Shape
from offramp.engine.cuda.prepared_stages import StageFacts
from offramp.engine.kernels.kernel_arguments import Launch

_TIMES_UNTIL_CAPTURE = 2


@dataclass(slots=True, kw_only=True, eq=False)
class OpenStage:
    """A stage with its executable in one slot."""

    facts: StageFacts
    executable: Executable
    graphs: bool
    """``True`` if the stage should be captured into CUDA graphs; ``False`` after a failed
    capture."""


@dataclass(slots=True, kw_only=True, eq=False)
class Execution:
    """A stage's executable with fixed rows, shapes and addresses.

    All batches that are padded to this number of rows share it, with its CUDA graph.
    """

    stage: OpenStage
    number: int
    """Number of the graph, for the executable; never used twice in a slot."""
    rows: int
    """Number of rows, including padding."""
    shapes: dict[str, Shape]
    addresses: dict[str, int]
    """Addresses of the batch's tensors, and of the stage's outputs."""
    given: dict[str, RowPart]
    """Row part (:data:`.RowPart`) of each output."""
    carried: Layout | None
    """Layout of the carried tensors (``StageSpec.carried``), in the next input area; ``None`` after
    the last stage."""
    targets: dict[str, int]
    """Addresses of the carried tensors there, by name."""
    runs: dict[int, StageRun] = field(default_factory=dict)
    """Runs by the rows of the batch."""
    times: int = 0
    """Number of runs without a graph."""
    graph: Graph | None = None

    def enqueue(self, stream: Stream) -> None:
        """Enqueue the stage, or launch its graph."""
        if self.graph is not None:
            self.graph.launch(stream)
            return
        prepares = self.times == 1 and self.stage.graphs
        self._enqueue(stream, self.number if prepares else None)

    def was_run(self, driver: Driver, stream: Stream) -> bool:
        """Count a run after the host has waited; after the second run, capture it.

        Returns ``False`` if it could not be captured: then the stage does not use graphs.
        """
        if self.graph is not None:
            return True
        self.times += 1
        return (
            self.times != _TIMES_UNTIL_CAPTURE
            or not self.stage.graphs
            or self._capture(driver, stream)
        )

    def release(self) -> None:
        """Close the graph, and release its preparation; the host has waited."""
        graph, self.graph = self.graph, None
        with ExitStack() as releases:  # last in, first out
            if self.times:  # otherwise it was not prepared for a graph
                releases.callback(self.stage.executable.forget, self.number)
            if graph is not None:
                releases.callback(graph.close)

    def _enqueue(self, stream: Stream, graph: int | None) -> None:
        self.stage.executable.enqueue(self.shapes, self.addresses, stream, graph=graph)

    def _capture(self, driver: Driver, stream: Stream) -> bool:
        """Capture right after a run with the same shapes, as TensorRT requires."""
        self.graph = driver.capture(stream, lambda: self._enqueue(stream, self.number))
        if self.graph is None:
            self.stage.graphs = False
            self.stage.executable.forget(self.number)
        return self.graph is not None


@dataclass(slots=True, kw_only=True, eq=False)
class StageRun:
    """A stage's run on a batch of a number of rows, prepared once."""

    execution: Execution
    rows: int
    """Number of rows of the batch, without padding."""
    target: int
    """Area of the carried tensors."""
    targets: tuple[int, ...]
    """Addresses of the carried tensors there."""
    sources: tuple[int, ...]
    """Addresses of the carried tensors while they still have the rows that leave."""
    passes: bool
    """``True`` if some carried tensors are inputs that pass through."""
    fills: tuple[tuple[int, int, int], ...]
    """(target, source, bytes) of the padding rows."""
    copies: tuple[tuple[int, int, int], ...]
    """(target, source, bytes) of inputs that pass through, for stages without an exit."""
    compacts: bool
    """``True`` if the stage end copies the carried tensors to the next input area."""
    answer: NDArray[Any] | None
    """Answers in pinned memory, [rows, classes]."""
    answer_bytes: NDArray[np.uint8]
    answer_address: int
    confidence: NDArray[np.float32]
    """Confidences in pinned memory, [rows]; the next two are pinned, too."""
    survivors: NDArray[np.int32]
    """Numbers of the surviving rows, [rows], of which the first ``survivor_count`` are valid."""
    survivor_count: NDArray[np.int32]
    """Number of surviving rows, int32[1]."""
    threshold: float = -1.0
    end: Launch | None = None
    """Launch of the kernel after the stage."""

    @property
    def facts(self) -> StageFacts:
        """Facts about the stage that are known before it runs."""
        return self.execution.stage.facts
