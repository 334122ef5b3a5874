"""How a stage runs in a slot: what has its shapes and its CUDA graph, and what a batch adds."""

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
    """A stage with what runs it in one slot."""

    facts: StageFacts
    executable: Executable
    graphs: bool
    """Whether to capture it; not any more once that failed."""


@dataclass(slots=True, kw_only=True, eq=False)
class Execution:
    """A stage's executable on so many rows of a shape at certain addresses.

    All batches that are padded to as many rows share it, with its CUDA graph.
    """

    stage: OpenStage
    number: int
    """Of the graph, for what it is captured from; never used twice in a slot."""
    rows: int
    """With those that the batch is filled up with."""
    shapes: dict[str, Shape]
    addresses: dict[str, int]
    """Of the batch's tensors, and of what the stage gives."""
    given: dict[str, RowPart]
    """What a row of each output is."""
    carried: Layout | None
    """Of what goes on, in the next input area; ``None`` after the last stage."""
    targets: dict[str, int]
    """Addresses of what goes on there, by name."""
    runs: dict[int, StageRun] = field(default_factory=dict)
    """By the rows of the batch."""
    times: int = 0
    """How often it was run without a graph."""
    graph: Graph | None = None

    def enqueue(self, stream: Stream) -> None:
        """Enqueue the stage, or launch its graph."""
        if self.graph is not None:
            self.graph.launch(stream)
            return
        prepares = self.times == 1 and self.stage.graphs
        self._enqueue(stream, self.number if prepares else None)

    def was_run(self, driver: Driver, stream: Stream) -> bool:
        """Note that it was, and that the host has waited; after the second time it is captured.

        False if it could not be: then the stage does without graphs.
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
        """Close the graph, and let go of what it was captured from; the host has waited."""
        graph, self.graph = self.graph, None
        with ExitStack() as releases:  # last in, first out
            if self.times:  # before, it was not prepared for a graph
                releases.callback(self.stage.executable.forget, self.number)
            if graph is not None:
                releases.callback(graph.close)

    def _enqueue(self, stream: Stream, graph: int | None) -> None:
        self.stage.executable.enqueue(self.shapes, self.addresses, stream, graph=graph)

    def _capture(self, driver: Driver, stream: Stream) -> bool:
        """To be called right after it ran with these very shapes, as TensorRT asks."""
        self.graph = driver.capture(stream, lambda: self._enqueue(stream, self.number))
        if self.graph is None:
            self.stage.graphs = False
            self.stage.executable.forget(self.number)
        return self.graph is not None


@dataclass(slots=True, kw_only=True, eq=False)
class StageRun:
    """A stage's run on a batch of so many rows, worked out once."""

    execution: Execution
    rows: int
    """Of the batch."""
    target: int
    """The area to which goes what goes on."""
    targets: tuple[int, ...]
    """Addresses of what goes on there."""
    sources: tuple[int, ...]
    """Addresses of what goes on, before rows are taken out."""
    passes: bool
    """Whether some of it are inputs that pass through."""
    fills: tuple[tuple[int, int, int], ...]
    """(target, source, bytes) of the rows that the batch is filled up with."""
    copies: tuple[tuple[int, int, int], ...]
    """The same of inputs that pass through, where nobody can exit."""
    compacts: bool
    """Whether the stage end brings what goes on to the next input area."""
    answer: NDArray[Any] | None
    """[rows, classes], in pinned memory."""
    answer_bytes: NDArray[np.uint8]
    answer_address: int
    confidence: NDArray[np.float32]
    """[rows], in pinned memory, as the next two."""
    survivors: NDArray[np.int32]
    """[rows], of which as many are valid as there are."""
    survivor_count: NDArray[np.int32]
    """[1]."""
    threshold: float = -1.0
    end: Launch | None = None
    """The launch after the stage."""

    @property
    def facts(self) -> StageFacts:
        """The stage's."""
        return self.execution.stage.facts
