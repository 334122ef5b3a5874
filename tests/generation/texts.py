"""Generating models that are served without a model: a scripted backend, and a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.stages.plan import Mode
from offramp.generation.bundle.text_model import LayerCache, TextEvidence, TextModel, TextStage
from offramp.generation.serving.served_text import ServedText, describe_text
from offramp.generation.serving.text_engine import TextEngine
from tests.generation.scripted_backend import VOCABULARY, ScriptedTextBackend

EVIDENCE = TextEvidence(
    risk="tokens", dissimilarity="edit-distance", bound=0.02, confidence_level=0.95,
    observed=0.005, prompts=321, layers_run=0.5,
)  # fmt: skip
STOP = 3


class Letters:
    """A tokenizer of the letters a to l; the stop token is special."""

    def encode(self, text: str) -> Sequence[int]:
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token) for token in tokens)


def text_model(**changes: Any) -> TextModel:
    """Three stages of a decoder of six layers, as the scripted backend has them."""
    stages = tuple(
        TextStage(end=end, file=f"{end}", threshold=threshold, propagation="p" if threshold else "")
        for end, threshold in ((2, 0.7), (4, 0.7), (6, None))
    )
    told: dict[str, Any] = {
        "kind": "decoder", "layers": (LayerCache(heads=2, size=4),) * 6, "width": 8,
        "vocabulary": VOCABULARY, "ragged": True, "several": True, "stages": stages, "head": "head",
        "stop_tokens": (STOP,), "longest_prompt": 8, "longest_answer": 12, "evidence": EVIDENCE,
    }  # fmt: skip
    return TextModel(**{**told, **changes})


def served_text(
    backend: ScriptedTextBackend,
    *,
    name: str = "text",
    mode: Mode = Mode.LEAVE,
    letters: bool = True,
    options: ModelOptions | None = None,
    **changes: Any,
) -> ServedText:
    model, codec = text_model(**changes), Letters() if letters else None
    info = describe_text(name, model, mode, codec)
    of_model = options or ModelOptions(max_batch_size=4)
    engine = EngineOptions(mode=mode)
    return ServedText(info, model, backend, engine, of_model=of_model, codec=codec)


async def engine_with(backend: ScriptedTextBackend, **more: Any) -> TextEngine:
    """An engine that serves one model, "text"."""
    engine = TextEngine()
    engine.put("text", await served_text(backend, **more).open())
    return engine
