"""Train heads on the frozen model's features, each exit for itself.

Apparate 3.1: ramps are trained independently of each other on a frozen model. The targets are the
source model's probabilities (self-distillation), so no labels are needed. Exits are dealt to
threads, one core each: that keeps its pace beside a busy neighbour, where threads that share one
matrix product wait for each other. The only module that names torch.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from offramp.bundle import Head
from offramp.calibration.families import CutTensor
from offramp.calibration.features import WHOLE, Recording
from offramp.calibration.preconditioning import Preconditioner, moments

_FAR_BELOW = -1e9
_EVALUATED = 512
"""Samples that are answered at once."""
_FEWEST_STEPS = 24
"""Of an epoch: little data is taken in smaller batches, or heads would hardly be trained."""
_SMALLEST_BATCH = 32
_WARM_UP = 0.1
"""Share of the steps in which the learning rate rises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """How heads are trained."""

    epochs: int = 8
    batch_size: int = 512
    """At most."""
    learning_rate: float = 4e-3
    """At its peak; it rises over the first tenth of the steps, then falls along a cosine."""
    weight_decay: float = 1e-4
    dropout: float = 0.1
    """On the hidden layer, or on the features of a linear head."""
    threads: int = 1
    """Exits that are trained at once."""
    seed: int = 0


class View(NamedTuple):
    """What heads see of a cut tensor."""

    candidate: int
    kind: str
    """Of head."""
    grid: int


def view_of(candidate: int, head: Head) -> View:
    """What a head sees of a candidate's cut tensor."""
    return View(candidate, head.kind, head.grid)


Preconditioners: TypeAlias = dict[View, Preconditioner]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedHead:
    """A head for a candidate exit."""

    candidate: int
    head: Head
    weights: Mapping[str, NDArray[np.float32]]
    """``weight`` [inputs, classes], ``bias`` [classes]; ``hidden_weight``, ``hidden_bias`` of
    the hidden layer; ``queries`` [queries, width]. Preconditioning is folded in."""
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
    known: Preconditioners | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> list[TrainedHead]:
    """Train heads of every candidate.

    Args:
        train: Features to train on.
        tune: Features to answer with the trained heads; they also pick each head's best epoch.
        cuts: Per candidate.
        families: Per candidate, the heads to train; may be none.
        probabilities: [train samples, classes], the source model's.
        options: How.
        known: Preconditioners by view, to be used where there is one; new ones are added.
        progress: Called with 1 after every step of :func:`count_steps`, from several threads.

    Returns:
        All trained heads, in the order of ``families``; the same in every run, however many
        threads there are.
    """
    torch.set_num_threads(1)
    known = {} if known is None else known
    stop = threading.Event()
    targets = torch.from_numpy(probabilities)

    def run(item: tuple[View, Sequence[Head]]) -> list[TrainedHead]:
        view, heads = item
        cut = cuts[view.candidate]
        mask = cut.mask if cut.rank == 3 else None
        reader: _Reader
        if view.kind == "attention":
            reader = _Attention(heads, view, mask, train=train, options=options)
        else:
            reader = _Fixed(heads, view, mask, train=train, options=options, known=known)
        _fit(reader, train, tune, targets=targets, options=options, progress=progress, stop=stop)
        return _answered(reader, view.candidate, tune)

    with ThreadPoolExecutor(options.threads) as pool:
        try:
            groups = list(pool.map(run, _groups(families).items()))
        except BaseException:  # an interrupt must not wait until the others are trained
            stop.set()
            raise
    trained = {(t.candidate, t.head): t for group in groups for t in group}
    return [trained[c, head] for c, family in enumerate(families) for head in family]


def count_steps(families: Sequence[Sequence[Head]], options: TrainingOptions) -> int:
    """How often :func:`train_heads` reports progress: once an epoch of heads on one view."""
    return options.epochs * len(_groups(families))


def _groups(families: Sequence[Sequence[Head]]) -> dict[View, list[Head]]:
    """Heads by what they see of a cut tensor, which is read once for all of them."""
    groups: dict[View, list[Head]] = {}
    for candidate, family in enumerate(families):
        for head in family:
            groups.setdefault(view_of(candidate, head), []).append(head)
    return groups


