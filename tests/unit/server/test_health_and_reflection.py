"""grpc.health.v1 and server reflection."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from offramp.proto.descriptors import FILE, SERVICE
from offramp.testing.engine import FakeEngine

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def health(channel: Any, service: str) -> Any:
    stub = health_pb2_grpc.HealthStub(channel)
    return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=30).status


def test_health_of_server_service_and_model(served: Any) -> None:
    with grpc.insecure_channel(served.address) as channel:
        assert [health(channel, name) for name in ("", SERVICE, "fake")] == [SERVING] * 3
        with pytest.raises(grpc.RpcError) as caught:
            health(channel, "other")
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.NOT_FOUND
        served.run(served.grpc.leaving())
        assert [health(channel, name) for name in ("", SERVICE, "fake")] == [NOT_SERVING] * 3


def test_a_watcher_is_told(served: Any) -> None:
    with grpc.insecure_channel(served.address) as channel:
        request = health_pb2.HealthCheckRequest(service="fake")
        watch = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=30)
        assert next(watch).status == SERVING
        served.run(served.grpc.leaving())
        assert next(watch).status == NOT_SERVING
        watch.cancel()


def test_health_follows_the_engine_while_serving(served: Any) -> None:
    """Each watcher is notified separately, as the engine itself notifies none."""
    served.run(served.repository.change({"fake": Path(), "other": Path()}, {}))
    with grpc.insecure_channel(served.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = {
            name: stub.Watch(health_pb2.HealthCheckRequest(service=name), timeout=30)
            for name in ("", SERVICE, "fake")
        }
        assert [next(watch).status for watch in watches.values()] == [SERVING] * 3
        served.engine.unready.add("fake")
        assert [next(watch).status for watch in watches.values()] == [NOT_SERVING] * 3
        assert health(channel, "other") == SERVING
        served.engine.unready.clear()
        assert [next(watch).status for watch in watches.values()] == [SERVING] * 3
        for watch in watches.values():
            watch.cancel()


async def following() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task.get_name() == "health"]


def test_a_server_that_leaves_follows_no_more(served: Any) -> None:
    assert len(served.run(following())) == 1
    served.run(served.grpc.leaving())
    assert served.run(following()) == []


def test_what_ends_the_following_is_logged(
    served: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> bool:
        raise RuntimeError("no idea")

    async def followed() -> None:
        monkeypatch.setattr(FakeEngine, "ready", fail)
        (task,) = await following()
        await asyncio.wait_for(task, 30)

    served.run(followed())
    assert "health is no longer followed" in caplog.text
    assert "RuntimeError: no idea" in caplog.text


def reflect(address: str, **query: str) -> Any:
    with grpc.insecure_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(**query)
        (response,) = stub.ServerReflectionInfo(iter([request]), timeout=30)
        return response


def test_reflection_lists_the_services(served: Any) -> None:
    listed = reflect(served.address, list_services="").list_services_response.service
    assert [service.name for service in listed] == [
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
        "inference.GRPCInferenceService",
    ]


@pytest.mark.parametrize(
    ("symbol", "file"),
    [
        (SERVICE, FILE),
        ("inference.ModelInferRequest", FILE),
        ("grpc.health.v1.Health", health_pb2.DESCRIPTOR),
        ("grpc.reflection.v1alpha.ServerReflection", reflection_pb2.DESCRIPTOR),
    ],
)
def test_reflection_describes_them(served: Any, symbol: str, file: Any) -> None:
    response = reflect(served.address, file_containing_symbol=symbol)
    (serialized,) = response.file_descriptor_response.file_descriptor_proto
    expected = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(expected)
    assert descriptor_pb2.FileDescriptorProto.FromString(serialized) == expected
