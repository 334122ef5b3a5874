"""Measures latencies on this machine: the times of parts that all predictions use.

:mod:`~offramp.engine.common.timing` runs the rounds, and :mod:`.estimates` computes estimates from
them; *borders*, the switches from one stage to the next, are explained there. In all functions
here, ``samples`` returns model inputs of a batch size, ``threads`` are those of ONNX Runtime,
``batch_sizes`` rise, and ``progress`` is called with 1 after each of the first ``effort.least``
sweeps, or, when heads are timed, after every candidate.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from offramp.calibration.measure.estimates import (
    BackboneTimes,
    StageCosts,
    backbone_of,
    heads_of,
    sets_of_exits,
    stages_of,
    widest_ratio,
)
from offramp.engine.backends import Slot
from offramp.engine.backends.host import HostBatch
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend, make_session
from offramp.engine.common.timing import (
    Effort,
    Timed,
    clock_of,
    disturbances,
    repeats_of,
    time_rounds,
)
from offramp.engine.graphs.external_weights import WeightForm
from offramp.engine.stages.loaded import Loaded, fits_together
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import Mode, Plan, StageSpec

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
HEAD_EFFORT = Effort(least=16, most=16)
"""Effort for heads, which are short: this many sweeps take a fraction of a second."""

Tensors = Mapping[str, NDArray[Any]]


class TimedGraph:
    """A loaded graph that can be timed on the inputs that it reads."""

    def __init__(self, model: bytes, threads: int, form: WeightForm = WeightForm.PACKED) -> None:
        self._clock = clock_of(threads)
        self.session: ort.InferenceSession = make_session(model, threads, form=form)
        self._inputs = [tensor.name for tensor in self.session.get_inputs()]
        self._outputs = [tensor.name for tensor in self.session.get_outputs()]

    def run(self, tensors: Tensors) -> dict[str, NDArray[Any]]:
        """Run once; return all outputs by name."""
        values = self.session.run(self._outputs, {name: tensors[name] for name in self._inputs})
        return dict(zip(self._outputs, values, strict=True))

    def time_ms(self, tensors: Tensors) -> float:
        """Run once; return the milliseconds."""
        feed = {name: tensors[name] for name in self._inputs}
        started = self._clock()
        self.session.run(self._outputs, feed)
        return (self._clock() - started) * 1e3


def profile_backbone(
    source: bytes,
    segments: Sequence[bytes],
    samples: Callable[[int], Tensors],
    *,
    threads: int,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    effort: Effort | None = None,
    quantised: bytes | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> BackboneTimes:
    """Time the source model and its segments.

    The segments' times are scaled to sum to the source model's: borders only cost time at active
    exits, so their costs are separate (:func:`profile_stages`). In a cascade ``quantised`` is the
    quantised model as one graph. The times of its segments are scaled to sum to the time of that
    graph; the last segment is the source model.
    """
    is_cascade = quantised is not None
    wholes = [source] if quantised is None else [source, quantised]
    parts = segments[:-1] if is_cascade else segments
    makers = [partial(TimedGraph, graph, threads) for graph in (*wholes, *parts)]
    timed = Loaded(makers, together=fits_together(source))
    places = range(len(wholes), len(timed))
    tensors = _all_tensors((timed[place] for place in places), samples(batch_sizes[-1]))
    found = _time(
        timed,
        lambda graph, size: graph.time_ms(_first(tensors, size)),
        batch_sizes,
        effort=effort,
        progress=progress,
    )
    return replace(
        backbone_of(found.rounds, batch_sizes, is_cascade=is_cascade),
        disturbed=disturbances("segments", found.load, found.rounds),
    )


def profile_stages(
    source: bytes,
    plan: Callable[[Sequence[int]], Sequence[StageSpec]],
    samples: Callable[[int], Tensors],
    *,
    exits_ms: Sequence[Sequence[float]],
    until_ms: Sequence[Sequence[float]] = (),
    threads: int,
    batch_sizes: Sequence[int],
    effort: Effort | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> StageCosts:
    """Measure the costs of the borders between stages, exit by exit.

    Several sets of exits run as they will be served, with thresholds that no sample reaches. The
    time of a set, minus the source model in the same round and the heads, is the cost of its
    borders: layout changes, lost fusion, calls, exit checks, and cold caches. ``plan`` returns the
    stages with some exits active at ``NEVER``; ``exits_ms`` [exits][batch sizes] are the times of
    the heads. In a cascade ``until_ms``, of the same form, is the time of the quantised model until
    each exit.
    """
    sets = sets_of_exits(len(exits_ms))
    if not sets:
        nothing = (0,) * len(batch_sizes)
        return StageCosts(stages_ms=(), added_widths=(0.0,) * len(nothing), rounds=nothing)
    backend = OnnxRuntimeBackend(threads=threads)
    slot, clock, inputs = backend.open_slot(), clock_of(threads), samples(batch_sizes[-1])

    def load(set_: Sequence[int]) -> Pipeline:
        stages = tuple(plan(set_))
        return Pipeline(backend, Plan(stages=stages, policy_version=0, mode=Mode.LEAVE))

    makers: list[Callable[[], TimedGraph | Pipeline]] = [partial(TimedGraph, source, threads)]
    makers += [partial(load, set_) for set_ in sets]
    timed = Loaded(makers, together=fits_together(source))

    def time_ms(system: TimedGraph | Pipeline, size: int) -> float:
        rows = _first(inputs, size)
        if isinstance(system, TimedGraph):
            return system.time_ms(rows)
        return _staged_ms(system, slot, rows, clock)

    found = _time(timed, time_ms, batch_sizes, effort=effort, progress=progress)
    first = timed[1]
    assert not isinstance(first, TimedGraph)
    crossing = _crossing_bytes(first, slot, inputs)
    slot.close()
    return replace(
        stages_of(
            found.rounds,
            batch_sizes,
            sets,
            crossing,
            exits_ms,
            front_ms=[until_ms[set_[-1]] for set_ in sets] if until_ms else (),
        ),
        disturbed=disturbances("stages", found.load, found.rounds),
    )


_System = TypeVar("_System")


def _time(
    systems: Loaded[_System],
    time_ms: Callable[[_System, int], float],
    batch_sizes: Sequence[int],
    *,
    effort: Effort | None,
    progress: Callable[[int], None],
) -> Timed:
    """Time systems at some batch sizes; a system that was reloaded first runs once untimed."""
    warm: set[tuple[int, int]] = set()

    def timed(place: int, size: int) -> float:
        system = systems[place]
        if not systems.together and (place, size) not in warm:
            warm.difference_update([known for known in warm if known[0] != place])
            warm.add((place, size))
            time_ms(system, size)
        return time_ms(system, size)

    return time_rounds(
        [[partial(timed, place, size) for place in range(len(systems))] for size in batch_sizes],
        repeats_of(batch_sizes),
        effort or Effort(),
        widest_ratio,
        progress=progress,
        one_by_one=not systems.together,
    )


def _staged_ms(
    pipeline: Pipeline, slot: Slot, tensors: Tensors, clock: Callable[[], float]
) -> float:
    """Run a batch through all stages once; return the milliseconds."""
    started = clock()
    collections.deque(pipeline.run(slot, tensors), maxlen=0)
    return (clock() - started) * 1e3


def _crossing_bytes(pipeline: Pipeline, slot: Slot, inputs: Tensors) -> NDArray[np.float64]:
    """Return the bytes of a sample's tensors that cross each border: float64[exits]."""
    batch, found = slot.upload(inputs), []
    for index in range(len(pipeline.plan.stages) - 1):
        carry = pipeline.step(slot, index, batch).result.carry
        assert isinstance(carry, HostBatch)
        found.append(sum(tensor.nbytes for tensor in carry.tensors.values()) / len(carry))
        batch = carry
    return np.array(found)


