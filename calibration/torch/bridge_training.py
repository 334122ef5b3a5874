"""Trains the bridges of all exits on the frozen model, independently (PAME 5.1, 5.2).

Each batch runs through the source model, which computes the cut tensors that bridges read and the
answer that they learn (self-distillation). Nothing is recorded, since the tensors of models that
answer by pixels or tokens are large. Weights start as the model's. Bridges are distributed to
threads, one core each, as heads are (:mod:`.heads.head_training`): threads that share one product
would wait for each other if another process uses a core.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from offramp.bundle import Answer
from offramp.calibration.data.augmentation import AugmentedSamples, Method
from offramp.calibration.data.dataset import Dataset
from offramp.calibration.data.running import Graphs, run_over
from offramp.calibration.data.training_options import TrainingOptions, rate_after
from offramp.calibration.torch.torch_graph import TorchGraph
from offramp.engine.answers.agreement import agreement_of
from offramp.engine.answers.principal_values import principal_values

_LEAST = 1e-12
"""Lower limit of a probability whose logarithm is taken."""
BATCH = 16
"""Number of samples in a training step."""
_JUDGED = 64
"""Number of samples that are answered together."""


class BridgeToTrain(Protocol):
    """A bridge as an ONNX graph."""

    @property
    def proto(self) -> onnx.ModelProto:
        """The graph, including its weights."""

    @property
    def scores(self) -> str:
        """Name of the graph's output, the scores."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the model's tensors that it reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedBridge:
    """A trained bridge, and its answers to the tuning split."""

    proto: onnx.ModelProto
    principal: NDArray[np.float32]
    """Principal values of the answers (docs/tasks.md): [tune samples, principal values]."""
    agrees: NDArray[np.bool_]
    """[tune samples]: whether its answer agrees with the model's."""
    losses: Sequence[float]
    """Loss on the tuning split by epoch; the first is before training."""


