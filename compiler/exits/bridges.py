"""Exits whose heads are bridges from a cut point to the model's own end, as in PAME (5.1).

A bridge is made from all of the model after the exit's cut point. Consecutive blocks whose cut
tensors have the same shape are a region. Of each later region only the first block, which changes
the shape, is kept. Then comes the model's own head, so the answer has the model's form. Weights are
copies of the model's (5.2, transfer), under names with the bridge's prefix.

The head begins either at the last cut point, or after the last block, where hardly any work is
left. With the second choice bridges are shorter: cheaper, but with less capacity.

Bridges are built, trained, timed and judged like pooled heads. If an answer has positions, pooled
heads cannot answer, so all exits are bridges.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

import numpy as np
import onnx
from onnx import TensorProto

from offramp.bundle import Answer, Head
from offramp.calibration.data.dataset import Dataset
from offramp.calibration.data.errors import UntrainableError
from offramp.calibration.torch.bridge_training import TrainedBridge, count_samples, train_bridges
from offramp.calibration.torch.torch_graph import REMEDY, check_trainable
from offramp.compiler.common.options import CompileOptions
from offramp.compiler.cuts.cuts import CutPoint
from offramp.compiler.cuts.slicing import Sliced
from offramp.compiler.exits.endings import (
    CONFIDENCE,
    DescribedTensor,
    PartBuilder,
    add_confidence,
    add_counts,
    add_principal,
    exit_prefix,
)
from offramp.compiler.exits.exits import BuiltExit, FoundExits, judge
from offramp.compiler.exits.feature_recording import augmentation
from offramp.compiler.exits.timed_model import TimedModel
from offramp.compiler.graphs.graph import emptied, rename_graph
from offramp.compiler.graphs.shapes import TensorType, declared_types
from offramp.compiler.graphs.source_model import SourceModel
from offramp.compiler.graphs.tail import giving
from offramp.engine.graphs.assembly import assemble

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
BRIDGE = Head(kind="bridge")
_OURS = re.compile(r"offramp_exit_\d+/bridge/")
"""Pattern of the names of operators in a bridge."""
TRAINED_BRIDGES = 4
"""Largest number of bridges that are trained completely: training one costs as much as some blocks
of the model."""
SCREENING_SAMPLES = 1500
SCREENING_EPOCHS = 2
"""Number of epochs in the short training of all bridges, on ``SCREENING_SAMPLES`` samples."""


def needs_bridges(answer: Answer, options: CompileOptions) -> bool:
    """Return whether exits may be bridges: the user asked for them, or answers have positions."""
    return options.building.heads in ("bridges", "both") or answer.task.is_dense


def check_bridges(sliced: Sliced, options: CompileOptions) -> CompileOptions:
    """Raise UntrainableError if bridges have operators that cannot be trained; nothing is run yet.

    With ``--heads both`` a warning is logged instead, and the returned options have pooled heads
    only.
    """
    answer = sliced.model.answer
    if not needs_bridges(answer, options):
        return options
    remedy = REMEDY
    if answer.task.is_dense:
        remedy = f"export the model without them: answers of {answer.task.kind} need bridges"
    try:
        for bridge in _bridges(sliced, sliced.model):
            check_trainable(bridge.proto, remedy)
    except UntrainableError as error:
        reason = _OURS.sub("", str(error))  # the operator's name in the user's file
        if options.building.heads != "both":
            raise UntrainableError(reason) from error
        _log.warning("Bridges are left out, and heads pool: %s.", reason)
        return replace(options, building=replace(options.building, heads="pooled"))
    return options


def find_bridged_exits(timed: TimedModel) -> FoundExits:
    """Try bridges at every candidate, train the best, and keep those with positive net savings.

    :func:`check_bridges` must have checked their operators. DataError if the model fails on a
    sample.
    """
    sliced = timed.sliced
    bridges = bridges_of(sliced)
    names = {name for bridge in bridges for name in bridge.reads}
    given = {name for segment in sliced.segments[:-1] for name in segment.outputs}
    scores = sliced.model.taught.output
    wanted = [scores, *sorted(names & given)]
    graphs: Sequence[bytes] = sliced.graphs
    if sliced.model.tail is not None:
        graphs = [giving(graph, scores) for graph in graphs]
    search = BridgeSearch(timed, assemble(graphs, wanted))
    exits = search.train(search.screen(bridges))
    exits = [max(of, key=_net) for of in _grouped((e.candidate for e in exits), exits).values()]
    return FoundExits(built=tuple(exits), best=tuple(exit_.best for exit_ in exits))


def _net(exit_: BuiltExit) -> float:
    return exit_.best.net_savings


@dataclass(frozen=True, slots=True)
class BridgeSearch:
    """Trains all bridges briefly, and then the ones with the best results completely."""

    timed: TimedModel
    source: bytes
    """Source model, with the tensors that bridges read and imitate as its outputs."""

    def screen(self, bridges: Sequence[Bridge]) -> list[Bridge]:
        """Train all bridges on some samples; return the best bridges, in the order of depth.

        The best ones have the largest net savings; at most one bridge of each candidate is
        returned.
        """
        if len(bridges) <= TRAINED_BRIDGES:
            return list(bridges)
        some = self.timed.run.parts.train
        if len(some) > SCREENING_SAMPLES:
            some = some.subset(np.arange(SCREENING_SAMPLES, dtype=np.intp))
        epochs = min(SCREENING_EPOCHS, self.timed.run.options.building.training.epochs)
        title = f"Try {len(bridges)} bridges"
        tried = self._trained(bridges, some, title, epochs)
        netted = [_net(exit_) for exit_ in self._built(bridges, tried)]
        places = _grouped((bridge.candidate for bridge in bridges), range(len(bridges)))
        best = [max(of, key=netted.__getitem__) for of in places.values()]
        best.sort(key=netted.__getitem__, reverse=True)
        return [
            replace(bridges[place], proto=tried[place].proto)
            for place in sorted(best[:TRAINED_BRIDGES])
        ]

    def train(self, bridges: Sequence[Bridge]) -> list[BuiltExit]:
        """Train bridges on all samples, and build their exits."""
        run, title = self.timed.run, f"Train {len(bridges)} bridges"
        epochs = run.options.building.training.epochs
        return self._built(bridges, self._trained(bridges, run.parts.train, title, epochs))

    def _trained(
        self, bridges: Sequence[Bridge], train: Dataset, title: str, epochs: int
    ) -> list[TrainedBridge]:
        sliced, run = self.timed.sliced, self.timed.run
        options = replace(run.options.building.training, epochs=epochs)
        with run.progress.step(title, count_samples(len(train), options)) as advance:
            return train_bridges(
                self.source,
                bridges,
                sliced.model.taught,
                train=train,
                tune=run.parts.tune,
                options=options,
                made=augmentation(sliced, train, run.options),
                progress=advance,
            )

    def _built(
        self, bridges: Sequence[Bridge], trained: Sequence[TrainedBridge]
    ) -> list[BuiltExit]:
        """Time and judge trained bridges, and make an exit of each."""
        graphs = [
            _served(self.timed.sliced, bridge, of, 1.0)
            for bridge, of in zip(bridges, trained, strict=True)
        ]
        times = self.timed.time_heads(_grouped((bridge.candidate for bridge in bridges), graphs))
        return [
            self.judged(bridge, of, cost_ms)
            for bridge, of, (cost_ms,) in zip(bridges, trained, chain(*times), strict=True)
        ]

    def judged(self, bridge: Bridge, of: TrainedBridge, cost_ms: float) -> BuiltExit:
        """Measure the net savings of a trained bridge as the only exit, and make an exit of it."""
        sliced, run = self.timed.sliced, self.timed.run
        mask = sliced.model.answer.task.mask
        judged = judge(
            BRIDGE,
            of.principal,
            of.agrees,
            self.timed.alone(bridge.candidate, cost_ms),
            max_disagreement=run.options.promise.max_disagreement,
            mask=None if mask is None else run.parts.tune.column(mask, slice(None)),
        )
        return BuiltExit(
            candidate=bridge.candidate,
            cut=sliced.cuts[bridge.candidate],
            graph=_served(sliced, bridge, of, judged.share),
            # The confidence is computed with the mask, whether or not the bridge reads the mask.
            reads=tuple(dict.fromkeys((*bridge.reads, *([mask] if mask else [])))),
            weights={},
            heads=(judged.score,),
            best=judged.score,
            share=judged.share,
        )


def bridges_of(sliced: Sliced) -> list[Bridge]:
    """Build the untrained bridges of all candidates, in the order of depth.

    A candidate has a second, shorter bridge if the model has operators between its last cut point
    and its own end: the second bridge leaves these operators out.
    """
    return _bridges(sliced, sliced.whole_model())


def _bridges(sliced: Sliced, model: SourceModel) -> list[Bridge]:
    """Build the bridges of the sliced model, with or without its weights."""
    analysis = sliced.analysis
    places = {point.tensors: place for place, point in enumerate(analysis.cuts)}
    bridges = []
    for candidate, cut in enumerate(sliced.cuts):
        behind = analysis.cuts[places[tuple(tensor.name for tensor in cut.tensors)] :]
        ways = [behind] if analysis.end is None else [behind, (*behind, analysis.end)]
        prefix = exit_prefix(candidate)
        built = [build_bridge(model, way, candidate=candidate, prefix=prefix) for way in ways]
        operators = [len(bridge.proto.graph.node) for bridge in built]
        bridges += built if operators[-1] < operators[0] else built[:1]
    return bridges


def _grouped(candidates: Iterable[int], values: Iterable[_T]) -> dict[int, list[_T]]:
    """Group values by their candidate."""
    groups: dict[int, list[_T]] = {}
    for candidate, value in zip(candidates, values, strict=True):
        groups.setdefault(candidate, []).append(value)
    return groups


def _served(sliced: Sliced, bridge: Bridge, of: TrainedBridge, share: float) -> bytes:
    """Return a trained bridge as an exit's graph, with the confidence of its answers."""
    answer, tail = sliced.model.taught, sliced.model.tail
    prefix = exit_prefix(bridge.candidate)
    part = PartBuilder(prefix, **sliced.model.versions)
    shape, dtype = bridge.scores_type.shape or (), bridge.scores_type.dtype
    single = dtype == "float32"
    scores = bridge.scores if single else part.add("Cast", [bridge.scores], to=TensorProto.FLOAT)
    inputs: list[DescribedTensor] = [(bridge.scores, dtype, shape)]
    principal, places = add_principal(part, scores, answer, shape)
    mask = None
    if (spec := sliced.model.mask) is not None:
        inputs.append((spec.name, spec.dtype, spec.shape))
        mask = add_counts(part, spec)
    add_confidence(part, principal, share, places=places, mask=mask)
    confidence = prefix + CONFIDENCE
    end = part.build(inputs, [(confidence, "float32", ("batch",))])
    exit_ = assemble([of.proto.SerializeToString(), end], [bridge.scores, confidence])
    if tail is None:
        return exit_
    return tail.end(exit_, prefix, [prefix + sliced.model.answer.output, confidence])


