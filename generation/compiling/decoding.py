"""Answers to many prompts, with the serving scheduler and step loop, without a thread."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from offramp.compiler.common.progress import Advance
from offramp.engine.common.errors import BackendError, EngineError
from offramp.generation.compiling.prompts import Tokens
from offramp.generation.promise.dissimilarity import Dissimilarity
from offramp.generation.promise.text_promise import TextLosses, TextRisk
from offramp.generation.scheduling import (
    NewSequence,
    RefillPolicy,
    StepPolicy,
    TextOutcome,
    TextScheduler,
    TokenThresholds,
)
from offramp.generation.serving.step_loop import StepLoop, limits_of
from offramp.generation.serving.text_differences import compare_texts
from offramp.generation.stages.text_backend import TextBackend

BATCH: Final = 16
"""Default number of rows in a step."""


@dataclass(slots=True, eq=False)
class DecodedText:
    """An answer to a prompt, with the stage at which each token left."""

    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    """Stage at which each token left."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decoded:
    """Answers to prompts, in the order of the prompts."""

    texts: list[DecodedText]
    seconds: float
    """Time that decoding all prompts took, in seconds."""
    layer_tokens: int
    """Number of layer runs: each layer counts once for each token that it ran for."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all answers per second."""
        return sum(len(text.tokens) for text in self.texts) / self.seconds

    def layers_run(self, layers: int) -> float:
        """Return the mean share of ``layers`` that ran for a token, including catch-up."""
        return self.layer_tokens / (layers * sum(len(text.tokens) for text in self.texts))


def decode(
    backend: TextBackend,
    prompts: Sequence[Tokens],
    thresholds: TokenThresholds,
    *,
    stop: Sequence[int],
    most_tokens: int,
    batch: int = BATCH,
    policy: StepPolicy | None = None,
    advance: Advance = lambda _: None,
) -> Decoded:
    """Answer all prompts with at most ``most_tokens`` each; BackendError if one fails."""
    limits = limits_of(backend, batch=batch)
    scheduler = TextScheduler(limits, policy or RefillPolicy(), thresholds, queue=len(prompts))
    texts = [DecodedText() for _ in prompts]

    def publish(outcome: TextOutcome, error: EngineError | None) -> None:
        if error is not None and outcome.ended:
            raise BackendError(f"a prompt could not be answered: {error}") from error
        for given in outcome.given:
            texts[given.sequence].tokens.append(given.token)
            texts[given.sequence].depths.append(given.stage)
        advance(len(outcome.ended))

    loop = StepLoop(backend, scheduler, publish, time.monotonic)
    ends = frozenset(stop)
    for number, prompt in enumerate(prompts):
        new = NewSequence(
            number=number, prompt_tokens=len(prompt), most_tokens=most_tokens, stop=ends
        )
        loop.submit(new, prompt)
    begun, before = time.perf_counter(), _layer_tokens(backend)
    while loop.turn():
        pass
    seconds = time.perf_counter() - begun
    return Decoded(texts=texts, seconds=seconds, layer_tokens=_layer_tokens(backend) - before)


def _layer_tokens(backend: TextBackend) -> int:
    return int(backend.statistics()["layer_tokens"])


def losses_of(
    found: Sequence[DecodedText],
    wanted: Sequence[DecodedText],
    risk: TextRisk,
    dissimilarity: Dissimilarity,
) -> TextLosses:
    """Return the losses of answers, compared with the model's own."""
    pairs = [(a.tokens, b.tokens) for a, b in zip(found, wanted, strict=True)]
    compared = [compare_texts(*pair) for pair in pairs]
    losses: list[Any] = [difference.differs for difference in compared]
    if risk is TextRisk.TEXTS:
        losses = [a != b and dissimilarity(a, b) for a, b in pairs]
    return TextLosses(
        losses=np.array(losses, np.float64),
        tokens=np.array([difference.compared for difference in compared], np.int64),
    )
