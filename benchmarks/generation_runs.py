"""Systems that generate text in one thread, as measured by :mod:`benchmarks.generation`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from offramp.calibration.data.data_sources import numpy_source
from offramp.calibration.data.scratch import ScratchSpace
from offramp.engine.backends.host import LoadedGraph
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.common.errors import BackendError, EngineError
from offramp.generation.bundle.generating_bundle import GeneratingBundle
from offramp.generation.bundle.tensor_names import ANSWER, CONFIDENCE, IDS, NEXT_STATE
from offramp.generation.compiling.prompts import read_prompts
from offramp.generation.compiling.text_options import TextCompileOptions, settle
from offramp.generation.graphs.decoder_cut import DecoderCut
from offramp.generation.graphs.decoder_export import decoder_of, load_graph
from offramp.generation.graphs.encoder_graph import encoder_graph
from offramp.generation.graphs.text_graphs import (
    ENCODER_FILE,
    FIRST_FILE,
    TextExport,
    cut_export,
    read_export,
)
from offramp.generation.scheduling import (
    NewSequence,
    RefillPolicy,
    StepPolicy,
    TextOutcome,
    TextScheduler,
    TogetherPolicy,
    TokenThresholds,
)
from offramp.generation.serving.step_loop import StepLoop, limits_of
from offramp.generation.stages.cache_slots import CacheSlots
from offramp.generation.stages.onnx_text import OnnxTextBackend

Prompts: TypeAlias = Sequence[NDArray[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSetup:
    """The unmodified model, and the common settings of all systems."""

    model: Path
    layers: int
    """Number of layers of its decoder."""
    prompts: Prompts
    pool: Prompts
    """Prompts for the random splits."""
    labels: Sequence[list[int]] = ()
    """Right answers to ``prompts``, including their end tokens; empty if they are not known."""
    most_tokens: int
    """Largest number of tokens of an answer."""
    start_token: int | None
    stop: frozenset[int]
    threads: int

    @classmethod
    def of(cls, model: Path, data: Path | None, pool: Path | None, *, threads: int) -> Self:
        """Read a model's configuration and its prompts; the pool is by default the test prompts."""
        folder = model if model.is_dir() else model.parent
        source = numpy_source(data or folder / "test.npz")
        settings = settle(TextCompileOptions(model=model, data=source, output=Path()))
        prompts = read_prompts(source, ScratchSpace())
        stop = frozenset(settings.stop_tokens)
        with np.load(data or folder / "test.npz") as arrays:
            labels = [_up_to(stop, row) for row in arrays.get("label", ())]
        if labels and len(labels) != len(prompts):
            raise ValueError(f"{source.name}: {len(labels)} labels of {len(prompts)} prompts")
        return cls(
            labels=labels,
            model=model,
            layers=len(read_export(model).decoder.layers),
            prompts=prompts,
            pool=prompts if pool is None else read_prompts(numpy_source(pool), ScratchSpace()),
            most_tokens=settings.most_tokens,
            start_token=settings.start_token,
            stop=stop,
            threads=threads,
        )

    def room(self, *, encodes: bool) -> dict[str, int]:
        """Return the lengths that a backend's slots need, in tokens, by argument."""
        longest = max(len(prompt) for prompt in (*self.prompts, *self.pool))
        if encodes:
            return {"length": self.most_tokens, "source_length": longest}
        return {"length": longest + self.most_tokens}


def _up_to(stop: frozenset[int], row: NDArray[np.int64]) -> list[int]:
    """Return the tokens of a row, up to the first that ends it."""
    ends = np.flatnonzero(np.isin(row, list(stop)))
    tokens: list[int] = row[: ends[0] + 1 if ends.size else None].tolist()
    return tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSystem:
    """A model with thresholds, and the policy that forms its batches."""

    name: str
    backend: OnnxTextBackend
    thresholds: TokenThresholds
    policy: StepPolicy = field(default_factory=RefillPolicy)

    @property
    def has_exits(self) -> bool:
        """True if tokens may leave early."""
        return self.backend.stages > 1


def whole_system(name: str, setup: TextSetup, model: Path, slots: int) -> TextSystem:
    """Load a model as it is, in one stage."""
    return _uncut(name, setup, read_export(model), slots)


