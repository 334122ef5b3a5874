"""Train heads: backbone frozen, every head of every exit on every sample, at once.

Apparate 3.1: ramps are trained independently of each other on a frozen model, so their losses
are summed and one backward pass serves them all. The targets are the source model's
probabilities (self-distillation), so no labels are needed. The only module that names torch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from offramp.bundle import Head
from offramp.calibration.families import CutTensor
from offramp.calibration.features import WHOLE, Recording

_FAR_BELOW = -1e9
_POOLED = -1
"""Key of the fixed poolings of tokens among an exit's features."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """How heads are trained."""

    epochs: int = 12
    batch_size: int = 256
    learning_rate: float = 2e-3
    decay: float = 0.8
    """Factor on the learning rate after each epoch."""
    weight_decay: float = 1e-4
    dropout: float = 0.1
    """On the pooled features."""
    holdout: float = 0.15
    """Share of the training split that picks each head's best epoch."""
    threads: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedHead:
    """A head for a candidate exit."""

    candidate: int
    head: Head
    weights: Mapping[str, NDArray[np.float32]]
    """``weight`` [inputs, classes], ``bias`` [classes]; ``hidden_weight``, ``hidden_bias`` of
    the hidden layer; ``queries`` [queries, width]. Standardisation is folded in."""
    confidence: NDArray[np.float32]
    """[tune samples]."""
    prediction: NDArray[np.int32]
    """[tune samples]."""


def train_heads(
    train: Recording,
    tune: Recording,
    *,
    cuts: Sequence[CutTensor],
    families: Sequence[Sequence[Head]],
    probabilities: NDArray[np.float32],
    options: TrainingOptions,
    progress: Callable[[int], None] = lambda _: None,
) -> list[TrainedHead]:
    """Train every head of every candidate.

    Args:
        train: Features to train on.
        tune: Features to answer with the trained heads.
        cuts: Per candidate.
        families: Per candidate, the heads to train.
        probabilities: [train samples, classes], the source model's.
        options: How.
        progress: Called with 1 after every step of :func:`count_steps`.

    Returns:
        All trained heads.
    """
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    order = np.random.default_rng(options.seed).permutation(len(probabilities))
    held = max(round(len(order) * options.holdout), 1)
    held_rows, fit_rows = np.sort(order[:held]), np.sort(order[held:])
    exits = [
        _ExitHeads(index, cut, family, train, fit_rows=fit_rows, dropout=options.dropout)
        for index, (cut, family) in enumerate(zip(cuts, families, strict=True))
        if family
    ]
    if not exits:
        return []
    targets = torch.from_numpy(probabilities)
    parameters = [p for e in exits for p in e.modules.parameters()]
    optimiser = torch.optim.AdamW(
        parameters, lr=options.learning_rate, weight_decay=options.weight_decay
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimiser, options.decay)
    shuffler = np.random.default_rng(options.seed)
    for _ in range(options.epochs):
        for rows in _batches(shuffler.permutation(fit_rows), options.batch_size):
            optimiser.zero_grad(set_to_none=True)
            for exit_ in exits:
                exit_.backward(rows, targets[rows])
            optimiser.step()
            progress(1)
        schedule.step()
        for exit_ in exits:
            exit_.keep_best(held_rows, targets, options.batch_size)
    return [trained for exit_ in exits for trained in exit_.finish(tune)]


def count_steps(train_samples: int, options: TrainingOptions) -> int:
    """How often :func:`train_heads` reports progress."""
    fitted = train_samples - max(round(train_samples * options.holdout), 1)
    return options.epochs * math.ceil(fitted / options.batch_size)


def _batches(rows: NDArray[np.intp], size: int) -> list[NDArray[np.intp]]:
    return [np.sort(rows[start : start + size]) for start in range(0, len(rows), size)]


