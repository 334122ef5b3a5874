"""Which head at which candidate: all are trained a little, the best of each candidate to its end.

Successive halving with one step: what tells good heads from bad ones shows early, so a short
training on a part of the real samples chooses, by what each head would net. Only the chosen ones
are trained on all samples, made ones included.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import AnswerForm, Head
from offramp.bundle.manifest import HeadTrial
from offramp.calibration.augmentation import MadeSamples, makes_sense, method_for
from offramp.calibration.dataset import Parts
from offramp.calibration.estimates import BackboneTimes
from offramp.calibration.families import family_of
from offramp.calibration.features import Recording, fit_projections, record
from offramp.calibration.training import (
    Preconditioners,
    TrainedHead,
    TrainingOptions,
    count_steps,
    train_heads,
    view_of,
)
from offramp.compiler.exits import ExitTrials, Judge, Workbench
from offramp.compiler.options import CompileOptions
from offramp.compiler.poolings import attach_poolings
from offramp.compiler.progress import Progress
from offramp.compiler.slicing import Sliced
from offramp.engine.options import available_cores

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
