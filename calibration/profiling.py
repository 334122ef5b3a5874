"""Measure latencies on this machine: the inference times that every prediction starts from.

Each round runs every graph once, so that what else the machine does hits all of them alike. The
lower quartile over rounds is taken: a machine that also does other things only ever adds time.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from offramp.engine.backends import Slot
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend, make_session
from offramp.engine.pipeline import Pipeline
from offramp.engine.plan import Mode, Plan, StageSpec

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

    The segments' own times are scaled to add up to the source model's: what a border costs is
    paid at active exits only, so it belongs to no segment (:func:`profile_stages`).

    Args:
        source: The whole model.
        segments: Its segments, in order.
        samples: Gives model inputs of a batch size.
        threads: Of ONNX Runtime.
        batch_sizes: To measure at.
        progress: Called with 1 per batch size.
    """
    graphs = [TimedGraph(segment, threads) for segment in segments]
    timed = [TimedGraph(source, threads), *graphs]
    totals: list[float] = []
    columns: list[list[float]] = []
    for size in batch_sizes:
        tensors = _all_tensors(graphs, samples(size))
        total, *times = time_calls([partial(graph.time_ms, tensors) for graph in timed])
        totals.append(total)
        columns.append([t * total / sum(times) for t in times])
        progress(1)
    return BackboneTimes(
        batch_sizes=tuple(batch_sizes),
        source_ms=tuple(totals),
        segments_ms=tuple(zip(*columns, strict=True)),
    )


def profile_stages(
    source: bytes,
    stages: Sequence[StageSpec],
    samples: Callable[[int], Tensors],
    *,
    exits_ms: Sequence[Sequence[float]],
    threads: int,
    batch_sizes: Sequence[int],
) -> tuple[float, ...]:
    """Time what one more stage costs, by batch size.

    All exits run as they will be served, with thresholds that nobody reaches. What that takes
    beyond the source model and the heads is the cost of the borders: layout changes, lost fusion,
    calls, exit checks, and caches that went cold.

    Args:
        source: The whole model.
        stages: Of a plan with every exit active at ``NEVER``.
        samples: Gives model inputs of a batch size.
        exits_ms: [exits][batch sizes]: the heads' own times.
        threads: Of ONNX Runtime.
        batch_sizes: To measure at.

    Returns:
        Milliseconds per batch and border, at least 0; zeros where there is no exit.
    """
    if len(stages) < 2:
        return (0.0,) * len(batch_sizes)
    backend = OnnxRuntimeBackend(threads=threads)
    pipeline = Pipeline(backend, Plan(stages=tuple(stages), policy_version=0, mode=Mode.LEAVE))
    slot, graph = backend.open_slot(), TimedGraph(source, threads)
    result = []
    for column, size in enumerate(batch_sizes):
        tensors = samples(size)
        timers = [partial(graph.time_ms, tensors), partial(_staged_ms, pipeline, slot, tensors)]
        whole, staged = time_calls(timers)
        heads = sum(row[column] for row in exits_ms)
        result.append(max(staged - whole - heads, 0.0) / (len(stages) - 1))
    slot.close()
    return tuple(result)


def _staged_ms(pipeline: Pipeline, slot: Slot, tensors: Tensors) -> float:
    """Run a batch through all stages once; gives the milliseconds."""
    started = time.perf_counter()
    collections.deque(pipeline.run(slot, tensors), maxlen=0)
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
            timers = [partial(graph.time_ms, tensors) for graph in candidates]
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
