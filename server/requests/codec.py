"""Conversion of the protocol's requests to engine calls, and of results to responses.

A request on ``ModelStreamInfer`` is answered as Triton answers requests to models that are not
decoupled: with exactly one response, in the order of requests. The bool parameter
``offramp_decoupled`` requests the behaviour of a decoupled model: each answer is sent as soon as it
exists, regardless of other requests. If samples that exits answered run on to the model's end,
there are two answers: an early one and the final one. All stream requests to a model that is itself
decoupled are answered in this way, with any number of responses. The last response to a request has
the parameter ``triton_final_response`` set.

``triton_enable_empty_final_response`` means what it means in Triton (``stream_infer_handler.cc``):
if no response with outputs was marked as the last, a response without outputs ends the request.
Triton does so for decoupled models only. We do so for decoupled requests only, and only if the
final answer never came, for instance because its batch failed. A final answer that comes has the
mark itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import grpc
import numpy as np
from numpy.typing import NDArray

from offramp.bundle import TensorSpec
from offramp.engine.common.errors import BadInputError
from offramp.engine.requests.results import EngineResult, ModelInfo, ResultKind, StreamResult
from offramp.proto.messages import (
    InferParameter,
    ModelConfig,
    ModelInferRequest,
    ModelInferResponse,
    ModelInput,
    ModelMetadataResponse,
    ModelOutput,
    ModelStreamInferResponse,
    ModelTransactionPolicy,
)
from offramp.proto.request_bytes import InferMessage
from offramp.proto.tensors import (
    TensorError,
    datatype_of,
    decode_tensors,
    encode_strings,
    encode_tensor,
)
from offramp.server.requests.shared_memory import RegionPart, SharedRegions

DEFAULT_PRIORITY_LEVEL: Final = 5
"""Triton's level of a request that sets none: levels 1 to 4 are served earlier, 6 and up later.

Triton leaves the default level to each model's configuration.
"""

DECOUPLED: Final = "offramp_decoupled"
"""Parameter of a request on a stream that wants each of its answers immediately."""
CLASSIFICATION: Final = "classification"
"""Parameter of an output: how many of its largest values to return."""
EMPTY_FINAL_RESPONSE: Final = "triton_enable_empty_final_response"
"""Parameter of a request that wants a marked end even if no more answers come; see above."""

_TYPES: Final = {"BYTES": "TYPE_STRING"}
"""Types of the model configuration whose name differs from the datatype's."""

_LOWEST_PRIORITY_LEVEL: Final = 2**31
"""Higher levels are reduced to this one: the parameter is uint64, the engine uses int64."""


class WantedOutput(NamedTuple):
    """An output that the client requests, and the form in which it is returned."""

    name: str
    classes: int = 0
    """Number of largest values to return with their indices; 0 returns the whole tensor."""
    part: RegionPart | None = None
    """Shared memory to write the output to; ``None`` puts it into the response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferCall:
    """Arguments of an engine call, and the requested outputs, read from a request."""

    inputs: Mapping[str, NDArray[Any]]
    outputs: tuple[WantedOutput, ...]
    """The requested outputs, in this order."""
    deadline_s: float | None
    """Absolute deadline on the clock of ``now_s``."""
    priority: int
    """The engine's priority: higher is served first, 0 is the default."""
    empty_final_response: bool
    """If true, an empty response ends the request if no answer did."""


def is_decoupled(request: ModelInferRequest) -> bool:
    """Return whether a request asks to be decoupled; invalid parameters are refused later."""
    return DECOUPLED in request.parameters and request.parameters[DECOUPLED].bool_param


def read_request(
    message: InferMessage,
    model: ModelInfo,
    *,
    now_s: float,
    time_remaining_s: float | None,
    regions: SharedRegions | None = None,
) -> InferCall:
    """Decode a request to ``model``; ``now_s`` is ``time.monotonic()``.

    Raises:
        BadInputError: A tensor, an output name or a parameter is wrong.
    """
    request, regions = message.head, regions or SharedRegions()
    _flag(request.parameters, DECOUPLED)
    return InferCall(
        inputs=_inputs(message, regions),
        outputs=_requested_outputs(request, model, regions),
        deadline_s=_deadline_s(request.parameters, now_s, time_remaining_s),
        priority=_priority(request.parameters),
        empty_final_response=_flag(request.parameters, EMPTY_FINAL_RESPONSE),
    )


def _inputs(message: InferMessage, regions: SharedRegions) -> dict[str, NDArray[Any]]:
    tensors = message.head.inputs
    try:
        raw = _raw_contents(message, regions)
        return decode_tensors(tensors, raw, message.floats)
    except TensorError as error:
        raise BadInputError(str(error)) from error


