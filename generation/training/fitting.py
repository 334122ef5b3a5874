"""The loop that trains one module of an exit on states of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from offramp.calibration.data.training_options import rate_after
from offramp.generation.training.exit_samples import ExitFit, ExitTraining

_JUDGED = 1024
"""Number of tokens per batch in measurements of the fit."""
_MEASURED = 65_536
"""Largest number of tokens used to compute means and deviations."""
_OWN_RATE = 0.02
"""Learning rate of the model's own weights, relative to the learning rate of new weights."""


class Lesson(Protocol):
    """Training target of a module: the loss of its scores, and the scores that are right."""

    def losses(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each token [n]."""
        ...

    def right(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Return bool [n]: True for right predictions."""
        ...


class TokenLesson:
    """Lesson to predict the model's next token by logits [n, v].

    A token without a column in the logits always counts as predicted wrongly.
    """

    def __init__(self, answers: int | None = None) -> None:
        """Only the first ``answers`` columns are tokens; by default all columns are."""
        self._answers = answers

    def losses(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of each token [n]."""
        return nn.functional.cross_entropy(scores.float(), targets, reduction="none")

    def right(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Return bool [n]: True if the first of the largest logits is the target."""
        found = scores.argmax(1) == targets
        return found if self._answers is None else found & (targets < self._answers)


class Examples(NamedTuple):
    """States with their targets."""

    states: NDArray[np.float32]
    """[n, width], possibly memory-mapped."""
    targets: NDArray[Any]
    """[n]: training target of each state."""

    def batches(self, order: NDArray[np.intp], size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield states and targets in batches, in the order of these indices."""
        for start in range(0, len(order), size):
            rows = np.sort(order[start : start + size])  # sequential file reads
            yield torch.from_numpy(self.states[rows]), torch.from_numpy(self.targets[rows])


def fit(
    module: nn.Module,
    lesson: Lesson,
    train: Examples,
    tuning: Examples,
    *,
    options: ExitTraining,
    own: Sequence[nn.Parameter] = (),
) -> tuple[ExitFit, ExitFit]:
    """Train a module, from states [n, width] to scores; return its fit before and after.

    ``own`` are the parameters that the model itself has. The weights with the smallest loss on the
    tuning tokens are kept, which may be those before training.
    """
    slow = {id(p) for p in own}
    learned = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in learned if id(p) not in slow], "lr": options.learning_rate},
        # The model's own weights are good, so they do not decay.
        {
            "params": [p for p in learned if id(p) in slow],
            "lr": options.learning_rate * _OWN_RATE,
            "weight_decay": 0.0,
        },
    ]
    optimiser = torch.optim.AdamW([g for g in groups if g["params"]])
    steps = max(options.epochs * math.ceil(len(train.targets) / options.batch_size), 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: rate_after(step / steps))
    rng = np.random.default_rng(options.seed)
    before = best = _judge(module, lesson, tuning)
    kept, late = _weights(module), 0
    for _ in range(options.epochs):
        order = rng.permutation(len(train.targets))
        for states, targets in train.batches(order, options.batch_size):
            optimiser.zero_grad(set_to_none=True)
            lesson.losses(module(states), targets).mean().backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(learned, 1.0)
            optimiser.step()
            schedule.step()
        now = _judge(module, lesson, tuning)
        late += 1
        if now.loss < best.loss:
            best, kept, late = now, _weights(module), 0
        if late >= options.patience or not math.isfinite(now.loss):
            break
    module.load_state_dict(kept)
    return before, best


@torch.no_grad()
def _judge(module: nn.Module, lesson: Lesson, tuning: Examples) -> ExitFit:
    loss, right, order = 0.0, 0, np.arange(len(tuning.targets))
    for states, targets in tuning.batches(order, _JUDGED):
        scores = module(states)
        loss += float(lesson.losses(scores, targets).double().sum())
        right += int(lesson.right(scores, targets).sum())
    return ExitFit(loss=loss / len(order), agreement=right / len(order))


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in module.state_dict().items()}


def moments(states: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return mean and deviation of each component of a state, float64 [width] each.

    Constant components get a share of the median deviation, to avoid a division by 0.
    """
    seen = np.asarray(states[:: max(len(states) // _MEASURED, 1)], np.float64)
    mean, deviation = seen.mean(0), seen.std(0)
    usual = float(np.median(deviation)) or 1.0
    return mean, np.maximum(deviation, 1e-3 * usual)
