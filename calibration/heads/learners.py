"""Groups of heads that are trained together on one view of a cut tensor, with torch.

A group reads its features once for all of its heads. The resulting weights are for plain features,
so that the served graph does not need the coordinates of training.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offramp.bundle.npz import copy_rows
from offramp.bundle.schema.parts import Head, HeadKind
from offramp.calibration.heads.families import FAR_BELOW, POOLINGS
from offramp.calibration.heads.features import FULL_TENSOR, LAST, Recording
from offramp.calibration.heads.preconditioning import Preconditioner, moments

FloatArray = NDArray[np.float32]
_POOLED = 256
"""Number of samples whose tokens are pooled together."""


class View(NamedTuple):
    """The part of a cut tensor that a group of heads reads."""

    candidate: int
    kind: HeadKind
    grid: int


def view_of(candidate: int, head: Head) -> View:
    """Return the view that a head has of a candidate's cut tensor."""
    return View(candidate, head.kind, head.grid)


Preconditioners: TypeAlias = dict[View, Preconditioner]
_Tokens: TypeAlias = tuple[NDArray[np.float16], NDArray[Any] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The heads to train on one view, with their data and settings."""

    view: View
    heads: Sequence[Head]
    mask: str | None
    """Graph input that marks the tokens that count, if there is one."""
    train: Recording
    scores: int
    """Number of scores of each head, for instance one for each class."""
    dropout: float
    seed: int

    @property
    def projection(self) -> tuple[Preconditioner, ...]:
        """Transformation of recorded tokens to coordinates; empty if they are recorded plain."""
        found = self.train.projections.get(self.view.candidate)
        return () if found is None else (found,)

    def random(self) -> torch.Generator:
        """Return a generator seeded by the view; no head depends on the other heads trained."""
        entropy = (self.seed, self.view.candidate, sum(self.view.kind.encode()), self.view.grid)
        (seed,) = np.random.SeedSequence(entropy).generate_state(1)
        return torch.Generator().manual_seed(int(seed))

    def layers(self, inputs: Sequence[int], random: torch.Generator) -> list[HeadLayers]:
        """Return every head's layers, with ``inputs`` features each."""
        return [
            HeadLayers(head, size, self.scores, dropout=self.dropout, random=random)
            for head, size in zip(self.heads, inputs, strict=True)
        ]

    def mask_in(self, recording: Recording) -> NDArray[Any] | None:
        """Return the recorded mask [n, tokens], if there is one."""
        return recording.masks[self.mask] if self.mask else None


class HeadLayers:
    """The one or two dense layers of a head, applied to features [b, inputs]."""

    def __init__(
        self, head: Head, inputs: int, classes: int, *, dropout: float, random: torch.Generator
    ) -> None:
        self.head, self._dropout, self._random = head, dropout, random
        sizes = [inputs, head.hidden, classes] if head.hidden else [inputs, classes]
        steps = list(itertools.pairwise(sizes))
        self.weights = [_uniform((n, to), random, 1 / math.sqrt(n)) for n, to in steps]
        self.biases = [_uniform((to,), random, 1 / math.sqrt(n)) for n, to in steps]

    def __call__(self, features: Tensor, *, training: bool) -> Tensor:
        """Return logits [b, classes]."""
        x = features
        if self.head.hidden:
            x = torch.addmm(self.biases[0], x, self.weights[0]).relu()
        if training and self._dropout:
            kept = torch.empty_like(x).bernoulli_(1 - self._dropout, generator=self._random)
            x = x * kept / (1 - self._dropout)
        return torch.addmm(self.biases[-1], x, self.weights[-1])

    def folded(self, *preconditioners: Preconditioner) -> dict[str, FloatArray]:
        """Return the weights for plain features; the last preconditioner was applied first."""
        weights = [w.detach().numpy() for w in self.weights]
        biases = [b.detach().numpy() for b in self.biases]
        first, bias = weights[0], biases[0]
        for preconditioner in preconditioners:
            first, bias = preconditioner.fold(first, bias)
        named = {"weight": first, "bias": bias}
        if self.head.hidden:
            named = {"hidden_weight": first, "hidden_bias": bias}
            named |= {"weight": weights[1], "bias": biases[1]}
        return {name: np.ascontiguousarray(v, np.float32) for name, v in named.items()}


class Learner(ABC):
    """A group of heads with their parameters, and access to their features."""

    layers: list[HeadLayers]

    def parameters(self, index: int) -> list[Tensor]:
        """Return the trainable parameters of a head."""
        return [*self.layers[index].weights, *self.layers[index].biases]

    @abstractmethod
    def load(self, recording: Recording) -> Any:
        """Return a recording in the form that :meth:`pool` takes rows from."""

    @abstractmethod
    def pool(self, loaded: Any, rows: Tensor) -> list[Tensor]:
        """Return each head's features [b, inputs] of some rows."""

    @abstractmethod
    def folded(self, index: int) -> dict[str, FloatArray]:
        """Return a head's weights for the served graph."""

    def logits(self, loaded: Any, rows: Tensor, *, training: bool) -> list[Tensor]:
        """Return each head's logits [b, classes] of some rows."""
        pooled = zip(self.layers, self.pool(loaded, rows), strict=True)
        return [layers(features, training=training) for layers, features in pooled]


def learner_of(group: Group, known: Preconditioners) -> Learner:
    """Return the learner for a group's kind; a new preconditioner is added to ``known``."""
    if POOLINGS[group.view.kind].learned:
        return _AttentionLearner(group)
    return _FixedLearner(group, known)


class _FixedLearner(Learner):
    """Heads on features without trainable parameters: grids, vectors, fixed poolings of tokens."""

    def __init__(self, group: Group, known: Preconditioners) -> None:
        self._group = group
        self._pooling = POOLINGS[group.view.kind]
        self._projection = () if self._pooling.recorded else group.projection
        if group.view not in known:
            known[group.view] = Preconditioner.fit(self._seen(group.train))
        self._preconditioner = known[group.view]
        self.layers = group.layers([self._preconditioner.width] * len(group.heads), group.random())

    def load(self, recording: Recording) -> Tensor | NDArray[np.floating]:
        seen = self._seen(recording)
        # Scaling alone is used for many features, and is cheap: it is repeated every time.
        if self._preconditioner.matrix.ndim == 1:
            return seen
        return torch.from_numpy(self._preconditioner.apply(seen))

    def pool(self, loaded: Tensor | NDArray[np.floating], rows: Tensor) -> list[Tensor]:
        if isinstance(loaded, Tensor):
            return [loaded[rows]] * len(self.layers)
        scaled = self._preconditioner.apply(copy_rows(loaded, rows.numpy()))
        return [torch.from_numpy(scaled)] * len(self.layers)

    def folded(self, index: int) -> dict[str, FloatArray]:
        return self.layers[index].folded(self._preconditioner, *self._projection)

    def _seen(self, recording: Recording) -> NDArray[np.floating]:
        """Return the features [n, inputs] before preconditioning."""
        key = LAST if self._pooling.recorded else self._group.view.grid or FULL_TENSOR
        recorded = recording.features[self._group.view.candidate][key]
        if self._pooling.form != "tokens" or self._pooling.recorded:
            return recorded
        mask, parts = self._group.mask_in(recording), []
        for start in range(0, len(recorded), _POOLED):
            rows = slice(start, start + _POOLED)
            tokens = copy_rows(recorded, rows).astype(np.float32)
            keep = np.ones(tokens.shape[:2]) if mask is None else copy_rows(mask, rows)
            parts.append(self._pooling.features(tokens, keep.astype(np.float32)[..., None]))
        return np.concatenate(parts)


class _AttentionLearner(Learner):
    """Heads with learned attention queries, trained together, since reading tokens is slow."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._standard = self._standardise()
        self._mean = torch.from_numpy(self._standard.mean)
        self._scaling = torch.from_numpy(self._standard.matrix)
        width, random = len(self._mean), group.random()
        self._query_scaling = self._scaling / math.sqrt(width)
        self.queries = [_uniform((h.queries, width), random, 0.035) for h in group.heads]
        self.layers = group.layers([h.queries * width for h in group.heads], random)

    def _standardise(self) -> Preconditioner:
        """Return a standardisation of single tokens; recorded coordinates are already scaled."""
        loaded = self.load(self._group.train)
        samples = len(loaded[0])
        values, kept = _take(loaded, torch.arange(0, samples, max(1, samples // 1024)))
        flat = values.flatten(0, 1) if kept is None else values[kept > 0]
        mean, scale = moments(flat.numpy())
        if self._group.projection:
            scale = np.ones_like(scale)
        return Preconditioner(mean=mean, matrix=np.reciprocal(scale))

    def parameters(self, index: int) -> list[Tensor]:
        return [self.queries[index], *super().parameters(index)]

    def load(self, recording: Recording) -> _Tokens:
        tokens = recording.features[self._group.view.candidate][FULL_TENSOR]
        return tokens, self._group.mask_in(recording)

    def pool(self, loaded: _Tokens, rows: Tensor) -> list[Tensor]:
        tokens, keep = _take(loaded, rows)
        scores = tokens @ (torch.cat(self.queries) * self._query_scaling).T
        if keep is not None:
            scores = scores + ((1 - keep) * FAR_BELOW)[..., None]
        pooled = scores.softmax(1).transpose(1, 2) @ tokens
        parts = torch.split(pooled, [len(queries) for queries in self.queries], dim=1)
        return [((part - self._mean) * self._scaling).flatten(1) for part in parts]

    def folded(self, index: int) -> dict[str, FloatArray]:
        queries = (self.queries[index] * self._query_scaling).detach().numpy()
        for projection in self._group.projection:
            # The tokens' mean adds a constant to all scores of a sample; softmax ignores it.
            queries = queries @ projection.matrix.T
        layers = self.layers[index].folded(self._standard, *self._group.projection)
        return layers | {"queries": np.ascontiguousarray(queries)}


def _uniform(shape: tuple[int, ...], random: torch.Generator, bound: float) -> Tensor:
    """Return a parameter drawn uniformly between minus and plus ``bound``."""
    values = torch.empty(shape).uniform_(-bound, bound, generator=random)
    return values.requires_grad_()


def _take(loaded: _Tokens, rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return tokens and mask of some rows as float32, read in the order of the file."""
    (tokens, mask), places = loaded, rows.numpy()
    values = torch.from_numpy(copy_rows(tokens, places)).float()
    keep = None if mask is None else copy_rows(mask, places).astype(np.float32)
    return values, None if keep is None else torch.from_numpy(keep)
