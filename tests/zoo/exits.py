"""Exits of random weights at every cut of a model, and what they have to answer.

Their heads are those that compiling would train, of one kind after the other. The weights are
scaled by what they give on some samples, so that confidences differ and samples leave apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from offramp.bundle import ActiveExit, Exit, Head
from offramp.calibration.heads.cut_tensors import CutTensor
from offramp.calibration.heads.families import family_of, joined_width, masks_of
from offramp.certify.decision import MODEL_END
from offramp.compiler.common.rounding import SINGLE
from offramp.compiler.cuts.slicing import Sliced
from offramp.compiler.exits.endings import CONFIDENCE, exit_prefix
from offramp.compiler.exits.exits import build_on
from offramp.compiler.graphs.graph import copied
from offramp.compiler.graphs.runtime import GraphRunner

Arrays = dict[str, NDArray[Any]]

_SPREAD = 2.0
"""Standard deviation of the logits that weights are scaled to."""
_MOST_SCALE = 30.0
"""Largest scale: above it rounding would decide."""


@dataclass(frozen=True, kw_only=True)
class RandomExit:
    """An exit, and what its own graph says of n samples on the source model's cut tensor."""

    exit: Exit
    graph: bytes
    answer: NDArray[Any]
    """[n, classes]."""
    confidence: NDArray[np.float32]
    """[n]."""


@dataclass(frozen=True, kw_only=True)
class Departures:
    """A policy, and where each of n samples leaves by it."""

    active: tuple[ActiveExit, ...]
    exits: NDArray[np.int64]
    """[n]: the exit's index, or that of the model's end."""
    confidence: Mapping[int, NDArray[np.float32]]
    """[n], by exit."""

    def allows(self, row: int, place: int, rounding: float) -> bool:
        """Return True if a sample may leave at an exit, given the rounding of confidences."""
        for active in self.active:
            sure = float(self.confidence[active.exit][row])
            if active.exit == place:
                return sure >= active.threshold - rounding
            if sure > active.threshold + rounding:
                return False
        return place == MODEL_END


def give_exits(pieces: Sliced, inputs: Arrays, rng: np.random.Generator) -> list[RandomExit]:
    """Add an exit to every cut that heads can read, and compute its outputs for the inputs."""
    values = inputs | cut_values(pieces, inputs)
    made: list[RandomExit] = []
    for candidate, cut in enumerate(pieces.cuts):
        if family := family_of(cut):
            head = family[len(made) % len(family)]
            made.append(_Maker(pieces, candidate, cut, head, rng).make(len(made), values))
    return made


def cut_values(pieces: Sliced, inputs: Arrays) -> Arrays:
    """Return the whole model's values at its cuts."""
    exposed = copied(pieces.model.proto)
    known = {info.name: info for info in exposed.graph.value_info}
    names = dict.fromkeys(tensor.name for cut in pieces.cuts for tensor in cut.tensors)
    exposed.graph.output.extend(known[name] for name in names)
    return dict(GraphRunner(exposed).run(inputs))


