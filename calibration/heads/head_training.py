"""Trains heads on the frozen model's features, independently for each exit.

Apparate 3.1: ramps are trained independently of each other on a frozen model. The targets are the
source model's probabilities (self-distillation), so no labels are needed. Exits are distributed to
threads, one core each. This stays fast if another process uses a core, whereas threads that share
one matrix product would wait for each other. Only this module, :mod:`.learners`,
:mod:`.objectives`, :mod:`.torch.bridge_training`, :mod:`.torch.joint_training` and, for whole
graphs, :mod:`.torch.torch_graph` with :mod:`.calibration.torch_operators` import torch.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offramp.bundle import Head
from offramp.calibration.data.training_options import TrainingOptions, rate_after
from offramp.calibration.heads.cut_tensors import CutTensor
from offramp.calibration.heads.features import Recording
from offramp.calibration.heads.learners import (
    Group,
    Learner,
    Preconditioners,
    View,
    learner_of,
    view_of,
)
from offramp.calibration.heads.objectives import Objective

_EVALUATED = 512
"""Number of samples that are answered together."""
_FEWEST_STEPS = 24
"""Smallest number of steps in an epoch: with little data, batches are smaller, or heads would
hardly learn."""
_SMALLEST_BATCH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedHead:
    """A trained head of a candidate exit, and its answers to the tuning split."""

    candidate: int
    head: Head
    weights: Mapping[str, NDArray[np.float32]]
    """Weights: ``weight`` [inputs, classes], ``bias`` [classes]; ``hidden_weight``, ``hidden_bias``
    of the hidden layer; ``queries`` [queries, width]. Preconditioning is folded in."""
    principal: NDArray[np.float32]
    """Principal values of the answers (docs/tasks.md): [tune samples, principal values]."""
    said: NDArray[np.generic]
    """[tune samples, …]: the head's answers, reduced to what is compared with the model's."""
    statistics: NDArray[np.float32] | None = None
    """[tune samples, 3], for classification: statistics that criteria are computed from."""

    @property
    def confidence(self) -> NDArray[np.float32]:
        """Smallest principal value of each answer, [tune samples]."""
        smallest: NDArray[np.float32] = self.principal.min(axis=1)
        return smallest


def train_heads(
    train: Recording,
    tune: Recording,
    *,
    cuts: Sequence[CutTensor],
    families: Sequence[Sequence[Head]],
    objective: Objective,
    options: TrainingOptions,
    known: Preconditioners | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> list[TrainedHead]:
    """Train heads of every candidate; results do not depend on the number of threads.

    ``cuts`` and ``families`` are, by candidate, its cut tensor and the heads to train, in the order
    of the result. ``objective`` defines what is learned from the source model's answers. The
    features ``tune`` select each head's best epoch; the result has the heads' answers to them.
    Preconditioners in ``known`` are used, and new ones are added to it. ``progress`` is called with
    1 after every step of :func:`count_steps`, from several threads.
    """
    torch.set_num_threads(1)
    known = {} if known is None else known
    stop = threading.Event()
    targets = objective.targets(train.answers)

    def run(item: tuple[View, Sequence[Head]]) -> list[TrainedHead]:
        view, heads = item
        cut = cuts[view.candidate]
        group = Group(
            view=view,
            heads=heads,
            mask=cut.mask if cut.form == "tokens" else None,
            train=train,
            scores=objective.scores,
            dropout=options.dropout,
            seed=options.seed,
        )
        learner = learner_of(group, known)
        lesson = _Lesson(objective=objective, targets=targets, options=options)
        _fit(learner, train, tune, lesson, progress=progress, stop=stop)
        return _answered(learner, view.candidate, tune, objective)

    with ThreadPoolExecutor(options.threads) as pool:
        try:
            groups = list(pool.map(run, _groups(families).items()))
        except BaseException:  # an interrupt must not wait until the other heads are trained
            stop.set()
            raise
    trained = {(t.candidate, t.head): t for group in groups for t in group}
    return [trained[c, head] for c, family in enumerate(families) for head in family]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lesson:
    """Objective, targets and options of a group of heads."""

    objective: Objective
    targets: Tensor
    """Training targets, [train samples, …]."""
    options: TrainingOptions


def count_steps(families: Sequence[Sequence[Head]], options: TrainingOptions) -> int:
    """Return the number of progress calls of :func:`train_heads`: one per epoch and view."""
    return options.epochs * len(_groups(families))


def _groups(families: Sequence[Sequence[Head]]) -> dict[View, list[Head]]:
    """Group heads by their view of a cut tensor, which is read once for all of them."""
    groups: dict[View, list[Head]] = {}
    for candidate, family in enumerate(families):
        for head in family:
            groups.setdefault(view_of(candidate, head), []).append(head)
    return groups


def _fit(
    learner: Learner,
    train: Recording,
    tune: Recording,
    lesson: _Lesson,
    *,
    progress: Callable[[int], None],
    stop: threading.Event,
) -> None:
    """Train a group of heads; each keeps the weights of its best epoch."""
    objective, targets, options = lesson.objective, lesson.targets, lesson.options
    loaded, judged = learner.load(train), learner.load(tune)
    wanted = objective.judged_by(tune.answers)
    shuffler = np.random.default_rng(options.seed)
    size = max(min(options.batch_size, len(targets) // _FEWEST_STEPS), _SMALLEST_BATCH)
    steps = options.epochs * math.ceil(len(targets) / size)
    learned = [learner.parameters(index) for index in range(len(learner.layers))]
    optimiser = torch.optim.AdamW(
        [p for parameters in learned for p in parameters],
        lr=options.learning_rate,
        weight_decay=options.weight_decay,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: rate_after(step / steps))
    best: list[tuple[float, list[Tensor]]] = [(math.inf, [])] * len(learned)
    for _ in range(options.epochs):
        if stop.is_set():
            return
        for rows in torch.split(torch.from_numpy(shuffler.permutation(len(targets))), size):
            optimiser.zero_grad(set_to_none=True)
            logits = learner.logits(loaded, rows, training=True)
            losses = [objective.loss(values, targets[rows]) for values in logits]
            torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
        for index, values in enumerate(_logits(learner, judged, len(wanted))):
            loss = objective.loss(values, wanted).item()
            if loss < best[index][0]:
                best[index] = loss, [p.detach().clone() for p in learned[index]]
        progress(1)
    with torch.no_grad():
        for parameters, (_, kept) in zip(learned, best, strict=True):
            for parameter, value in zip(parameters, kept, strict=False):
                parameter.copy_(value)


@torch.no_grad()
def _logits(learner: Learner, loaded: Any, samples: int) -> list[Tensor]:
    """Return every head's logits [samples, classes]."""
    chunks = [
        learner.logits(loaded, rows, training=False)
        for rows in torch.split(torch.arange(samples), _EVALUATED)
    ]
    return [torch.cat(parts) for parts in zip(*chunks, strict=True)]


def _answered(
    learner: Learner, candidate: int, tune: Recording, objective: Objective
) -> list[TrainedHead]:
    """Return the trained heads with their answers to the tuning split."""
    trained = []
    for index, logits in enumerate(_logits(learner, learner.load(tune), len(tune.answers))):
        reading = objective.read(logits)
        trained.append(
            TrainedHead(
                candidate=candidate,
                head=learner.layers[index].head,
                weights=objective.served(learner.folded(index)),
                principal=reading.principal,
                said=reading.said,
                statistics=reading.statistics,
            )
        )
    return trained