def layers_system(setup: TextSetup, count: int, slots: int) -> TextSystem:
    """Load the first layers of the unmodified model, with its norm and head."""
    return _uncut(f"first {count} layers", setup, first_layers(setup.model, count), slots)


def bundle_systems(name: str, setup: TextSetup, path: Path, slots: int) -> list[TextSystem]:
    """Load a bundle as two systems: with refilled batches, and with batches that stay together."""
    bundle = GeneratingBundle.open(path)
    model = bundle.model
    room = setup.room(encodes=bool(model.encoder))
    backend = OnnxTextBackend.of(bundle, slots=slots, threads=setup.threads, **room)
    thresholds = TokenThresholds(
        version=1,
        by_stage=tuple(s.threshold for s in model.stages if s.threshold is not None),
        decay=model.decay,
        most_tokens=setup.most_tokens,
    )
    policies = {"refill": RefillPolicy(), "together": TogetherPolicy()}
    return [
        TextSystem(name=f"{name}, {way}", backend=backend, thresholds=thresholds, policy=policy)
        for way, policy in policies.items()
    ]


def _uncut(name: str, setup: TextSetup, export: TextExport, slots: int) -> TextSystem:
    graphs = cut_export(export, (), start_token=setup.start_token)
    room = setup.room(encodes=export.encoder is not None)
    backend = OnnxTextBackend(
        graphs.model, graphs.graphs.__getitem__, slots=slots, threads=setup.threads, **room
    )
    return TextSystem(name=name, backend=backend, thresholds=TokenThresholds.off(1))


def first_layers(path: Path, count: int) -> TextExport:
    """Return a model without the decoder layers after the first ``count``."""
    whole = read_export(path)
    layers = whole.decoder.layers
    if not 0 < count <= len(layers):
        raise ValueError(f"{count} layers are to be left, and the decoder has {len(layers)}")
    borders = DecoderCut(whole.decoder).borders
    proto = deepcopy(whole.decoder.proto)
    for node in proto.graph.node:
        # Only the norm and the head read the last border.
        node.input[:] = [borders[count] if name == borders[-1] else name for name in node.input]
    gone = {name for layer in layers[count:] for name in layer.inputs}
    kept = [info for info in proto.graph.input if info.name not in gone]
    del proto.graph.input[:]
    proto.graph.input.extend(kept)
    _drop_later_layers(proto.graph, whole.decoder.logits, count)
    decoder = decoder_of(proto, f"{path.name}, first {count} layers")
    if whole.encoder is None:
        return TextExport(decoder=decoder, encoder=None)
    encoder, first = load_graph(path / ENCODER_FILE), load_graph(path / FIRST_FILE)
    return TextExport(decoder=decoder, encoder=encoder_graph(encoder, first, decoder))


