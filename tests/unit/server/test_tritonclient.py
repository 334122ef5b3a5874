"""tritonclient, unchanged, against the service."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

from offramp.engine.common.errors import QueueFullError
from offramp.engine.stages.plan import Mode
from offramp.proto.descriptors import method_path

X = np.array([[1, 2, 3, 0.95]], np.float32)


def infer_input(name: str = "x", array: Any = X, datatype: str = "FP32") -> Any:
    tensor = triton.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


def wait_until(condition: Callable[[], Any], limit_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition was not met in time"
        time.sleep(0.002)


@pytest.fixture
def client(served: Any) -> Any:
    with triton.InferenceServerClient(served.address) as client:
        yield client


def test_server_and_model_are_described(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("fake")
    assert not client.is_model_ready("other")
    assert client.get_server_metadata().name == "offramp"
    metadata = client.get_model_metadata("fake", "1")
    assert list(metadata.versions) == ["1"]
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs] == [
        ("x", "FP32", [-1, 4])
    ]


def test_the_configuration_is_that_of_the_model(client: Any) -> None:
    config = client.get_model_config("fake", "1").config
    assert (config.name, config.platform) == ("fake", "offramp_fake")
    assert config.max_batch_size == 32
    (x,), (logits,) = config.input, config.output
    assert (x.name, x.data_type, list(x.dims)) == ("x", triton.model_config_pb2.TYPE_FP32, [4])
    assert (logits.name, list(logits.dims)) == ("logits", [3])
    assert logits.data_type == triton.model_config_pb2.TYPE_FP32
    assert not config.model_transaction_policy.decoupled
    with pytest.raises(InferenceServerException) as caught:
        client.get_model_config("other")
    assert caught.value.status() == "StatusCode.NOT_FOUND"


def test_a_request_is_answered(client: Any, served: Any) -> None:
    result = client.infer(
        "fake",
        [infer_input()],
        outputs=[triton.InferRequestedOutput("logits")],
        request_id="7",
        priority=2,
        timeout=5_000_000,
        client_timeout=30,
    )
    np.testing.assert_array_equal(result.as_numpy("logits"), X[:, :3])
    response = result.get_response()
    assert response.id == "7"
    assert response.parameters["offramp_exits"].string_param == "0"
    assert response.parameters["offramp_confidences"].string_param == "0.95"
    call = served.engine.calls[0]
    assert call.priority == 3
    assert call.deadline_s is not None


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_a_compressed_request_is_refused_before_it_is_decompressed(
    client: Any, served: Any, algorithm: str
) -> None:
    with pytest.raises(InferenceServerException, match=f"'{algorithm}' is disabled") as caught:
        client.infer("fake", [infer_input()], compression_algorithm=algorithm)
    assert caught.value.status() == "StatusCode.UNIMPLEMENTED"
    assert served.engine.calls == []
    large = bytes(2 << 20)  # told by the compression, not by its size
    with grpc.insecure_channel(served.address) as channel, pytest.raises(grpc.RpcError) as failed:
        infer = channel.unary_unary(method_path("ModelInfer"))
        infer(large, timeout=30, compression=grpc.Compression.Gzip)
    error: Any = failed.value
    assert error.code() == grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("model", "version", "tensor", "status"),
    [
        ("other", "", infer_input(), "NOT_FOUND"),
        ("fake", "3", infer_input(), "NOT_FOUND"),
        ("fake", "", infer_input(name="y"), "INVALID_ARGUMENT"),
        ("fake", "", infer_input(array=X[:, :2]), "INVALID_ARGUMENT"),
        ("fake", "", infer_input(array=X.astype("f8"), datatype="FP64"), "INVALID_ARGUMENT"),
        ("fake", "", infer_input(array=np.array([b"a"], object), datatype="BYTES"),
         "INVALID_ARGUMENT"),
    ],
)  # fmt: skip
def test_wrong_requests_have_tritons_status(
    client: Any, model: str, version: str, tensor: Any, status: str
) -> None:
    with pytest.raises(InferenceServerException) as caught:
        client.infer(model, [tensor], model_version=version)
    assert caught.value.status() == f"StatusCode.{status}"


def test_a_full_queue_has_tritons_status(client: Any, served: Any) -> None:
    served.engine.failure = QueueFullError("4096 samples wait")
    with pytest.raises(InferenceServerException, match="4096 samples wait") as caught:
        client.infer("fake", [infer_input()])
    assert caught.value.status() == "StatusCode.RESOURCE_EXHAUSTED"


def test_tritons_timeout_is_kept_by_the_engine(client: Any, served: Any) -> None:
    served.hold()
    with pytest.raises(InferenceServerException) as caught:
        client.infer("fake", [infer_input()], timeout=20_000)
    assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"


def test_the_asyncio_client_works_too(served: Any) -> None:
    async def ask() -> Any:
        async with triton_aio.InferenceServerClient(served.address) as client:
            return await client.infer("fake", [infer_input()])

    np.testing.assert_array_equal(asyncio.run(ask()).as_numpy("logits"), X[:, :3])


def collect(client: Any, requests: Callable[[], None], last: int) -> list[tuple[Any, Any]]:
    """Return the callback's arguments, until ``last`` final responses or errors arrived."""
    told: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: told.put((result, error)))
    requests()
    responses = []
    while last:
        result, error = told.get(timeout=20)
        responses.append((result, error))
        parameters = {} if error else result.get_response().parameters
        last -= bool(error or parameters["triton_final_response"].bool_param)
    client.stop_stream()
    assert told.empty()
    return responses


