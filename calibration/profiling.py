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


def time_graphs(
    graphs: Sequence[TimedGraph], tensors: Tensors, *, rounds: int = ROUNDS
) -> list[float]:
    """Milliseconds of each graph on the same tensors, interleaved."""
    times = [
        [graph.time_ms(tensors) for graph in graphs] for _ in range(rounds + WARM_UP_ROUNDS)
    ]
    typical: list[float] = np.quantile(times[WARM_UP_ROUNDS:], QUANTILE, axis=0).tolist()
    return typical


@dataclass(frozen=True, slots=True, kw_only=True)
class BackboneTimes:
    """Milliseconds of the source model and of its segments."""

    source_ms: tuple[float, ...]
    """By batch size."""
    segments_ms: tuple[tuple[float, ...], ...]
    """[segments][batch sizes], scaled to add up to ``source_ms``."""
    borders_ms: tuple[float, ...]
    """By batch size: what the chain of segments takes beyond the source model, per border."""


def profile_backbone(
    source: bytes,
    segments: Sequence[bytes],
    samples: Callable[[int], Tensors],
    *,
    threads: int,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    progress: Callable[[int], None] = lambda _: None,
) -> BackboneTimes:
    """Time the source model and its segments.

    The segments are timed as graphs of their own and scaled to add up to the source model's
    time: what a border costs is paid at active exits only, so it is kept apart.
    """
    source_graph = TimedGraph(source, threads)
    graphs = [TimedGraph(segment, threads) for segment in segments]
    source_ms: list[float] = []
    columns: list[list[float]] = []
    borders_ms: list[float] = []
    for size in batch_sizes:
        tensors = _all_tensors(graphs, samples(size))
        total, *times = time_graphs([source_graph, *graphs], tensors)
        source_ms.append(total)
        columns.append([t * total / sum(times) for t in times])
        borders_ms.append(max(sum(times) - total, 0.0) / max(len(times) - 1, 1))
        progress(1)
    return BackboneTimes(
        source_ms=tuple(source_ms),
        segments_ms=tuple(zip(*columns, strict=True)),
        borders_ms=tuple(borders_ms),
    )


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
            base, *times = time_graphs(candidates, tensors, rounds=2 * ROUNDS)
            for times_of_head, value in zip(result[index], times, strict=True):
                times_of_head.append(max(value - base, 0.0))
            progress(1)
    return result


def measure_overhead_ms(empty: bytes, cut: NDArray[Any], classes: int) -> float:
    """Cost of one more stage: a call of ONNX Runtime, the exit check, the compaction.

    Args:
        empty: A graph that reads a cut tensor and does next to nothing.
        cut: That tensor, for a batch.
        classes: Of the answer.
    """
    session = make_session(empty, 1)
    feed = {session.get_inputs()[0].name: cut}
    answer = np.zeros((len(cut), classes), np.float32)
    survivors = np.arange(len(cut) // 2)

    def once() -> None:
        session.run(None, feed)
        leaving = exits(confidence_of(answer, "logits"), 0.5)
        np.flatnonzero(leaving)
        np.flatnonzero(~leaving)
        cut.take(survivors, axis=0)

    times = []
    for _ in range(200):
        started = time.perf_counter()
        once()
        times.append(time.perf_counter() - started)
    return float(np.quantile(times, QUANTILE)) * 1e3


def _all_tensors(graphs: Sequence[TimedGraph], inputs: Tensors) -> dict[str, NDArray[Any]]:
    """The model's inputs and every cut tensor, by running the segments once."""
    tensors = dict(inputs)
    for graph in graphs:
        tensors |= graph.run(tensors)
    return tensors
