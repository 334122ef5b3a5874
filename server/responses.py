"""Writes what the engine answers as messages of the protocol."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from offramp.bundle import TensorSpec
from offramp.engine.core import InferResult, ModelInfo
from offramp.proto.datatypes import datatype_of
from offramp.proto.messages import (
    ModelInferRequest,
    ModelInferResponse,
    ModelMetadataResponse,
)
from offramp.proto.tensors import encode_tensor
from offramp.server.requests import MODEL_VERSION


def write_response(
    request: ModelInferRequest, result: InferResult, outputs: Sequence[str]
) -> ModelInferResponse:
    """The response to ``request``: the named outputs, raw, and where each sample's came from."""
    response = ModelInferResponse(
        model_name=request.model_name, model_version=MODEL_VERSION, id=request.id
    )
    for name in outputs:
        raw = encode_tensor(response.outputs.add(), name, result.outputs[name])
        response.raw_output_contents.append(raw)
    _write_parameters(response, result)
    return response


def write_metadata(model: ModelInfo) -> ModelMetadataResponse:
    """What a client may know of a model."""
    return ModelMetadataResponse(
        name=model.name,
        versions=[MODEL_VERSION],
        platform=model.platform,
        inputs=[_tensor_metadata(tensor) for tensor in model.inputs],
        outputs=[_tensor_metadata(tensor) for tensor in model.outputs],
    )


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
        forced = map(str, result.forced.astype(int).tolist())
        parameters["offramp_forced"].string_param = ",".join(forced)


def _tensor_metadata(tensor: TensorSpec) -> ModelMetadataResponse.TensorMetadata:
    return ModelMetadataResponse.TensorMetadata(
        name=tensor.name,
        datatype=datatype_of(np.dtype(tensor.dtype), tensor.name),
        shape=[-1 if isinstance(size, str) else size for size in tensor.shape],
    )
