"""Interfaces for operators: health, reflection, metrics, status page, limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.facts import tells

from offramp.client import Client, MessageTooLargeError


def test_health(server: Any) -> None:
    with grpc.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", server.model, "inference.GRPCInferenceService"):
            response = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=30)
            assert response.status == health_pb2.HealthCheckResponse.SERVING
    assert server.get("/health/live") == "live\n"
    assert server.get("/health/ready") == "ready\n"


def test_reflection(server: Any) -> None:
    with grpc.insecure_channel(server.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(
                file_containing_symbol="inference.GRPCInferenceService"
            ),
        ]
        listed, described = stub.ServerReflectionInfo(iter(requests), timeout=30)
    names = {service.name for service in listed.list_services_response.service}
    assert {"inference.GRPCInferenceService", "grpc.health.v1.Health"} <= names
    assert len(described.file_descriptor_response.file_descriptor_proto) == 1


def test_metrics_count_every_sample_once(server: Any) -> None:
    before = server.metric("offramp_answers_total")
    with Client(server.address) as client:
        result = client.infer(server.model, server.inputs(6))
        assert len(result.exits) == 6
    assert server.metric("offramp_answers_total") == before + 6
    assert server.metric("offramp_queued_samples") == 0


def test_the_status_page(server: Any) -> None:
    page = server.get("/")
    assert f"<h2>{server.model} " in page
    for name in (*server.metadata().inputs, *server.metadata().outputs):
        assert f"<code>{name}: " in page


def test_mode_off_serves_the_unmodified_model(launch: Any, bundle_path: Path) -> None:
    server = launch(bundle_path, "--mode=off")
    with Client(server.address) as client:
        result = client.infer(server.model, server.inputs(4))
    assert result.exits.tolist() == [-1] * 4
    assert "Exits are switched off" in server.get("/")


def test_a_bundle_may_be_served_under_two_names(launch: Any, bundle_path: Path) -> None:
    server = launch("--model", f"a={bundle_path}", "--model", f"b={bundle_path}")
    assert server.models == ("a", "b")
    with Client(server.address) as client:
        for model in server.models:
            assert len(client.infer(model, server.inputs(2)).exits) == 2
    assert server.metric("offramp_answers_total", model="a") == 2
    assert server.metric("offramp_answers_total", model="b") == 2


def test_a_request_above_the_limit_is_refused_alone(launch: Any, bundle_path: Path) -> None:
    server = launch(bundle_path, "--max-message-mib=1")
    size_bytes = sum(array.nbytes for array in server.inputs(1).values())
    with Client(server.address) as client:
        with pytest.raises(MessageTooLargeError, match="--max-message-mib"):
            client.infer(server.model, server.inputs(2**20 // size_bytes + 1))
        assert len(client.infer(server.model, server.inputs(1)).exits) == 1


@pytest.mark.parametrize("side", ["grpc", "http"])
def test_a_port_in_use_is_one_line(server: Any, refused: Any, bundle_path: Path, side: str) -> None:
    taken = (server.address if side == "grpc" else server.url).rpartition(":")[2]
    ports = {"grpc": "0", "http": "0", side: taken}
    options = (f"--{name}-port={port}" for name, port in ports.items())
    status, told = refused(bundle_path, *options)
    assert status == 1
    assert told.count("\n") == 1
    tells(told, f"eeserve: port {taken}", "127.0.0.1")
    assert f"--{side}-port" in told


def test_a_bundle_that_is_not_there_is_one_line(refused: Any, tmp_path: Path) -> None:
    status, told = refused(tmp_path / "absent.ee", "--grpc-port=0", "--http-port=0")
    assert status == 1
    assert told.count("\n") == 1
    assert f"{tmp_path / 'absent.ee'}" in told