def _raw_contents(
    message: InferMessage, regions: SharedRegions
) -> Sequence[bytes | memoryview | None]:
    """Return the elements of all inputs in order; read those in shared memory from there.

    The raw contents in the message belong to the other inputs, in order.
    """
    parts = [regions.part(t.parameters, f"input {t.name!r}") for t in message.head.inputs]
    if not any(parts):
        return message.raw_contents
    sent = iter(message.raw_contents)
    filled = [next(sent, None) if part is None else part.read() for part in parts]
    if next(sent, None) is not None:
        raise BadInputError(
            f"there are {len(message.raw_contents)} raw contents, and "
            f"{parts.count(None)} inputs that are not in shared memory; send one for each of these"
        )
    return filled


def _requested_outputs(
    request: ModelInferRequest, model: ModelInfo, regions: SharedRegions
) -> tuple[WantedOutput, ...]:
    known = tuple(tensor.name for tensor in model.outputs)
    for tensor in request.outputs:
        if tensor.name not in known:
            raise BadInputError(
                f"model {model.name!r} has no output {tensor.name!r}; it has {', '.join(known)}"
            )
    wanted = {
        tensor.name: WantedOutput(
            name=tensor.name,
            classes=_integer(tensor.parameters, CLASSIFICATION, "classes; 0 is the whole tensor"),
            part=regions.part(tensor.parameters, f"output {tensor.name!r}"),
        )
        for tensor in request.outputs
    }
    return tuple(wanted.values()) or tuple(map(WantedOutput, known))


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
    """Return a parameter ≥ 0 that clients send as int64 or uint64; 0 if it is absent."""
    if name not in parameters:
        return 0
    kind = parameters[name].WhichOneof("parameter_choice") or "empty"
    value = getattr(parameters[name], kind, None)
    if kind not in {"int64_param", "uint64_param"} or not isinstance(value, int) or value < 0:
        raise BadInputError(
            f"parameter {name!r} is {value!r} ({kind}); "
            f"expected int64_param or uint64_param, at least 0 ({meaning})"
        )
    return value


def _flag(parameters: Mapping[str, InferParameter], name: str) -> bool:
    """Return a bool parameter; false if it is absent."""
    if name not in parameters:
        return False
    kind = parameters[name].WhichOneof("parameter_choice") or "empty"
    value = getattr(parameters[name], kind, None)
    if not isinstance(value, bool):
        raise BadInputError(f"parameter {name!r} is {value!r} ({kind}); expected bool_param")
    return value


def write_response(
    request: ModelInferRequest, result: EngineResult, call: InferCall, version: str
) -> ModelInferResponse:
    """Return the response: requested outputs as raw contents, and the exit of each sample.

    Raise BadInputError if the model that answered lacks one of the outputs.
    """
    response = _response_to(request, version)
    if gone := [each.name for each in call.outputs if each.name not in result.outputs]:
        raise BadInputError(
            f"model {request.model_name!r} was replaced while the request was read, and has no "
            f"output {gone[0]!r} any more; it has {', '.join(result.outputs)}: ask for its metadata"
        )
    for each in call.outputs:
        _write_output(response, each, result.outputs[each.name])
    _write_parameters(response, result)
    return response


def _write_output(response: ModelInferResponse, wanted: WantedOutput, array: NDArray[Any]) -> None:
    """Write an output to the response or, with empty raw contents, to shared memory."""
    tensor = response.outputs.add()
    if wanted.classes:
        raw = encode_strings(tensor, wanted.name, largest(array, wanted.classes))
    else:
        raw = encode_tensor(tensor, wanted.name, array)
    if (part := wanted.part) is not None:
        part.write(raw, wanted.name)
        tensor.parameters["shared_memory_region"].string_param = part.region.name
        tensor.parameters["shared_memory_offset"].int64_param = part.offset
        tensor.parameters["shared_memory_byte_size"].int64_param = len(raw)
        raw = b""
    response.raw_output_contents.append(raw)


def largest(array: NDArray[Any], count: int) -> NDArray[np.object_]:
    """Return the largest values of each sample in the form of Triton's ``class_count``.

    The array is [n, k] strings ``value:index``, largest first; k is ``count`` or, if smaller, the
    number of elements of one sample in ``array`` [n, …].
    """
    rows = array.reshape(len(array), math.prod(array.shape[1:]))
    order = np.argsort(-rows.astype(np.float64), axis=1, kind="stable")[:, :count]
    return np.array(
        [
            [f"{row[index]:f}:{index}".encode() for index in indices]
            for row, indices in zip(rows, order, strict=True)
        ],
        dtype=np.object_,
    ).reshape(order.shape)


def write_only(
    request: ModelInferRequest, result: EngineResult, call: InferCall, version: str
) -> ModelStreamInferResponse:
    """Return the only response to a request on a stream that is not decoupled."""
    response = write_response(request, result, call, version)
    response.parameters["offramp_answer"].string_param = ResultKind.ANSWER.value
    _end(response, final=True)
    return ModelStreamInferResponse(infer_response=response)


