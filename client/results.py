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
    """Outputs by name, first dimension n, or 1 if one value applies to all samples; read-only views
    of the message, use ``.copy()`` to change them."""
    exits: NDArray[np.int32]
    """[n]: index of the exit that answered; -1 is the model's end."""
    confidences: NDArray[np.float32]
    """[n]: confidence of the answer, 0 to 1."""
    forced: NDArray[np.bool_]
    """[n]: whether the sample was forced to leave at the exit, below the threshold, to be in time;
    the promise of agreement does not hold for it."""
    policy_version: int
    """Version of the exit policy that was active."""
    details: Mapping[str, str] = field(default_factory=dict)
    """Other string parameters of the response, by name."""
    model_version: str = ""
    """Version of the model that answered, in a repository; ``1`` for a model served by its path."""
    variants: NDArray[np.int16]
    """[n]: number of the model's variant that answered; ``exits`` are indices of the exits of that
    variant. 0 is the full model, other variants are its subnets."""


class AnswerKind(StrEnum):
    """Kind of a result of ``infer_stream``."""

    ANSWER = "answer"
    """The only result of the request."""
    EARLY = "early"
    """Early result from exits; the final answer of some samples follows."""
    CONFIRMATION = "confirmation"
    """Last result: the model's end agrees with the early answer."""
    CORRECTION = "correction"
    """Last result: the model's end disagrees on at least one sample."""
    PART = "part"
    """A part of an answer with any number of parts; more follow."""
    LAST = "last"
    """The last part of an answer with any number of parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedResult(InferResult):
    """A result of ``infer_stream``, for n samples: one or two per request, or parts of one."""

    kind: AnswerKind
    corrected: NDArray[np.bool_]
    """[n]: whether the sample's class differs from the early answer's."""

    @property
    def final(self) -> NDArray[np.bool_]:
        """[n]: whether the answer is the unmodified model's; else it is an exit's answer."""
        return self.exits < 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedToken:
    """A token of a generated text, with the exit that it left at."""

    token: int
    """Id of the token in the model's vocabulary."""
    text: str
    """Text that the token adds; empty if the token ends inside a character, or if the server has no
    tokenizer."""
    exit: int
    """Index of the exit that answered; -1 is the model's end."""
    confidence: float
    """Confidence of that exit, 0 to 1."""
    end: str | None
    """Reason if the text ends with this token, else ``None``: ``stop``, ``most_tokens`` or
    ``length`` (the cache is full)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMetadata:
    """An input or output of a model."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    """Sizes of the dimensions; -1 is a free size. The first dimension, the batch, is always
    free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMetadata:
    """A served model's inputs and outputs."""

    name: str
    platform: str
    """Platform, for instance ``offramp_onnxruntime-cpu``."""
    inputs: Mapping[str, TensorMetadata]
    outputs: Mapping[str, TensorMetadata]
