"""tritonclient, unchanged, against the service."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

from offramp.engine.errors import QueueFullError

X = np.array([[1, 2, 3, 0.95]], np.float32)


def infer_input(name: str = "x", array: Any = X, datatype: str = "FP32") -> Any:
    tensor = triton.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


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


def test_a_request_is_answered(client: Any, served: Any) -> None:
    result = client.infer(
        "fake",
        [infer_input()],
        outputs=[triton.InferRequestedOutput("logits")],
        request_id="7",
        priority=2,
        timeout=5_000_000,
        client_timeout=30,
        compression_algorithm="gzip",
    )
    np.testing.assert_array_equal(result.as_numpy("logits"), X[:, :3])
    response = result.get_response()
    assert response.id == "7"
    assert response.parameters["offramp_exits"].string_param == "0"
    assert response.parameters["offramp_confidences"].string_param == "0.95"
    call = served.engine.calls[0]
    assert call.priority == 3
    assert call.deadline_s is not None


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