def write_streamed(
    request: ModelInferRequest, result: StreamResult, call: InferCall, version: str
) -> ModelStreamInferResponse:
    """Return the response with one of the results of a decoupled request.

    ``offramp_corrected``, 0 or 1 for each sample, is present only if a sample was corrected.
    ``offramp_exits`` shows which answers are the unmodified model's.
    """
    response = write_response(request, result, call, version)
    response.parameters["offramp_answer"].string_param = result.kind.value
    _end(response, final=not result.kind.more)
    if result.corrected.any():
        response.parameters["offramp_corrected"].string_param = _flags(result.corrected)
    return ModelStreamInferResponse(infer_response=response)


def write_end(request: ModelInferRequest, version: str) -> ModelStreamInferResponse:
    """Return the empty last response to a decoupled request whose final answer was lost."""
    response = _response_to(request, version)
    _end(response, final=True)
    return ModelStreamInferResponse(infer_response=response)


def write_failure(
    request: ModelInferRequest, code: grpc.StatusCode, message: str
) -> ModelStreamInferResponse:
    """Return the error response to a request on a stream."""
    response = _response_to(request, request.model_version)
    _end(response, final=True)
    response.parameters["offramp_status"].string_param = code.name
    return ModelStreamInferResponse(error_message=message, infer_response=response)


def write_metadata(name: str, versions: Sequence[str], model: ModelInfo) -> ModelMetadataResponse:
    """Return a model's name, served versions, inputs and outputs."""
    return ModelMetadataResponse(
        name=name,
        versions=versions,
        platform=model.platform,
        inputs=[_tensor_metadata(tensor) for tensor in model.inputs],
        outputs=[_tensor_metadata(tensor) for tensor in model.outputs],
    )


def write_config(name: str, model: ModelInfo) -> ModelConfig:
    """Return the fields of Triton's model configuration that apply here."""
    configured = partial(_configured, batched=model.max_batch_size > 0)
    return ModelConfig(
        name=name,
        platform=model.platform,
        max_batch_size=model.max_batch_size,
        input=[
            ModelInput(**configured(tensor), optional=tensor.name in model.unread | model.optional)
            for tensor in model.inputs
        ],
        output=[ModelOutput(**configured(tensor)) for tensor in model.outputs],
        model_transaction_policy=ModelTransactionPolicy(decoupled=True)
        if model.decoupled
        else None,
    )


def _configured(tensor: TensorSpec, *, batched: bool) -> dict[str, Any]:
    """Return the fields of an input or output; with ``batched``, without the batch dimension."""
    metadata = _tensor_metadata(tensor)
    return {
        "name": metadata.name,
        "data_type": _TYPES.get(metadata.datatype, f"TYPE_{metadata.datatype}"),
        "dims": metadata.shape[1:] if batched else metadata.shape,
    }


def _response_to(request: ModelInferRequest, version: str) -> ModelInferResponse:
    return ModelInferResponse(model_name=request.model_name, model_version=version, id=request.id)


def _end(response: ModelInferResponse, *, final: bool) -> None:
    """Mark whether this is the last response to its request, as Triton's clients expect."""
    response.parameters["triton_final_response"].bool_param = final


def _write_parameters(response: ModelInferResponse, result: EngineResult) -> None:
    """Write the result's parameters; values per sample are joined by commas.

    ``offramp_forced``, 0 or 1 for each sample, is present only if the promise does not hold for a
    sample; ``offramp_variants``, one number for each sample, only if a variant other than the full
    one answered.
    """
    parameters = response.parameters
    parameters["offramp_policy_version"].int64_param = result.policy_version
    parameters["offramp_exits"].string_param = ",".join(map(str, result.exits.tolist()))
    confidences = map("{:.6g}".format, result.confidences.tolist())
    parameters["offramp_confidences"].string_param = ",".join(confidences)
    if result.forced.any():
        parameters["offramp_forced"].string_param = _flags(result.forced)
    if result.variants.any():
        variants = map(str, result.variants.tolist())
        parameters["offramp_variants"].string_param = ",".join(variants)
    for name, value in result.details.items():
        parameters[name].string_param = value


def _flags(values: NDArray[np.bool_]) -> str:
    """Return flags as text such as ``0,1,0``."""
    return ",".join(map(str, values.astype(int).tolist()))


def _tensor_metadata(tensor: TensorSpec) -> ModelMetadataResponse.TensorMetadata:
    return ModelMetadataResponse.TensorMetadata(
        name=tensor.name,
        datatype=datatype_of(np.dtype(tensor.dtype), tensor.name),
        shape=[-1 if isinstance(size, str) else size for size in tensor.shape],
    )
