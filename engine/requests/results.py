"""The answers that the engine gives, and what it tells about its models."""

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
    """By output name, first dimension n."""
    exits: NDArray[np.int32]
    """[n]: index of the exit that answered (``Manifest.exits``), or ``MODEL_END``."""
    confidences: NDArray[np.float32]
    """[n]: confidence of the answer, 0 to 1."""
    forced: NDArray[np.bool_]
    """[n]: whether the sample had to leave there, below the exit's threshold, to be in time."""
    policy_version: int
    variants: NDArray[np.int16]
    """[n]: the variant that answered, whose exits ``exits`` counts; 0 is the full model."""
    details: Mapping[str, str] = field(default_factory=dict)
    """Parameters of the response besides, by name."""


class ResultKind(StrEnum):
    """The kinds of answers that ``infer_stream`` of an engine yields."""

    ANSWER = "answer"
    """The only answer."""
    EARLY = "early"
    """Exits answered; the model's end has yet to be heard on some of the samples."""
    CONFIRMATION = "confirmation"
    """The model's end agrees with the early answer."""
    CORRECTION = "correction"
    """The model's end disagrees about some sample."""
    PART = "part"
    """A part of the answer, of any number; more follow."""
    LAST = "last"
    """The last part of the answer."""

    @property
    def more(self) -> bool:
        """Whether another answer or part follows, unless it is lost."""
        return self in (ResultKind.EARLY, ResultKind.PART)

    @property
    def partial(self) -> bool:
        """Whether it adds to the results before, in the place of telling all of them again."""
        return self in (ResultKind.PART, ResultKind.LAST)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamResult(EngineResult):
    """One answer to a request, of which there may be two; or one of any number of parts."""

    kind: ResultKind
    final: NDArray[np.bool_]
    """[n]: whether the sample's answer is the unmodified model's."""
    corrected: NDArray[np.bool_]
    """[n]: whether the model's own answer does not agree with the early one."""

    @classmethod
    def first(cls, answer: Answer, request: Request) -> Self:
        """Give the first answer to a request, ``answer`` being the model's own."""
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
        """Give the first answer, with the model's own answers where there are any."""
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
    """An input or output of strings, each ``bytes``, which no model of a bundle has."""

    dtype: str = "object"

    def __post_init__(self) -> None:
        """Take the one dtype that numbers do not have."""

    def describe(self) -> str:
        """``text: bytes [1]``, for messages."""
        return f"{self.name}: bytes [{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The facts about a served model that clients are told."""

    name: str
    inputs: tuple[TensorSpec, ...]
    unread: frozenset[str] = frozenset()
    """Names of the inputs that nothing reads, which requests may leave out."""
    optional: frozenset[str] = frozenset()
    """Names of other inputs that requests may leave out."""
    outputs: tuple[TensorSpec, ...]
    decoupled: bool = False
    """Whether a request on a stream is answered in any number of parts, unless asked otherwise."""
    answer: Answer | None
    """``None`` where answers are of a kind that only the engine of the model knows."""
    platform: str
    """For instance ``offramp_onnxruntime-cpu``."""
    max_batch_size: int
    """Most samples of a batch; 0 if the first dimension of tensors is none of samples."""
    policy: ExitPolicy
    """The exit policy in force, with the promise that it was certified for."""
    scheduling: str
    variants: tuple[str, ...] = ()
    """Names of the variants that may answer in the model's place, from number 1 on."""
    class_losses: tuple[ClassLoss, ...] = ()
    """Disagreement of the policy by class of the model, counted on the calibration data."""
    promise: str | None = None
    """The promise in words, where it is no certificate of ``policy``; without a full stop."""
    notes: tuple[str, ...] = ()
    """Sentences on how the model is served otherwise than asked for, without full stops."""
