"""Requests and responses without a network."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.facts import Told, facts

from offramp.client.conversion import build_request, parse_metadata, parse_response, parse_streamed
from offramp.client.errors import (
    InvalidInputError,
    ResponseError,
    ServerBusyError,
    ServerError,
    UnknownModelError,
)
from offramp.client.results import AnswerKind
from offramp.proto.messages import (
    ModelInferResponse,
    ModelMetadataResponse,
    ModelStreamInferResponse,
)


def response(
    exits: str = "0,-1",
    confidences: str = "0.9,0.25",
    rows: int = 2,
    forced: str | None = None,
    variants: str | None = None,
) -> ModelInferResponse:
    message = ModelInferResponse(model_name="m")
    message.outputs.add(name="y", datatype="FP32", shape=[rows, 1])
    message.raw_output_contents.append(np.arange(rows, dtype=np.float32).tobytes())
    message.parameters["offramp_policy_version"].int64_param = 4
    message.parameters["offramp_exits"].string_param = exits
    message.parameters["offramp_confidences"].string_param = confidences
    if forced is not None:
        message.parameters["offramp_forced"].string_param = forced
    if variants is not None:
        message.parameters["offramp_variants"].string_param = variants
    return message


def test_a_request_carries_inputs_outputs_and_priority() -> None:
    inputs = {"a": np.ones((2, 3), np.float16), "b": [[1], [2]]}
    request = build_request("m", inputs, outputs=["y"], priority=2)
    assert request.model_name == "m"
    assert [(t.name, t.datatype, list(t.shape)) for t in request.inputs] == [
        ("a", "FP16", [2, 3]), ("b", "INT64", [2, 1]),
    ]  # fmt: skip
    assert request.raw_input_contents[1] == np.array([1, 2], "<i8").tobytes()
    assert [output.name for output in request.outputs] == ["y"]
    assert request.parameters["priority"].uint64_param == 2


def test_defaults_are_left_to_the_server() -> None:
    request = build_request("m", {}, outputs=None, priority=0)
    assert not request.parameters
    assert not request.outputs


@pytest.mark.parametrize(
    ("inputs", "priority", "message"),
    [
        ({"a": ["text"]}, 0, ("'a'", "<U4")),
        ({}, -1, ("priority -1", "0")),
        (np.zeros(3), 0, ("ndarray", "input name")),
    ],
)
def test_what_cannot_be_sent_is_refused(inputs: Any, priority: int, message: Told) -> None:
    with pytest.raises(InvalidInputError, match=facts(*message)):
        build_request("m", inputs, outputs=None, priority=priority)


def test_a_response_becomes_a_result() -> None:
    result = parse_response(response())
    np.testing.assert_array_equal(result.outputs["y"], np.array([[0], [1]], np.float32))
    assert result.exits.tolist() == [0, -1]
    assert result.exits.dtype == np.int32
    np.testing.assert_array_equal(result.confidences, np.array([0.9, 0.25], np.float32))
    assert result.confidences.dtype == np.float32
    assert result.policy_version == 4
    assert result.forced.tolist() == [False, False]
    assert result.forced.dtype == np.bool_


def test_forced_samples_are_told() -> None:
    assert parse_response(response(forced="0,1")).forced.tolist() == [False, True]


def test_variants_that_answered_are_told() -> None:
    assert parse_response(response()).variants.tolist() == [0, 0]
    found = parse_response(response(variants="2,0")).variants
    assert found.tolist() == [2, 0]
    assert found.dtype == np.int16


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (response(variants="1"), ("'offramp_variants': 1}",)),
        (response(variants="1,x"), ("'offramp_variants'", "'1,x'")),
        (ModelInferResponse(model_name="m"), ("'offramp_exits'", "Offramp")),
        (response(exits="0,x"), ("'offramp_exits'", "'0,x'")),
        (response(exits="0,99999999999"), ("'offramp_exits' is not a list of numbers",)),
        (response(exits="0,2147483648"), ("'offramp_exits' is not a list of numbers",)),
        (response(exits="-2147483649,0"), ("'offramp_exits' is not a list of numbers",)),
        (response(forced="0,2"), ("'offramp_forced' has values other than 0 and 1",)),
        (response(forced="0,yes"), ("'offramp_forced'", "'0,yes'")),
        (response(forced="1"), ("'offramp_forced': 1}",)),
        (response(exits="0"), ("inconsistent numbers of samples",)),
        (response(rows=3), ("{'y': 3, 'offramp_exits': 2, 'offramp_confidences': 2}",)),
    ],
)
def test_other_responses_are_refused(message: ModelInferResponse, reason: Told) -> None:
    with pytest.raises(ResponseError, match=facts(*reason)):
        parse_response(message)


def test_a_malformed_response_is_refused() -> None:
    broken = response()
    broken.raw_output_contents[0] = b"123"
    with pytest.raises(ResponseError, match="malformed: tensor 'y' has 3 bytes"):
        parse_response(broken)


def streamed(answer: str = "early", **parameters: str) -> ModelStreamInferResponse:
    inner = response()
    inner.parameters["offramp_answer"].string_param = answer
    for name, value in parameters.items():
        inner.parameters[name].string_param = value
    return ModelStreamInferResponse(infer_response=inner)


@pytest.mark.parametrize("kind", AnswerKind)
def test_a_streamed_response_becomes_a_result(kind: AnswerKind) -> None:
    result = parse_streamed(streamed(kind.value), address="a:1")
    assert result is not None
    assert result.kind is kind
    assert result.final.tolist() == [False, True]
    assert result.corrected.tolist() == [False, False]
    assert result.outputs["y"].tolist() == [[0], [1]]


def test_corrected_samples_are_told() -> None:
    result = parse_streamed(streamed("correction", offramp_corrected="1,0"), address="a:1")
    assert result is not None
    assert result.corrected.tolist() == [True, False]


def test_the_end_of_a_request_is_no_result() -> None:
    message = ModelStreamInferResponse()
    message.infer_response.parameters["triton_final_response"].bool_param = True
    assert parse_streamed(message, address="a:1") is None


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (streamed("maybe"), ("'offramp_answer'", "'maybe'", "answer, early, confirm")),
        (streamed(offramp_corrected="1"), ("'offramp_exits': 2, 'offramp_corrected': 1}",)),
        (ModelStreamInferResponse(), ("'offramp_exits'", "Offramp")),
    ],
)
def test_other_streamed_responses_are_refused(
    message: ModelStreamInferResponse, reason: Told
) -> None:
    with pytest.raises(ResponseError, match=facts(*reason)):
        parse_streamed(message, address="a:1")


@pytest.mark.parametrize(
    ("status", "expected"),
    [("NOT_FOUND", UnknownModelError), ("RESOURCE_EXHAUSTED", ServerBusyError), ("", ServerError)],
)
def test_an_error_on_a_stream_is_raised(status: str, expected: type[Exception]) -> None:
    message = ModelStreamInferResponse(error_message="no such thing")
    message.infer_response.parameters["offramp_status"].string_param = status
    with pytest.raises(expected, match="no such thing"):
        parse_streamed(message, address="a:1")


@pytest.mark.parametrize(("deadline_s", "timeout_us"), [(0.25, 250_000), (1e-9, 1), (3600, 36e8)])
def test_a_deadline_is_sent_in_microseconds(deadline_s: float, timeout_us: int) -> None:
    request = build_request("m", {}, outputs=None, priority=0, deadline_s=deadline_s)
    assert request.parameters["timeout"].int64_param == timeout_us


def test_a_request_for_both_answers_says_so() -> None:
    request = build_request("m", {}, outputs=None, priority=0, decoupled=True)
    assert request.parameters["offramp_decoupled"].bool_param


def test_metadata() -> None:
    message = ModelMetadataResponse(name="m", platform="p")
    message.inputs.add(name="x", datatype="INT64", shape=[-1, 128])
    metadata = parse_metadata(message)
    assert metadata.inputs["x"].dtype == np.int64
    assert metadata.inputs["x"].shape == (-1, 128)
    message.outputs.add(name="s", datatype="BYTES", shape=[-1])
    assert parse_metadata(message).outputs["s"].dtype == np.object_
    message.outputs.add(name="b", datatype="BF16", shape=[-1])
    with pytest.raises(ResponseError, match="BF16"):
        parse_metadata(message)
