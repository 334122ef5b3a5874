"""Choice of the head of each candidate: all heads are trained briefly, the best completely.

This is successive halving with one step, because differences between heads show early. After a
short training on a part of the real samples, the heads with the largest net savings are chosen.
Only these are trained on all samples, including generated ones.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Head
from offramp.bundle.schema.parts import HeadScore
from offramp.calibration.choose.selection import net_savings_alone
from offramp.calibration.data.training_options import TrainingOptions
from offramp.calibration.heads.cut_tensors import CutTensor
from offramp.calibration.heads.families import family_of, masks_of
from offramp.calibration.heads.features import Recording
from offramp.calibration.heads.head_training import TrainedHead, count_steps, train_heads
from offramp.calibration.heads.learners import Preconditioners, view_of
from offramp.calibration.heads.objectives import Objective, fit_certainty, objective_of, truth_of
from offramp.compiler.common.options import CompileOptions
from offramp.compiler.common.resources import feature_folder
from offramp.compiler.cuts.slicing import Sliced
from offramp.compiler.exits.endings import CONFIDENCE, exit_prefix
from offramp.compiler.exits.feature_recording import FeatureRecorder
from offramp.compiler.exits.heads import build_exit
from offramp.compiler.exits.timed_model import TimedModel
from offramp.compiler.graphs.source_model import SourceModel
from offramp.engine.answers.agreement import agreement_of
from offramp.engine.answers.certainty import sure_by
from offramp.engine.answers.principal_values import sure_of
from offramp.engine.control.costs import CostModel

SCREENING_SAMPLES = 6000
"""Largest number of real samples in the short training after which heads are chosen."""
SCREENING_DRAWS = 12_000
"""Number of samples that the short training shows to a head; repeated samples count again."""

COUNT_SHARES = (1.0, 0.99, 0.97, 0.95, 0.9, 0.8, 0.5)
"""Tried values of the count threshold: the share of the principal values that must reach the
threshold (PAME 6.1 tries ten)."""

_AS_IT_IS = (1.0, 0.0, 0.0, 0.0)
"""Weights of the criterion ``learned`` for exits that are only timed."""
_net = attrgetter("net_savings")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltExit:
    """An exit as an ONNX graph: the head chosen for a candidate, and the scores of all heads."""

    candidate: int
    """Index of the segment that the exit follows."""
    cut: CutTensor
    graph: bytes
    reads: tuple[str, ...]
    """Names of the tensors that the exit's graph reads."""
    weights: Mapping[str, NDArray[np.float32]]
    """Weights of the trained head; none for a copy's own answer."""
    heads: tuple[HeadScore, ...]
    """Scores of all heads of the candidate that were trained completely."""
    best: HeadScore
    """Score in ``heads`` with the largest net savings, computed for the head as the only exit."""
    share: float = 1.0
    """Share of the answer's principal values that are at least the confidence."""
    certainty: tuple[float, ...] = ()
    """Weights of the criterion ``learned``, if it is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundExits:
    """Exits worth building, and the scores of the best heads of all candidates."""

    built: tuple[BuiltExit, ...]
    """For every candidate with a head, the exit with the largest net savings, which may be
    negative."""
    best: tuple[HeadScore, ...]
    """For every candidate, the score of the head with the largest net savings in each family."""

    @property
    def exits(self) -> tuple[BuiltExit, ...]:
        """Exits with positive net savings."""
        return tuple(exit_ for exit_ in self.built if exit_.best.net_savings > 0)

    def or_better(self, other: FoundExits) -> FoundExits:
        """Return, for each candidate, the exit with larger net savings of the two results.

        The scores of both results are kept.
        """
        exits = {exit_.candidate: exit_ for exit_ in self.built}
        for exit_ in other.built:
            known = exits.setdefault(exit_.candidate, exit_)
            if known is not exit_:
                heads = (*known.heads, *exit_.heads)
                better = max(known, exit_, key=attrgetter("best.net_savings"))
                exits[exit_.candidate] = replace(better, heads=heads)
        in_order = tuple(exits[candidate] for candidate in sorted(exits))
        return FoundExits(built=in_order, best=(*self.best, *other.best))


def find_exits(timed: TimedModel) -> FoundExits:
    """Record features, choose a head for every candidate, and train it.

    The result has all candidates with a head. If the features of all candidates do not fit on the
    disk together, candidates are recorded in groups. DataError if even one group does not fit.
    """
    exits: list[BuiltExit] = []
    run = timed.run
    recorder = FeatureRecorder.of(timed.sliced, run)
    with feature_folder(run.options.scratch) as directory, run.scratch.taking(recorder.size_bytes):
        recorder.check(directory)
        projections = recorder.fit()
        for number, group in enumerate(recorder.plan.groups):
            place = directory / str(number)
            train, tune = recorder.record(number, place, projections)
            search = _HeadSearch(
                timed=timed,
                group=frozenset(group),
                train=train,
                tune=tune,
                truth=truth_of(timed.sliced.model.taught, tune.answers),
            )
            exits += search.build(search.screen(recorder.plan.counts.train))
            # Release the features of this pass before the next one begins.
            del train, tune, search
            shutil.rmtree(place, ignore_errors=True)
    return FoundExits(built=tuple(exits), best=tuple(exit_.best for exit_ in exits))


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeadSearch:
    """Trains heads, and judges each by its net savings as the only exit."""

    timed: TimedModel
    group: frozenset[int]
    """Indices of the candidates whose features were recorded."""
    train: Recording
    """Features of training samples: real samples first, then generated ones."""
    tune: Recording
    truth: NDArray[np.generic]
    """Reference values [tune samples, …] of the source model's scores."""
    preconditioners: Preconditioners = field(default_factory=dict)

    @property
    def _sliced(self) -> Sliced:
        return self.timed.sliced

    @property
    def _options(self) -> CompileOptions:
        return self.timed.run.options

    def screen(self, real_samples: int) -> dict[int, list[HeadScore]]:
        """Train all heads briefly, on real samples only; return their scores by candidate."""
        samples = min(real_samples, SCREENING_SAMPLES)
        epochs = min(
            max(round(SCREENING_DRAWS / samples), 1), self._options.building.training.epochs
        )
        families = [self._family(candidate) for candidate in range(len(self._sliced.cuts))]
        options = replace(self._options.building.training, epochs=epochs)
        title = f"Try {sum(map(len, families))} heads"
        trained = self._train(title, families, self.train.subset(slice(samples)), options)
        candidates = sorted({t.candidate for t in trained})
        heads = {c: [t for t in trained if t.candidate == c] for c in candidates}
        times = self.timed.time_heads(
            {candidate: [self._build(t) for t in tried] for candidate, tried in heads.items()}
        )
        return {
            candidate: [self._judge(t, ms).score for t, (ms,) in zip(tried, costs, strict=True)]
            for (candidate, tried), costs in zip(heads.items(), times, strict=True)
        }

    def build(self, screened: Mapping[int, Sequence[HeadScore]]) -> list[BuiltExit]:
        """Train all heads on the best view of each candidate, on all samples; build the best heads.

        A view is what a head reads. Heads with the same view share the reading, and the benefit of
        a hidden layer shows only late in the training.
        """
        views = {c: view_of(c, max(heads, key=_net).head) for c, heads in screened.items()}
        families = [
            [h for h in self._family(candidate) if view_of(candidate, h) == views.get(candidate)]
            for candidate in range(len(self._sliced.cuts))
        ]
        title = f"Train {sum(map(len, families))} heads"
        trained = self._train(title, families, self.train, self._options.building.training)
        exits = []
        for candidate, briefly in screened.items():
            costs = {tried.head: tried.cost_ms for tried in briefly}
            ended = {t.head: t for t in trained if t.candidate == candidate}
            heads = [self._judge(t, costs[head]) for head, t in ended.items()]
            best = max(heads, key=lambda judged: judged.score.net_savings)
            exits.append(
                BuiltExit(
                    candidate=candidate,
                    cut=self._sliced.cuts[candidate],
                    reads=reads_of(self._sliced.cuts[candidate], best.score.head),
                    graph=self._build(ended[best.score.head], best.share, best.certainty),
                    weights=ended[best.score.head].weights,
                    heads=tuple(judged.score for judged in heads),
                    best=best.score,
                    share=best.share,
                    certainty=best.certainty,
                )
            )
        return exits

    def _train(
        self,
        title: str,
        families: Sequence[Sequence[Head]],
        train: Recording,
        options: TrainingOptions,
    ) -> list[TrainedHead]:
        with self.timed.run.progress.step(title, count_steps(families, options)) as advance:
            return train_heads(
                train,
                self.tune,
                cuts=self._sliced.cuts,
                families=families,
                objective=_objective(self._sliced.model, train.answers),
                options=options,
                known=self.preconditioners,
                progress=advance,
            )

    def _family(self, candidate: int) -> tuple[Head, ...]:
        return family_of(self._sliced.cuts[candidate]) if candidate in self.group else ()

    def _build(
        self, trained: TrainedHead, share: float = 1.0, certainty: Sequence[float] = _AS_IT_IS
    ) -> bytes:
        return build_on(
            self._sliced,
            trained.candidate,
            trained.head,
            trained.weights,
            share=share,
            certainty=certainty,
        )

    def _judge(self, trained: TrainedHead, cost_ms: float) -> JudgedHead:
        agrees = agreement_of(self._sliced.model.taught).agree(trained.said, self.truth)
        cost = self.timed.alone(trained.candidate, cost_ms)
        bound = self._options.promise.max_disagreement
        principal, certainty = trained.principal, tuple[float, ...]()
        criterion = self._sliced.model.answer.criterion
        if trained.statistics is not None and not criterion.on_host:
            if criterion.name == "learned":
                certainty = fit_certainty(trained.statistics, agrees)
            principal = sure_by(trained.statistics, criterion.name, certainty)[:, None]
        judged = judge(trained.head, principal, agrees, cost, max_disagreement=bound)
        return judged._replace(certainty=certainty)


