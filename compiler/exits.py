"""Exits of a model: which head at each candidate, built as ONNX graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Head
from offramp.bundle.manifest import HeadTrial
from offramp.calibration.families import CutTensor
from offramp.calibration.profiling import BackboneTimes, profile_heads
from offramp.calibration.selection import CostModel, net_savings_alone
from offramp.calibration.training import TrainedHead
from offramp.compiler.heads import build_empty, build_exit
from offramp.compiler.model import SourceModel

Samples = Callable[[int], Mapping[str, NDArray[Any]]]
"""Gives model inputs of a batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitTrials:
    """The heads tried at one candidate."""

    candidate: int
    """The segment that the exit follows."""
    cut: CutTensor
    trained: tuple[TrainedHead, ...]
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


def exit_prefix(candidate: int) -> str:
    """What the names of a candidate's exit begin with; unique in the joined graph."""
    return f"offramp_exit_{candidate:02d}/"


def try_heads(
    trained: Sequence[TrainedHead],
    cuts: Sequence[CutTensor],
    model: SourceModel,
    segments: Sequence[bytes],
    backbone: BackboneTimes,
    batch_sizes: Sequence[int],
    reference: int,
    samples: Samples,
    truth: NDArray[np.int32],
    *,
    max_disagreement: float,
    threads: int,
    progress: Callable[[int], None],
) -> list[ExitTrials]:
    """Build and time every trained head, and judge it by what it nets alone.

    Args:
        trained: All heads of all candidates.
        cuts: Per candidate.
        model: The source model.
        segments: Serialised; segment i ends at candidate i.
        backbone: Times by ``batch_sizes``.
        batch_sizes: Columns of ``backbone``.
        reference: Column to judge by.
        samples: To time on.
        truth: The source model's predictions on the tuning split.
        max_disagreement: The constraint.
        threads: Of ONNX Runtime.
        progress: Called with 1 per candidate.
    """
    by_candidate = {c: [t for t in trained if t.candidate == c] for c in range(len(cuts))}
    graphs = {c: [_build(t, cuts[c], model) for t in heads] for c, heads in by_candidate.items()}
    used = [c for c, heads in by_candidate.items() if heads]
    costs = profile_heads(
        [graphs[c] for c in used],
        [empty_exit(cuts[c], model) for c in used],
        segments,
        samples,
        threads=threads,
        batch_sizes=[batch_sizes[reference]],
        progress=progress,
    )
    result = []
    for candidate, cost in zip(used, costs, strict=True):
        trials = tuple(
            _judge(head, cost_ms, candidate, backbone, reference, truth, max_disagreement)
            for head, (cost_ms,) in zip(by_candidate[candidate], cost, strict=True)
        )  # fmt: skip
        result.append(
            ExitTrials(
                candidate=candidate,
                cut=cuts[candidate],
                trained=tuple(by_candidate[candidate]),
                graphs=tuple(graphs[candidate]),
                trials=trials,
                best=int(np.argmax([trial.net_savings for trial in trials])),
            )
        )
    return result


def time_exits(
    exits: Sequence[ExitTrials],
    model: SourceModel,
    segments: Sequence[bytes],
    samples: Samples,
    *,
    batch_sizes: Sequence[int],
    threads: int,
) -> list[tuple[float, ...]]:
    """Time the chosen exits at every batch size: milliseconds [exits][batch sizes]."""
    times = profile_heads(
        [[e.graph] for e in exits],
        [empty_exit(e.cut, model) for e in exits],
        segments,
        samples,
        threads=threads,
        batch_sizes=batch_sizes,
    )
    return [tuple(per_exit[0]) for per_exit in times]


def _judge(
    trained: TrainedHead,
    cost_ms: float,
    candidate: int,
    backbone: BackboneTimes,
    reference: int,
    truth: NDArray[np.int32],
    max_disagreement: float,
) -> HeadTrial:
    cost = CostModel(
        source_ms=backbone.source_ms[reference],
        segments_ms=tuple(row[reference] for row in backbone.segments_ms),
        stage_ms=backbone.stages_ms[reference],
        after_segment=(candidate,),
        exits_ms=(cost_ms,),
    )
    agrees = trained.prediction == truth
    net = net_savings_alone(trained.confidence, agrees, cost, 0, max_disagreement)
    return HeadTrial(
        head=trained.head, agreement=float(agrees.mean()), cost_ms=cost_ms, net_savings=net
    )


def _build(trained: TrainedHead, cut: CutTensor, model: SourceModel) -> bytes:
    return build_exit(
        cut,
        trained.head,
        trained.weights,
        model.answer,
        exit_prefix(trained.candidate),
        answer_dtype=model.outputs[0].dtype,
        opset=model.opset,
        ir_version=model.proto.ir_version,
    )


def empty_exit(cut: CutTensor, model: SourceModel) -> bytes:
    """A graph that reads a cut tensor and does next to nothing, to be timed against."""
    return build_empty(cut, "offramp_empty/", opset=model.opset, ir_version=model.proto.ir_version)