class _HeadModule(nn.Module):
    """One head; standardises its features, so that one learning rate suits all."""

    def __init__(self, head: Head, cut: CutTensor, classes: int, dropout: float) -> None:
        super().__init__()
        assert cut.width is not None
        self.head, self.width = head, cut.width
        features = self.width * _multiplier(head)
        self.mean: Tensor
        self.scale: Tensor
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("scale", torch.ones(features))
        if head.kind == "attention":
            self.queries = nn.Parameter(torch.randn(head.queries, self.width) * 0.02)
        self.dropout = nn.Dropout(dropout)
        self.hidden = nn.Linear(features, head.hidden) if head.hidden else None
        self.output = nn.Linear(head.hidden or features, classes)

    def pick(self, values: Tensor) -> Tensor:
        """Give [b, features] of the fixed poolings stored under :attr:`key`."""
        if self.head.kind == "first":
            return values[:, : self.width]
        if self.head.kind == "mean":
            return values[:, self.width : 2 * self.width]
        return values

    def scaled_queries(self) -> Tensor:
        """The learned queries [queries, width], for tokens that are not standardised."""
        return self.queries / self._token_scale()

    @property
    def key(self) -> int:
        """Which of the exit's features the head reads."""
        if self.head.kind in ("first", "mean", "mean_max"):
            return _POOLED
        return self.head.grid or WHOLE

    def _token_scale(self) -> Tensor:
        """Scale of one token's values, and the usual root of the width."""
        return self.scale[: self.width] * math.sqrt(self.width)

    def forward(self, pooled: Tensor) -> Tensor:
        """Give logits [b, classes] of pooled features [b, features]."""
        x = self.dropout((pooled - self.mean) / self.scale)
        if self.hidden is not None:
            x = self.hidden(x).relu()
        logits: Tensor = self.output(x)
        return logits

    @torch.no_grad()
    def standardise(self, values: Tensor, keep: Tensor | None) -> None:
        """Set mean and scale from a sample of the features."""
        if self.head.kind == "attention":
            flat = values.flatten(0, 1) if keep is None else values[keep > 0]
            mean, scale = _moments(flat)
            self.mean.copy_(mean.repeat(self.head.queries))
            self.scale.copy_(scale.repeat(self.head.queries))
            return
        mean, scale = _moments(self.pick(values))
        self.mean.copy_(mean)
        self.scale.copy_(scale)

    @torch.no_grad()
    def folded(self) -> dict[str, NDArray[np.float32]]:
        """Give the weights with the standardisation folded into the first layer."""
        first = self.hidden or self.output
        weight = (first.weight.double() / self.scale).T
        bias = first.bias - self.mean.double() @ weight  # in float64: large terms may cancel
        layers = {"weight": weight, "bias": bias}
        if self.hidden is not None:
            layers = {"hidden_weight": weight, "hidden_bias": bias}
            layers |= {"weight": self.output.weight.T, "bias": self.output.bias}
        if self.head.kind == "attention":
            layers["queries"] = self.scaled_queries()
        return {n: np.ascontiguousarray(v.float().numpy()) for n, v in layers.items()}


def _attend(
    tokens: Tensor, keep: Tensor | None, heads: Sequence[_HeadModule]
) -> tuple[Tensor, ...]:
    """Pool tokens [b, tokens, width] by the queries of several heads, each [b, features].

    All at once: the tokens are large, and reading them is what takes the time.
    """
    queries = torch.cat([head.scaled_queries() for head in heads])
    scores = tokens @ queries.T
    if keep is not None:
        scores = scores + ((1 - keep) * _FAR_BELOW)[..., None]
    pooled = scores.softmax(1).transpose(1, 2) @ tokens
    parts = torch.split(pooled, [head.head.queries for head in heads], dim=1)
    return tuple(part.flatten(1) for part in parts)


def _pool_tokens(tokens: NDArray[np.float16], mask: NDArray[Any] | None) -> NDArray[np.float32]:
    """First token, masked mean and masked maximum of [n, tokens, width]: [n, 3 · width].

    Fixed poolings are computed once; only learned queries have to see the tokens every epoch.
    """
    pooled = np.empty((len(tokens), 3 * tokens.shape[2]), np.float32)
    for start in range(0, len(tokens), 256):
        rows = slice(start, start + 256)
        values = tokens[rows].astype(np.float32)
        keep = np.ones(values.shape[:2], np.float32) if mask is None else mask[rows]
        keep = keep.astype(np.float32)[..., None]
        mean = (values * keep).sum(axis=1) / np.maximum(keep.sum(axis=1), 1)
        largest = (values + (1 - keep) * np.float32(_FAR_BELOW)).max(axis=1)
        pooled[rows] = np.concatenate([values[:, 0], mean, largest], axis=1)
    return pooled


