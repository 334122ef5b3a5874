"""Conversion of arrays to requests, and of responses to results: no I/O, for both clients."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import grpc
import numpy as np
from numpy.typing import ArrayLike, NDArray

from offramp.client.errors import InvalidInputError, ResponseError, error_from_status
from offramp.client.results import (
    AnswerKind,
    GeneratedToken,
    InferResult,
    ModelMetadata,
    StreamedResult,
    TensorMetadata,
)
from offramp.client.shared_memory import SharedInputs
from offramp.proto.messages import (
    ModelConfigResponse,
    ModelInferRequest,
    ModelInferResponse,
    ModelMetadataResponse,
    ModelStreamInferResponse,
)
from offramp.proto.tensors import (
    TensorError,
    decode_tensors,
    describe_tensor,
    dtype_of,
    encode_tensor,
)

_OF_SAMPLES = (
    "offramp_answer", "offramp_confidences", "offramp_corrected", "offramp_exits",
    "offramp_forced", "offramp_variants",
)  # fmt: skip
"""Parameters that become fields of results."""
_MOST_TOKENS = 2**31 - 1
"""Largest number of tokens that a request can ask for: it is sent as an int32."""


def build_request(
    model: str,
    inputs: Mapping[str, ArrayLike],
    *,
    outputs: Sequence[str] | None,
    priority: int,
    deadline_s: float | None = None,
    decoupled: bool = False,
    shared: SharedInputs | None = None,
) -> ModelInferRequest:
    """Return an inference request; its deadline is ``deadline_s`` from now, or the call's if None.

    On a stream, ``decoupled`` requests the early and the final answer as soon as they exist;
    without it the server sends one answer, after the answers to all earlier requests. The inputs
    are in the message, or in ``shared`` memory.

    Raises:
        InvalidInputError: An input's dtype cannot be sent, ``priority`` is negative, or ``inputs``
            is not a mapping by name.
    """
    if priority < 0:
        raise InvalidInputError(
            f"priority {priority} is below 0; 1 is served first, 0 is the server's default"
        )
    if not isinstance(inputs, Mapping):
        raise InvalidInputError(
            f"inputs are a {type(inputs).__name__}, expected arrays by input name, such as "
            "{'INPUT': array}; see client.metadata(MODEL).inputs for the names"
        )
    request = ModelInferRequest(model_name=model)
    try:
        for name, values in inputs.items():
            tensor, array = request.inputs.add(), np.asarray(values)
            if shared is None:
                request.raw_input_contents.append(encode_tensor(tensor, name, array))
            else:
                describe_tensor(tensor, name, array)
    except TensorError as error:
        raise InvalidInputError(str(error)) from error
    if shared is not None:
        shared.place(request, inputs)
    for name in outputs or ():
        request.outputs.add(name=name)
    if priority:
        request.parameters["priority"].uint64_param = priority
    if deadline_s is not None:
        request.parameters["timeout"].int64_param = max(1, round(deadline_s * 1e6))
    if decoupled:
        request.parameters["offramp_decoupled"].bool_param = True
    return request


def parse_response(response: ModelInferResponse) -> InferResult:
    """Return the result in a response; ResponseError if no Offramp server sent it."""
    return InferResult(**_fields(response))


def parse_streamed(response: ModelStreamInferResponse, *, address: str) -> StreamedResult | None:
    """Return the result in a response on a stream; ``None`` if it only marks the end.

    Raises:
        OfframpError: The server sent an error instead.
        ResponseError: As :func:`parse_response`.
    """
    inner = response.infer_response
    if response.error_message:
        status = inner.parameters["offramp_status"].string_param
        code = grpc.StatusCode.__members__.get(status, grpc.StatusCode.UNKNOWN)
        raise error_from_status(code, response.error_message, address=address, from_server=True)
    if inner.parameters["triton_final_response"].bool_param and not inner.outputs:
        return None
    known = _fields(inner)
    answer = inner.parameters["offramp_answer"].string_param
    if answer not in set(AnswerKind):
        kinds = ", ".join(AnswerKind)
        raise ResponseError(f"parameter 'offramp_answer' is {answer!r}, expected one of {kinds}")
    corrected = _flags(inner, "offramp_corrected", len(known["exits"]))
    return StreamedResult(**known, kind=AnswerKind(answer), corrected=corrected)


def _fields(response: ModelInferResponse) -> dict[str, Any]:
    """Return the fields of an :class:`InferResult`."""
    try:
        outputs = decode_tensors(response.outputs, response.raw_output_contents)
    except TensorError as error:
        raise ResponseError(f"the response is malformed: {error}") from error
    exits = _per_sample(response, "offramp_exits", np.int32)
    confidences = _per_sample(response, "offramp_confidences", np.float32)
    forced = _flags(response, "offramp_forced", len(exits))
    variants = _variants(response, len(exits))
    rows = {name: array.shape[0] if array.ndim else 0 for name, array in outputs.items()}
    rows = {name: count for name, count in rows.items() if count != 1}  # may apply to all
    _refuse_other_counts(**rows, offramp_exits=len(exits), offramp_confidences=len(confidences))
    return {
        "outputs": outputs,
        "exits": exits,
        "confidences": confidences,
        "forced": forced,
        "variants": variants,
        "model_version": response.model_version,
        "policy_version": response.parameters["offramp_policy_version"].int64_param,
        "details": {
            name: value.string_param
            for name, value in response.parameters.items()
            if value.HasField("string_param") and name not in _OF_SAMPLES
        },
    }


def text_inputs(prompt: str | ArrayLike, max_tokens: int | None) -> dict[str, NDArray[Any]]:
    """Return the inputs of a text request whose prompt is a text or token ids."""
    if isinstance(prompt, str):
        try:
            text = prompt.encode()
        except UnicodeEncodeError as error:
            raise InvalidInputError(f"the prompt cannot be sent as UTF-8: {error}") from error
        inputs = {"text_input": np.array([text], np.object_)}
    else:
        ids = np.asarray(prompt)
        if ids.dtype.kind not in "iu":
            raise InvalidInputError(
                f"the prompt is {ids.dtype} {list(ids.shape)}, expected a string or token ids"
            )
        inputs = {"input_ids": ids.astype(np.int64)}
    if max_tokens is not None:
        if not 0 < max_tokens <= _MOST_TOKENS:
            raise InvalidInputError(f"max_tokens is {max_tokens}, expected 1 to {_MOST_TOKENS}")
        inputs["max_tokens"] = np.array([max_tokens], np.int32)
    return inputs


def generated_token(result: StreamedResult) -> GeneratedToken:
    """Return the token in a part of a text; ResponseError if the result is not such a part."""
    ids = result.outputs.get("output_ids")
    if ids is None or ids.shape != (1,):
        raise ResponseError(
            f"a response has outputs {', '.join(result.outputs)}, expected output_ids with one "
            "token: is it a model that generates text?"
        )
    text = result.outputs.get("text_output")
    return GeneratedToken(
        token=int(ids[0]),
        text="" if text is None else text[0].decode(),
        exit=int(result.exits[0]),
        confidence=float(result.confidences[0]),
        end=result.details.get("offramp_end"),
    )


def parse_metadata(response: ModelMetadataResponse) -> ModelMetadata:
    """Return the metadata in a response; ResponseError for an unknown datatype."""
    return ModelMetadata(
        name=response.name,
        platform=response.platform,
        inputs=_tensors(response.inputs),
        outputs=_tensors(response.outputs),
    )


def parse_optional(response: ModelConfigResponse) -> frozenset[str]:
    """Return the names of the inputs that a model's configuration marks as optional."""
    return frozenset(each.name for each in response.config.input if each.optional)


