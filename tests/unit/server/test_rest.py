"""The protocol over HTTP: the same answers as over gRPC."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import aiohttp
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tests.facts import tells
from tests.unit.server.test_service import wait_until
from tritonclient.utils import InferenceServerException

from offramp.bundle import TensorSpec
from offramp.engine.common import errors as engine_errors
from offramp.engine.requests.results import EngineResult, StringSpec
from offramp.engine.stages.plan import Mode
from offramp.proto.request_bytes import MAX_FIELDS
from offramp.proto.tensors import DATATYPES
from offramp.server.arguments.options import ServerOptions
from offramp.server.rest.json_requests import JsonRequest
from offramp.testing.engine import FakeEngine, fake_model
from offramp.testing.server import FakeServer

X = np.array([[1, 2, 3, 0.95], [4, 5, 6, 0.25]], np.float32)
BODY = {"inputs": [{"name": "x", "shape": [2, 4], "datatype": "FP32", "data": X.tolist()}]}
INFER = "/v2/models/fake/infer"


def ask(
    served: Any,
    path: str,
    body: Any = None,
    *,
    verb: str | None = None,
    headers: dict[str, str] | None = None,
) -> tuple[int, Any]:
    """Return status and decoded JSON of a request; ``body`` is bytes, or sent as JSON."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(
        f"{served.url}{path}", data=data, headers=headers or {}, method=verb
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.fixture
def client(served: Any) -> Any:
    with triton.InferenceServerClient(served.url.removeprefix("http://")) as client:
        yield client


def test_json_in_and_json_out(served: Any) -> None:
    body = {**BODY, "id": "seven", "parameters": {"priority": 1, "timeout": 20_000_000}}
    status, answer = ask(served, INFER, body)
    assert status == 200
    assert answer == {
        "model_name": "fake",
        "model_version": "1",
        "id": "seven",
        "parameters": {
            "offramp_policy_version": 7,
            "offramp_exits": "0,-1",
            "offramp_confidences": "0.95,0.25",
        },
        "outputs": [
            {
                "name": "logits",
                "datatype": "FP32",
                "shape": [2, 3],
                "data": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            }
        ],
    }
    (call,) = served.engine.calls
    assert call.priority == 4
    assert 0 < call.deadline_s - time.monotonic() <= 20
    assert call.source == "ipv4:127.0.0.1"


class Echo(FakeEngine):
    """Answers with its input, in its own dtype."""

    async def infer(self, model: str, inputs: Any, **_: Any) -> EngineResult:  # type: ignore[override]
        array = inputs["x"]
        return EngineResult(
            outputs={"logits": array},
            exits=np.zeros(len(array), np.int32),
            confidences=np.ones(len(array), np.float32),
            forced=np.zeros(len(array), np.bool_),
            policy_version=1,
            variants=np.zeros(len(array), np.int16),
        )


def values_of(datatype: str) -> Any:
    dtype = DATATYPES[datatype]
    if dtype == np.object_:
        return np.array([[b"", "\u00e4\u4e2d".encode(), b"ab"]], np.object_)
    if dtype.kind == "b":
        return np.array([[True, False, True]])
    if dtype.kind == "f":
        limits = np.finfo(dtype)
        special = [0.1, -0.0, limits.max, limits.tiny, np.nan, np.inf, -np.inf]
        return np.array([special], dtype)
    integers = np.iinfo(dtype)
    return np.array([[integers.min, 0, integers.max]], dtype)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("datatype", DATATYPES)