class _Layers:
    """One or two dense layers behind features [b, inputs]."""

    def __init__(
        self, head: Head, inputs: int, classes: int, *, dropout: float, random: torch.Generator
    ) -> None:
        self.head, self._dropout, self._random = head, dropout, random
        sizes = [inputs, head.hidden, classes] if head.hidden else [inputs, classes]
        self.weights = [
            _uniform((size, to), random, 1 / math.sqrt(size))
            for size, to in itertools.pairwise(sizes)
        ]
        self.biases = [
            _uniform((to,), random, 1 / math.sqrt(size)) for size, to in itertools.pairwise(sizes)
        ]

    def parameters(self) -> list[Tensor]:
        return [*self.weights, *self.biases]

    def __call__(self, features: Tensor, *, training: bool) -> Tensor:
        """Give logits [b, classes]."""
        x = features
        if self.head.hidden:
            x = torch.addmm(self.biases[0], x, self.weights[0]).relu()
        if training and self._dropout:
            kept = torch.empty_like(x).bernoulli_(1 - self._dropout, generator=self._random)
            x = x * kept / (1 - self._dropout)
        return torch.addmm(self.biases[-1], x, self.weights[-1])

    def folded(self, *preconditioners: Preconditioner) -> dict[str, NDArray[np.float32]]:
        """Give the weights as served, on plain features; the last preconditioner came first."""
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


class _Reader(Protocol):
    """What a group of heads learns, and the features that it learns from."""

    layers: list[_Layers]

    def parameters(self, index: int) -> list[Tensor]:
        """Give what a head learns."""
        ...

    def load(self, recording: Recording) -> Any:
        """Give a recording in the form that :meth:`pool` takes rows from."""
        ...

    def pool(self, loaded: Any, rows: Tensor) -> list[Tensor]:
        """Give each head's features [b, inputs] of some rows."""
        ...

    def folded(self, index: int) -> dict[str, NDArray[np.float32]]:
        """Give a head's weights as served."""
        ...


def _random(view: View, seed: int) -> torch.Generator:
    """A generator of a view's own: its heads must not depend on what else is trained."""
    entropy = (seed, view.candidate, sum(view.kind.encode()), view.grid)
    return torch.Generator().manual_seed(int(np.random.SeedSequence(entropy).generate_state(1)[0]))


def _projection(train: Recording, view: View) -> tuple[Preconditioner, ...]:
    """How the tokens that a view reads were stored; nothing where they were stored plain."""
    return tuple(p for candidate, p in train.projections.items() if candidate == view.candidate)


class _Fixed:
    """Heads on features that no learning changes: grids, vectors, fixed poolings of tokens."""

    def __init__(
        self,
        heads: Sequence[Head],
        view: View,
        mask: str | None,
        *,
        train: Recording,
        options: TrainingOptions,
        known: Preconditioners,
    ) -> None:
        self._view, self._mask = view, mask
        self._projection = _projection(train, view)
        # the maximum of coordinates is no coordinate of the maximum
        assert not (self._projection and view.kind == "mean_max")
        if view not in known:
            known[view] = Preconditioner.fit(self._seen(train))
        self._preconditioner = known[view]
        classes, inputs = train.answers.shape[1], self._preconditioner.width
        random = _random(view, options.seed)
        self.layers = [
            _Layers(head, inputs, classes, dropout=options.dropout, random=random) for head in heads
        ]

    def parameters(self, index: int) -> list[Tensor]:
        return self.layers[index].parameters()

    def load(self, recording: Recording) -> Tensor:
        return torch.from_numpy(self._preconditioner.apply(self._seen(recording)))

    def pool(self, loaded: Tensor, rows: Tensor) -> list[Tensor]:
        return [loaded[rows]] * len(self.layers)

    def folded(self, index: int) -> dict[str, NDArray[np.float32]]:
        return self.layers[index].folded(self._preconditioner, *self._projection)

    def _seen(self, recording: Recording) -> NDArray[np.floating]:
        features = recording.features[self._view.candidate]
        if self._view.kind in ("first", "mean", "mean_max"):
            mask = recording.masks[self._mask] if self._mask else None
            return _pool_tokens(features[WHOLE], mask, self._view.kind)
        return features[self._view.grid or WHOLE]