def _tensors(tensors: Iterable[ModelMetadataResponse.TensorMetadata]) -> dict[str, TensorMetadata]:
    try:
        return {
            tensor.name: TensorMetadata(
                name=tensor.name,
                dtype=dtype_of(tensor.datatype, tensor.name),
                shape=tuple(tensor.shape),
            )
            for tensor in tensors
        }
    except TensorError as error:
        raise ResponseError(f"the model's metadata: {error}") from error


def _flags(response: ModelInferResponse, name: str, samples: int) -> NDArray[np.bool_]:
    """Return a parameter with one flag a sample; it is absent if no flag is set."""
    if name not in response.parameters:
        return np.zeros(samples, np.bool_)
    values = _per_sample(response, name, np.int32)
    if not np.isin(values, (0, 1)).all():
        raise ResponseError(f"parameter {name!r} has values other than 0 and 1: {values}")
    _refuse_other_counts(offramp_exits=samples, **{name: len(values)})
    return values.astype(np.bool_)


def _variants(response: ModelInferResponse, samples: int) -> NDArray[np.int16]:
    """Return each sample's variant; the parameter is absent if the full model answered all."""
    name = "offramp_variants"
    if name not in response.parameters:
        return np.zeros(samples, np.int16)
    values: NDArray[np.int16] = _per_sample(response, name, np.int16)
    _refuse_other_counts(offramp_exits=samples, **{name: len(values)})
    return values


def _refuse_other_counts(**counts: int) -> None:
    if len(set(counts.values())) != 1:
        raise ResponseError(f"the response has inconsistent numbers of samples: {counts}")


def _per_sample(response: ModelInferResponse, name: str, dtype: type[Any]) -> NDArray[Any]:
    if name not in response.parameters:
        raise ResponseError(
            f"the response of model {response.model_name!r} has no parameter {name!r}; "
            "is this an Offramp server? For other servers of the protocol use tritonclient"
        )
    text = response.parameters[name].string_param
    parts: Any = text.split(",") if text else []
    try:
        if dtype is np.int32:
            parts = array("i", map(int, parts))  # numpy 1 wraps values that do not fit
        return np.array(parts, dtype=dtype)
    except (ValueError, OverflowError) as error:
        raise ResponseError(f"parameter {name!r} is not a list of numbers: {text!r}") from error