class BridgeObjective:
    """The training objective of bridges: the model's scores of each token, pixel or key point."""

    def __init__(self, answer: Answer) -> None:
        """Set the description of the scores, ``answer``."""
        self._answer = answer
        self._agreement = agreement_of(answer)
        self._axis = 2 if answer.task.kind == "token-classification" else 1

    def loss(self, scores: Tensor, taught: Tensor, mask: Tensor | None) -> Tensor:
        """Return the mean loss per token, pixel or point; ``taught`` [b, …]: the model's scores."""
        answer, axis = self._answer, self._axis
        if answer.form == "values":
            scale = taught.std().clamp_min(1e-6)
            return functional.mse_loss(scores / scale, taught / scale)
        if answer.task.kind == "multi-label":
            return self._of_labels(scores, taught)
        chances = taught if answer.form == "probabilities" else taught.softmax(axis)
        if answer.form == "probabilities":
            logarithms = scores.clamp_min(_LEAST).log()
        else:
            # A class that is masked by −∞ has probability 0 and logarithm −∞.
            logarithms = scores.log_softmax(axis).clamp_min(torch.finfo(scores.dtype).min)
        each = -(chances * logarithms).sum(axis)
        if mask is None:
            return each.mean()
        counts = (mask != 0).float()
        return (each * counts).sum() / counts.sum().clamp_min(1)

    def _of_labels(self, scores: Tensor, taught: Tensor) -> Tensor:
        if self._answer.form == "probabilities":
            return functional.binary_cross_entropy(scores.clamp(_LEAST, 1 - 1e-7), taught)
        return functional.binary_cross_entropy_with_logits(scores, taught.sigmoid())

    def read(
        self, found: Mapping[str, Tensor], bridge: BridgeToTrain, ends: NDArray[Any], mask: Any
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return principal values [b, n] of a bridge's scores, and whether they agree."""
        scores = found[bridge.scores].numpy()
        principal = principal_values(scores, self._answer.form, self._answer.task)
        said = self._agreement.reduce(scores)
        return principal, self._agreement.agree(said, self._agreement.reduce(ends), mask)


def train_bridges(
    source: Graphs,
    bridges: Sequence[BridgeToTrain],
    answer: Answer,
    *,
    train: Dataset,
    tune: Dataset,
    options: TrainingOptions,
    made: Method | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> list[TrainedBridge]:
    """Train all bridges in parallel; results do not depend on the number of threads.

    ``source`` outputs the scores ``answer``, and all tensors that bridges read except graph inputs.
    With ``made``, half of the samples of each epoch are augmented, and made again for each epoch.
    ``progress`` is called with the number of samples of each batch, :func:`count_samples` in all.

    Raises:
        UntrainableError: A bridge has an operator that cannot be trained.
        DataError: The model fails on a sample.
    """
    torch.set_num_threads(1)
    run = _Run(source, bridges, answer)
    modules = [TorchGraph(b.proto, outputs=[b.scores]) for b in bridges]
    learned = [[p for p in module.parameters() if p.requires_grad] for module in modules]
    sizes = _sizes_of_epoch(len(train), made)
    steps = options.epochs * sum(math.ceil(size / BATCH) for size in sizes)
    optimiser = torch.optim.AdamW(
        [p for parameters in learned for p in parameters],
        lr=options.learning_rate / 4,
        weight_decay=options.weight_decay,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: rate_after(step / steps))
    shuffler = np.random.default_rng(options.seed)
    sides = list(zip(bridges, modules, strict=True))
    kept = [_weights(module) for module in modules]
    with ThreadPoolExecutor(
        options.threads, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        found = run.judge(sides, tune, pool)
        for _ in range(options.epochs):
            for batch in _interleaved(
                run.batches(part, BATCH) for part in _of_epoch(train, made, shuffler)
            ):
                optimiser.zero_grad(set_to_none=True)
                list(pool.map(partial(run.learn, batch), sides))
                for parameters in learned:
                    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimiser.step()
                schedule.step()
                progress(len(batch.taught))
            for place, now in enumerate(run.judge(sides, tune, pool)):
                told = [*found[place].losses, *now.losses]
                if now.losses[0] < min(found[place].losses):
                    found[place], kept[place] = now, _weights(modules[place])
                found[place] = replace(found[place], losses=told)
    trained = []
    for of, module, bridge, weights in zip(found, modules, bridges, kept, strict=True):
        with torch.no_grad():
            for name, weight in module.weights.items():
                weight.copy_(weights[name])
        trained.append(replace(of, proto=module.write_back(bridge.proto)))
    return trained


def _sizes_of_epoch(samples: int, made: Method | None) -> tuple[int, int]:
    """Return the numbers of real and of augmented samples of an epoch."""
    joined = 0 if made is None else samples // 2
    return samples - joined, joined


def _of_epoch(
    train: Dataset, made: Method | None, shuffler: np.random.Generator
) -> list[Dataset | AugmentedSamples]:
    """Return the samples of an epoch: all real ones, or half of them and as many augmented ones."""
    order = shuffler.permutation(len(train))
    if made is None:
        return [train.subset(order)]
    _, half = _sizes_of_epoch(len(order), made)
    joined = AugmentedSamples.draw(train, made, seed=int(shuffler.integers(2**31)))
    return [train.subset(order[half:]), joined.subset(order[:half])]


def _interleaved(parts: Iterable[Iterator[_TargetBatch]]) -> Iterator[_TargetBatch]:
    """Yield from all parts in turn, until all are used up."""
    for turn in zip_longest(*parts):
        yield from (batch for batch in turn if batch is not None)


def count_samples(train: int, options: TrainingOptions) -> int:
    """Return the number of samples that :func:`train_bridges` reports as progress."""
    return options.epochs * train


def _weights(module: TorchGraph) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in module.weights.items()}


_Side: TypeAlias = tuple[BridgeToTrain, TorchGraph]
"""A bridge, and the module that trains it."""


class _TargetBatch(NamedTuple):
    """Inputs and targets of bridges for b samples."""

    feeds: dict[str, Tensor]
    """Tensors that bridges read, by name."""
    taught: Tensor
    """[b, …]: the model's scores."""
    mask: Tensor | None


class _Run:
    """The source model, with the names that bridges read from it."""

    def __init__(self, source: Graphs, bridges: Sequence[BridgeToTrain], answer: Answer) -> None:
        self._source, self._answer = source, answer
        self.objective = BridgeObjective(answer)
        self._read = sorted({name for bridge in bridges for name in bridge.reads})

    def batches(self, dataset: Dataset | AugmentedSamples, size: int) -> Iterator[_TargetBatch]:
        """Run the source model over some samples."""
        given = (dataset.base if isinstance(dataset, AugmentedSamples) else dataset).inputs
        inputs = [name for name in self._read if name in given]
        wanted = [name for name in self._read if name not in given]
        outputs = list(dict.fromkeys([self._answer.output, *wanted]))
        mask_name = self._answer.task.mask
        for rows, values in run_over(self._source, outputs, dataset, threads=1, batch_size=size):
            found = dict(zip(outputs, values, strict=True))
            feeds = {name: tensor_of(found[name]) for name in wanted}
            feeds |= {name: tensor_of(dataset.column(name, rows)) for name in inputs}
            mask = None if mask_name is None else tensor_of(dataset.column(mask_name, rows))
            yield _TargetBatch(feeds, tensor_of(found[self._answer.output]), mask)

    def learn(self, batch: _TargetBatch, side: _Side) -> None:
        """Compute the gradients of a bridge."""
        bridge, module = side
        scores = module(batch.feeds)[bridge.scores]
        self.objective.loss(scores, batch.taught, batch.mask).backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def read(self, batch: _TargetBatch, side: _Side) -> _ReadBatch:
        """Answer a batch with a bridge; return the answers, agreement and loss."""
        bridge, module = side
        found = module(batch.feeds)
        counts = None if batch.mask is None else batch.mask.numpy()
        values, same = self.objective.read(found, bridge, batch.taught.numpy(), counts)
        loss = self.objective.loss(found[bridge.scores], batch.taught, batch.mask).item()
        return _ReadBatch(values, same, loss * len(batch.taught))

    def judge(self, sides: Sequence[_Side], tune: Dataset, pool: Executor) -> list[TrainedBridge]:
        """Answer the tuning split with all bridges."""
        read: list[list[_ReadBatch]] = [[] for _ in sides]
        for batch in self.batches(tune, _JUDGED):
            for of, found in zip(read, pool.map(partial(self.read, batch), sides), strict=True):
                of.append(found)
        return [
            TrainedBridge(
                proto=bridge.proto,
                principal=np.concatenate([batch.principal for batch in of]),
                agrees=np.concatenate([batch.agrees for batch in of]),
                losses=[sum(batch.loss for batch in of) / len(tune)],
            )
            for (bridge, _), of in zip(sides, read, strict=True)
        ]


class _ReadBatch(NamedTuple):
    """A bridge's answers to a batch."""

    principal: NDArray[np.float32]
    agrees: NDArray[np.bool_]
    loss: float
    """Loss, summed over the samples."""


def tensor_of(values: NDArray[Any]) -> Tensor:
    """Return values as a tensor, which shares their memory if it is contiguous."""
    return torch.from_numpy(np.ascontiguousarray(values))
