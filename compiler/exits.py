"""Exits of a model: which head at each candidate, built as ONNX graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Head
from offramp.bundle.manifest import HeadTrial
from offramp.calibration.estimates import BackboneTimes
from offramp.calibration.families import CutTensor
from offramp.calibration.profiling import profile_heads
from offramp.calibration.selection import net_savings_alone
from offramp.calibration.training import TrainedHead
from offramp.compiler.heads import build_empty, build_exit
from offramp.compiler.slicing import Sliced
from offramp.engine.control.costs import CostModel

Samples = Callable[[int], Mapping[str, NDArray[Any]]]
"""Gives model inputs of a batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitTrials:
    """The heads tried at one candidate."""

    candidate: int
    """The segment that the exit follows."""
    cut: CutTensor
    graphs: tuple[bytes, ...]
    trials: tuple[HeadTrial, ...]
    best: int
    """Of ``trials``, by what it nets."""

    @property
    def head(self) -> Head:
        """The head that nets most."""
        return self.trials[self.best].head

    @property
    def net_savings(self) -> float:
        """What it nets with no other exit beside it."""
        return self.trials[self.best].net_savings

    @property
    def graph(self) -> bytes:
        """Its exit."""
        return self.graphs[self.best]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """What a head is worth: the time that it would save with no other exit beside it."""

    truth: NDArray[np.int32]
    """[tune samples], the source model's predictions."""
    backbone: BackboneTimes
    batch_size: int
    """Of those that were profiled."""
    max_disagreement: float
    """The constraint."""

    def __call__(self, trained: TrainedHead, cost_ms: float) -> HeadTrial:
        """Judge a head that takes ``cost_ms`` a batch."""
        agrees = trained.prediction == self.truth
        cost = self._cost(trained.candidate, cost_ms)
        return HeadTrial(
            head=trained.head,
            agreement=float(agrees.mean()),
            cost_ms=cost_ms,
            net_savings=net_savings_alone(
                trained.confidence, agrees, cost, 0, self.max_disagreement
            ),
        )

    def _cost(self, candidate: int, cost_ms: float) -> CostModel:
        """Costs with a single exit."""
        column = self.backbone.batch_sizes.index(self.batch_size)
        return CostModel(
            source_ms=self.backbone.source_ms[column],
            segments_ms=tuple(row[column] for row in self.backbone.segments_ms),
            stages_ms=(0.0,),  # the same for every head, and measured once the heads are chosen
            after_segment=(candidate,),
            exits_ms=(cost_ms,),
        )


def exit_prefix(candidate: int) -> str:
    """What the names of a candidate's exit begin with; unique in the joined graph."""
    return f"offramp_exit_{candidate:02d}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workbench:
    """What exits are built for and timed with."""

    sliced: Sliced
    samples: Samples
    threads: int
    """Of ONNX Runtime."""

    def try_heads(
        self,
        trained: Sequence[TrainedHead],
        judge: Judge,
        progress: Callable[[int], None] = lambda _: None,
    ) -> list[ExitTrials]:
        """Build and time every trained head, and judge it by what it nets alone.

        Args:
            trained: All heads of all candidates.
            judge: By what.
            progress: Called with 1 per candidate.
        """
        candidates = sorted({t.candidate for t in trained})
        heads = [[t for t in trained if t.candidate == c] for c in candidates]
        graphs = [[self._build(t) for t in per_exit] for per_exit in heads]
        costs = self._time(candidates, graphs, [judge.batch_size], progress=progress)
        result = []
        for candidate, tried, built, cost in zip(candidates, heads, graphs, costs, strict=True):
            trials = tuple(judge(t, ms) for t, (ms,) in zip(tried, cost, strict=True))
            result.append(
                ExitTrials(
                    candidate=candidate,
                    cut=self.sliced.cuts[candidate],
                    graphs=tuple(built),
                    trials=trials,
                    best=int(np.argmax([trial.net_savings for trial in trials])),
                )
            )
        return result

    def finish(
        self, tried: Sequence[ExitTrials], trained: Sequence[TrainedHead], judge: Judge
    ) -> list[ExitTrials]:
        """Choose among the heads that were trained to the end; the others are dropped.

        Args:
            tried: The exits.
            trained: At least one head of each.
            judge: By what.
        """
        result = []
        for exit_ in tried:
            costs = {trial.head: trial.cost_ms for trial in exit_.trials}
            ended = [t for t in trained if t.candidate == exit_.candidate]
            trials = tuple(judge(t, costs[t.head]) for t in ended)
            result.append(
                replace(
                    exit_,
                    graphs=tuple(self._build(t) for t in ended),
                    trials=trials,
                    best=int(np.argmax([trial.net_savings for trial in trials])),
                )
            )
        return result

    def time_exits(
        self, exits: Sequence[ExitTrials], batch_sizes: Sequence[int]
    ) -> list[tuple[float, ...]]:
        """Time the chosen exits at every batch size: milliseconds [exits][batch sizes]."""
        times = self._time([e.candidate for e in exits], [[e.graph] for e in exits], batch_sizes)
        return [tuple(per_exit[0]) for per_exit in times]

    def _time(
        self,
        candidates: Sequence[int],
        graphs: Sequence[Sequence[bytes]],
        batch_sizes: Sequence[int],
        progress: Callable[[int], None] = lambda _: None,
    ) -> list[list[list[float]]]:
        return profile_heads(
            graphs,
            [self._empty(candidate) for candidate in candidates],
            self.sliced.graphs,
            self.samples,
            threads=self.threads,
            batch_sizes=batch_sizes,
            progress=progress,
        )

    def _build(self, trained: TrainedHead) -> bytes:
        model = self.sliced.model
        return build_exit(
            self.sliced.cuts[trained.candidate],
            trained.head,
            trained.weights,
            model.answer,
            exit_prefix(trained.candidate),
            answer_dtype=model.outputs[0].dtype,
            opset=model.opset,
            ir_version=model.proto.ir_version,
        )

    def _empty(self, candidate: int) -> bytes:
        """A graph that reads a cut tensor and does next to nothing, to be timed against."""
        model = self.sliced.model
        return build_empty(
            self.sliced.cuts[candidate],
            "offramp_empty/",
            opset=model.opset,
            ir_version=model.proto.ir_version,
        )
