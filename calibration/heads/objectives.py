"""Training objectives of heads by task: targets, loss, reading of scores, and confidence.

Targets are the source model's answers (self-distillation), so no labels are needed. A head has one
score for each class or label. For regression it has one more, with which it learns whether its
values are near enough, as values alone contain no confidence.

After training, :func:`fit_certainty` fits the weights that turn statistics of an exit's answer
into the probability that it agrees with the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from offramp.bundle import Answer
from offramp.engine.answers.agreement import HALF, agreement_of
from offramp.engine.answers.certainty import log_odds, statistics_of

FloatArray = NDArray[np.float32]


class ReadScores(NamedTuple):
    """The scores of a head, read as answers to n samples."""

    principal: FloatArray
    """Principal values of the answers (docs/tasks.md), [n, principal values], from 0 to 1."""
    said: NDArray[np.generic]
    """[n, …]: the answers, reduced to what is compared with the model's."""
    statistics: FloatArray | None = None
    """[n, 3], for classification: statistics that criteria are computed from."""


class Objective(ABC):
    """The training objective of heads for a task, from the source model's answers [n, …]."""

    def __init__(self, answer: Answer, answers: FloatArray) -> None:
        """Take the model's answers to the training samples, which may set scales."""
        self.answer = answer
        self.scores = answers.shape[1]
        """Number of scores of a head."""

    @abstractmethod
    def targets(self, answers: FloatArray) -> Tensor:
        """Return the training targets for answers, [n, …]."""

    def judged_by(self, answers: FloatArray) -> Tensor:
        """Return the targets by which the epochs of a head's training are compared, [n, …]."""
        return self.targets(answers)

    @abstractmethod
    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of scores [n, scores]."""

    @abstractmethod
    def read(self, scores: Tensor) -> ReadScores:
        """Read scores [n, scores] as answers."""

    def served(self, weights: dict[str, FloatArray]) -> Mapping[str, FloatArray]:
        """Return a head's weights for serving, which may use other units than training."""
        return weights


class ClassObjective(Objective):
    """Classification: heads learn the probabilities, and epochs are compared by the class.

    A class that the model rules out for every training sample, by a mask before its activation, is
    ruled out at exits too: its bias is -infinity.
    """

    def __init__(self, answer: Answer, answers: FloatArray) -> None:
        """Find the classes whose probability is always 0."""
        super().__init__(answer, answers)
        never = 0.0 if answer.form == "probabilities" else -np.inf
        self._ruled_out: NDArray[np.bool_] = (answers == never).all(axis=0)

    def targets(self, answers: FloatArray) -> Tensor:
        """Return probabilities [n, classes]."""
        if self.answer.form == "probabilities":
            return torch.from_numpy(answers)
        shifted = np.exp(answers - answers.max(axis=1, keepdims=True))
        return torch.from_numpy(shifted / shifted.sum(axis=1, keepdims=True))

    def judged_by(self, answers: FloatArray) -> Tensor:
        """Return classes [n]."""
        return torch.from_numpy(answers.argmax(axis=1))

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy."""
        return functional.cross_entropy(scores, targets)

    def served(self, weights: dict[str, FloatArray]) -> Mapping[str, FloatArray]:
        """Rule out classes that the model never predicts."""
        bias = np.where(self._ruled_out, np.float32(-np.inf), weights["bias"])
        return weights | {"bias": bias}

    def read(self, scores: Tensor) -> ReadScores:
        """Read the largest probability, and its class."""
        scores = scores.masked_fill(torch.from_numpy(self._ruled_out), -np.inf)
        confidence, classes = scores.softmax(1).max(1)
        statistics = statistics_of(scores.numpy(), "logits")
        return ReadScores(confidence.numpy()[:, None], classes.numpy(), statistics)


class LevelObjective(ClassObjective):
    """Classification with logits that the model clips or rounds: heads learn their level too.

    Logits that differ by a constant have the same cross entropy, but are clipped differently.
    """

    def __init__(self, answer: Answer, answers: FloatArray) -> None:
        """Measure the spread of the model's logits."""
        super().__init__(answer, answers)
        self._spread = float(answers.std()) or 1.0

    def targets(self, answers: FloatArray) -> Tensor:
        """Return logits [n, classes]."""
        return torch.from_numpy(answers)

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy plus the squared error of logits in units of their spread."""
        if targets.ndim == 1:
            return functional.cross_entropy(scores, targets)
        apart = functional.mse_loss(scores / self._spread, targets / self._spread)
        return functional.cross_entropy(scores, targets.softmax(1)) + apart


class LabelObjective(Objective):
    """Sets of labels: heads learn a yes or no for each label."""

    def targets(self, answers: FloatArray) -> Tensor:
        """Return probabilities [n, labels]."""
        given = torch.from_numpy(answers)
        return given if self.answer.form == "probabilities" else given.sigmoid()

    def judged_by(self, answers: FloatArray) -> Tensor:
        """Return decisions [n, labels], 0 or 1."""
        return (self.targets(answers) >= HALF).float()

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Return the binary cross entropy of all labels."""
        return functional.binary_cross_entropy_with_logits(scores, targets)

    def read(self, scores: Tensor) -> ReadScores:
        """Read the probability of each decision."""
        chance = scores.sigmoid()
        return ReadScores(torch.maximum(chance, 1 - chance).numpy(), (scores >= 0).numpy())