class JudgedHead(NamedTuple):
    """Score of a head, and the count threshold that gives its largest net savings."""

    score: HeadScore
    share: float
    certainty: tuple[float, ...] = ()
    """Weights of the criterion ``learned``, if it is used."""


def judge(
    head: Head,
    principal: NDArray[np.float32],
    agrees: NDArray[np.bool_],
    cost: CostModel,
    *,
    max_disagreement: float,
    mask: NDArray[Any] | None = None,
) -> JudgedHead:
    """Find the count threshold (PAME 5.3) with the largest net savings of a single exit.

    ``principal`` values [samples, n] and ``agrees`` [samples] are from the tuning split; ``cost``
    is the cost with this exit as the only one.
    """
    shares = COUNT_SHARES if principal.shape[1] > 1 else COUNT_SHARES[:1]
    netted = [
        net_savings_alone(sure_of(principal, share, mask), agrees, cost, 0, max_disagreement)
        for share in shares
    ]
    best = int(np.argmax(netted))
    score = HeadScore(
        head=head,
        agreement=float(agrees.mean()),
        cost_ms=cost.exits_ms[0],
        net_savings=netted[best],
    )
    return JudgedHead(score, shares[best])


def reads_of(cut: CutTensor, head: Head) -> tuple[str, ...]:
    """Return the names of a pooled head's inputs: cut tensors, and masks where there are any."""
    return (*(tensor.name for tensor in cut.read), *masks_of(cut, head))


def build_on(
    sliced: Sliced,
    candidate: int,
    head: Head,
    weights: Mapping[str, NDArray[np.float32]],
    *,
    share: float = 1.0,
    certainty: Sequence[float] = (),
) -> bytes:
    """Build the exit of a trained head after one of the segments."""
    model, tail, prefix = sliced.model, sliced.model.tail, exit_prefix(candidate)
    exit_ = build_exit(
        sliced.cuts[candidate],
        head,
        weights,
        model.taught,
        prefix,
        answer_dtype=model.outputs[0].dtype if tail is None else tail.dtype,
        share=share,
        certainty=certainty,
        **sliced.versions,
    )
    if tail is None:
        return exit_
    return tail.end(exit_, prefix, [prefix + model.answer.output, prefix + CONFIDENCE])


def _objective(model: SourceModel, scores: NDArray[np.float32]) -> Objective:
    levels = model.tail is not None and model.tail.takes_levels
    return objective_of(model.taught, scores, levels=levels)