def test_answers_are_those_of_grpc_to_the_last_bit(datatype: str, binary: bool) -> None:
    array = values_of(datatype)
    kind = StringSpec if array.dtype == np.object_ else TensorSpec
    spec = kind(name="x", dtype=array.dtype.name, shape=("batch", array.shape[1]))
    model = replace(fake_model(), inputs=(spec,), outputs=(replace(spec, name="logits"),))
    with FakeServer(Echo(served=(model,))) as server:
        by_http = triton.InferenceServerClient(server.url.removeprefix("http://"))
        tensor = triton.InferInput("x", list(array.shape), datatype)
        tensor.set_data_from_numpy(array, binary_data=binary)
        wanted = triton.InferRequestedOutput("logits", binary_data=binary)
        answer = by_http.infer("fake", [tensor], outputs=[wanted]).as_numpy("logits")
        by_http.close()
        with triton_grpc.InferenceServerClient(server.address) as by_grpc:
            other = triton_grpc.InferInput("x", list(array.shape), datatype)
            other.set_data_from_numpy(array)
            expected = by_grpc.infer("fake", [other]).as_numpy("logits")
    assert answer.dtype == expected.dtype == array.dtype
    if array.dtype == np.object_:
        encoded = [s if isinstance(s, bytes) else s.encode() for s in answer.flat]
        assert encoded == list(expected.flat) == list(array.flat)
        return
    assert answer.tobytes() == expected.tobytes() == array.tobytes()


