"""Trains a model together with its exits: backbone, bridges and heads (PAME 5.2).

One graph contains all of them, and :mod:`.torch_graph` computes it, so that gradients of every exit
reach the blocks before it. Weights start as the model's, and as those of exits that were trained on
the frozen model. The loss is the mean of all answers' losses, with equal weights, since no exit is
preferred. Batch normalisation is folded or fixed, which only works with small learning rates.

Every batch is divided into shards, one core each, whose gradients are added in a fixed order. This
stays fast if another process uses a core, whereas threads that share one product would wait for
each other, and it produces the same weights with any number of cores.

The state of the training is written to a file after every epoch (:class:`JointState`), so that an
interrupted run continues with the same result.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from offramp.bundle import Answer
from offramp.bundle.schema.compilation import JointEpoch, JointTraining, Teacher
from offramp.calibration.data.dataset import Dataset
from offramp.calibration.data.errors import UntrainableError
from offramp.calibration.data.running import Graphs, run_over
from offramp.calibration.data.training_options import rate_after
from offramp.calibration.torch.bridge_training import BridgeObjective, tensor_of
from offramp.calibration.torch.torch_graph import TorchGraph
from offramp.engine.answers.agreement import agreement_of

_log = logging.getLogger(__name__)

BATCH = 32
"""Number of samples in a training step."""
_SHARD = 8
"""Number of samples of a step that one core computes together."""
_JUDGED = 64
"""Number of samples of the tuning split that are answered together."""
_HELD_BYTES = 2**28
"""Limit on the bytes of the teacher's answers that are kept in memory; larger answers are computed
again in every epoch."""
_LEAST = 1e-12
"""Lower limit of a probability whose logarithm is taken."""
_LARGEST_STEP = 1.0
"""Largest norm of gradients; larger ones are scaled down to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JointOptions:
    """Settings of joint training."""

    teacher: Teacher = "model"
    epochs: int = 8
    """Largest number of epochs."""
    learning_rate: float = 1e-4
    """Peak learning rate; it rises over the first tenth of the steps, then falls as a cosine."""
    patience: int = 3
    """Epochs without a smaller loss on the tuning split, after which training ends."""
    threads: int = 1
    """Number of cores that share a step."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JointModel:
    """A model and its exits, as one graph."""

    proto: onnx.ModelProto
    """Graph with its weights; it contains the tensors ``scores``."""
    scores: tuple[str, ...]
    """Names of the class scores: of each exit, in depth order, then of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JointlyTrained:
    """The trained graph, and the record of its training."""

    proto: onnx.ModelProto
    training: JointTraining