@dataclass(frozen=True, slots=True, kw_only=True)
class Bridge:
    """Operators from a cut point to the model's answer, untrained."""

    candidate: int
    """Index of the segment that the bridge follows."""
    proto: onnx.ModelProto
    """Graph that reads cut tensors, and perhaps graph inputs. It writes the scores, under a name
    with the bridge's prefix. The model's tail (:mod:`~offramp.compiler.graphs.tail`) comes after
    the graph."""
    scores: str
    """Name of the graph's output: the scores that the model computes its answer from, or the answer
    itself."""
    scores_type: TensorType
    kept: int
    """Number of the model's blocks that the bridge keeps, without the head."""
    dropped: int

    @property
    def reads(self) -> tuple[str, ...]:
        """Tensors that the bridge reads, cut tensors first."""
        return tuple(tensor.name for tensor in self.proto.graph.input)


def build_bridge(
    source: SourceModel, points: Sequence[CutPoint], *, candidate: int, prefix: str
) -> Bridge:
    """Build a bridge that begins at the first of ``points``; its head begins at the last one.

    ``source`` must contain its weights. Inner names begin with ``prefix``; graph inputs keep their
    names. The output, named ``{prefix}{taught.output}``, is the scores ``source.taught``.
    """
    proto, taught, types = source.proto, source.taught, declared_types(source.proto)
    aliases, kept, dropped = _regions(points)
    starts = points[0].tensors
    operators = source.flow.upstream([taught.output], stop=frozenset(starts), instead_of=aliases)
    read = {aliases.get(tensor, tensor) for op in operators for tensor in op.reads}
    ordered = [*starts, *(spec.name for spec in source.inputs)]
    model = emptied(proto, prefix.rstrip("/"), producer="offramp")
    graph = model.graph
    graph.node.extend(op.proto for op in operators)
    graph.initializer.extend(t for t in proto.graph.initializer if t.name in read)
    graph.input.extend(_info(name, types) for name in ordered if name in read)
    graph.output.append(_info(taught.output, types))

    def renamed(tensor: str) -> str:
        name = aliases.get(tensor, tensor)
        if name in ordered:
            return name
        return prefix + (name if name == taught.output else f"bridge/{name}")

    rename_graph(graph, renamed)
    return Bridge(
        candidate=candidate,
        proto=model,
        scores=renamed(taught.output),
        scores_type=types[taught.output],
        kept=kept,
        dropped=dropped,
    )