def test_server_and_models_are_described(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("fake")
    assert client.is_model_ready("fake", "1")
    assert not client.is_model_ready("fake", "2")
    assert not client.is_model_ready("other")
    metadata = client.get_server_metadata()
    assert (metadata["name"], "statistics" in metadata["extensions"]) == ("offramp", True)
    assert client.get_model_metadata("fake") == {
        "name": "fake",
        "versions": ["1"],
        "platform": "offramp_fake",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
        "outputs": [{"name": "logits", "datatype": "FP32", "shape": [-1, 3]}],
    }
    config = client.get_model_config("fake", "1")
    assert (config["max_batch_size"], config["input"][0]["data_type"]) == (32, "TYPE_FP32")


def test_health_that_fails_is_a_status(served: Any) -> None:
    served.engine.unready.add("fake")
    assert ask(served, "/v2/health/ready") == (400, {"ready": False})
    assert ask(served, "/v2/models/fake/ready") == (400, {"ready": False})
    assert ask(served, "/v2/health/live") == (200, {"live": True})
    served.engine.given_up = True
    assert ask(served, "/v2/health/live") == (400, {"live": False})


def test_tritons_client_infers_and_manages(client: Any, served: Any) -> None:
    tensor = triton.InferInput("x", [2, 4], "FP32")
    tensor.set_data_from_numpy(X)
    classes = triton.InferRequestedOutput("logits", class_count=1, binary_data=False)
    result = client.infer("fake", [tensor], outputs=[classes], request_id="a", priority=1)
    assert result.as_numpy("logits").tolist() == [["3.000000:2"], ["6.000000:2"]]
    assert result.get_response()["id"] == "a"
    (statistics,) = client.get_inference_statistics("fake")["model_stats"]
    assert statistics["inference_count"] == 2
    assert client.get_inference_statistics()["model_stats"][0]["version"] == "1"
    assert client.get_model_repository_index() == [
        {"name": "fake", "version": "1", "state": "READY", "reason": ""}
    ]
    for change in (client.load_model, client.unload_model):
        with pytest.raises(InferenceServerException, match="--model-control explicit"):
            change("fake")
    assert client.get_system_shared_memory_status() == []
    with pytest.raises(InferenceServerException, match="cannot be opened"):
        client.register_system_shared_memory("r", "/offramp-not-there", 8, offset=0)
    client.unregister_system_shared_memory()
    assert client.get_cuda_shared_memory_status() == []
    assert client.update_trace_settings(settings={"trace_rate": "9"})["trace_rate"] == "9"
    assert client.get_trace_settings()["trace_level"] == ["OFF"]
    assert client.get_log_settings()["log_error"] is True
    with pytest.raises(InferenceServerException, match="no log setting 'colour'"):
        client.update_log_settings({"colour": True})
    assert served.admission.refused["UNAVAILABLE", "model_control"] == 2


def test_the_asynchronous_client_asks_for_many_at_once(served: Any) -> None:
    async def talk() -> list[Any]:
        address = served.url.removeprefix("http://")
        async with triton_aio.InferenceServerClient(address, conn_limit=20) as client:
            tensors = []
            for row in range(20):
                tensor = triton_aio.InferInput("x", [1, 4], "FP32")
                tensor.set_data_from_numpy(np.full((1, 4), row, np.float32))
                tensors.append(tensor)
            answers = await asyncio.gather(*(client.infer("fake", [each]) for each in tensors))
        return [answer.as_numpy("logits").tolist() for answer in answers]

    assert asyncio.run(talk()) == [[[row] * 3] for row in map(float, range(20))]


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_bodies_are_compressed_both_ways(client: Any, algorithm: str) -> None:
    array = np.repeat(X, 200, axis=0)
    tensor = triton.InferInput("x", list(array.shape), "FP32")
    tensor.set_data_from_numpy(array)
    result = client.infer(
        "fake",
        [tensor],
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    np.testing.assert_array_equal(result.as_numpy("logits"), array[:, :3])


@pytest.mark.parametrize(("encoding", "compress"), [("gzip", gzip.compress),
                                                    ("deflate", zlib.compress)])  # fmt: skip
def test_a_small_body_that_is_large_decompressed_is_refused(
    encoding: str, compress: Callable[[bytes], bytes]
) -> None:
    with FakeServer(FakeEngine()) as server:  # messages of 1 MiB
        body = compress(b" " * (64 * 2**20))
        assert len(body) < 2**17
        status, answer = ask(server, INFER, body, headers={"Content-Encoding": encoding})
        assert status == 400
        assert "body" in answer["error"]
        assert wait_until(lambda: server.admission.held_bytes == 0)


def test_a_body_above_the_limit_is_refused_before_it_is_read(served: Any) -> None:
    status, answer = ask(served, INFER, bytes(2**20 + 1))
    assert status == 400
    tells(answer["error"], "1048577 bytes", "at most 1048576")


def changed(**changes: Any) -> dict[str, Any]:
    return {"inputs": [{**BODY["inputs"][0], **changes}]}


@pytest.mark.parametrize(
    ("body", "facts"),
    [
        (b"{", ["not JSON"]),
        (b"\xff", ["not JSON"]),
        (b"[" * 100_000, ["not JSON"]),
        ([], ["a list", "expected a JSON object"]),
        ({"inputs": {}}, ["inputs", "list of objects"]),
        ({"inputs": [1]}, ["inputs", "list of objects"]),
        ({"inputs": []}, ["input 'x' is missing"]),
        (changed(name=3), ["name 3", "expected a string"]),
        (changed(name="y"), ["no input 'y'"]),
        (changed(name="x" * 2000), ["2000 characters", "at most 1024"]),
        (changed(datatype="FP31"), ["'FP31'", "not served"]),
        (changed(datatype="FP16", data=[1e5] * 8), ["100000.0", "beyond FP16"]),
        (changed(datatype="FP64"), ["float64"]),
        (changed(shape=[2, -4]), ["shape [2, -4]", "expected a list of sizes"]),
        (changed(shape="2"), ["shape '2'", "expected a list of sizes"]),
        (changed(shape=[3, 4]), ["8 elements", "takes 12"]),
        (changed(shape=[2, True]), ["expected a list of sizes"]),
        (changed(data=1.5), ["data 1.5", "expected a list"]),
        (changed(data=[[1.0, 2.0], [3.0]]), ["lists of different lengths"]),
        (changed(data=["a"] * 8), ["FP32", "'a'"]),
        (changed(data=[None] * 8), ["FP32", "None"]),
        (changed(data=[1e300] * 8), ["1e+300", "beyond FP32"]),
        (changed(datatype="INT8", data=[1.5] * 8), ["INT8", "1.5"]),
        (changed(datatype="INT8", data=[300] * 8), ["300", "beyond INT8"]),
        (changed(datatype="UINT64", data=[-1] * 8), ["-1", "beyond UINT64"]),
        (changed(datatype="UINT64", data=[2**64] * 8), ["not a UINT64"]),
        (changed(datatype="INT64", data=[2**63, 0.5] * 4), ["INT64"]),
        (changed(datatype="BOOL", data=[1] * 8), ["BOOL", "1"]),
        (changed(parameters={"binary_data_size": 8}), ["binary_data_size 8", "0 bytes are left"]),
        (changed(parameters={"binary_data_size": "8"}), ["binary_data_size '8'"]),
        (changed(parameters=[]), ["parameters", "a list", "expected an object"]),
        (changed(parameters={"p": [1]}), ["parameter 'p'", "a list"]),
        ({**BODY, "parameters": {"timeout": "now"}}, ["'timeout'", "'now'", "int64_param"]),
        ({**BODY, "outputs": [{"name": "other"}]}, ["no output 'other'"]),
        ({**BODY, "outputs": [{"name": "logits"}] * (MAX_FIELDS + 1)}, ["1026", "1024"]),
    ],
)
def test_wrong_bodies_are_refused(served: Any, body: Any, facts: list[str]) -> None:
    status, answer = ask(served, INFER, body)
    assert status == 400
    assert all(fact in answer["error"] for fact in facts), answer
    assert served.admission.held_bytes == served.admission.requests == 0


def test_integers_that_no_int64_holds_are_taken_where_they_fit() -> None:
    spec = {"name": "x", "shape": [2], "datatype": "UINT64", "data": [2**64 - 1, 3]}
    body = json.dumps({"inputs": [spec]}).encode()
    (raw,) = JsonRequest(memoryview(body), len(body), "m", "").message.raw_contents
    assert np.frombuffer(raw, np.uint64).tolist() == [2**64 - 1, 3]


@pytest.mark.parametrize(
    ("length", "rest", "facts"),
    [
        ("9999", b"", ["Inference-Header-Content-Length", "9999"]),
        ("-1", b"", ["Inference-Header-Content-Length", "-1"]),
        ("two", b"", ["Inference-Header-Content-Length", "two"]),
        (None, b"\0" * 33, ["1 bytes more"]),
        (None, b"\0" * 31, ["binary_data_size 32", "31 bytes are left"]),
    ],
)
def test_wrong_binary_bodies_are_refused(
    served: Any, length: str | None, rest: bytes, facts: list[str]
) -> None:
    spec = {**BODY["inputs"][0], "parameters": {"binary_data_size": 32}}
    header = json.dumps({"inputs": [spec]}).encode()
    headers = {"Inference-Header-Content-Length": length or str(len(header))}
    status, answer = ask(served, INFER, header + rest, headers=headers)
    assert status == 400
    assert all(fact in answer["error"] for fact in facts), answer


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (engine_errors.QueueFullError("full"), 429),
        (engine_errors.DeadlineExceededError("late"), 504),
        (engine_errors.DrainingError("leaving"), 503),
        (engine_errors.BackendError("broken"), 500),
    ],
)
def test_errors_of_the_engine_have_their_status(served: Any, error: Any, status: int) -> None:
    served.engine.failure = error
    assert ask(served, INFER, BODY) == (status, {"error": str(error)})