def train_jointly(
    joined: JointModel,
    source: Graphs,
    answer: Answer,
    *,
    train: Dataset,
    tune: Dataset,
    options: JointOptions,
    state: JointState | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> JointlyTrained:
    """Train all weights; results depend neither on interruptions nor on the number of threads.

    ``source`` is the unmodified model: the teacher, and the reference of agreement. The weights of
    the epoch with the smallest mean loss on ``tune`` are kept; the weights before training count as
    an epoch, too. ``progress`` is called with the number of samples of each batch, ``epochs`` ×
    train in all.

    Raises:
        UntrainableError: The graph has an operator that cannot be trained.
        DataError: The model fails on a sample.
        ValueError: The teacher is labels, and the data has none.
    """
    if options.teacher == "labels" and (train.labels is None or tune.labels is None):
        raise ValueError(
            "the teacher 'labels' needs labels, but the data has none; add an array 'labels'"
        )
    torch.set_num_threads(1)
    lesson = _Lesson(answer, source, joined.scores, options.teacher)
    module = TorchGraph(joined.proto, outputs=list(dict.fromkeys(joined.scores)))
    known, judged = lesson.answers(train), lesson.answers(tune)
    with ThreadPoolExecutor(
        options.threads, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        run = _Course.begin(module, lesson, len(train), options, pool)
        if not run.resume_from(state):
            run.judge(lesson.batches(tune, _JUDGED, judged))
        progress(len(train) * run.epoch)
        while not run.has_ended:
            order = np.random.default_rng([options.seed, run.epoch]).permutation(len(train))
            ends = None if known is None else known[order]
            for batch in lesson.batches(train.subset(order), BATCH, ends):
                run.learn(batch)
                progress(len(batch.ends))
            run.judge(lesson.batches(tune, _JUDGED, judged))
            if state is not None:
                state.write(run.state())
        progress(len(train) * (options.epochs - run.epoch))
    module.load_state_dict(run.best)
    training = JointTraining(
        teacher=options.teacher,
        learning_rate=options.learning_rate,
        epochs=tuple(run.told),
        kept=run.kept,
    )
    return JointlyTrained(proto=module.write_back(joined.proto), training=training)


class _TrainingBatch(NamedTuple):
    """Inputs of b samples, with the model's answers and the targets."""

    feeds: dict[str, Tensor]
    taught: Tensor
    """[b, …]: the scores to learn from the model, or [b]: classes."""
    ends: NDArray[Any]
    """[b, …]: the unmodified model's answers."""
    mask: NDArray[Any] | None

    def shards(self) -> list[_TrainingBatch]:
        """Divide the samples into shards."""
        starts = range(0, len(self.ends), _SHARD)
        return [self._rows(slice(start, start + _SHARD)) for start in starts]

    def _rows(self, rows: slice) -> _TrainingBatch:
        return _TrainingBatch(
            feeds={name: values[rows] for name, values in self.feeds.items()},
            taught=self.taught[rows],
            ends=self.ends[rows],
            mask=None if self.mask is None else self.mask[rows],
        )


class _Lesson:
    """Losses and agreement of answers, by the teacher and the unmodified model."""

    def __init__(
        self, answer: Answer, source: Graphs, scores: Sequence[str], teacher: Teacher
    ) -> None:
        self.scores, self._answer, self._source = tuple(scores), answer, source
        self._teacher = teacher
        self._objective = BridgeObjective(answer)
        self._agreement = agreement_of(answer)

    def answers(self, dataset: Dataset) -> NDArray[Any] | None:
        """Return the unmodified model's answers, [n, …]; ``None`` if they are too large."""
        found: list[NDArray[Any]] = []
        for _, ends in self._answered(dataset, _JUDGED):
            if ends.nbytes / len(ends) * len(dataset) > _HELD_BYTES:
                return None
            found.append(ends)
        return np.concatenate(found)

    def _answered(self, dataset: Dataset, size: int) -> Iterator[tuple[slice, NDArray[Any]]]:
        outputs = [self._answer.output]
        for rows, (ends,) in run_over(self._source, outputs, dataset, threads=1, batch_size=size):
            yield rows, ends

    def batches(
        self, dataset: Dataset, size: int, known: NDArray[Any] | None
    ) -> Iterator[_TrainingBatch]:
        """Yield all samples with the unmodified model's answers: ``known``, or computed here."""
        mask_name = self._answer.task.mask
        given = self._answered(dataset, size) if known is None else _in_batches(known, size)
        for rows, ends in given:
            feeds = {name: tensor_of(values) for name, values in dataset.take(rows).items()}
            taught = tensor_of(ends)
            if self._teacher == "labels":
                assert dataset.labels is not None
                taught = tensor_of(dataset.labels[rows])
            mask = None if mask_name is None else dataset.column(mask_name, rows)
            yield _TrainingBatch(feeds, taught, ends, mask)

    def losses(self, found: Mapping[str, Tensor], batch: _TrainingBatch) -> Tensor:
        """Return the mean loss of every answer, [answers]."""
        return torch.stack([self._loss(found[name], batch) for name in self.scores])

    def _loss(self, scores: Tensor, batch: _TrainingBatch) -> Tensor:
        if self._teacher == "labels":
            soft = self._answer.form == "probabilities"
            logs = scores.clamp_min(_LEAST).log() if soft else scores.log_softmax(1)
            return functional.nll_loss(logs, batch.taught)
        mask = None if batch.mask is None else tensor_of(batch.mask)
        return self._objective.loss(scores, batch.taught, mask)

    def agrees(self, found: Mapping[str, Tensor], batch: _TrainingBatch) -> NDArray[np.bool_]:
        """Return which answers agree with the unmodified model's, [answers, b]."""
        reduce, ends = self._agreement.reduce, self._agreement.reduce(batch.ends)
        said = (reduce(found[name].numpy()) for name in self.scores)
        return np.stack([self._agreement.agree(ours, ends, batch.mask) for ours in said])


@dataclass(kw_only=True)
class _Course:
    """A running joint training, with its state after each epoch."""

    module: TorchGraph
    lesson: _Lesson
    options: JointOptions
    learned: list[torch.nn.Parameter]
    pool: Executor
    optimiser: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR
    epoch: int = 0
    """Number of finished epochs."""
    diverged: bool = False
    kept: int = 0
    best: dict[str, Tensor] = field(default_factory=dict)
    told: list[JointEpoch] = field(default_factory=list)

    @classmethod
    def begin(
        cls,
        module: TorchGraph,
        lesson: _Lesson,
        samples: int,
        options: JointOptions,
        pool: Executor,
    ) -> _Course:
        steps = max(options.epochs * math.ceil(samples / BATCH), 1)
        learned = [p for p in module.parameters() if p.requires_grad]
        optimiser = torch.optim.AdamW(learned, lr=options.learning_rate, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimiser, lambda step: rate_after(step / steps)
        )
        return cls(
            module=module,
            lesson=lesson,
            options=options,
            learned=learned,
            pool=pool,
            optimiser=optimiser,
            schedule=schedule,
        )

    @property
    def has_ended(self) -> bool:
        """True after all epochs, after epochs without improvement, or after divergence."""
        late = self.epoch - self.kept >= self.options.patience
        return self.epoch >= self.options.epochs or late or self.diverged

    def learn(self, batch: _TrainingBatch) -> None:
        """Run one training step."""
        shards = batch.shards()
        for parameter in self.learned:
            parameter.grad = None
        for shard, found in zip(shards, self.pool.map(self._gradients, shards), strict=True):
            share = len(shard.ends) / len(batch.ends)
            for parameter, gradient in zip(self.learned, found, strict=True):
                if gradient is not None:
                    part = share * gradient
                    parameter.grad = part if parameter.grad is None else parameter.grad + part
        torch.nn.utils.clip_grad_norm_(self.learned, _LARGEST_STEP)
        self.optimiser.step()
        self.schedule.step()

    def _gradients(self, shard: _TrainingBatch) -> tuple[Tensor | None, ...]:
        loss = self.lesson.losses(self.module(shard.feeds), shard).mean()
        return torch.autograd.grad(loss, self.learned, allow_unused=True)

    @torch.no_grad()
    def _judged(self, shard: _TrainingBatch) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Return the summed losses [answers], and which answers agree [answers, b]."""
        found = self.module(shard.feeds)
        losses = self.lesson.losses(found, shard).double().numpy() * len(shard.ends)
        return losses, self.lesson.agrees(found, shard)

    def judge(self, batches: Iterable[_TrainingBatch]) -> None:
        """Evaluate on the tuning split, also before the first epoch; keep the best weights."""
        read = [found for batch in batches for found in self.pool.map(self._judged, batch.shards())]
        agrees = np.concatenate([agrees for _, agrees in read], axis=1)
        mean = np.sum([losses for losses, _ in read], axis=0) / agrees.shape[1]
        shares = agrees.mean(axis=1)
        if not np.isfinite(mean).all():
            if not self.told:
                raise UntrainableError(
                    "the model cannot be trained: its loss on the tuning split is not finite "
                    "before training; leave out --train joint"
                )
            rate = self.options.learning_rate
            _log.warning("Joint training diverged at a learning rate of %g.", rate)
            self.diverged = True
            return
        self.epoch = len(self.told)
        self.told.append(JointEpoch(losses=tuple(mean.tolist()), agreement=tuple(shares.tolist())))
        smallest = min((np.mean(e.losses) for e in self.told[:-1]), default=math.inf)
        if np.mean(mean) < smallest:
            self.kept = self.epoch
            self.best = {k: v.detach().clone() for k, v in self.module.state_dict().items()}

    def resume_from(self, state: JointState | None) -> bool:
        """Continue from a saved state; return whether there is one."""
        kept = None if state is None else state.read()
        if kept is None:
            return False
        self.module.load_state_dict(kept["now"])
        self.optimiser.load_state_dict(kept["optimiser"])
        self.schedule.load_state_dict(kept["schedule"])
        self.best, self.kept, self.epoch = kept["best"], kept["kept"], kept["epoch"]
        self.told = [
            JointEpoch(losses=tuple(losses), agreement=tuple(agreement))
            for losses, agreement in kept["told"]
        ]
        _log.info("Joint training continues after epoch %d.", self.epoch)
        return True

    def state(self) -> dict[str, Any]:
        """Return everything that the rest of the training depends on."""
        return {
            "now": self.module.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "schedule": self.schedule.state_dict(),
            "best": self.best,
            "kept": self.kept,
            "epoch": self.epoch,
            "told": [(list(e.losses), list(e.agreement)) for e in self.told],
        }


def _in_batches(values: NDArray[Any], size: int) -> Iterator[tuple[slice, NDArray[Any]]]:
    for start in range(0, len(values), size):
        rows = slice(start, start + size)
        yield rows, values[rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class JointState:
    """The file to which a training is saved after every epoch."""

    path: Path
    digest: str
    """Hash of everything that the training depends on: a file with another hash is not read."""

    def write(self, state: Mapping[str, Any]) -> None:
        """Replace the saved state; if that fails, log a warning, and training continues."""
        temporary = self.path.with_name(self.path.name + ".new")
        try:
            torch.save({"digest": self.digest, "state": dict(state)}, temporary)
            temporary.replace(self.path)
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError for a full disk
            reason = str(error).splitlines()[0]
            _log.warning(
                "%s cannot be written (%s): this progress is lost if the run is interrupted.",
                temporary,
                reason,
            )
            temporary.unlink(missing_ok=True)

    def read(self) -> dict[str, Any] | None:
        """Return the saved state; ``None`` if it is missing, broken, or of another training."""
        if not self.path.exists():
            return None
        try:  # only tensors, numbers and names: loading runs no code
            kept = torch.load(self.path, weights_only=True)
            digest, state = kept["digest"], kept["state"]
        except Exception as error:  # pickle, zip and torch have errors of many classes
            reason = str(error).splitlines()[0]
            _log.warning(
                "%s cannot be read (%s): training starts from the beginning.", self.path, reason
            )
            return None
        if digest != self.digest:
            _log.warning(
                "%s belongs to another training: this one starts from the beginning.", self.path
            )
            return None
        found: dict[str, Any] = state
        return found
