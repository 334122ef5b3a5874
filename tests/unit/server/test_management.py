"""Statistics, shared memory and settings, by Triton's client."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as triton_memory
from tests.facts import Told, facts
from tests.unit.server.test_service import wait_until
from tritonclient.utils import InferenceServerException

from offramp.engine.requests.statistics import Histogram
from offramp.server.common.catalog import ServedName
from offramp.server.services.model_statistics import write_statistics
from offramp.testing.engine import FakeEngine

KEY = f"/offramp-test-{os.getpid()}"
X = np.array([[1, 2, 3, 0.95], [6, 5, 4, 0.25]], np.float32)


@pytest.fixture
def client(served: Any) -> Any:
    with triton.InferenceServerClient(served.address) as client:
        yield client


@pytest.fixture
def region() -> Iterator[Any]:
    """A region of 128 bytes: the input at 0, room for the output at 64."""
    handle = triton_memory.create_shared_memory_region("region", KEY, 128)
    try:
        yield handle
    finally:
        triton_memory.destroy_shared_memory_region(handle)


def shared_input(offset: int = 0, size: int = 32) -> Any:
    tensor = triton.InferInput("x", [2, 4], "FP32")
    tensor.set_shared_memory("region", size, offset=offset)
    return tensor


def shared_output(size: int = 24, offset: int = 64) -> Any:
    output = triton.InferRequestedOutput("logits")
    output.set_shared_memory("region", size, offset=offset)
    return output


def test_tensors_travel_in_shared_memory(client: Any, region: Any) -> None:
    triton_memory.set_shared_memory_region(region, [X])
    client.register_system_shared_memory("region", KEY, 128)
    result = client.infer("fake", [shared_input()], outputs=[shared_output()])
    output = result.get_output("logits")
    assert (output.datatype, list(output.shape)) == ("FP32", [2, 3])
    assert output.parameters["shared_memory_byte_size"].int64_param == 24
    answers = triton_memory.get_contents_as_numpy(region, np.float32, [2, 3], 64)
    np.testing.assert_array_equal(answers, X[:, :3])
    plain = client.infer("fake", [shared_input()])
    np.testing.assert_array_equal(plain.as_numpy("logits"), X[:, :3])


def test_regions_are_registered_listed_and_forgotten(client: Any, region: Any) -> None:
    client.register_system_shared_memory("region", KEY, 96, offset=32)
    status = client.get_system_shared_memory_status().regions
    assert {name: (r.name, r.key, r.offset, r.byte_size) for name, r in status.items()} == {
        "region": ("region", KEY, 32, 96)
    }
    with pytest.raises(InferenceServerException, match="'region' is registered already"):
        client.register_system_shared_memory("region", KEY, 96)
    client.unregister_system_shared_memory("region")
    client.unregister_system_shared_memory("region")
    assert not client.get_system_shared_memory_status().regions
    with pytest.raises(InferenceServerException, match="no shared memory region 'region'"):
        client.infer("fake", [shared_input()])


@pytest.mark.parametrize(
    ("key", "size", "offset", "reason"),
    [
        ("/offramp-not-there", 8, 0, ("cannot be opened", "No such file")),
        ("/../etc/passwd", 8, 0, ("is not /NAME",)),
        ("", 8, 0, ("is not /NAME",)),
        ("mine", 129, 0, ("128 bytes", "region 'r' from 0 to 129")),
        ("mine", 64, 65, ("region 'r' from 65 to 129",)),
        ("mine", 0, 0, ("or is empty",)),
    ],
)
def test_other_regions_are_refused(
    client: Any, region: Any, key: str, size: int, offset: int, reason: Told
) -> None:
    assert region is not None
    with pytest.raises(InferenceServerException, match=facts(*reason)):
        client.register_system_shared_memory(
            "r", KEY if key == "mine" else key, size, offset=offset
        )
    assert not client.get_system_shared_memory_status().regions


@pytest.mark.parametrize(
    ("tensor", "output", "reason"),
    [
        (shared_input(size=33), None, ("33 bytes", "FP32 [2, 4]", "32")),
        (shared_input(offset=97), None, ("97 to 129", "'region'")),
        (shared_input(size=0), None, ("0 to 0", "region")),
        (shared_input(), shared_output(size=20), ("'logits'", "24 bytes", "20")),
        (shared_input(), shared_output(offset=120), ("120 to 144", "region")),
    ],
)
def test_parts_beyond_their_region_are_refused(
    client: Any, region: Any, tensor: Any, output: Any, reason: Told
) -> None:
    triton_memory.set_shared_memory_region(region, [X])
    client.register_system_shared_memory("region", KEY, 128)
    with pytest.raises(InferenceServerException, match=facts(*reason)):
        client.infer("fake", [tensor], outputs=None if output is None else [output])


def test_a_region_that_is_shortened_harms_its_request_alone(
    client: Any, region: Any, served: Any
) -> None:
    client.register_system_shared_memory("region", KEY, 128)
    with open(f"/dev/shm{KEY}", "r+b") as file:  # noqa: PTH123
        file.truncate(16)
    with pytest.raises(InferenceServerException, match="it was shortened after it was registered"):
        client.infer("fake", [shared_input()])
    assert client.is_server_ready()
    assert wait_until(lambda: served.admission.held_bytes == 0)


def test_cuda_shared_memory_is_not_supported(client: Any) -> None:
    assert not client.get_cuda_shared_memory_status().regions
    with pytest.raises(InferenceServerException, match="register system shared memory instead"):
        client.register_cuda_shared_memory("r", b"AAAA", 0, 8)
    client.unregister_cuda_shared_memory("r")


def test_the_largest_classes_are_answered(client: Any) -> None:
    tensor = triton.InferInput("x", [2, 4], "FP32")
    tensor.set_data_from_numpy(X)
    wanted = triton.InferRequestedOutput("logits", class_count=2)
    classes = client.infer("fake", [tensor], outputs=[wanted]).as_numpy("logits")
    assert classes.tolist() == [[b"3.000000:2", b"2.000000:1"], [b"6.000000:0", b"5.000000:1"]]


def test_statistics_count_what_was_answered(client: Any) -> None:
    tensor = triton.InferInput("x", [2, 4], "FP32")
    tensor.set_data_from_numpy(X)
    client.infer("fake", [tensor])
    (model,) = client.get_inference_statistics("fake").model_stats
    assert (model.name, model.version, model.inference_count) == ("fake", "1", 2)
    assert model.last_inference > 1_700_000_000_000
    by_exit = {label: stats.success.count for label, stats in model.response_stats.items()}
    assert by_exit == {"exit 0": 1, "final": 1}
    with pytest.raises(InferenceServerException, match="no model 'other'"):
        client.get_inference_statistics("other")


def test_times_of_requests_add_up() -> None:
    statistics = FakeEngine()._statistics()
    latency = Histogram(bounds=(1.0,), counts=(2, 1), total=4.5)
    queue = Histogram(bounds=(1.0,), counts=(3, 0), total=1.25)
    changed = {name: getattr(statistics, name) for name in statistics.__dataclass_fields__}
    changed |= {"latency_s": latency, "queue_s": queue, "failed": {"expired": 2, "rejected": 1}}
    changed |= {"failed_requests": 2}
    message = write_statistics(ServedName("m", "2", "m:2"), type(statistics)(**changed), 1.5)
    stats = message.inference_stats
    assert (message.version, message.last_inference) == ("2", 1500)
    assert (stats.success.count, stats.success.ns) == (3, 4_500_000_000)
    assert (stats.queue.count, stats.queue.ns) == (3, 1_250_000_000)
    assert (stats.compute_infer.count, stats.compute_infer.ns) == (3, 3_250_000_000)
    assert stats.fail.count == 2


def test_the_log_has_levels(client: Any, restored_logging: None) -> None:
    ours = logging.getLogger("offramp")
    ours.setLevel(logging.INFO)
    assert client.get_log_settings(as_json=True)["settings"]["log_info"] == {"bool_param": True}
    settings = client.update_log_settings({"log_info": False}, as_json=True)["settings"]
    assert ours.level == logging.WARNING
    assert settings["log_info"] == {"bool_param": False}
    client.update_log_settings({"log_verbose_level": 1, "log_info": None})
    assert ours.level == logging.DEBUG
    for wrong in ({"log_file": "x"}, {"colour": True}, {"log_format": "ISO8601"}):
        with pytest.raises(InferenceServerException, match="log setting"):
            client.update_log_settings(wrong)
    assert ours.level == logging.DEBUG


def test_nothing_is_traced_without_a_collector(client: Any) -> None:
    assert list(client.get_trace_settings().settings["trace_level"].value) == ["OFF"]
    with pytest.raises(InferenceServerException, match="started without --trace-endpoint"):
        client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]})
