"""Reads a ModelInferRequest into what the engine takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from numpy.typing import NDArray

from offramp.engine.errors import InvalidInputError, UnknownModelError
from offramp.engine.results import ModelInfo
from offramp.proto.datatypes import TensorError
from offramp.proto.messages import InferParameter, ModelInferRequest
from offramp.proto.tensors import decode_tensors

MODEL_VERSION: Final = "1"
"""A served model has this one version; an empty one in a request means it."""

DEFAULT_PRIORITY_LEVEL: Final = 5
"""Triton's level that a request without one has: 1 to 4 are served before it, 6 and on after it.

Triton leaves the default level to each model's configuration.
"""

_LOWEST_PRIORITY_LEVEL: Final = 2**31
"""Levels beyond it count as it: the parameter is uint64, the engine sorts machine integers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferCall:
    """A decoded request."""

    inputs: Mapping[str, NDArray[Any]]
    outputs: tuple[str, ...]
    """Names of the outputs to answer with, in this order."""
    deadline_s: float | None
    """Absolute, on the clock of ``now_s``."""
    priority: int
    """The engine's: higher is served first, 0 is the default."""


def read_request(
    request: ModelInferRequest, model: ModelInfo, *, now_s: float, time_remaining_s: float | None
) -> InferCall:
    """Decode a request to ``model``.

    Args:
        request: As it came.
        model: The model that it names.
        now_s: ``time.monotonic()``.
        time_remaining_s: What gRPC's deadline leaves; ``None`` without one.

    Raises:
        InvalidInputError: A tensor, an output name or a parameter is wrong.
    """
    return InferCall(
        inputs=_inputs(request),
        outputs=_requested_outputs(request, model),
        deadline_s=_deadline_s(request.parameters, now_s, time_remaining_s),
        priority=_priority(request.parameters),
    )


def check_version(model: str, version: str) -> None:
    """Refuse any version but ours.

    Raises:
        UnknownModelError
    """
    if version not in {"", MODEL_VERSION}:
        raise UnknownModelError(
            f"model {model!r} has no version {version!r}; "
            f"leave the version empty or send {MODEL_VERSION!r}"
        )


def _inputs(request: ModelInferRequest) -> dict[str, NDArray[Any]]:
    for tensor in request.inputs:
        _refuse(tensor.parameters, f"input {tensor.name!r}", ("shared_memory_region",))
    try:
        return decode_tensors(request.inputs, request.raw_input_contents)
    except TensorError as error:
        raise InvalidInputError(str(error)) from error


def _requested_outputs(request: ModelInferRequest, model: ModelInfo) -> tuple[str, ...]:
    known = tuple(tensor.name for tensor in model.outputs)
    for tensor in request.outputs:
        if tensor.name not in known:
            raise InvalidInputError(
                f"model {model.name!r} has no output {tensor.name!r}; it has {', '.join(known)}"
            )
        refused = ("shared_memory_region", "classification")
        _refuse(tensor.parameters, f"output {tensor.name!r}", refused)
    return tuple(dict.fromkeys(tensor.name for tensor in request.outputs)) or known


def _refuse(parameters: Mapping[str, InferParameter], what: str, names: Sequence[str]) -> None:
    """Refuse the parameters that change where or what a tensor is; others are hints."""
    for name in names:
        if name in parameters:
            raise InvalidInputError(
                f"{what} has the parameter {name!r}, which is not supported; "
                "tensors travel whole, inside the message"
            )


def _deadline_s(
    parameters: Mapping[str, InferParameter], now_s: float, time_remaining_s: float | None
) -> float | None:
    timeout_us = _integer(parameters, "timeout", "microseconds; 0 is none")
    limits = [] if time_remaining_s is None else [time_remaining_s]
    if timeout_us:
        limits.append(timeout_us / 1e6)
    return now_s + min(limits) if limits else None


def _priority(parameters: Mapping[str, InferParameter]) -> int:
    level = _integer(parameters, "priority", "1 is served first; 0 is the default")
    return DEFAULT_PRIORITY_LEVEL - min(level or DEFAULT_PRIORITY_LEVEL, _LOWEST_PRIORITY_LEVEL)


def _integer(parameters: Mapping[str, InferParameter], name: str, meaning: str) -> int:
    """Read a parameter ≥ 0 that clients send as int64 or uint64; 0 where it is absent."""
    if name not in parameters:
        return 0
    kind = parameters[name].WhichOneof("parameter_choice") or "empty"
    value = getattr(parameters[name], kind, None)
    if kind not in {"int64_param", "uint64_param"} or not isinstance(value, int) or value < 0:
        raise InvalidInputError(
            f"parameter {name!r} is {value!r} ({kind}); "
            f"expected int64_param or uint64_param, at least 0 ({meaning})"
        )
    return value
