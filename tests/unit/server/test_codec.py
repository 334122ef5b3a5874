"""From a request's parameters to deadline, priority and outputs."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from offramp.bundle import TensorSpec
from offramp.engine.common.errors import BadInputError
from offramp.engine.requests.results import EngineResult
from offramp.proto.messages import ModelInferRequest
from offramp.proto.request_bytes import InferMessage
from offramp.server.common.errors import UndecodableError
from offramp.server.requests.codec import (
    InferCall,
    WantedOutput,
    is_decoupled,
    largest,
    read_request,
    write_response,
)
from offramp.server.requests.decoding import RequestDecoder
from offramp.testing.engine import fake_model


def request(**parameters: dict[str, Any]) -> ModelInferRequest:
    request = ModelInferRequest(model_name="fake")
    for name, choice in parameters.items():
        for field, value in choice.items():
            setattr(request.parameters[name], field, value)
    return request


def read(request: ModelInferRequest, time_remaining_s: float | None = None) -> InferCall:
    how: Any = {"now_s": 100.0, "time_remaining_s": time_remaining_s}
    return read_request(whole(request), fake_model(), **how)


def whole(request: ModelInferRequest) -> InferMessage:
    return InferMessage(head=request, raw_contents=request.raw_input_contents)


@pytest.mark.parametrize(
    ("timeout_us", "time_remaining_s", "deadline_s"),
    [
        (None, None, None),
        (0, None, None),
        (None, 2.0, 102.0),
        (500_000, None, 100.5),
        (500_000, 2.0, 100.5),
        (5_000_000, 2.0, 102.0),
    ],
)
def test_the_earlier_deadline_counts(
    timeout_us: int | None, time_remaining_s: float | None, deadline_s: float | None
) -> None:
    parameters = {} if timeout_us is None else {"timeout": {"int64_param": timeout_us}}
    assert read(request(**parameters), time_remaining_s).deadline_s == deadline_s


@pytest.mark.parametrize(
    ("level", "priority"), [(0, 0), (1, 4), (5, 0), (6, -1), (2**64 - 1, 5 - 2**31)]
)
def test_tritons_levels_become_priorities(level: int, priority: int) -> None:
    assert read(request(priority={"uint64_param": level})).priority == priority


def test_a_priority_as_int64_is_understood() -> None:
    assert read(request(priority={"int64_param": 2})).priority == 3


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"timeout": {"string_param": "5"}}, "'timeout' is '5' (string_param)"),
        ({"timeout": {"int64_param": -1}}, "'timeout' is -1 (int64_param)"),
        ({"priority": {"bool_param": True}}, "'priority' is True (bool_param)"),
        ({"offramp_decoupled": {"int64_param": 1}}, "is 1 (int64_param); expected bool_param"),
        (
            {"triton_enable_empty_final_response": {"string_param": "true"}},
            "'triton_enable_empty_final_response' is 'true' (string_param)",
        ),
    ],
)
def test_wrong_parameters_are_named(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=re.escape(message)):
        read(request(**parameters))


def test_unknown_parameters_are_tolerated() -> None:
    assert read(request(sequence_id={"int64_param": 3})) == read(request())


def test_a_request_may_ask_for_an_empty_final_response() -> None:
    assert not read(request()).empty_final_response
    for asked in (True, False):
        sent = request(triton_enable_empty_final_response={"bool_param": asked})
        assert read(sent).empty_final_response is asked


def test_a_request_may_be_decoupled() -> None:
    assert is_decoupled(request(offramp_decoupled={"bool_param": True}))
    assert not is_decoupled(request(offramp_decoupled={"bool_param": False}))
    sent = request()
    assert not is_decoupled(sent)
    assert not sent.parameters  # reading what is not there leaves nothing behind


@pytest.mark.parametrize("raw", [b"\xff", b"\x0a\x05ab", b"not protobuf"])
def test_other_bytes_are_no_request(raw: bytes) -> None:
    with pytest.raises(UndecodableError, match=r"^the message is not a ModelInferRequest"):
        asyncio.run(RequestDecoder().message(raw))
    read = asyncio.run(RequestDecoder().message(request().SerializeToString()))
    assert read.head == request()


def test_outputs_keep_the_order_asked_for() -> None:
    specs = tuple(TensorSpec(name=n, dtype="float32", shape=("n",)) for n in "abc")
    model = dataclasses.replace(fake_model(), outputs=specs)
    asked = request()
    for name in "caca":
        asked.outputs.add(name=name)
    how: Any = {"now_s": 0.0, "time_remaining_s": None}
    assert [o.name for o in read_request(whole(asked), model, **how).outputs] == ["c", "a"]
    assert [o.name for o in read_request(whole(request()), model, **how).outputs] == ["a", "b", "c"]


def test_a_region_that_is_not_registered_is_refused() -> None:
    asked = request()
    asked.inputs.add(name="x").parameters["shared_memory_region"].string_param = "r"
    with pytest.raises(BadInputError, match="no shared memory region 'r'; registered: none"):
        read(asked)


@pytest.mark.parametrize(
    ("array", "count", "expected"),
    [
        ([[0.5, 2.0, -1.0]], 2, [[b"2.000000:1", b"0.500000:0"]]),
        ([[1.0, 1.0], [0.0, 3.0]], 1, [[b"1.000000:0"], [b"3.000000:1"]]),
        ([[[1.0, 4.0], [3.0, 2.0]]], 9,
         [[b"4.000000:1", b"3.000000:2", b"2.000000:3", b"1.000000:0"]]),
    ],
)  # fmt: skip
def test_classes_are_the_largest_values_with_their_indices(
    array: Any, count: int, expected: Any
) -> None:
    assert largest(np.array(array, np.float32), count).tolist() == expected


def test_classes_of_no_samples_are_none() -> None:
    assert largest(np.zeros((0, 3), np.float32), 2).shape == (0, 2)


def test_an_output_that_went_with_the_model_that_had_it_is_named() -> None:
    result = EngineResult(
        outputs={"scores": np.zeros((1, 3), np.float32)},
        exits=np.zeros(1, np.int32),
        confidences=np.ones(1, np.float32),
        forced=np.zeros(1, np.bool_),
        policy_version=1,
        variants=np.zeros(1, np.int16),
    )
    call = read(request())
    scores = dataclasses.replace(call, outputs=(WantedOutput("scores"),))
    response = write_response(request(), result, scores, "3")
    assert (response.outputs[0].name, response.model_version) == ("scores", "3")
    with pytest.raises(BadInputError, match=r"'fake' was replaced.*no output 'logits'.*scores"):
        write_response(request(), result, call, "3")