def _moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and scale to standardise by, of [samples, features].

    A feature that hardly varies keeps a scale of 1/256 of its mean, as features are recorded in
    float16 (steps of 1/1024 and less): what is rounding there must not become a signal.
    """
    mean = values.mean(0)
    scale = values.std(0, correction=0).clamp(min=1e-3)
    return mean, torch.maximum(scale, mean.abs() / 256)


def _multiplier(head: Head) -> int:
    """Pooled features per channel."""
    if head.kind == "grid":
        return head.grid**2
    return {"attention": head.queries, "mean_max": 3}.get(head.kind, 1)


class _ExitHeads:
    """The heads of one candidate exit, on their features."""

    def __init__(
        self,
        candidate: int,
        cut: CutTensor,
        family: Sequence[Head],
        recording: Recording,
        *,
        fit_rows: NDArray[np.intp],
        dropout: float,
    ) -> None:
        classes = recording.answers.shape[1]
        self.candidate = candidate
        self._mask_name = cut.mask if cut.rank == 3 else None
        self.modules = nn.ModuleList(_HeadModule(head, cut, classes, dropout) for head in family)
        self._see(recording)
        sample = fit_rows[:: max(1, len(fit_rows) // 2048)]
        values, keep = self._read(sample)
        for module in self._heads():
            module.standardise(values[module.key], keep)
        self._best_loss = [math.inf] * len(family)
        self._best_state: list[Any] = [None] * len(family)

    def _see(self, recording: Recording) -> None:
        """Take features and mask from a recording; keep those that the heads read."""
        self.mask = recording.masks[self._mask_name] if self._mask_name else None
        available: dict[int, NDArray[Any]] = dict(recording.features[self.candidate])
        wanted = {module.key for module in self._heads()}
        if _POOLED in wanted:
            available[_POOLED] = _pool_tokens(available[WHOLE], self.mask)
        self.features = {key: available[key] for key in sorted(wanted)}

    def _heads(self) -> list[_HeadModule]:
        return [m for m in self.modules if isinstance(m, _HeadModule)]

    def _read(self, rows: NDArray[np.intp]) -> tuple[dict[int, Tensor], Tensor | None]:
        """Features by key, each read once, and the mask."""
        values = {
            key: torch.from_numpy(stored[rows].astype(np.float32))
            for key, stored in self.features.items()
        }
        if self.mask is None:
            return values, None
        return values, torch.from_numpy(self.mask[rows].astype(np.float32))

    def _grouped(self, rows: NDArray[np.intp]) -> list[Tensor]:
        """Logits of every head."""
        values, keep = self._read(rows)
        attending = [module for module in self._heads() if module.head.kind == "attention"]
        attended = iter(_attend(values[WHOLE], keep, attending) if attending else ())
        return [
            module(next(attended) if module in attending else module.pick(values[module.key]))
            for module in self._heads()
        ]

    def backward(self, rows: NDArray[np.intp], targets: Tensor) -> None:
        """Add the gradients of all heads on a batch."""
        self.modules.train()
        losses = [functional.cross_entropy(logits, targets) for logits in self._grouped(rows)]
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def keep_best(self, rows: NDArray[np.intp], targets: Tensor, batch_size: int) -> None:
        """Remember each head as it is now if the held-out loss never was lower."""
        self.modules.eval()
        totals = [0.0] * len(self.modules)
        for batch in _batches(rows, batch_size):
            for index, logits in enumerate(self._grouped(batch)):
                loss = functional.cross_entropy(logits, targets[batch], reduction="sum")
                totals[index] += loss.item()
        for index, (total, module) in enumerate(zip(totals, self._heads(), strict=True)):
            if total < self._best_loss[index]:
                self._best_loss[index] = total
                self._best_state[index] = copy.deepcopy(module.state_dict())

    @torch.no_grad()
    def finish(self, tune: Recording) -> list[TrainedHead]:
        """Restore the best of each head and answer the tuning split with it."""
        self._see(tune)
        for module, state in zip(self._heads(), self._best_state, strict=True):
            if state is not None:
                module.load_state_dict(state)
        self.modules.eval()
        chunks = [self._grouped(rows) for rows in _batches(np.arange(len(tune.answers)), 512)]
        trained = []
        for index, module in enumerate(self._heads()):
            probabilities = torch.cat([chunk[index] for chunk in chunks]).softmax(1)
            confidence, prediction = probabilities.max(1)
            trained.append(
                TrainedHead(
                    candidate=self.candidate,
                    head=module.head,
                    weights=module.folded(),
                    confidence=confidence.numpy(),
                    prediction=prediction.numpy().astype(np.int32),
                )
            )
        return trained