class _Attention:
    """Heads that pool tokens by learned queries.

    All at once: the tokens are large, and reading them is what takes the time.
    """

    def __init__(
        self,
        heads: Sequence[Head],
        view: View,
        mask: str | None,
        *,
        train: Recording,
        options: TrainingOptions,
    ) -> None:
        self._candidate, self._mask = view.candidate, mask
        self._projection = _projection(train, view)
        self._standard = self._standardise(train)
        self._mean = torch.from_numpy(self._standard.mean)
        self._scaling = torch.from_numpy(self._standard.matrix)
        width, classes = len(self._mean), train.answers.shape[1]
        self._query_scaling = self._scaling / math.sqrt(width)
        random, dropout = _random(view, options.seed), options.dropout
        self.queries = [_uniform((h.queries, width), random, 0.035) for h in heads]
        self.layers = [
            _Layers(h, h.queries * width, classes, dropout=dropout, random=random) for h in heads
        ]

    def _standardise(self, train: Recording) -> Preconditioner:
        """Of single tokens; coordinates have their scale already."""
        tokens, keep = self.load(train)
        rows = torch.arange(0, len(tokens), max(1, len(tokens) // 1024))
        values, kept = _take(tokens, keep, rows)
        flat = values.flatten(0, 1) if kept is None else values[kept > 0]
        mean, scale = moments(flat.numpy())
        if self._projection:
            scale = np.ones_like(scale)
        return Preconditioner(mean=mean, matrix=np.reciprocal(scale))

    def parameters(self, index: int) -> list[Tensor]:
        return [self.queries[index], *self.layers[index].parameters()]

    def load(self, recording: Recording) -> tuple[NDArray[np.float16], NDArray[Any] | None]:
        mask = recording.masks[self._mask] if self._mask else None
        return recording.features[self._candidate][WHOLE], mask

    def pool(
        self, loaded: tuple[NDArray[np.float16], NDArray[Any] | None], rows: Tensor
    ) -> list[Tensor]:
        tokens, keep = _take(*loaded, rows)
        scores = tokens @ (torch.cat(self.queries) * self._query_scaling).T
        if keep is not None:
            scores = scores + ((1 - keep) * _FAR_BELOW)[..., None]
        pooled = scores.softmax(1).transpose(1, 2) @ tokens
        parts = torch.split(pooled, [len(queries) for queries in self.queries], dim=1)
        return [((part - self._mean) * self._scaling).flatten(1) for part in parts]

    def folded(self, index: int) -> dict[str, NDArray[np.float32]]:
        queries = (self.queries[index] * self._query_scaling).detach().numpy()
        for projection in self._projection:
            # The tokens' mean shifts all scores of a sample alike, which softmax does not see.
            queries = queries @ projection.matrix.T
        layers = self.layers[index].folded(self._standard, *self._projection)
        return layers | {"queries": np.ascontiguousarray(queries)}


def _fit(
    reader: _Reader,
    train: Recording,
    tune: Recording,
    *,
    targets: Tensor,
    options: TrainingOptions,
    progress: Callable[[int], None],
    stop: threading.Event,
) -> None:
    """Train a group of heads, and leave each as it was after its best epoch."""
    loaded, judged = reader.load(train), reader.load(tune)
    wanted = torch.from_numpy(tune.answers.argmax(axis=1))
    shuffler = np.random.default_rng(options.seed)
    size = max(min(options.batch_size, len(targets) // _FEWEST_STEPS), _SMALLEST_BATCH)
    steps = options.epochs * math.ceil(len(targets) / size)
    learned = [reader.parameters(index) for index in range(len(reader.layers))]
    optimiser = torch.optim.AdamW(
        [p for parameters in learned for p in parameters],
        lr=options.learning_rate,
        weight_decay=options.weight_decay,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate(step / steps))
    best = [_Best(parameters) for parameters in learned]
    for _ in range(options.epochs):
        if stop.is_set():
            return
        for rows in _batches(torch.from_numpy(shuffler.permutation(len(targets))), size):
            optimiser.zero_grad(set_to_none=True)
            pooled = zip(reader.layers, reader.pool(loaded, rows), strict=True)
            losses = [
                functional.cross_entropy(layers(x, training=True), targets[rows])
                for layers, x in pooled
            ]
            torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
        for kept, loss in zip(best, _losses(reader, judged, wanted), strict=True):
            kept.offer(loss)
        progress(1)
    for kept in best:
        kept.restore()


def _rate(progress: float) -> float:
    """Factor on the learning rate after a share of the steps."""
    if progress < _WARM_UP:
        return (progress + 1e-3) / _WARM_UP
    return 0.5 * (1 + math.cos(math.pi * min((progress - _WARM_UP) / (1 - _WARM_UP), 1)))


class _Best:
    """A head's parameters at the lowest loss so far."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters, self._loss = parameters, math.inf
        self._values: list[Tensor] = []

    def offer(self, loss: float) -> None:
        if loss < self._loss:
            self._loss, self._values = loss, [p.detach().clone() for p in self._parameters]

    @torch.no_grad()
    def restore(self) -> None:
        for parameter, value in zip(self._parameters, self._values, strict=False):
            parameter.copy_(value)


@torch.no_grad()
def _logits(reader: _Reader, loaded: Any, samples: int) -> list[Tensor]:
    """Every head's logits [samples, classes]."""
    chunks = [
        [
            layers(x, training=False)
            for layers, x in zip(reader.layers, reader.pool(loaded, rows), strict=True)
        ]
        for rows in _batches(torch.arange(samples), _EVALUATED)
    ]
    return [torch.cat(parts) for parts in zip(*chunks, strict=True)]


def _losses(reader: _Reader, loaded: Any, wanted: Tensor) -> list[float]:
    """Every head's loss against the source model's predictions [samples]."""
    logits = _logits(reader, loaded, len(wanted))
    return [functional.cross_entropy(values, wanted).item() for values in logits]


def _answered(reader: _Reader, candidate: int, tune: Recording) -> list[TrainedHead]:
    """Answer the tuning split with the trained heads."""
    trained = []
    for index, logits in enumerate(_logits(reader, reader.load(tune), len(tune.answers))):
        confidence, prediction = logits.softmax(1).max(1)
        trained.append(
            TrainedHead(
                candidate=candidate,
                head=reader.layers[index].head,
                weights=reader.folded(index),
                confidence=confidence.numpy(),
                prediction=prediction.numpy().astype(np.int32),
            )
        )
    return trained


def _batches(rows: Tensor, size: int) -> Iterator[Tensor]:
    return iter(torch.split(rows, size))


def _uniform(shape: tuple[int, ...], random: torch.Generator, bound: float) -> Tensor:
    """A parameter, drawn between minus and plus ``bound``."""
    values = torch.empty(shape).uniform_(-bound, bound, generator=random)
    return values.requires_grad_()


def _take(
    tokens: NDArray[np.float16], mask: NDArray[Any] | None, rows: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Give tokens and mask of some rows as float32; read in order, as they lie in a file."""
    places = rows.numpy()
    values = torch.from_numpy(tokens[places]).float()
    return values, None if mask is None else torch.from_numpy(mask[places].astype(np.float32))


def _pool_tokens(
    tokens: NDArray[np.float16], mask: NDArray[Any] | None, kind: str
) -> NDArray[np.float32]:
    """Pool [n, tokens, width] by a fixed rule: first token, masked mean, or those and maximum.

    Computed once; only learned queries have to see the tokens every epoch.
    """
    if kind == "first":
        return tokens[:, 0].astype(np.float32)
    parts = [
        _pool_chunk(
            tokens[start : start + 256], None if mask is None else mask[start : start + 256], kind
        )
        for start in range(0, len(tokens), 256)
    ]
    return np.concatenate(parts)


def _pool_chunk(
    tokens: NDArray[np.float16], mask: NDArray[Any] | None, kind: str
) -> NDArray[np.float32]:
    values = tokens.astype(np.float32)
    keep = np.ones(values.shape[:2], np.float32) if mask is None else mask.astype(np.float32)
    keep = keep[..., None]
    mean: NDArray[np.float32] = (values * keep).sum(axis=1) / np.maximum(keep.sum(axis=1), 1)
    if kind == "mean":
        return mean
    largest = (values + (1 - keep) * np.float32(_FAR_BELOW)).max(axis=1)
    return np.concatenate([values[:, 0], mean, largest], axis=1)