def test_an_unexpected_error_tells_nothing(served: Any) -> None:
    served.engine.failure = RuntimeError("secret")
    status, answer = ask(served, INFER, BODY)
    assert (status, "secret" in answer["error"]) == (500, False)


@pytest.mark.parametrize(
    ("verb", "path", "status", "fact"),
    [
        ("GET", "/v2/nothing", 404, "/v2/models/{model}/infer"),
        ("GET", "/v2/models/other", 404, "no model 'other'"),
        ("GET", "/v2/models/fake/versions/9", 404, "no version '9'"),
        ("POST", "/v2/models/other/infer", 404, "no model 'other'"),
        ("GET", INFER, 404, "there is no GET"),
        ("POST", "/v2/health/live", 405, "takes GET"),
    ],
)
def test_what_is_not_there_is_told(
    served: Any, verb: str, path: str, status: int, fact: str
) -> None:
    found, answer = ask(served, path, BODY if verb == "POST" else None, verb=verb)
    assert (found, fact in answer["error"]) == (status, True), answer


def test_a_client_that_hangs_up_withdraws_its_request(served: Any) -> None:
    served.hold()

    async def leave() -> None:
        async with aiohttp.ClientSession() as session:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.0):
                    await session.post(f"{served.url}{INFER}", json=BODY)

    asyncio.run(leave())
    assert wait_until(lambda: served.engine.cancelled == 2)
    assert wait_until(lambda: served.admission.requests == served.admission.held_bytes == 0)


