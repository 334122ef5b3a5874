"""The service over real sockets, called by our clients."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import grpc
import numpy as np
import pytest

from offramp.client import (
    AsyncClient,
    Client,
    DeadlineError,
    InvalidInputError,
    MessageTooLargeError,
    ServerBusyError,
    ServerError,
    ServerUnavailableError,
    UnknownModelError,
)
from offramp.engine.common import errors as engine_errors
from offramp.proto import messages
from offramp.proto.descriptors import method_path

X = np.array([[1, 2, 3, 0.95], [4, 5, 6, 0.25]], np.float32)


def call(address: str, method: str, request: Any, response: Any) -> Any:
    with grpc.insecure_channel(address) as channel:
        return channel.unary_unary(
            method_path(method),
            request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,
        )(request, timeout=30)


def test_a_request_is_answered_with_exits_and_confidences(served: Any) -> None:
    with Client(served.address) as client:
        result = client.infer("fake", {"x": X}, priority=1)
    np.testing.assert_array_equal(result.outputs["logits"], X[:, :3])
    assert result.exits.tolist() == [0, -1]
    assert result.exits.dtype == np.int32
    np.testing.assert_array_equal(result.confidences, X[:, 3])
    assert result.confidences.dtype == np.float32
    assert result.policy_version == 7
    assert (served.engine.calls[0].priority, served.engine.calls[0].source) == (4, "ipv4:127.0.0.1")


def test_forced_samples_are_marked(served: Any) -> None:
    served.engine.hurried = True
    with Client(served.address) as client:
        forced = client.infer("fake", {"x": X})
        sure = client.infer("fake", {"x": X[:1]})
    assert forced.exits.tolist() == [0, 0]
    assert forced.forced.tolist() == [False, True]
    assert sure.forced.tolist() == [False]
    assert sure.forced.dtype == np.bool_

    async def ask() -> Any:
        async with AsyncClient(served.address) as client:
            return await client.infer("fake", {"x": X})

    assert asyncio.run(ask()).forced.tolist() == [False, True]


def test_grpcs_deadline_reaches_the_engine_as_an_absolute_time(served: Any) -> None:
    before_s = time.monotonic()
    with Client(served.address) as client:
        client.infer("fake", {"x": X}, timeout_s=20.0)
    after_s = time.monotonic()
    # gRPC sends what is left of the deadline, rounded up to its next unit (1 % at most).
    assert before_s + 19.8 <= served.engine.calls[0].deadline_s <= after_s + 20.2


def test_a_client_that_only_waits_leaves_the_deadline_to_the_server(served: Any) -> None:
    with Client(served.address, timeout_s=20.0) as client:
        client.infer("fake", {"x": X})

    async def ask() -> None:
        async with AsyncClient(served.address, timeout_s=20.0) as client:
            await client.infer("fake", {"x": X})

    asyncio.run(ask())
    assert [made.deadline_s for made in served.engine.calls] == [None, None]


def test_it_waits_no_longer_than_it_says(served: Any) -> None:
    served.hold()
    with Client(served.address, timeout_s=0.05) as client, pytest.raises(DeadlineError):
        client.infer("fake", {"x": X})
    assert wait_until(lambda: served.engine.cancelled == 2)


def test_the_response_names_model_version_and_id(served: Any) -> None:
    request = messages.ModelInferRequest(model_name="fake", model_version="1", id="a-7")
    request.inputs.add(name="x", datatype="FP32", shape=[2, 4])
    request.raw_input_contents.append(X.tobytes())
    response = call(served.address, "ModelInfer", request, messages.ModelInferResponse)
    assert (response.model_name, response.model_version, response.id) == ("fake", "1", "a-7")
    assert response.parameters["offramp_policy_version"].int64_param == 7
    assert response.parameters["offramp_exits"].string_param == "0,-1"
    assert response.parameters["offramp_confidences"].string_param == "0.95,0.25"
    assert "offramp_forced" not in response.parameters
    served.engine.hurried = True
    response = call(served.address, "ModelInfer", request, messages.ModelInferResponse)
    assert response.parameters["offramp_forced"].string_param == "0,1"


def test_metadata_and_readiness(served: Any) -> None:
    with Client(served.address) as client:
        metadata = client.metadata("fake")
        assert client.server_ready()
        assert client.model_ready("fake")
        assert not client.model_ready("other")
        served.engine.unready.add("fake")
        assert not client.server_ready()
        assert not client.model_ready("fake")
    assert metadata.platform == "offramp_fake"
    assert metadata.inputs["x"].shape == (-1, 4)
    assert metadata.inputs["x"].dtype == np.float32
    assert metadata.outputs["logits"].shape == (-1, 3)
    request = messages.ServerMetadataRequest()
    server = call(served.address, "ServerMetadata", request, messages.ServerMetadataResponse)
    assert server.name == "offramp"
    assert list(server.extensions) == sorted(server.extensions)
    assert "system_shared_memory" in server.extensions
    live = call(
        served.address, "ServerLive", messages.ServerLiveRequest(), messages.ServerLiveResponse
    )
    assert live.live
    served.engine.given_up = True
    live = call(
        served.address, "ServerLive", messages.ServerLiveRequest(), messages.ServerLiveResponse
    )
    assert not live.live


@pytest.mark.parametrize(
    ("model", "inputs", "outputs", "error", "message"),
    [
        ("fak", {"x": X}, None, UnknownModelError, "did you mean 'fake'[?] served: 'fake'"),
        ("fake", {"y": X}, None, InvalidInputError, "no input 'y'"),
        ("fake", {}, None, InvalidInputError, "input 'x' is missing"),
        ("fake", {"x": X[:, :3]}, None, InvalidInputError, r"float32 \[2, 3\]"),
        ("fake", {"x": X.astype(np.float64)}, None, InvalidInputError, "float64"),
        ("fake", {"x": X}, ["probs"], InvalidInputError, "no output 'probs'; it has logits"),
    ],
)
def test_wrong_requests_are_refused_with_the_reason(
    served: Any, model: str, inputs: Any, outputs: Any, error: type[Exception], message: str
) -> None:
    with Client(served.address) as client, pytest.raises(error, match=message) as caught:
        client.infer(model, inputs, outputs=outputs)
    assert isinstance(caught.value.__cause__, grpc.RpcError)
    assert served.engine.answered == [0, 0]


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (engine_errors.QueueFullError("4096 samples wait"), ServerBusyError),
        (engine_errors.DeadlineExceededError("too late"), DeadlineError),
        (engine_errors.DeadlineExceededError("given up early"), DeadlineError),
        (engine_errors.DrainingError("shutting down"), ServerUnavailableError),
        (engine_errors.BackendError("stage 2 failed"), ServerError),
    ],
)
def test_the_engines_errors_reach_the_client(
    served: Any, failure: Exception, error: type[Exception]
) -> None:
    served.engine.failure = failure
    with Client(served.address) as client, pytest.raises(error, match=str(failure)):
        client.infer("fake", {"x": X})


def test_an_unexpected_error_is_the_servers(served: Any, caplog: pytest.LogCaptureFixture) -> None:
    served.engine.failure = ZeroDivisionError("secret")
    with (
        caplog.at_level(logging.ERROR),
        Client(served.address) as client,
        pytest.raises(ServerError, match="internal error of the server"),
    ):
        client.infer("fake", {"x": X})
    assert "ZeroDivisionError: secret" in caplog.text


def test_a_request_above_the_limit_teaches_the_remedy(served: Any) -> None:
    large = np.zeros((2**17, 4), np.float32)  # 2 MiB; the limit here is 1 MiB
    with Client(served.address) as client, pytest.raises(MessageTooLargeError) as caught:
        client.infer("fake", {"x": large})
    assert "--max-message-mib" in str(caught.value)
    assert served.engine.calls == []


def test_a_response_above_the_clients_limit_teaches_the_remedy(served: Any) -> None:
    # 0.92 MiB there, and 0.69 MiB with 0.69 MiB of exits and confidences as text back.
    rows = np.full((60_000, 4), 1 / 3, np.float32)
    with (
        Client(served.address, max_message_mib=1) as client,
        pytest.raises(MessageTooLargeError, match="max_message_mib of the client"),
    ):
        client.infer("fake", {"x": rows})


def test_a_deadline_that_passes_in_the_engine(served: Any) -> None:
    served.hold()
    with Client(served.address) as client, pytest.raises(DeadlineError):
        client.infer("fake", {"x": X}, timeout_s=0.05)
    assert wait_until(lambda: served.engine.waiting == 0)


def test_a_client_that_hangs_up_withdraws_its_request_alone(served: Any) -> None:
    served.hold()

    async def scenario() -> Any:
        async with AsyncClient(served.address) as leaver, AsyncClient(served.address) as stayer:
            leaving = asyncio.create_task(leaver.infer("fake", {"x": X}))
            staying = asyncio.create_task(stayer.infer("fake", {"x": X[:1]}))
            await asyncio.to_thread(wait_until, lambda: served.engine.waiting == 3)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            await asyncio.to_thread(wait_until, lambda: served.engine.cancelled == 2)
            served.release()
            return await staying

    result = asyncio.run(scenario())
    assert result.exits.tolist() == [0]
    assert served.engine.waiting == 0


def test_a_method_that_is_not_there_is_unimplemented(served: Any) -> None:
    request = messages.ModelReadyRequest(name="fake")
    with pytest.raises(grpc.RpcError) as caught:
        call(served.address, "ModelTrain", request, messages.ModelReadyResponse)
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


def wait_until(condition: Any, limit_s: float = 30.0) -> bool:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.002)
    return True