def samples(count: int) -> list[Any]:
    """Return requests of one sample each with distinguishable logits."""
    return [np.array([[number, 0, 1, 0.95]], np.float32) for number in range(count)]


@pytest.mark.parametrize("empty_final", [False, True])
def test_who_reads_an_answer_to_each_request_reads_its_own(
    client: Any, served: Any, empty_final: bool
) -> None:
    """Every sample is audited here; who does not ask for the second answers gets none."""
    served.engine.mode, served.engine.mistaken = Mode.AUDIT, True
    told: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: told.put((result, error)))
    for number, x in enumerate(samples(600)):
        client.async_stream_infer(
            "fake", [infer_input(array=x)], request_id=str(number),
            enable_empty_final_response=empty_final,
        )  # fmt: skip
        result, error = told.get(timeout=20)
        assert error is None
        response = result.get_response()
        assert response.id == str(number)
        assert response.parameters["triton_final_response"].bool_param
        np.testing.assert_array_equal(result.as_numpy("logits"), x[:, :3])
    client.stop_stream()
    assert told.empty()


def test_requests_sent_at_once_are_answered_once_each_in_their_order(
    client: Any, served: Any
) -> None:
    """Though they are answered in another order; errors have their turn as well."""
    served.engine.mode = Mode.AUDIT
    told: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: told.put((result, error)))
    served.hold()
    for number, x in enumerate(samples(400)):
        model = "other" if number % 7 == 3 else "fake"
        client.async_stream_infer(model, [infer_input(array=x)], request_id=str(number))
        if number == 200:
            wait_until(lambda: served.engine.waiting > 150)
            held, served.engine.hold = served.engine.hold, None
    served.loop.call_soon_threadsafe(held.set)
    client.stop_stream()
    answers = [told.get(timeout=20) for _ in range(400)]
    assert told.empty()
    for number, (result, error) in enumerate(answers):
        if number % 7 == 3:
            assert "no model 'other' is served" in error.message()
        else:
            assert result.get_response().id == str(number)


def test_a_stream_gives_early_and_final_answers_to_who_asks(client: Any, served: Any) -> None:
    served.engine.mode, served.engine.mistaken = Mode.RELEASE, True
    unsure = X * np.array([1, 1, 1, 0], np.float32)
    both = {"offramp_decoupled": True}

    def ask() -> None:
        client.async_stream_infer("fake", [infer_input()], request_id="sure", parameters=both)
        client.async_stream_infer(
            "fake", [infer_input(array=unsure)], request_id="unsure", parameters=both,
            enable_empty_final_response=True,
        )  # fmt: skip

    responses = collect(client, ask, last=2)
    assert all(error is None for _, error in responses)
    told: dict[str, list[Any]] = {"sure": [], "unsure": []}
    for result, _ in responses:
        answer = result.get_response().parameters["offramp_answer"].string_param
        told[result.get_response().id].append((answer, result.as_numpy("logits").tolist()))
    assert told == {
        "sure": [("early", [[1, 2, 3]]), ("correction", [[3, 2, 1]])],
        "unsure": [("answer", [[1, 2, 3]])],
    }


def test_an_error_on_a_stream_is_one_requests(client: Any, served: Any) -> None:
    def ask() -> None:
        client.async_stream_infer("other", [infer_input()], request_id="1")
        client.async_stream_infer("fake", [infer_input()], request_id="2")

    responses = collect(client, ask, last=2)
    (error,) = [error for _, error in responses if error]
    (result,) = [result for result, _ in responses if result]
    assert "no model 'other' is served" in error.message()
    assert result.get_response().id == "2"


def test_stopping_a_stream_early_withdraws_its_requests(client: Any, served: Any) -> None:
    served.hold()
    client.start_stream(lambda result, error: None)
    client.async_stream_infer("fake", [infer_input()])
    wait_until(lambda: served.engine.waiting == 1)
    client.stop_stream(cancel_requests=True)
    wait_until(lambda: served.engine.cancelled == 1)


def test_the_asyncio_client_streams_too(served: Any) -> None:
    served.engine.mode = Mode.RELEASE

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "fake", "inputs": [infer_input()], "request_id": "1"}
        yield {
            "model_name": "fake", "inputs": [infer_input()], "request_id": "2",
            "parameters": {"offramp_decoupled": True},
        }  # fmt: skip

    async def ask() -> list[str]:
        answers = []
        async with triton_aio.InferenceServerClient(served.address) as client:
            async for result, error in client.stream_infer(requests()):
                assert error is None
                answers.append(result.get_response().parameters["offramp_answer"].string_param)
        return answers

    assert sorted(asyncio.run(ask())) == ["answer", "confirmation", "early"]
