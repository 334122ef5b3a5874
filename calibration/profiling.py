"""Measure latencies on this machine: the inference times that every prediction starts from.

Each round runs every graph once, so that what else the machine does hits all of them alike. The
lower quartile over rounds is taken: a machine that also does other things only ever adds time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from offramp.bundle import NEVER
from offramp.engine.backends.onnxruntime import make_session
from offramp.engine.exit_check import confidence_of, exits

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
ROUNDS = 15
QUANTILE = 0.25
WARM_UP_ROUNDS = 2

Tensors = Mapping[str, NDArray[Any]]


class TimedGraph:
    """A loaded graph that can be timed on the inputs that it reads."""

    def __init__(self, model: bytes, threads: int) -> None:
        """Load."""
        self.session: ort.InferenceSession = make_session(model, threads)
        self._inputs = [tensor.name for tensor in self.session.get_inputs()]
        self._outputs = [tensor.name for tensor in self.session.get_outputs()]

    def run(self, tensors: Tensors) -> dict[str, NDArray[Any]]:
        """Run once; gives all outputs by name."""
        values = self.session.run(self._outputs, {name: tensors[name] for name in self._inputs})
        return dict(zip(self._outputs, values, strict=True))

    def time_ms(self, tensors: Tensors) -> float:
        """Run once; gives the milliseconds."""
        feed = {name: tensors[name] for name in self._inputs}
        started = time.perf_counter()
        self.session.run(self._outputs, feed)
        return (time.perf_counter() - started) * 1e3


def time_calls(timers: Sequence[Callable[[], float]], *, rounds: int = ROUNDS) -> list[float]:
    """Milliseconds of each, interleaved; a timer runs once and gives its milliseconds."""
    times = [[timer() for timer in timers] for _ in range(rounds + WARM_UP_ROUNDS)]
    typical: list[float] = np.quantile(times[WARM_UP_ROUNDS:], QUANTILE, axis=0).tolist()
    return typical


@dataclass(frozen=True, slots=True, kw_only=True)
class BackboneTimes:
    """Milliseconds of the source model and of its segments."""

    batch_sizes: tuple[int, ...]
    source_ms: tuple[float, ...]
    """By batch size."""
    segments_ms: tuple[tuple[float, ...], ...]
    """[segments][batch sizes], scaled to add up to ``source_ms``."""
    stages_ms: tuple[float, ...]
    """By batch size: what one more stage costs, everything in it."""


def profile_backbone(
    source: bytes,
    segments: Sequence[bytes],
    samples: Callable[[int], Tensors],
    *,
    classes: int,
    threads: int,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    progress: Callable[[int], None] = lambda _: None,
) -> BackboneTimes:
    """Time the source model, its segments, and the segments as a chain.

    The segments' own times are scaled to add up to the source model's. What the chain takes
    beyond it is the cost of its borders: layout changes, lost fusion, calls, exit checks, and
    caches that went cold. It is paid at active exits only, so it is kept apart.

    Args:
        source: The whole model.
        segments: Its segments, in order.
        samples: Gives model inputs of a batch size.
        classes: Of the answer.
        threads: Of ONNX Runtime.
        batch_sizes: To measure at.
        progress: Called with 1 per batch size.
    """
    source_graph = TimedGraph(source, threads)
    graphs = [TimedGraph(segment, threads) for segment in segments]
    rows: list[tuple[float, list[float], float]] = []
    for size in batch_sizes:
        inputs = samples(size)
        chain = _Chain(graphs, np.zeros((size, classes), np.float32))
        tensors = chain.run(inputs)
        timers = [lambda t=tensors, g=g: g.time_ms(t) for g in (source_graph, *graphs)]
        timers.append(lambda i=inputs, c=chain: c.time_ms(i))
        total, *times, chained = time_calls(timers)
        scaled = [t * total / sum(times) for t in times]
        rows.append((total, scaled, max(chained - total, 0.0) / max(len(graphs) - 1, 1)))
        progress(1)
    totals, columns, stages = zip(*rows, strict=True)
    return BackboneTimes(
        batch_sizes=tuple(batch_sizes),
        source_ms=totals,
        segments_ms=tuple(zip(*columns, strict=True)),
        stages_ms=stages,
    )


class _Chain:
    """Segments one after the other, with an exit check after each that nobody passes."""

    def __init__(self, graphs: Sequence[TimedGraph], answer: NDArray[np.float32]) -> None:
        self._graphs = graphs
        self._answer = answer

    def run(self, inputs: Tensors) -> dict[str, NDArray[Any]]:
        """The model's inputs and every cut tensor."""
        tensors = dict(inputs)
        for graph in self._graphs:
            tensors |= graph.run(tensors)
            np.count_nonzero(exits(confidence_of(self._answer, "logits"), NEVER))
        return tensors

    def time_ms(self, inputs: Tensors) -> float:
        """Run once; gives the milliseconds."""
        started = time.perf_counter()
        self.run(inputs)
        return (time.perf_counter() - started) * 1e3


def profile_heads(
    heads: Sequence[Sequence[bytes]],
    empty: Sequence[bytes],
    segments: Sequence[bytes],
    samples: Callable[[int], Tensors],
    *,
    threads: int,
    batch_sizes: Sequence[int],
    progress: Callable[[int], None] = lambda _: None,
) -> list[list[list[float]]]:
    """Time heads on the cut tensors that they read.

    Args:
        heads: Per candidate, the exits' graphs to compare.
        empty: Per candidate, a graph that reads the same tensors and does next to nothing; its
            time is taken off.
        segments: Those that end at the candidates come first.
        samples: Gives model inputs of a batch size.
        threads: Of ONNX Runtime.
        batch_sizes: To measure at.
        progress: Called with 1 per batch size and candidate.

    Returns:
        Milliseconds [candidates][heads][batch_sizes], at least 0.
    """
    graphs = [TimedGraph(segment, threads) for segment in segments]
    loaded = [[TimedGraph(h, threads) for h in (nothing, *per_exit)]
              for nothing, per_exit in zip(empty, heads, strict=True)]  # fmt: skip
    result: list[list[list[float]]] = [[[] for _ in per_exit] for per_exit in heads]
    for size in batch_sizes:
        tensors = _all_tensors(graphs, samples(size))
        for index, candidates in enumerate(loaded):
            timers = [lambda t=tensors, g=g: g.time_ms(t) for g in candidates]
            base, *times = time_calls(timers, rounds=2 * ROUNDS)
            for times_of_head, value in zip(result[index], times, strict=True):
                times_of_head.append(max(value - base, 0.0))
            progress(1)
    return result


def _all_tensors(graphs: Sequence[TimedGraph], inputs: Tensors) -> dict[str, NDArray[Any]]:
    """The model's inputs and every cut tensor, by running the segments once."""
    tensors = dict(inputs)
    for graph in graphs:
        tensors |= graph.run(tensors)
    return tensors