def _drop_later_layers(graph: Any, logits: str, count: int) -> None:
    """Keep only the logits, the new keys and values of the first layers, and their inputs."""
    caches = re.compile(rf"present\.({'|'.join(map(str, range(count)))})\.")
    outputs = [o for o in graph.output if o.name == logits or caches.match(o.name)]
    wanted, nodes = {output.name for output in outputs}, list[Any]()
    for node in reversed(graph.node):
        if wanted.intersection(node.output):
            nodes.insert(0, deepcopy(node))
            wanted.update(node.input)
    outputs = [deepcopy(output) for output in outputs]
    del graph.output[:], graph.node[:]
    graph.output.extend(outputs)
    graph.node.extend(nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopRun:
    """Answers to some prompts, and how long they took."""

    texts: list[list[int]]
    seconds: float
    token_ms: float
    """Mean time per token in ms, from the previous token, or for a first token from the request."""
    layers_run: float
    """Mean number of decoder layers that a token ran."""
    steps: int
    """Number of steps that stages ran."""
    rows_of_a_step: float

    @property
    def tokens(self) -> int:
        """Number of tokens of all answers."""
        return sum(map(len, self.texts))

    @property
    def tokens_per_s(self) -> float:
        """Goodput: tokens of answers per second."""
        return self.tokens / self.seconds


def run_loop(
    system: TextSystem, setup: TextSetup, prompts: Prompts, *, in_flight: int, batch: int
) -> LoopRun:
    """Answer prompts, ``in_flight`` at a time; BackendError if one fails."""
    return _ClosedLoop(system, setup, prompts, in_flight, batch).run()


class _ClosedLoop:
    """A closed loop: a new prompt starts when an answer ends."""

    def __init__(
        self, system: TextSystem, setup: TextSetup, prompts: Prompts, in_flight: int, batch: int
    ) -> None:
        self._system, self._setup, self._prompts = system, setup, prompts
        self._in_flight = in_flight
        limits = replace(limits_of(system.backend, batch=batch), slots=in_flight)
        scheduler = TextScheduler(limits, system.policy, system.thresholds, queue=in_flight)
        self._loop = StepLoop(system.backend, scheduler, self._publish, time.perf_counter)
        self._texts: list[list[int]] = [[] for _ in prompts]
        self._last_s = [0.0] * len(prompts)
        self._between_s: list[float] = []
        self._following = self._open = 0

    def run(self) -> LoopRun:
        begun_s, before = time.perf_counter(), _layer_tokens(self._system)
        self._submit()
        while self._loop.turn():
            self._submit()
        seconds = time.perf_counter() - begun_s
        counts = self._loop.counter.counts()
        return LoopRun(
            texts=self._texts,
            seconds=seconds,
            token_ms=1e3 * float(np.mean(self._between_s)),
            layers_run=(_layer_tokens(self._system) - before) / sum(map(len, self._texts)),
            steps=sum(counts.steps),
            rows_of_a_step=sum(counts.rows) / sum(counts.steps),
        )

    def _submit(self) -> None:
        while self._open < self._in_flight and self._following < len(self._prompts):
            number, prompt = self._following, self._prompts[self._following]
            new = NewSequence(
                number=number,
                prompt_tokens=len(prompt),
                most_tokens=self._setup.most_tokens,
                stop=self._setup.stop,
            )
            self._following += 1
            self._open += 1
            self._last_s[number] = time.perf_counter()
            self._loop.submit(new, prompt)

    def _publish(self, outcome: TextOutcome, error: EngineError | None) -> None:
        if error is not None:
            raise BackendError(f"{self._system.name}: {error}") from error
        now_s = time.perf_counter()
        for given in outcome.given:
            self._texts[given.sequence].append(given.token)
            self._between_s.append(now_s - self._last_s[given.sequence])
            self._last_s[given.sequence] = now_s
        self._open -= len(outcome.ended)


def _layer_tokens(system: TextSystem) -> int:
    return int(system.backend.statistics()["layer_tokens"])


@dataclass(slots=True)
class StepTimes:
    """Seconds in graphs and in copies of caches."""

    KINDS: ClassVar[tuple[str, ...]] = ("layers", "head", "propagation", "encoder", "caches")
    seconds: dict[str, float] = field(default_factory=dict)

    def timed(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that makes a call and counts its time."""

        def counted(*arguments: Any, **named: Any) -> Any:
            begun_s = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                spent_s = time.perf_counter() - begun_s
                self.seconds[kind] = self.seconds.get(kind, 0.0) + spent_s

        return counted

    def shares(self, total_s: float) -> dict[str, float]:
        """Return the shares of a run; ``python`` is the rest."""
        found = {kind: self.seconds.get(kind, 0.0) / total_s for kind in self.KINDS}
        return {**found, "python": 1 - sum(found.values())}


@contextmanager
def timed_graphs() -> Iterator[StepTimes]:
    """Count the time of backends that are loaded, and run, while this lasts."""
    times = StepTimes()
    load = OnnxRuntimeBackend.load

    def timed_load(self: OnnxRuntimeBackend, *arguments: Any) -> LoadedGraph:
        graph = load(self, *arguments)
        kind = _kind_of(graph)
        return graph._replace(execute=times.timed(kind, graph.execute))

    read, write = (times.timed("caches", call) for call in (CacheSlots.read, CacheSlots.write))
    with (
        mock.patch.object(OnnxRuntimeBackend, "load", timed_load),
        mock.patch.multiple(CacheSlots, read=read, write=write),
    ):
        yield times


def _kind_of(graph: LoadedGraph) -> str:
    """Return the purpose of a generating model's graph, from the names of its tensors."""
    given: Mapping[str, None] = dict.fromkeys(graph.given)
    if ANSWER in given or CONFIDENCE in given or list(given) == [NEXT_STATE]:
        return "head"  # or the judge or the adapter of an exit
    if NEXT_STATE in given:
        return "layers"
    return "encoder" if IDS in graph.read else "propagation"