def test_limits_are_those_of_grpc() -> None:
    with FakeServer(FakeEngine(), ServerOptions(max_concurrent_requests=1)) as server:
        server.hold()

        async def both() -> list[int]:
            async with aiohttp.ClientSession() as session:

                async def post() -> int:
                    async with session.post(f"{server.url}{INFER}", json=BODY) as response:
                        return response.status

                first = asyncio.create_task(post())
                await asyncio.to_thread(wait_until, lambda: server.engine.waiting == 2)
                second = await post()
                server.release()
                return [await first, second]

        assert asyncio.run(both()) == [200, 429]
        assert server.admission.refused["RESOURCE_EXHAUSTED", "concurrency"] == 1


def test_pages_of_other_sites_are_refused(served: Any) -> None:
    status, answer = ask(served, INFER, BODY, headers={"Origin": "https://example.com"})
    assert (status, "another origin" in answer["error"]) == (403, True)
    own = {"Origin": served.url}
    assert ask(served, INFER, BODY, headers=own)[0] == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1:8000", 200), ("[::1]:8000", 200), ("localhost", 200), ("rebound.example", 403)],
)
def test_without_tokens_what_changes_the_server_is_asked_by_its_address(
    served: Any, host: str, status: int
) -> None:
    found, answer = ask(served, "/v2/logging", {}, headers={"Host": host})
    assert (found, "not 'rebound.example'" in str(answer)) == (status, status == 403)
    assert ask(served, INFER, BODY, headers={"Host": host})[0] == 200


def test_requests_have_a_line_in_the_access_log(caplog: pytest.LogCaptureFixture) -> None:
    with FakeServer(FakeEngine(), ServerOptions(access_log=True)) as server:
        ask(server, INFER, BODY)
        ask(server, "/v2/models/other")
        lines = [record.message for record in caplog.records if record.name == "offramp.access"]
    assert ["rows=2 model=fake" in lines[0], "method=rest/ModelInfer code=OK" in lines[0]] == [
        True,
        True,
    ]
    assert "method=rest/ModelMetadata code=NOT_FOUND" in lines[1]


def test_outputs_in_shared_memory_have_neither_data_nor_parameters(client: Any) -> None:
    """Triton does the same: perf_analyzer reads parameters as those of binary data."""
    region = SharedMemory(create=True, size=128)
    try:
        region.buf[:32] = X.tobytes()
        client.register_system_shared_memory("region", f"/{region.name}", 128)
        tensor = triton.InferInput("x", [2, 4], "FP32")
        tensor.set_shared_memory("region", 32)
        wanted = triton.InferRequestedOutput("logits")
        wanted.set_shared_memory("region", 24, offset=64)
        response = client.infer("fake", [tensor], outputs=[wanted]).get_response()
        assert response["outputs"] == [{"name": "logits", "datatype": "FP32", "shape": [2, 3]}]
        assert bytes(region.buf[64:88]) == X[:, :3].tobytes()
    finally:
        region.close()
        region.unlink()


def generated(server: FakeServer[Any], path: str, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(f"{server.url}/v2/models/{path}", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=30) as response:
        content: bytes = response.read()
        return content


def test_generate_has_a_field_an_input_and_an_output() -> None:
    with FakeServer(FakeEngine(mode=Mode.RELEASE)) as server:
        told = json.loads(generated(server, "fake/generate", {"x": [1, 2, 3, 0.95], "id": "7"}))
        assert told["logits"] == [1.0, 2.0, 3.0]
        assert (told["id"], told["offramp_exits"], told["model_version"]) == ("7", "0", "1")
        events = generated(server, "fake/versions/1/generate_stream", {"x": [1, 2, 3, 0.95]})
        *parts, rest = events.decode().split("\n\n")
        found = [json.loads(part.removeprefix("data: ")) for part in parts]
        assert [each["offramp_answer"] for each in found] == ["early", "confirmation"]
        assert [each["triton_final_response"] for each in found] == [False, True]
        assert rest == ""
        with pytest.raises(urllib.error.HTTPError) as error:
            generated(server, "fake/generate_stream", {"y": 1})
        assert error.value.code == 400
        assert "input 'x' is missing" in json.load(error.value)["error"]
