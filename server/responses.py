"""Writes what the engine answers as messages of the protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from offramp.bundle import TensorSpec
from offramp.engine.results import AnswerKind, InferResult, ModelInfo, StreamedResult
from offramp.proto.datatypes import datatype_of
from offramp.proto.messages import (
    ModelConfig,
    ModelInferRequest,
    ModelInferResponse,
    ModelInput,
    ModelMetadataResponse,
    ModelOutput,
    ModelStreamInferResponse,
)
from offramp.proto.tensors import encode_tensor
from offramp.server.requests import MODEL_VERSION


def write_response(
    request: ModelInferRequest, result: InferResult, outputs: Sequence[str]
) -> ModelInferResponse:
    """The response to ``request``: the named outputs, raw, and where each sample's came from."""
    response = _response_to(request)
    for name in outputs:
        raw = encode_tensor(response.outputs.add(), name, result.outputs[name])
        response.raw_output_contents.append(raw)
    _write_parameters(response, result)
    return response


def write_streamed(
    request: ModelInferRequest, result: StreamedResult, outputs: Sequence[str]
) -> ModelStreamInferResponse:
    """As :func:`write_response`, of one of the results of a request on a stream.

    ``offramp_corrected``, 0 or 1 a sample, is there only where something was corrected. Whose
    answer is the unmodified model's is told by ``offramp_exits``.
    """
    response = write_response(request, result, outputs)
    response.parameters["offramp_answer"].string_param = result.kind.value
    _end(response, final=result.kind is not AnswerKind.EARLY)
    if result.corrected.any():
        response.parameters["offramp_corrected"].string_param = _flags(result.corrected)
    return ModelStreamInferResponse(infer_response=response)


def write_end(request: ModelInferRequest) -> ModelStreamInferResponse:
    """Nothing, where an answer was to follow: none will, as in Triton's empty final responses."""
    response = _response_to(request)
    _end(response, final=True)
    return ModelStreamInferResponse(infer_response=response)


def write_failure(
    request: ModelInferRequest, code: grpc.StatusCode, message: str
) -> ModelStreamInferResponse:
    """The error that a request on a stream has instead of an answer."""
    response = _response_to(request)
    _end(response, final=True)
    response.parameters["offramp_status"].string_param = code.name
    return ModelStreamInferResponse(error_message=message, infer_response=response)


def write_metadata(model: ModelInfo) -> ModelMetadataResponse:
    """What a client may know of a model."""
    return ModelMetadataResponse(
        name=model.name,
        versions=[MODEL_VERSION],
        platform=model.platform,
        inputs=[_tensor_metadata(tensor) for tensor in model.inputs],
        outputs=[_tensor_metadata(tensor) for tensor in model.outputs],
    )


def write_config(model: ModelInfo) -> ModelConfig:
    """What of Triton's model configuration means something here."""
    return ModelConfig(
        name=model.name,
        platform=model.platform,
        max_batch_size=model.max_batch_size,
        input=[ModelInput(**_configured(tensor)) for tensor in model.inputs],
        output=[ModelOutput(**_configured(tensor)) for tensor in model.outputs],
    )


def _configured(tensor: TensorSpec) -> dict[str, Any]:
    """The same fields of an input and an output: sizes are without the batch."""
    metadata = _tensor_metadata(tensor)
    return {
        "name": metadata.name,
        "data_type": f"TYPE_{metadata.datatype}",
        "dims": metadata.shape[1:],
    }


def _response_to(request: ModelInferRequest) -> ModelInferResponse:
    return ModelInferResponse(
        model_name=request.model_name, model_version=MODEL_VERSION, id=request.id
    )


def _end(response: ModelInferResponse, *, final: bool) -> None:
    """Say whether this is the last response to its request, as Triton's clients look for it."""
    response.parameters["triton_final_response"].bool_param = final


def _write_parameters(response: ModelInferResponse, result: InferResult) -> None:
    """Parameters hold scalars and strings only: what is per sample is joined by commas.

    ``offramp_forced``, 0 or 1 a sample, is there only where the promise does not hold for one.
    """
    parameters = response.parameters
    parameters["offramp_policy_version"].int64_param = result.policy_version
    parameters["offramp_exits"].string_param = ",".join(map(str, result.exits.tolist()))
    confidences = map("{:.6g}".format, result.confidences.tolist())
    parameters["offramp_confidences"].string_param = ",".join(confidences)
    if result.forced.any():
        parameters["offramp_forced"].string_param = _flags(result.forced)


def _flags(values: NDArray[np.bool_]) -> str:
    """``0,1,0``."""
    return ",".join(map(str, values.astype(int).tolist()))


def _tensor_metadata(tensor: TensorSpec) -> ModelMetadataResponse.TensorMetadata:
    return ModelMetadataResponse.TensorMetadata(
        name=tensor.name,
        datatype=datatype_of(np.dtype(tensor.dtype), tensor.name),
        shape=[-1 if isinstance(size, str) else size for size in tensor.shape],
    )
