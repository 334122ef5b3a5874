"""Training of a copy of a decoder with its exits, on the original's answers (CALM 3.3-3.5).

All tokens of an answer run in one pass, each after the true previous ones (teacher forcing). Each
exit predicts the original's next token, with the model's own norm and LM head. The loss of an exit
is weighted by the number of layers before it (CALM 3.5).

Training includes state propagation: some tokens, drawn at random, leave at an exit. Later layers
compute the keys and values of such a token from its state at the exit, as in serving (CALM 3.3).

The decoder's layers are the served graphs, computed in torch with an empty past; a weight that
several of them use is one parameter. The encoder, and the keys and values computed from its output,
stay unchanged.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from offramp.calibration.data.errors import UntrainableError
from offramp.calibration.data.training_options import rate_after
from offramp.calibration.torch.torch_graph import TorchGraph, with_weights
from offramp.certify.decision import IntArray
from offramp.compiler.graphs.runtime import GraphRunner
from offramp.generation.bundle.tensor_names import (
    IDS,
    KINDS,
    LOGITS,
    MASK,
    NEXT_STATE,
    POSITIONS,
    SOURCE_MASK,
    STATE,
    cross_name,
    past_name,
    size_name,
)
from offramp.generation.graphs.decoder_cut import DecoderCut
from offramp.generation.graphs.padding_check import takes_several
from offramp.generation.graphs.stacking import unstacked
from offramp.generation.graphs.text_graphs import TextExport, logits_graph, segment_graph

_POOL = 50
"""Batches in a pool; within a pool, answers of similar length are batched together."""
_LEAST_SAME = 0.98
"""Smallest share of its own tokens that the model must predict in torch before training; with less,
the conversion to torch is considered wrong."""
_NONE = -1
"""Target of a position at which no token is learned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JointTextTraining:
    """Options of training a decoder together with its exits."""

    epochs: int = 4
    """Largest number of epochs."""
    minutes: float | None = None
    """Limit on the processor time, in minutes; with a limit, two runs may differ."""
    patience: int = 2
    """Epochs without a smaller loss on the tuning prompts after which training ends."""
    batch_size: int = 16
    """Answers per step."""
    learning_rate: float = 3e-4
    """Peak rate; it rises over the first tenth, then falls along a cosine."""
    tuned: float = 0.1
    """Share of the prompts used for tuning: they are not trained on, and select the best
    weights.
    """
    threads: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 0 or self.batch_size < 1 or not 0 < self.tuned < 1:
            raise ValueError(
                f"{self} must have 0 epochs or more, batches of 1 or more, and tune with a share "
                "between 0 and 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class JointTextFit:
    """Fit to the tuning prompts: of each exit in order, then of the model's end."""

    losses: tuple[float, ...]
    """Mean cross-entropy per token, in nats, if no token leaves."""
    agreement: tuple[float, ...]
    """Share of the original's tokens that each exit, or the model's end, predicts, if no token
    leaves."""
    propagated: tuple[float, ...]
    """Mean loss of the tokens that reach each exit, if tokens leave at random."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JointlyTrainedText:
    """A copy of a model that was trained with its exits."""

    export: TextExport
    before: JointTextFit
    after: JointTextFit


def train_joint_text(
    export: TextExport,
    prompts: Sequence[IntArray],
    answers: Sequence[IntArray],
    *,
    exits: Sequence[int],
    start_token: int | None = None,
    options: JointTextTraining = JointTextTraining(),
    progress: Callable[[float], None] = lambda _: None,
) -> JointlyTrainedText:
    """Train a copy of a decoder; the weights of the epoch with the least loss are kept.

    Args:
        export: The model, which is not changed.
        prompts: int64[tokens] each.
        answers: int64[tokens] each: the model's own greedy answers, including the stop token.
        exits: Numbers of layers before each exit, increasing.
        start_token: First token that the decoder of an encoder-decoder reads.
        options: Length and speed of the training.
        progress: Called after each step with the finished share of the training.

    Raises:
        UntrainableError: The decoder takes only one token per step, has operators that are missing
            in torch, or predicts other tokens there.
        ModelError: The decoder cannot be cut.
        ValueError: Prompts, answers or exits do not fit together.
    """
    torch.set_num_threads(options.threads)
    course = _Course(export, _Texts.of(export, prompts, answers, start_token), exits, options)
    before = course.judge()
    course.check(before)
    after = course.train(before, progress)
    trained = with_weights(export.decoder.proto, course.decoder.learned)
    return JointlyTrainedText(
        export=replace(export, decoder=replace(export.decoder, proto=trained)),
        before=before,
        after=after,
    )


class _Batch(NamedTuple):
    """Texts of b prompts, padded on the right to t tokens."""

    feeds: dict[str, Tensor]
    wanted: Tensor
    """int64 [b, t]: next token to predict; -1 if none is learned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Texts:
    """Inputs of the decoder, and the tokens that it should predict."""

    export: TextExport
    encoder: GraphRunner | None
    prompts: Sequence[IntArray]
    fed: Sequence[IntArray]
    wanted: Sequence[IntArray]

    @classmethod
    def of(
        cls,
        export: TextExport,
        prompts: Sequence[IntArray],
        answers: Sequence[IntArray],
        start_token: int | None,
    ) -> _Texts:
        if len(prompts) != len(answers) or len(prompts) < 2:
            raise ValueError(
                f"{len(prompts)} prompts and {len(answers)} answers were given, expected equal "
                "numbers of at least 2"
            )
        if any(not len(text) for text in (*prompts, *answers)):
            raise ValueError("a prompt or an answer is empty; leave it out")
        encodes = export.encoder is not None
        if encodes and start_token is None:
            raise ValueError("the decoder of an encoder-decoder needs a start token")
        fed, wanted = [], []
        for prompt, answer in zip(prompts, answers, strict=True):
            begin = np.array([start_token]) if encodes else prompt
            fed.append(np.concatenate([begin, answer[:-1]]).astype(np.int64))
            # The tokens of a decoder's prompt, except the last one, run through all layers.
            skipped = np.full(len(begin) - 1, _NONE)
            wanted.append(np.concatenate([skipped, answer]).astype(np.int64))
        encoder = GraphRunner(export.encoder) if export.encoder is not None else None
        return cls(export=export, encoder=encoder, prompts=prompts, fed=fed, wanted=wanted)

    def __len__(self) -> int:
        return len(self.fed)

    def batch(self, rows: Sequence[int]) -> _Batch:
        """Return a batch of some texts, padded on the right; real tokens ignore the padding."""
        ids, wanted = (
            torch.from_numpy(_padded([texts[row] for row in rows], fill))
            for texts, fill in ((self.fed, 0), (self.wanted, _NONE))
        )
        count, tokens = ids.shape
        feeds = {
            IDS: ids,
            MASK: torch.ones_like(ids),
            POSITIONS: torch.arange(tokens).expand(count, -1),
            size_name("tokens"): torch.tensor([tokens]),
            size_name("past"): torch.tensor([0]),
        }
        for number, layer in enumerate(self.export.decoder.layers):
            nothing = torch.zeros(count, layer.cache.heads, 0, layer.cache.size)
            feeds |= {past_name(number, kind): nothing for kind in KINDS}
        if self.encoder is not None:
            feeds |= self._crossed(self.encoder, [self.prompts[row] for row in rows])
        return _Batch(feeds, wanted)

    def _crossed(self, encoder: GraphRunner, prompts: Sequence[IntArray]) -> dict[str, Tensor]:
        """Run the encoder: all prompts together if it has a mask, else prompts of equal length."""
        lengths = np.array([len(prompt) for prompt in prompts])
        longest = int(lengths.max())
        groups = [np.arange(len(prompts))]
        if MASK not in encoder.inputs:
            groups = [np.flatnonzero(lengths == length) for length in np.unique(lengths)]
        sizes = {
            cross_name(number, kind): (layer.cache.cross_heads, layer.cache.cross_size)
            for number, layer in enumerate(self.export.decoder.layers)
            for kind in KINDS
        }
        feeds = {
            name: torch.zeros(len(prompts), heads, longest, size)
            for name, (heads, size) in sizes.items()
        }
        for group in groups:
            ids = _padded([prompts[row] for row in group.tolist()], 0)
            mask = (np.arange(ids.shape[1]) < lengths[group, None]).astype(np.int64)
            found = unstacked(encoder.run({IDS: ids, MASK: mask}), sizes)
            for name, given in feeds.items():
                given[torch.from_numpy(group), :, : ids.shape[1]] = torch.from_numpy(found[name])
        counted = (np.arange(longest) < lengths[:, None]).astype(np.int64)
        feeds[SOURCE_MASK] = torch.from_numpy(counted)
        feeds[size_name("source")] = torch.tensor([longest])
        return feeds


class _Decoder(nn.Module):
    """Layers and head of a decoder in torch, with one set of weights."""

    def __init__(self, export: TextExport, exits: Sequence[int]) -> None:
        super().__init__()
        cut, count = DecoderCut(export.decoder), len(export.decoder.layers)
        if not exits or list(exits) != sorted(set(exits)) or exits[0] < 1 or exits[-1] >= count:
            raise ValueError(
                f"exits are wanted after layers {list(exits)}, expected increasing numbers from 1 "
                f"to {count - 1}: the model has {count} layers"
            )
        self.ends = (*exits, count)
        graphs = [segment_graph(cut, layer, layer + 1) for layer in range(count)]
        self.layers = nn.ModuleList(TorchGraph(graph, outputs=[NEXT_STATE]) for graph in graphs)
        self.head = TorchGraph(logits_graph(cut))
        weights: dict[str, nn.Parameter] = {}
        for graph in (*self.layers, self.head):
            assert isinstance(graph, TorchGraph)
            graph.share(weights)
            weights |= graph.weights
        # Weights of one element are not trained: scales, mask values, the epsilon of a variance.
        self.learned = {n: p for n, p in weights.items() if p.requires_grad and p.numel() > 1}

    def forward(self, batch: _Batch, left: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield for each exit the states and targets of the n tokens that reach it.

        ``left`` is int64 [b, t]: the number of layers that each token runs.
        """
        state = torch.empty(0)
        for number, layer in enumerate(self.layers):
            given = layer({**batch.feeds, STATE: state})[NEXT_STATE]
            state = given if not number else torch.where((left <= number)[..., None], state, given)
            if number + 1 in self.ends:
                here = (batch.wanted != _NONE) & (left > number)
                yield state[here], batch.wanted[here]

    def logits(self, states: Tensor) -> Tensor:
        """Return the head's logits of states [n, width]."""
        found: Tensor = self.head({STATE: states[:, None]})[LOGITS][:, 0].float()
        return found


class _Course:
    """A running training of a decoder with its exits."""

    def __init__(
        self, export: TextExport, texts: _Texts, exits: Sequence[int], options: JointTextTraining
    ) -> None:
        if not takes_several(export.decoder):
            raise UntrainableError(
                "the decoder takes only one token per step, and training runs all tokens of an "
                "answer in one pass; export it with a symbolic number of tokens and with a mask "
                "between new tokens, or train adapters"
            )
        self._texts, self._options = texts, options
        self.decoder = _Decoder(export, exits)
        order = np.random.default_rng(options.seed).permutation(len(texts))
        tuned = min(max(round(options.tuned * len(texts)), 1), len(texts) - 1)
        self._tuning, self._trained = order[:tuned], order[tuned:]
        # Deeper exits weigh more: they answer what the ones before them cannot (CALM 3.5).
        self._weights = torch.tensor(self.decoder.ends) / sum(self.decoder.ends)

    def train(self, before: JointTextFit, progress: Callable[[float], None]) -> JointTextFit:
        """Train, and return the fit of the kept weights."""
        options, learned = self._options, list(self.decoder.learned.values())
        optimiser = torch.optim.AdamW(learned, lr=options.learning_rate, weight_decay=0.0)
        rng, random = np.random.default_rng(options.seed), torch.Generator()
        random.manual_seed(options.seed)
        best, kept, late = before, self._copied(), 0
        begun, done = time.process_time(), 0
        steps = options.epochs * math.ceil(len(self._trained) / options.batch_size)
        for _ in range(options.epochs):
            for rows in self._batches(rng.permutation(self._trained), rng):
                spent = (time.process_time() - begun) / 60
                share = max(done / steps, spent / options.minutes if options.minutes else 0.0)
                if share >= 1:
                    break
                optimiser.param_groups[0]["lr"] = options.learning_rate * rate_after(share)
                self._step(self._texts.batch(rows), optimiser, random)
                done += 1
                progress(min(share, 1.0))
            now = self.judge()
            late += 1
            if self._total(now) < self._total(best):
                best, kept, late = now, self._copied(), 0
            if late >= options.patience or share >= 1 or not math.isfinite(self._total(now)):
                break
        progress(1.0)
        with torch.no_grad():
            for name, weight in self.decoder.learned.items():
                weight.copy_(kept[name])
        return best

    def check(self, before: JointTextFit) -> None:
        """Raise UntrainableError if the model's predictions in torch differ from its answers."""
        if before.agreement[-1] < _LEAST_SAME:
            raise UntrainableError(
                f"computed in torch, the model predicts {before.agreement[-1]:.1%} of the tokens "
                f"of its answers, expected at least {_LEAST_SAME:.0%}: pass its own greedy answers "
                "and its start token; if they are, leave out joint training and report this"
            )

    @torch.no_grad()
    def judge(self) -> JointTextFit:
        """Measure the fit to the tuning prompts, without and with tokens that leave.

        The same tokens leave in each measurement.
        """
        random = torch.Generator().manual_seed(self._options.seed)
        ends = len(self.decoder.ends)
        losses, right, counts = np.zeros((2, ends)), np.zeros(ends), np.zeros((2, ends))
        for rows in self._batches(self._tuning, None):
            batch = self._texts.batch(rows)
            for side, left in enumerate((self._none(batch), self._drawn(batch, random))):
                for place, (states, wanted) in enumerate(self.decoder(batch, left)):
                    scores = self.decoder.logits(states)
                    losses[side, place] += float(_summed(scores, wanted))
                    counts[side, place] += len(wanted)
                    if side == 0:
                        right[place] += int((scores.argmax(1) == wanted).sum())
        mean = losses / np.maximum(counts, 1)
        return JointTextFit(
            losses=tuple(mean[0].tolist()),
            agreement=tuple((right / counts[0]).tolist()),
            propagated=tuple(mean[1].tolist()),
        )

    def _step(
        self, batch: _Batch, optimiser: torch.optim.Optimizer, random: torch.Generator
    ) -> None:
        optimiser.zero_grad(set_to_none=True)
        loss = torch.zeros(())
        for weight, (states, wanted) in zip(
            self._weights, self.decoder(batch, self._drawn(batch, random)), strict=True
        ):
            # Logits of all exits would need by far the most memory, so they are computed again in
            # the backward pass.
            part = checkpoint(self._loss, states, wanted, use_reentrant=False)
            loss = loss + weight * part / max(len(wanted), 1)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.decoder.learned.values(), 1.0)
        optimiser.step()

    def _loss(self, states: Tensor, wanted: Tensor) -> Tensor:
        return _summed(self.decoder.logits(states), wanted)

    def _none(self, batch: _Batch) -> Tensor:
        return torch.full_like(batch.wanted, self.decoder.ends[-1])

    def _drawn(self, batch: _Batch, random: torch.Generator) -> Tensor:
        """Draw the number of layers that each token runs; in half of the texts it is all layers.

        In the other texts a random share of the tokens leaves, each at a random exit. Draws do not
        depend on predictions, so that losses of different weights can be compared.
        """
        draw = partial(torch.rand, generator=random)
        share = (2 * draw(len(batch.wanted), 1) - 1).clamp_min(0)
        ends = torch.tensor(self.decoder.ends)
        exits = ends[(draw(*batch.wanted.shape) * (len(ends) - 1)).long()]
        leaves = (draw(*batch.wanted.shape) < share) & (batch.wanted != _NONE)
        return torch.where(leaves, exits, ends[-1])

    def _batches(
        self, rows: NDArray[np.int64], rng: np.random.Generator | None
    ) -> Iterator[list[int]]:
        """Yield batches of texts of similar length, in random order."""
        size = self._options.batch_size
        for start in range(0, len(rows), size * _POOL):
            pool = rows[start : start + size * _POOL]
            pool = pool[np.argsort([len(self._texts.fed[row]) for row in pool], kind="stable")]
            parts = [pool[at : at + size].tolist() for at in range(0, len(pool), size)]
            places = range(len(parts)) if rng is None else rng.permutation(len(parts)).tolist()
            yield from (parts[place] for place in places)

    def _total(self, fit: JointTextFit) -> float:
        """Return the loss that selects weights: the mean of the losses without and with leaving."""
        both = np.add(fit.losses, fit.propagated) / 2
        return float(both @ self._weights.double().numpy())

    def _copied(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.decoder.learned.items()}


def _summed(scores: Tensor, wanted: Tensor) -> Tensor:
    return functional.cross_entropy(scores, wanted, reduction="sum")


def _padded(rows: Sequence[IntArray], fill: int) -> IntArray:
    found = np.full((len(rows), max(map(len, rows))), fill, np.int64)
    for place, row in zip(found, rows, strict=True):
        place[: len(row)] = row
    return found
