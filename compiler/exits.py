"""Exits of a model: which head at each candidate, built as ONNX graphs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import AnswerForm, Head
from offramp.bundle.manifest import HeadTrial
from offramp.calibration.augmentation import MadeSamples, makes_sense, method_for
from offramp.calibration.dataset import Parts
from offramp.calibration.estimates import BackboneTimes
from offramp.calibration.families import CutTensor, family_of
from offramp.calibration.features import Recording, fit_projections, record
from offramp.calibration.profiling import profile_heads
from offramp.calibration.selection import net_savings_alone
from offramp.calibration.training import (
    Preconditioners,
    TrainedHead,
    TrainingOptions,
    count_steps,
    train_heads,
    view_of,
)
from offramp.compiler.heads import attach_poolings, build_empty, build_exit
from offramp.compiler.options import CompileOptions
from offramp.compiler.progress import Progress
from offramp.compiler.slicing import Sliced
from offramp.engine.control.costs import CostModel
from offramp.engine.options import available_cores

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


TRIAL_SAMPLES = 6000
"""Real samples that heads are tried on, at most."""
TRIAL_VISITS = 12_000
"""Samples, counted with their repetitions, that a trial shows to a head where it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundExits:
    """Exits worth building, and how near the others came."""

    exits: tuple[ExitTrials, ...]
    best: tuple[HeadTrial, ...]
    """Of every candidate with a head, the one that nets most, whether that is anything or not."""


def find_exits(
    sliced: Sliced,
    parts: Parts,
    options: CompileOptions,
    times: BackboneTimes,
    *,
    workbench: Workbench,
    progress: Progress,
) -> FoundExits:
    """Record features, choose a head for every candidate, and train it; who nets nothing is out."""
    with tempfile.TemporaryDirectory(prefix="offramp-features-") as directory:
        train, tune = _record(sliced, parts, options, Path(directory), progress)
        search = _Search(sliced, train, tune, options, progress)
        judge = Judge(
            truth=tune.answers.argmax(axis=1).astype(np.int32),
            backbone=times,
            batch_size=options.reference_batch_size,
            max_disagreement=options.max_disagreement,
        )
        tried = workbench.try_heads(search.tried(len(parts.train)), judge)
        exits = workbench.finish(tried, search.trained(tried), judge)
    return FoundExits(
        exits=tuple(exit_ for exit_ in exits if exit_.net_savings > 0),
        best=tuple(exit_.trials[exit_.best] for exit_ in exits),
    )


@dataclass(frozen=True, slots=True)
class _Search:
    sliced: Sliced
    train: Recording
    """Real samples first, then made ones."""
    tune: Recording
    options: CompileOptions
    progress: Progress
    preconditioners: Preconditioners = field(default_factory=dict)

    def tried(self, real_samples: int) -> list[TrainedHead]:
        """Train all heads a little, on real samples alone."""
        samples = min(real_samples, TRIAL_SAMPLES)
        epochs = min(max(round(TRIAL_VISITS / samples), 1), self.options.training.epochs)
        families = [family_of(cut) for cut in self.sliced.cuts]
        options = replace(self.options.training, epochs=epochs)
        heads = sum(map(len, families))
        return self._train(
            f"Try {heads} heads", families, self.train.subset(slice(samples)), options
        )

    def trained(self, tried: Sequence[ExitTrials]) -> list[TrainedHead]:
        """Train all heads on the best view of every exit, on all samples.

        Heads on one view share the reading; and whether a hidden layer pays shows late.
        """
        views = {exit_.candidate: view_of(exit_.candidate, exit_.head) for exit_ in tried}
        families = [
            [head for head in family_of(cut) if view_of(candidate, head) == views.get(candidate)]
            for candidate, cut in enumerate(self.sliced.cuts)
        ]
        title = f"Train {sum(map(len, families))} heads"
        return self._train(title, families, self.train, self.options.training)

    def _train(
        self,
        title: str,
        families: Sequence[Sequence[Head]],
        train: Recording,
        options: TrainingOptions,
    ) -> list[TrainedHead]:
        with self.progress.step(title, count_steps(families, options)) as advance:
            return train_heads(
                train,
                self.tune,
                cuts=self.sliced.cuts,
                families=families,
                probabilities=_probabilities(train.answers, self.sliced.model.answer.form),
                options=options,
                known=self.preconditioners,
                progress=advance,
            )


def _record(
    sliced: Sliced, parts: Parts, options: CompileOptions, directory: Path, progress: Progress
) -> tuple[Recording, Recording]:
    """Features of the training split, with made samples if wanted, and of the tuning split."""
    graph, outputs = attach_poolings(sliced.model, sliced.graphs, sliced.cuts)
    method = method_for(sliced.model.inputs) if options.augment == "auto" else None
    made = None
    if method is not None and makes_sense(method, parts.train):
        made = MadeSamples.draw(parts.train, method, seed=options.seed)
    samples = len(parts.train) + len(parts.tune) + (0 if made is None else len(made))
    threads = available_cores()
    projections = fit_projections(graph, outputs, sliced.cuts, parts.train, threads=threads)
    with progress.step("Record features", samples) as advance:
        train, tune = (
            record(
                graph,
                outputs,
                sliced.model.answer,
                part,
                made=more,
                projections=projections,
                threads=threads,
                directory=directory / name,
                progress=advance,
            )
            for name, part, more in (("train", parts.train, made), ("tune", parts.tune, None))
        )
    return train, tune


def _probabilities(answers: NDArray[np.float32], form: AnswerForm) -> NDArray[np.float32]:
    if form == "probabilities":
        return answers
    shifted = np.exp(answers - answers.max(axis=1, keepdims=True))
    result: NDArray[np.float32] = shifted / shifted.sum(axis=1, keepdims=True)
    return result
