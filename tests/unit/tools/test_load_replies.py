from __future__ import annotations

import numpy as np
import pytest

from offramp.certify.decision import MODEL_END
from offramp.proto.messages import ModelInferRequest, ModelInferResponse
from offramp.proto.tensors import encode_tensor
from offramp.tools.bench.common.outcomes import Status
from offramp.tools.bench.load.load_settings import LoadSettings
from offramp.tools.bench.load.request_log import UNKNOWN, Causes, Reply, read_reply, status_of
from offramp.tools.bench.load.shares import serialise_requests


def response(**parameters: str) -> ModelInferResponse:
    made = ModelInferResponse()
    for name, values in (("other", [[9.0, 0.0]]), ("logits", [[0.5, 2.0, 1.0]])):
        array = np.array(values, np.float32)
        made.raw_output_contents.append(encode_tensor(made.outputs.add(), name, array))
    for name, text in parameters.items():
        made.parameters[name].string_param = text
    return made


def test_a_reply_says_where_and_what_was_answered() -> None:
    full = response(offramp_exits="3", offramp_confidences="0.9", offramp_forced="1")
    assert read_reply(full, "logits") == Reply(exit=3, forced=True, prediction=1)
    assert read_reply(full, "other") == Reply(exit=3, forced=True, prediction=0)
    assert read_reply(full, None).prediction == UNKNOWN


def test_nothing_forced_and_the_models_end() -> None:
    assert read_reply(response(offramp_exits="-1"), None) == Reply(MODEL_END, False, UNKNOWN)
    assert not read_reply(response(offramp_exits="2", offramp_forced="0"), None).forced


def test_another_server_says_nothing_of_exits() -> None:
    assert read_reply(response(), "logits") == Reply(MODEL_END, False, 1)


def test_a_malformed_response_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="no output 'scores'"):
        read_reply(response(), "scores")
    with pytest.raises(ValueError, match="invalid literal"):
        read_reply(response(offramp_exits="0,x"), None)
    typed = response()
    del typed.raw_output_contents[:]
    with pytest.raises(ValueError, match="shorter"):
        read_reply(typed, "logits")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("DEADLINE_EXCEEDED", Status.EXPIRED),
        ("RESOURCE_EXHAUSTED", Status.REJECTED),
        ("UNAVAILABLE", Status.REJECTED),
        ("INVALID_ARGUMENT", Status.FAILED),
        ("INTERNAL", Status.FAILED),
        ("CANCELLED", Status.FAILED),
    ],
)
def test_statuses(code: str, status: Status) -> None:
    assert status_of(code) is status


def test_causes_that_differ_in_numbers_are_one() -> None:
    causes = Causes()
    for text in ("full: 7 wait", "full: 12 wait", "odd", "full: -0.5 wait"):
        causes.count(text)
    assert causes.to_json() == {"full: 7 wait": 3, "odd": 1}
    merged = Causes.merge([causes.to_json(), {"odd": 4, "full: 99 wait": 1}])
    assert merged.to_json() == {"odd": 5, "full: 7 wait": 4}


def test_of_many_causes_the_later_ones_are_counted_together() -> None:
    causes = Causes()
    for letter in "abcdefghijklmnopqrstuvwxyz":
        causes.count(letter)
    assert causes.to_json()["others"] == 6
    assert sum(causes.to_json().values()) == 26


def test_requests_carry_one_sample_deadline_and_priority() -> None:
    settings = LoadSettings(address="a:1", model="m", duration_s=5.0, slo_ms=2.5, priority=3)
    inputs = {"x": np.arange(8, dtype=np.float32).reshape(4, 2), "n": np.arange(4)}
    sent = serialise_requests(settings, inputs, np.array([3, 1, 3]))
    assert sorted(sent) == [1, 3]
    request = ModelInferRequest.FromString(sent[3])
    assert request.model_name == "m"
    assert request.parameters["timeout"].int64_param == 2500
    assert request.parameters["priority"].uint64_param == 3
    assert [(t.name, t.datatype, list(t.shape)) for t in request.inputs] == [
        ("x", "FP32", [1, 2]),
        ("n", "INT64", [1]),
    ]
    assert np.frombuffer(request.raw_input_contents[0], "<f4").tolist() == [6.0, 7.0]
    assert np.frombuffer(request.raw_input_contents[1], "<i8").tolist() == [3]


def test_without_deadline_and_priority_nothing_is_said_of_them() -> None:
    settings = LoadSettings(
        address="a:1", model="m", duration_s=5.0, slo_ms=2.5, send_deadline=False
    )
    sent = serialise_requests(settings, {"x": np.zeros((1, 2), np.float32)}, np.array([0]))
    assert dict(ModelInferRequest.FromString(sent[0]).parameters) == {}
