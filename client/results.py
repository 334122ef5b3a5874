"""The results and metadata that a client's methods return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class InferResult:
    """The answer to a request of n samples."""

    outputs: Mapping[str, NDArray[Any]]
    """By name, first dimension n, or 1 for what is of all samples; read-only views of the message,
    ``.copy()`` to change them."""
    exits: NDArray[np.int32]
    """[n]: index of the exit that answered; -1 is the model's end."""
    confidences: NDArray[np.float32]
    """[n]: confidence of the answer, 0 to 1."""
    forced: NDArray[np.bool_]
    """[n]: whether the sample had to leave there, not sure enough, to be in time; the promise of
    agreement does not hold for it."""
    policy_version: int
    """Version of the exit policy that was in force."""
    details: Mapping[str, str] = field(default_factory=dict)
    """Other parameters that are strings, by name."""
    variants: NDArray[np.int16]
    """[n]: the variant of the model that answered, whose exits ``exits`` counts; 0 is the full
    model, others are subnets of it."""


class AnswerKind(StrEnum):
    """The kind of a result of ``infer_stream``: early or last, and in which way."""

    ANSWER = "answer"
    """The only one."""
    EARLY = "early"
    """Exits gave it; the model's end has yet to speak of some of the samples."""
    CONFIRMATION = "confirmation"
    """The last one: the model's end agrees with the early answer."""
    CORRECTION = "correction"
    """The last one: it does not, about some sample."""
    PART = "part"
    """A part of the answer, of any number; more follow."""
    LAST = "last"
    """The last part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedResult(InferResult):
    """An answer to a request of n samples, of which there may be two; or a part of one."""

    kind: AnswerKind
    corrected: NDArray[np.bool_]
    """[n]: whether the sample's class differs from that of the early answer."""

    @property
    def final(self) -> NDArray[np.bool_]:
        """[n]: whose answer is the unmodified model's; the others keep that of their exit."""
        return self.exits < 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedToken:
    """A token of a text that a model generates."""

    token: int
    """Its number in the vocabulary."""
    text: str
    """The text that it adds: empty amid a character, and where the server has no tokenizer."""
    exit: int
    """Index of the exit that answered; -1 is the model's end."""
    confidence: float
    """Of that exit, 0 to 1."""
    end: str | None
    """The reason why the text ends with this token, if it does: ``stop``, ``most_tokens`` or
    ``length`` (the cache is full)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMetadata:
    """An input or output of a model."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    """-1 where the size is free, as the first one, the batch, always is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMetadata:
    """A served model's inputs and outputs."""

    name: str
    platform: str
    """For instance ``offramp_onnxruntime-cpu``."""
    inputs: Mapping[str, TensorMetadata]
    outputs: Mapping[str, TensorMetadata]
