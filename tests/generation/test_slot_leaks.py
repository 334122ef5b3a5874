"""Thousands of cancelled, late or failing sequences leak no resources."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from offramp.generation.scheduling import SequenceEnd, TokenThresholds
from offramp.generation.stages.onnx_text import OnnxTextBackend
from offramp.generation.stages.text_backend import TokenAnswers
from tests.generation.random_life import Life, OnCall
from tests.generation.scripted_backend import ScriptedTextBackend, Tokens
from tests.text_models import backend_of, graphs_of

BATCH = 6
"""Most rows of a step that a life draws."""
MODELS: dict[str, dict[str, Any]] = {
    "decoder": {},
    "decoder without mask": {"mask": False, "positions": False},
    "encoder-decoder": {"encodes": True},
    "encoder-decoder as optimum writes it": {
        "encodes": True, "mask": False, "positions": False, "tokens": 1,
    },
}  # fmt: skip


class BrittleTextBackend:
    """An ONNX backend of which calls fail: before their work, after it, or amid it.

    Amid it means that keys or values of a layer were just written, and nothing was counted yet.
    """

    def __init__(self, backend: OnnxTextBackend, alone: OnnxTextBackend, seed: int) -> None:
        """``alone`` is the same model, and answers one sequence at a time."""
        self.inner, self._alone = backend, alone
        self.on_call: OnCall = lambda _method, _slots: None
        self._draw = random.Random(seed)
        self._amid: tuple[str, Sequence[int]] | None = None
        """The call that may fail when it next writes to the caches."""
        self.failed_amid = 0
        self._write, backend._caches.write = backend._caches.write, self._write_and_fail
        self.used: set[int] = set()
        self.stages, self.slots, self.length = backend.stages, backend.slots, backend.length
        self.ragged, self.vocabulary = backend.ragged, backend.vocabulary
        self.prompt_in_slot = backend.prompt_in_slot
        self.longest_prompt = backend.longest_prompt

    def open(self, slot: int, inputs: NDArray[np.int64]) -> None:
        self.used.add(slot)
        self._call("open", [slot], slot, inputs)

    def prefill(self, slots: Sequence[int]) -> None:
        self._call("prefill", slots, slots)

    def run(
        self, stage: int, slots: Sequence[int], limits: Sequence[float] | None = None
    ) -> TokenAnswers:
        answers: TokenAnswers = self._call("run", slots, stage, slots, limits)
        return answers

    def leave(self, stage: int, slots: Sequence[int]) -> None:
        self._call("leave", slots, stage, slots)

    def accept(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        self._call("accept", slots, slots, tokens)

    def close_slot(self, slot: int) -> None:
        self.used.remove(slot)
        self.inner.close_slot(slot)

    def close(self) -> None:
        self.inner.close()

    def statistics(self) -> dict[str, Any]:
        return self.inner.statistics()

    def reference(
        self, prompt: Tokens, thresholds: TokenThresholds, most: int, stop: frozenset[int]
    ) -> tuple[Tokens, Tokens]:
        """The answer of one sequence that nothing happens to, and where its tokens leave."""
        backend, tokens, depths = self._alone, list[int](), list[int]()
        backend.open(0, np.array(prompt))
        backend.prefill([0])
        while len(tokens) < most and not (tokens and tokens[-1] in stop):
            if tokens:
                if depths[-1] < self.stages - 1:
                    backend.leave(depths[-1], [0])
                backend.accept([0], tokens[-1:])
            for stage in range(self.stages):
                token, sure = (array[0].item() for array in backend.run(stage, [0]))
                if thresholds.leaves(stage, len(tokens), sure):
                    break
            tokens.append(token)
            depths.append(stage)
        backend.close_slot(0)
        return tuple(tokens), tuple(depths)

    def _call(self, method: str, slots: Sequence[int], *arguments: Any) -> Any:
        when = self._draw.choice(["before", "amid", "after"])
        if when == "before":
            self.on_call(method, slots)
        self._amid = (method, slots) if when == "amid" else None
        found = getattr(self.inner, method)(*arguments)
        if when == "after" or self._amid is not None:  # it wrote nothing
            self._amid = None
            self.on_call(method, slots)
        return found

    def _write_and_fail(self, *arguments: Any) -> None:
        self._write(*arguments)
        if self._amid is not None:
            call, self._amid = self._amid, None
            self.failed_amid += 1
            self.on_call(*call)
            self.failed_amid -= 1


@pytest.mark.parametrize("policy", ["refill", "together"])
def test_ten_thousand_sequences_leak_no_slot(policy: str) -> None:
    backend = ScriptedTextBackend(stages=3, slots=8, length=12, batch=BATCH)
    life = Life(5, policy, backend, sequences=10_000, fail_share=0.01)
    life.run()
    life.check_ends()
    ends = Counter(ended.end for ended in life.ended.values())
    refused = len(life.prompts) - len(life.ended)
    assert sum(ends.values()) + refused == 10_000
    assert min(ends[end] for end in SequenceEnd) > 50, ends
    assert not life.loop._prompts
    assert life.scheduler.sequences == 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("skipped", ["propagation", "catch-up"])
def test_sequences_in_onnx_runtime_leave_empty_caches(name: str, skipped: Any) -> None:
    graphs = graphs_of(**MODELS[name], skipped=skipped)
    inner = backend_of(graphs, slots=6, length=16)
    alone = backend_of(graphs, slots=1, length=16)
    backend = BrittleTextBackend(inner, alone, seed=1)
    life = Life(9, "refill", backend, sequences=60, fail_share=0.05)
    life.run()
    life.check_ends()
    ends = Counter(ended.end for ended in life.ended.values())
    assert ends[SequenceEnd.CANCELLED] > 3, ends
    assert ends[SequenceEnd.EXPIRED] > 3, ends
    assert life.scheduler.retried > 3
    assert backend.failed_amid > 0
    assert len({depth for depths in life.depths.values() for depth in depths}) > 1
    assert inner.statistics()["slots_used"] == 0
    assert not inner._prompts
    caches = [a for slots in (inner._caches, inner._cross) for a in slots._held.values()]
    assert not any(array.any() for array in (*caches, *inner._states))