def _regions(points: Sequence[CutPoint]) -> tuple[dict[str, str], int, int]:
    """Return replacements of tensors, and the numbers of kept and dropped blocks.

    The bridge starts at the first point, and two steps are repeated up to the last point. First all
    blocks up to the last point with the same shapes are dropped: the tensors of that point are
    replaced by the current ones. Then the next block is kept. Everything after the last point is
    the head, which is kept.
    """
    aliases: dict[str, str] = {}
    place = kept = 0
    while True:
        ways = ((far, _alike(points[place], points[far])) for far in range(len(points) - 1, 0, -1))
        place, same = next(((far, same) for far, same in ways if far > place and same), (place, {}))
        aliases |= {come: aliases.get(gone, gone) for come, gone in same.items()}
        if place == len(points) - 1:
            return aliases, kept, place - kept
        place, kept = place + 1, kept + 1


def _alike(before: CutPoint, after: CutPoint) -> dict[str, str]:
    """Map a later point's new tensors to those of an earlier point; empty if shapes differ."""
    old, new = _described(before), _described(after)
    gone = [name for name in old if name not in new]
    come = [name for name in new if name not in old]
    alike = [old[name] for name in gone] == [new[name] for name in come]
    return dict(zip(come, gone, strict=True)) if alike else {}


def _described(point: CutPoint) -> dict[str, tuple[str, tuple[int | str, ...]]]:
    found = {point.tensor: (point.dtype, point.shape)}
    return found | {other.name: (other.dtype, other.shape) for other in point.beside}


def _info(name: str, types: Mapping[str, TensorType]) -> onnx.ValueInfoProto:
    tensor = types[name]
    return onnx.helper.make_tensor_value_info(name, tensor.elem_type, list(tensor.shape or ()))
