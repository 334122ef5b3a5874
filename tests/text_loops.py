"""Greedy loops: the plain one on an export, and one that drives a backend's stages at random."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from offramp.generation.stages.text_backend import TextBackend
from tests.text_models import START

Leaves = Callable[[int, int, int, float], bool]
"""Function that decides if a token leaves, from sequence number, token index, stage, confidence."""


class PlainModel:
    """An export as it is, in ONNX Runtime, one sequence at a time and nothing padded."""

    def __init__(self, path: Path, start: int = START) -> None:
        self.encodes, self.start = path.is_dir(), start
        decoder = path / "decoder_with_past_model.onnx" if self.encodes else path
        self._decoder = _session(decoder)
        self._inputs = {i.name: i.shape for i in self._decoder.get_inputs()}
        if self.encodes:
            self._encoder = _session(path / "encoder_model.onnx")
            self._first = _session(path / "decoder_model.onnx")

    def greedy(self, prompt: NDArray[np.int64], most: int) -> list[int]:
        """The plain loop: the most likely token each time."""
        cache, logits = self._begin(prompt)
        told = [int(logits.argmax())]
        while len(told) < most:
            cache, logits = self.step(cache, told[-1])
            told.append(int(logits.argmax()))
        return told

    def at_prefixes(self, prompt: NDArray[np.int64], answer: Sequence[int]) -> list[int]:
        """Return the model's next token after each prefix of an answer, the empty one first."""
        cache, logits = self._begin(prompt)
        told = [int(logits.argmax())]
        for token in answer[:-1]:
            cache, logits = self.step(cache, token)
            told.append(int(logits.argmax()))
        return told

    def cache_behind(self, prompt: NDArray[np.int64], answer: Sequence[int]) -> dict[str, Any]:
        """Keys and values of a prompt and the tokens of an answer, by the names of inputs."""
        cache, _ = self._begin(prompt)
        for token in answer:
            cache, _ = self.step(cache, token)
        return cache

    def step(self, cache: dict[str, Any], token: int) -> tuple[dict[str, Any], NDArray[Any]]:
        return self._run(self._decoder, cache, np.array([[token]]))

    def _begin(self, prompt: NDArray[np.int64]) -> tuple[dict[str, Any], NDArray[Any]]:
        if not self.encodes:
            cache: dict[str, Any] = {
                name: np.zeros((1, shape[1], 0, shape[3]), np.float32)
                for name, shape in self._inputs.items()
                if name.startswith("past")
            }
            return self._run(self._decoder, cache, prompt[None])
        ids, mask = prompt[None], np.ones((1, len(prompt)), np.int64)
        (states,) = self._encoder.run(None, {"input_ids": ids, "attention_mask": mask})
        side = {"encoder_hidden_states": states, "encoder_attention_mask": mask}
        cache, logits = self._run(self._first, side, np.array([[self.start]]))
        return cache | {"encoder_attention_mask": mask}, logits

    def _run(
        self, session: Any, cache: dict[str, Any], ids: NDArray[np.int64]
    ) -> tuple[dict[str, Any], NDArray[Any]]:
        own = next((n for n in cache if n.endswith(("0.key", "0.decoder.key"))), None)
        past = 0 if own is None else cache[own].shape[2]
        total = past + ids.shape[1]
        feeds = {"input_ids": ids, **cache}
        for prefix in ("", "decoder_"):
            feeds[f"{prefix}attention_mask"] = np.ones((1, total), np.int64)
            feeds[f"{prefix}position_ids"] = np.arange(past, total)[None]
        taken = {i.name: feeds[i.name] for i in session.get_inputs()}
        names = [o.name for o in session.get_outputs()]
        given = dict(zip(names, session.run(None, taken), strict=True))
        logits = given.pop("logits")[0, -1]
        new = {n.replace("present", "past_key_values"): value for n, value in given.items()}
        return cache | new, logits


def _session(path: Path) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


@dataclass(slots=True)
class Written:
    """A sequence, and what it has so far."""

    number: int
    prompt: NDArray[np.int64]
    slot: int
    stage: int = -1
    """Stage that runs next; -1 before its prompt."""
    tokens: list[int] = field(default_factory=list)
    stages: list[int] = field(default_factory=list)
    """Stages at which tokens left."""


def write_all(
    backend: TextBackend,
    prompts: Sequence[NDArray[np.int64]],
    most: int,
    leaves: Leaves = lambda *_: False,
    *,
    seed: int = 0,
    drop: float = 0.0,
) -> dict[int, Written]:
    """Write answers of ``most`` tokens, in random batches.

    A share ``drop`` of all steps closes a sequence permanently, at any place. Return the finished
    ones, by number.
    """
    rng = np.random.default_rng(seed)
    waiting = list(enumerate(prompts))
    free = list(rng.permutation(backend.slots))
    running: list[Written] = []
    done: dict[int, Written] = {}
    while waiting or running:
        while waiting and free and rng.random() < 0.7:
            number, prompt = waiting.pop(0)
            running.append(Written(number, prompt, int(free.pop())))
            backend.open(running[-1].slot, prompt)
        if not running:
            continue
        if rng.random() < drop:
            gone = running.pop(rng.integers(len(running)))
            backend.close_slot(gone.slot)
            free.append(gone.slot)
            continue
        stage = running[rng.integers(len(running))].stage
        ready = [one for one in running if one.stage == stage]
        batch = [ready[i] for i in rng.permutation(len(ready))[: rng.integers(1, len(ready) + 1)]]
        slots = [one.slot for one in batch]
        if stage < 0:
            backend.prefill(slots)
            for one in batch:
                one.stage = 0
            continue
        answers = backend.run(stage, slots)
        given, left = [], []
        for one, token, sure in zip(batch, *answers, strict=True):
            last = stage == backend.stages - 1
            if not last and not leaves(one.number, len(one.tokens), stage, float(sure)):
                one.stage += 1
                continue
            one.tokens.append(int(token))
            one.stages.append(stage)
            one.stage = 0
            given.append(one)
            left += [] if last else [one.slot]
        if left:
            backend.leave(stage, left)
        for one in [one for one in given if len(one.tokens) == most]:
            done[one.number] = one
            given.remove(one)
            running.remove(one)
            backend.close_slot(one.slot)
            free.append(one.slot)
        if given:
            backend.accept([one.slot for one in given], [one.tokens[-1] for one in given])
    return done