class ValueObjective(Objective):
    """Regression: heads learn values in units of their spread, and whether they are near enough."""

    def __init__(self, answer: Answer, answers: FloatArray) -> None:
        """Measure mean and spread of every value."""
        super().__init__(answer, answers)
        self.scores += 1
        self._mean = answers.mean(axis=0)
        spread = answers.std(axis=0)
        self._spread = np.where(spread > 0, spread, 1).astype(np.float32)
        self._within = torch.from_numpy(answer.task.within / self._spread).float()

    def targets(self, answers: FloatArray) -> Tensor:
        """Return values in units of their spread, [n, values]."""
        return torch.from_numpy((answers - self._mean) / self._spread)

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Return the squared error, plus the cross entropy of predicting that it is small."""
        values, sure = scores[:, :-1], scores[:, -1]
        near = ((values.detach() - targets).abs() <= self._within).all(1).float()
        knows = functional.binary_cross_entropy_with_logits(sure, near)
        return functional.mse_loss(values, targets) + knows

    def read(self, scores: Tensor) -> ReadScores:
        """Read the probability of being near enough."""
        values = scores[:, :-1].numpy() * self._spread + self._mean
        return ReadScores(scores[:, -1:].sigmoid().numpy(), values.astype(np.float32))

    def served(self, weights: dict[str, FloatArray]) -> Mapping[str, FloatArray]:
        """Scale the last layer, so that it outputs values in their units."""
        weight, bias = weights["weight"].copy(), weights["bias"].copy()
        weight[:, :-1] *= self._spread
        bias[:-1] = bias[:-1] * self._spread + self._mean
        return weights | {"weight": weight, "bias": bias}


def objective_of(answer: Answer, answers: FloatArray, *, levels: bool = False) -> Objective:
    """Return the objective of pooled heads for the model's answers to the training samples.

    ``answers`` are [n, …]; with ``levels`` the level of logits is learned too.
    """
    match answer.task.kind:
        case "classification":
            return (LevelObjective if levels else ClassObjective)(answer, answers)
        case "multi-label":
            return LabelObjective(answer, answers)
        case "regression":
            return ValueObjective(answer, answers)
        case kind:
            raise ValueError(
                f"pooled heads cannot compute answers of {kind}, which have one for each token, "
                "pixel or key point"
            )


def truth_of(answer: Answer, answers: FloatArray) -> NDArray[np.generic]:
    """Return the source model's answers reduced for comparison, [n, …]."""
    return agreement_of(answer).reduce(answers)


_STEPS = 50
_PRIOR = np.array([1.0, 0.0, 0.0, 0.0])
"""Weights with which the certainty is the largest probability itself."""


def fit_certainty(statistics: NDArray[np.float32], agrees: NDArray[np.bool_]) -> tuple[float, ...]:
    """Fit an exit's weights of the statistics' log-odds, and a constant, by Newton's method.

    ``statistics`` are [samples, 3] (:func:`offramp.engine.answers.certainty.statistics_of`) and
    ``agrees`` is bool[samples]; no head was trained on these samples. The penalty ``|w − w0|² / 2``
    draws the weights ``w`` towards ``w0``, the largest probability alone, and keeps the fit finite
    if all answers agree (:func:`offramp.certify.agreement.fit_agreement` does the same with one
    feature).
    """
    design = np.column_stack([log_odds(statistics), np.ones(len(statistics))]).astype(np.float64)
    weights = _PRIOR.copy()
    loss = _loss(design, agrees, weights)
    for _ in range(_STEPS):
        probability = np.exp(-np.logaddexp(0.0, -(design @ weights)))
        gradient = design.T @ (probability - agrees) + (weights - _PRIOR)
        curvature = (design * (probability * (1 - probability))[:, None]).T @ design
        step = np.linalg.solve(curvature + np.eye(len(weights)), gradient)
        scale = 1.0
        while (tried := _loss(design, agrees, weights - scale * step)) > loss:
            scale /= 2
            if scale < 1e-6:
                return tuple(weights.tolist())
        weights, loss = weights - scale * step, tried
        if np.abs(step).max() < 1e-9:
            break
    return tuple(weights.tolist())


def _loss(
    design: NDArray[np.float64],
    agrees: NDArray[np.bool_],
    weights: NDArray[np.float64],
) -> float:
    logit = design @ weights
    data = (np.logaddexp(0.0, logit) - agrees * logit).sum()
    return float(data + 0.5 * ((weights - _PRIOR) ** 2).sum())