def profile_heads(
    heads: Sequence[Sequence[bytes]],
    empty: Sequence[bytes],
    segments: Sequence[bytes],
    samples: Callable[[int], Tensors],
    *,
    threads: int,
    batch_sizes: Sequence[int],
    effort: Effort | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> list[list[list[float]]]:
    """Time the heads of every candidate on the cut tensors that they read.

    The time of the candidate's ``empty`` graph, which reads the same tensor and does almost
    nothing, is subtracted in the same round. Segments that end at the candidates come first.
    Returns milliseconds [candidates][heads][batch sizes], rising with the batch size, at least 0.
    """
    if not heads:
        return []
    tensors = _all_tensors((TimedGraph(s, threads) for s in segments), samples(batch_sizes[-1]))
    views = [_first(tensors, size) for size in batch_sizes]
    result: list[list[list[float]]] = []
    for nothing, per_exit in zip(empty, heads, strict=True):
        loaded = [TimedGraph(graph, threads) for graph in (nothing, *per_exit)]
        found = time_rounds(
            [[partial(graph.time_ms, view) for graph in loaded] for view in views],
            repeats_of(batch_sizes),
            effort or HEAD_EFFORT,
            lambda _: 0.0,
        )
        result.append(heads_of(found.rounds))
        progress(1)
    return result


def _first(tensors: Tensors, rows: int) -> dict[str, NDArray[Any]]:
    """Return a smaller batch: the first rows of every tensor, not copied."""
    return {name: array[:rows] for name, array in tensors.items()}


def _all_tensors(graphs: Iterable[TimedGraph], inputs: Tensors) -> dict[str, NDArray[Any]]:
    """Return the model's inputs and every cut tensor, by running the segments once."""
    tensors = dict(inputs)
    for graph in graphs:
        tensors |= graph.run(tensors)
    return tensors
