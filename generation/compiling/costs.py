"""Costs of layers, exits and propagation, measured on the serving backend."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from offramp.certify.decision import MODEL_END, FloatArray, IntArray
from offramp.generation.bundle.text_model import TextModel
from offramp.generation.compiling.prompts import Tokens
from offramp.generation.stages.text_backend import TextBackend

_REPEATS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextCosts:
    """Times of a step in ms, for the measured number of rows."""

    layers: FloatArray
    """float64[layers]: time of each decoder layer."""
    check: float
    """Time of an exit or of the model's end: the head and the overhead of calling a stage."""
    leaving: FloatArray
    """float64[layers]: time to fill the layers after layer i when a token leaves there; 0 without
    an exit."""

    @property
    def whole(self) -> float:
        """Time of a token that runs all layers of the model without exits, in ms."""
        return float(self.layers.sum() + self.check)

    def of_tokens(self, exits: Sequence[int], answered_at: IntArray, *, fills: bool) -> float:
        """Return the mean time of tokens that leave at ``answered_at``, int64[tokens].

        ``exits`` are increasing layer numbers; ``fills`` is true if skipped layers are filled when
        a token leaves.
        """
        ends = [*exits, len(self.layers)]
        until = np.cumsum(self.layers)[np.array(ends) - 1] + self.check * np.arange(
            1, 1 + len(ends)
        )
        if fills:
            until[:-1] += self.leaving[np.array(exits, np.int64) - 1]
        places = np.where(answered_at == MODEL_END, len(exits), answered_at)
        return float(until[places].mean())


def measure_costs(
    exits: TextBackend,
    whole: TextBackend,
    model: TextModel,
    prompts: Sequence[Tokens],
    answer: Sequence[int],
) -> TextCosts:
    """Time a backend with exits at layers of ``model``, and the same model without exits.

    One sequence runs for each of ``prompts``; all are fed the tokens of ``answer`` in place of
    their own. The difference between both backends is the cost of the exits.
    """
    stages, leaving = _time_steps(exits, prompts, answer)
    (one_stage,), _ = _time_steps(whole, prompts, answer)
    check = max((stages.sum() - one_stage) / max(len(stages) - 1, 1), 0.0)
    layers, behind = np.zeros(len(model.layers)), np.zeros(len(model.layers))
    for number, ms in enumerate(stages):
        own = model.layers_of(number)
        layers[own.start : own.stop] = max(ms - check, 0.0) / len(own)
    for number, ms in enumerate(leaving):
        behind[model.stages[number].end - 1] = ms
    return TextCosts(layers=layers, check=check, leaving=behind)


def _time_steps(
    backend: TextBackend, prompts: Sequence[Tokens], answer: Sequence[int]
) -> tuple[FloatArray, FloatArray]:
    """Return medians in ms: float64[stages] to run, float64[stages - 1] to leave a stage."""
    slots = list(range(len(prompts)))
    ran, left = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
    last = backend.stages - 1
    for _ in range(_REPEATS):
        for slot, prompt in zip(slots, prompts, strict=True):
            backend.open(slot, prompt)
        backend.prefill(slots)
        for place, token in enumerate(answer):
            end = place % backend.stages
            for stage in range(end + 1):
                ran[stage].append(_timed(backend.run, stage, slots))
            if end < last:
                left[end].append(_timed(backend.leave, end, slots))
            if place < len(answer) - 1:
                backend.accept(slots, [token] * len(slots))
        for slot in slots:
            backend.close_slot(slot)
    return (
        np.array([np.median(ran[stage]) for stage in range(backend.stages)]),
        np.array([np.median(left[stage]) for stage in range(last)]),
    )


def _timed(call: Callable[[int, Sequence[int]], object], stage: int, slots: Sequence[int]) -> float:
    begun = time.perf_counter()
    call(stage, slots)
    return (time.perf_counter() - begun) * 1e3
