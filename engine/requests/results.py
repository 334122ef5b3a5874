"""The engine's answers, and its descriptions of models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Answer, ExitPolicy, TensorSpec
from offramp.bundle.records import ClassLoss
from offramp.certify.decision import MODEL_END
from offramp.engine.answers.agreement import agreement_of
from offramp.engine.requests.request_table import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResult:
    """The answer to one request of n samples."""

    outputs: Mapping[str, NDArray[Any]]
    """Outputs by name, first dimension n."""
    exits: NDArray[np.int32]
    """[n]: index of the exit that answered (``Manifest.exits``), or ``MODEL_END``."""
    confidences: NDArray[np.float32]
    """[n]: confidence of the answer, 0 to 1."""
    forced: NDArray[np.bool_]
    """[n]: whether the sample was forced to leave at its exit, below the threshold, to meet a
    deadline."""
    policy_version: int
    variants: NDArray[np.int16]
    """[n]: variant that answered; 0 is the full model. ``exits`` are exits of this variant."""
    details: Mapping[str, str] = field(default_factory=dict)
    """Further parameters of the response, by name."""


class ResultKind(StrEnum):
    """Kinds of answers that an engine's ``infer_stream`` yields."""

    ANSWER = "answer"
    """The only answer to a request."""
    EARLY = "early"
    """The answer of exits; the model's end has yet to answer some of the samples."""
    CONFIRMATION = "confirmation"
    """The second answer: the model's end agrees with the early answer."""
    CORRECTION = "correction"
    """The second answer: the model's end disagrees on at least one sample."""
    PART = "part"
    """A part of an answer with any number of parts; more follow."""
    LAST = "last"
    """The last part of the answer."""

    @property
    def more(self) -> bool:
        """True if another answer or part follows, unless it is lost."""
        return self in (ResultKind.EARLY, ResultKind.PART)

    @property
    def partial(self) -> bool:
        """True if this result adds to the earlier results; ``False`` if it replaces them."""
        return self in (ResultKind.PART, ResultKind.LAST)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamResult(EngineResult):
    """One of at most two answers to a request, or one of any number of parts."""

    kind: ResultKind
    final: NDArray[np.bool_]
    """[n]: whether the sample's answer is the unmodified model's."""
    corrected: NDArray[np.bool_]
    """[n]: whether the model's own answer disagrees with the early one."""

    @classmethod
    def first(cls, answer: Answer, request: Request) -> Self:
        """Return the first answer to a request; ``answer`` is the model's output specification."""
        assert request.first.values is not None
        return cls(
            outputs={answer.output: answer.served(request.first.values)},
            exits=request.exits,
            confidences=request.first.confidences,
            forced=request.forced,
            policy_version=request.policy_version,
            variants=request.variants,
            kind=ResultKind.ANSWER if request.final is None else ResultKind.EARLY,
            final=request.exits == MODEL_END,
            corrected=np.zeros(request.count, np.bool_),
        )

    @classmethod
    def second(cls, answer: Answer, request: Request) -> Self:
        """Return the second answer: the first, updated with the model's own answers where known."""
        first, final = request.first, request.final
        assert first.values is not None
        assert final is not None
        assert final.values is not None
        known = final.filled
        values, confidences = first.values.copy(), first.confidences.copy()
        values[known], confidences[known] = final.values[known], final.confidences[known]
        agreement = agreement_of(answer)
        mask = agreement.mask_in(request.inputs)
        ends, said = agreement.reduce(values), agreement.reduce(first.values)
        corrected = ~agreement.agree(said, ends, mask)
        return replace(
            cls.first(answer, request),
            outputs={answer.output: answer.served(values)},
            exits=np.where(known, np.int32(MODEL_END), request.exits),
            variants=np.where(known, np.int16(0), request.variants),
            confidences=confidences,
            kind=ResultKind.CORRECTION if corrected.any() else ResultKind.CONFIRMATION,
            final=known | (request.exits == MODEL_END),
            corrected=corrected,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StringSpec(TensorSpec):
    """An input or output of strings, each ``bytes``; bundles have none."""

    dtype: str = "object"

    def __post_init__(self) -> None:
        """Accept the dtype ``object``, which :class:`TensorSpec` refuses."""

    def describe(self) -> str:
        """Return a description such as ``text: bytes [1]``, for messages."""
        return f"{self.name}: bytes [{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts about a served model that are sent to clients."""

    name: str
    inputs: tuple[TensorSpec, ...]
    unread: frozenset[str] = frozenset()
    """Names of inputs that the graph does not read, and that requests may omit."""
    optional: frozenset[str] = frozenset()
    """Names of other inputs that requests may omit."""
    outputs: tuple[TensorSpec, ...]
    decoupled: bool = False
    """True if a request on a stream gets any number of parts, unless it asks otherwise."""
    answer: Answer | None
    """The model's answer; ``None`` for a kind of answer that only the model's engine knows."""
    platform: str
    """Platform name, for instance ``offramp_onnxruntime-cpu``."""
    max_batch_size: int
    """Largest number of samples in a batch; 0 if the first dimension of tensors is not the
    batch."""
    policy: ExitPolicy
    """The active exit policy, with its certified promise."""
    scheduling: str
    variants: tuple[str, ...] = ()
    """Names of the variants that may answer in place of the model, from number 1 on."""
    class_losses: tuple[ClassLoss, ...] = ()
    """Disagreement of the policy by the model's class, counted on the calibration data."""
    promise: str | None = None
    """The promise in words, without a full stop, if it is not a certificate of ``policy``."""
    notes: tuple[str, ...] = ()
    """Sentences, without full stops, on differences between the request and how it is served."""