@dataclass(frozen=True)
class _Maker:
    """Makes the exit of a head at one cut."""

    pieces: Sliced
    candidate: int
    cut: CutTensor
    head: Head
    rng: np.random.Generator

    def make(self, index: int, values: Arrays) -> RandomExit:
        answer = self.pieces.model.answer
        prefix = exit_prefix(self.candidate)
        read = [tensor.name for tensor in self.cut.read]
        exit_ = Exit(
            index=index,
            after_segment=self.candidate,
            file=f"exits/{index:02d}.onnx",
            inputs=(*read, *masks_of(self.cut, self.head)),
            output=prefix + answer.output,
            confidence=prefix + CONFIDENCE,
            head=self.head,
            agreement=0.5,
        )
        weights = self._weights()
        logits = self._run(exit_, weights, values)[exit_.output].astype(np.float64)
        if answer.form == "probabilities":
            logits = np.log(np.maximum(logits, 1e-30))
        deviation = float(logits.std(axis=0).mean())
        scale = min(_SPREAD / deviation, _MOST_SCALE) if deviation > 0 else 1.0
        weights["weight"] *= np.float32(scale)
        weights["bias"] = -(logits.mean(axis=0) * scale).astype(np.float32)
        said = self._run(exit_, weights, values)
        return RandomExit(
            exit=exit_,
            graph=build_on(self.pieces, self.candidate, self.head, weights),
            answer=said[exit_.output],
            confidence=said[exit_.confidence].astype(np.float32),
        )

    def _run(self, exit_: Exit, weights: Arrays, values: Arrays) -> Mapping[str, NDArray[Any]]:
        graph = build_on(self.pieces, self.candidate, self.head, weights)
        return GraphRunner(onnx.load_model_from_string(graph)).run(
            {name: values[name] for name in exit_.inputs}
        )

    def _weights(self) -> Arrays:
        """Draw weights of a head as it is served."""
        width, head = self.cut.width, self.head
        if self.cut.beside:
            features = joined_width(self.cut)
        else:
            assert width, "the cut has a fixed width"
            features = width * (head.grid**head.axes if head.kind == "grid" else head.queries or 1)
        classes = self.pieces.model.answer.classes
        drawn: Arrays = {}
        if head.kind == "attention":
            drawn["queries"] = self._normal(head.queries, width)
        if head.hidden:
            drawn["hidden_weight"] = self._normal(features, head.hidden)
            drawn["hidden_bias"] = np.zeros(head.hidden, np.float32)
        drawn["weight"] = self._normal(head.hidden or features, classes)
        drawn["bias"] = np.zeros(classes, np.float32)
        return drawn

    def _normal(self, inputs: int, outputs: int) -> NDArray[np.float32]:
        values = self.rng.standard_normal((inputs, outputs), np.float32)
        return values / np.float32(np.sqrt(max(inputs, 1)))


def draw_policy(exits: Sequence[RandomExit], rng: np.random.Generator) -> Departures:
    """Draw thresholds at which batches shrink at random, one of them to 7, the last to 1.

    No confidence is as near to a threshold as single precision is sure of; an exit that tells no
    two samples apart by more than that is not active.
    """
    rows = len(exits[0].confidence)
    survivors = _survivors(rows, len(exits), rng)
    left = np.full(rows, MODEL_END, np.int64)
    active: list[ActiveExit] = []
    here = np.arange(rows)
    for made, wanted in zip(exits, survivors, strict=True):
        sure = np.sort(made.confidence[here].astype(np.float64))
        (places,) = np.nonzero(np.diff(sure) > 2 * SINGLE.batches)
        if not len(places):
            continue
        kept = int(places[np.abs(places + 1 - wanted).argmin()]) + 1
        threshold = float(sure[kept - 1 : kept + 1].mean())
        active.append(ActiveExit(exit=made.exit.index, threshold=threshold))
        leaving = made.confidence[here] >= threshold
        left[here[leaving]] = made.exit.index
        here = here[~leaving]
    confidence = {made.exit.index: made.confidence for made in exits}
    return Departures(active=tuple(active), exits=left, confidence=confidence)


def _survivors(rows: int, exits: int, rng: np.random.Generator) -> list[int]:
    """Return the number of samples that should go on after each exit."""
    between = rng.integers(2, rows, max(exits - 2, 0)).tolist()
    return sorted([7, 1, *between], reverse=True)[:exits]


def subset(exits: Sequence[RandomExit], rng: np.random.Generator) -> list[RandomExit]:
    """About half of some exits, at least one, so that stages have several segments."""
    kept = rng.random(len(exits)) < 0.5
    kept[rng.integers(len(exits))] = True
    return [made for made, keep in zip(exits, kept, strict=True) if keep]


def heads_of(exits: Sequence[RandomExit]) -> str:
    """The kinds of heads, and how many of each: ``grid 2, vector``."""
    kinds = [made.exit.head.kind for made in exits]
    counted = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    return ", ".join(f"{kind} {n}" if n > 1 else kind for kind, n in counted.items())
