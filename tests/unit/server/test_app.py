"""The life of a server: starting, leaving, and what may be in the way."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families
from tests.facts import facts, tells
from tests.leaving import codes_of_two_replicas, codes_while_leaving

from offramp.client import AsyncClient, Client, ConnectionFailedError, ServerUnavailableError
from offramp.client.conversion import build_request
from offramp.engine.common.errors import BackendError
from offramp.proto.messages import ModelStreamInferResponse
from offramp.server.app import StopSignals, serve_until_stopped
from offramp.server.arguments.logging_setup import FORMATS, JsonFormatter, set_up_logging
from offramp.server.arguments.options import ModelRepositoryOptions, ServerOptions
from offramp.server.common.errors import StartError
from offramp.server.ports.sockets import check_free
from offramp.testing.engine import FakeEngine

X = np.array([[1, 2, 3, 0.95]], np.float32)
READY = re.compile(r"ready: gRPC on (\S+), status page on (\S+)/, serving fake")


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A fake server in a process of its own."""

    process: subprocess.Popen[str]
    address: str
    url: str

    def told(self) -> str:
        """Return stderr after the ready line; the process has ended."""
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def in_flight(self) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            text = response.read().decode()
        families = {family.name: family for family in text_string_to_metric_families(text)}
        return families["offramp_in_flight_samples"].samples[0].value


@pytest.fixture
def launch() -> Iterator[Callable[..., Process]]:
    """Start fake servers; they are gone after the test."""
    started: list[subprocess.Popen[str]] = []

    def launch(*arguments: str) -> Process:
        command = [sys.executable, "-m", "offramp.testing.engine", "--grpc-port=0", "--http-port=0"]
        process = subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stderr is not None
        line = process.stderr.readline()
        ready = READY.search(line)
        assert ready, line
        return Process(process=process, address=ready[1], url=ready[2])

    yield launch
    for process in started:
        with process:
            process.kill()


def wait_until(condition: Callable[[], bool], limit_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_sigterm_answers_what_is_in_flight_and_exits_0(launch: Callable[..., Process]) -> None:
    server = launch("--hold")

    async def scenario() -> object:
        async with AsyncClient(server.address) as client:
            asking = asyncio.create_task(client.infer("fake", {"x": X}))
            await asyncio.to_thread(wait_until, lambda: server.in_flight() == 1)
            server.process.send_signal(signal.SIGTERM)
            return (await asking).exits.tolist()

    assert asyncio.run(scenario()) == [0]
    assert server.process.wait(30) == 0
    with Client(server.address) as client, pytest.raises(ConnectionFailedError, match="eeserve"):
        client.server_ready(timeout_s=30)


def test_sigint_does_the_same(launch: Callable[..., Process]) -> None:
    server = launch()
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(30) == 0
    told = server.told()
    tells(told, "SIGINT", "in flight")
    assert "Traceback" not in told


def test_sighup_does_the_same(launch: Callable[..., Process]) -> None:
    server = launch()
    server.process.send_signal(signal.SIGHUP)
    assert server.process.wait(30) == 0
    tells(server.told(), "SIGHUP", "in flight")


def test_sighup_is_ignored_where_the_process_was_told_to() -> None:
    async def scenario() -> StopSignals:
        stop = StopSignals()
        with stop.installed():
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
            await stop.requested.wait()
        return stop

    kept = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = asyncio.run(scenario())
    finally:
        signal.signal(signal.SIGHUP, kept)
    assert not stop.forced.is_set()


def readiness(url: str) -> int:
    try:
        with urllib.request.urlopen(f"{url}/health/ready", timeout=30) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_new_requests_are_answered_for_a_while_after_readiness_fell(
    launch: Callable[..., Process],
) -> None:
    server = launch("--drain-delay-s=3600")
    with Client(server.address) as client:
        assert client.server_ready(timeout_s=30)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not client.server_ready(timeout_s=30))
        assert readiness(server.url) == 503
        assert not client.model_ready("fake", timeout_s=30)
        with grpc.insecure_channel(server.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            reply = health.Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert client.infer("fake", {"x": X}).exits.tolist() == [0]
        assert [one.exits.tolist() for one in client.infer_stream("fake", {"x": X})] == [[0]]
        with Client(server.address) as another:
            assert another.infer("fake", {"x": X}).exits.tolist() == [0]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0  # nothing was in flight
    told = server.told()
    tells(told, "3600 s", "--drain-delay-s")
    assert told.index("SIGTERM again: stopping immediately") < told.index("stopped")


def test_at_a_terminal_shutdown_does_not_wait_for_load_balancers(
    launch: Callable[..., Process],
) -> None:
    server = launch("--drain-delay-s=3600")
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(30) == 0


LOADING = """
import asyncio, threading
from offramp.server.app import serve
from offramp.server.arguments.logging_setup import set_up_logging
from offramp.server.arguments.options import ModelRepositoryOptions, ServerOptions

async def load():
    print("loading", flush=True)
    await asyncio.shield(asyncio.to_thread(threading.Event().wait))

set_up_logging(level="info", log_format="human")
serve(load, ServerOptions(grpc_port=0, http_port=0))
"""


def test_a_second_signal_ends_even_a_load_that_does_not_end() -> None:
    command = [sys.executable, "-c", LOADING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"loading\n"
        process.send_signal(signal.SIGTERM)
        assert b"SIGTERM: stopping" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == -signal.SIGTERM


def test_under_load_calls_end_with_ok_or_unavailable(launch: Callable[..., Process]) -> None:
    server = launch()
    request = build_request("fake", {"x": X}, outputs=None, priority=0)
    codes = asyncio.run(codes_while_leaving(server.address, server.process, request))
    assert server.process.wait(30) == 0
    assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}


@pytest.mark.skipif(sys.platform != "linux", reason="clients are sent away on Linux alone")
@pytest.mark.parametrize("delay_s", [0, 0.5])
def test_a_rolling_restart_loses_no_request(launch: Callable[..., Process], delay_s: float) -> None:
    leaving, staying = launch(f"--drain-delay-s={delay_s}"), launch()
    request = build_request("fake", {"x": X}, outputs=None, priority=0)
    addresses = (leaving.address, staying.address)
    codes = asyncio.run(codes_of_two_replicas(addresses, leaving.process, request))
    assert leaving.process.wait(30) == 0
    assert set(codes) == {grpc.StatusCode.OK}


def test_an_open_stream_is_answered_while_its_server_leaves(launch: Callable[..., Process]) -> None:
    server = launch("--drain-delay-s=0")
    request = build_request("fake", {"x": X}, outputs=None, priority=0)

    errors = []

    async def scenario() -> None:
        async with grpc.aio.insecure_channel(server.address) as channel:
            stream = channel.stream_stream(
                "/inference.GRPCInferenceService/ModelStreamInfer",
                request_serializer=type(request).SerializeToString,
                response_deserializer=ModelStreamInferResponse.FromString,
            )(timeout=60)
            for number in range(10):
                await stream.write(request)
                errors.append((await stream.read()).error_message)
                if number == 1:
                    server.process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.05)
            await stream.read()  # until the server, which hears no more, ends it

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        asyncio.run(scenario())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert errors == [""] * 10
    assert server.process.wait(30) == 0


def test_requests_that_do_not_end_in_time_are_given_up(launch: Callable[..., Process]) -> None:
    server = launch("--hold", "--shutdown-timeout-s=0")

    async def scenario() -> None:
        async with AsyncClient(server.address) as client:
            asking = asyncio.create_task(client.infer("fake", {"x": X}))
            await asyncio.to_thread(wait_until, lambda: server.in_flight() == 1)
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises((ConnectionFailedError, ServerUnavailableError)):
                await asking

    asyncio.run(scenario())
    assert server.process.wait(30) == 1
    told = server.told()
    tells(told, "1 samples", "0 s")


class Stuck(FakeEngine):
    """Never done with draining."""

    async def drain(self, timeout_s: float) -> bool:
        await asyncio.sleep(timeout_s)
        return False


@pytest.mark.parametrize(("waiting", "status"), [(1, 1), (0, 0)])
def test_a_second_signal_forces_and_only_lost_requests_are_an_error(
    waiting: int, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Stuck()
    engine.waiting = waiting

    async def open_engine() -> Stuck:
        return engine

    async def scenario() -> int:
        stop = StopSignals()
        options = ServerOptions(grpc_port=0, http_port=0, shutdown_timeout_s=3600)
        serving = asyncio.create_task(serve_until_stopped(open_engine, options, stop))
        await asyncio.to_thread(wait_until, lambda: "ready: gRPC" in caplog.text)
        stop.request("SIGTERM")
        stop.request("SIGTERM")
        return await serving

    with caplog.at_level(logging.INFO):
        assert asyncio.run(scenario()) == status
    assert engine.closed
    assert "SIGTERM again: stopping immediately" in caplog.text
    assert ("leaving with 1 samples unanswered" in caplog.text) == bool(waiting)


def test_a_signal_while_models_load_ends_the_loading() -> None:
    events: list[str] = []

    async def scenario() -> int:
        stop, loading = StopSignals(), asyncio.Event()

        async def open_engine() -> FakeEngine:
            loading.set()
            try:
                await asyncio.Event().wait()
            finally:
                events.append("given up")
            return FakeEngine()

        options = ServerOptions(grpc_port=0, http_port=0)
        serving = asyncio.create_task(serve_until_stopped(open_engine, options, stop))
        await loading.wait()
        stop.request("SIGTERM")
        return await serving

    assert asyncio.run(scenario()) == 0
    assert events == ["given up"]


def test_a_signal_while_the_repository_loads_ends_before_the_next_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded: list[str] = []

    async def scenario() -> int:
        stop, closed = StopSignals(), asyncio.Event()

        class Signalled(FakeEngine):
            async def load(self, name: str, path: Path, **options: Any) -> None:
                stop.request("SIGTERM")
                try:
                    await asyncio.Event().wait()
                finally:  # as a thread that loads a model, which ends before it is cancelled
                    loaded.append(name)

            async def close(self) -> None:
                closed.set()

        async def open_engine() -> FakeEngine:
            return Signalled(served=())

        for name in ("a", "b"):
            (tmp_path / name / "1.ee").mkdir(parents=True)
        repository = ModelRepositoryOptions(model_repository=tmp_path)
        options = ServerOptions(grpc_port=0, http_port=0, repository=repository)
        status = await asyncio.wait_for(serve_until_stopped(open_engine, options, stop), 30)
        assert closed.is_set()
        assert not stop.serving
        return status

    with caplog.at_level(logging.INFO):
        assert asyncio.run(scenario()) == 0
    assert loaded == ["a:1"]
    assert "ready" not in caplog.text


def test_the_log_states_at_the_start_which_models_are_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a" / "1.ee").mkdir(parents=True)

    async def open_engine() -> FakeEngine:
        return FakeEngine(served=(), load_failure=BackendError("no room"))

    async def scenario() -> None:
        stop = StopSignals()
        repository = ModelRepositoryOptions(model_repository=tmp_path)
        options = ServerOptions(grpc_port=0, http_port=0, repository=repository)
        serving = asyncio.create_task(serve_until_stopped(open_engine, options, stop))
        await asyncio.to_thread(wait_until, lambda: "ready: gRPC" in caplog.text)
        stop.request("SIGTERM")
        await serving

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
    (line,) = [r for r in caplog.records if "ready: gRPC" in r.getMessage()]
    assert line.levelno == logging.WARNING
    assert line.getMessage().startswith("not ready: ")
    assert line.getMessage().endswith("serving no model yet; could not be loaded: a")


@pytest.mark.parametrize("option", ["grpc_port", "http_port"])
def test_a_port_in_use_is_named_with_the_remedy(option: str) -> None:
    async def open_engine() -> FakeEngine:
        raise AssertionError("models must not be loaded for nothing")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ServerOptions(**{"grpc_port": 0, "http_port": 0, option: port})
        with pytest.raises(StartError) as caught:
            asyncio.run(serve_until_stopped(open_engine, options, StopSignals()))
    flag = f"--{option.replace('_', '-')}"
    tells(str(caught.value), f"port {port}", "127.0.0.1")
    assert flag in str(caught.value)


def test_two_servers_do_not_share_a_port(launch: Callable[..., Process]) -> None:
    port = launch().address.rpartition(":")[2]
    with pytest.raises(StartError, match=f"port {port} is in use"):
        check_free("127.0.0.1", int(port), option="--grpc-port")


def test_a_foreign_address_is_named() -> None:
    with pytest.raises(StartError, match=facts("'192.0.2.1'", "not an address")):
        check_free("192.0.2.1", 0, option="--grpc-port")


def test_json_lines() -> None:
    error = KeyError("x")
    record = logging.LogRecord(
        "offramp.x", logging.ERROR, __file__, 1, "a %s\nb", ("ü",), (KeyError, error, None)
    )
    record.created = 1_700_000_000.25
    (line,) = JsonFormatter().format(record).splitlines()
    parsed = json.loads(line)
    assert parsed.pop("exception").endswith("KeyError: 'x'")
    assert parsed == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "error",
        "logger": "offramp.x",
        "message": "a ü\nb",
    }


def test_health_watchers_are_notified_before_connections_close(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def open_engine() -> FakeEngine:
        return FakeEngine()

    async def scenario() -> list[int]:
        stop = StopSignals()
        options = ServerOptions(grpc_port=0, http_port=0, drain_delay_s=0)
        serving = asyncio.create_task(serve_until_stopped(open_engine, options, stop))
        await asyncio.to_thread(wait_until, lambda: "ready: gRPC" in caplog.text)
        ready = READY.search(caplog.text)
        assert ready
        async with grpc.aio.insecure_channel(ready[1]) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=30)
            told = [(await watch.read()).status]
            stop.request("SIGTERM")
            told.append((await watch.read()).status)
        assert await serving == 0
        return told

    with caplog.at_level(logging.INFO):
        told = asyncio.run(scenario())
    assert told == [
        health_pb2.HealthCheckResponse.SERVING,
        health_pb2.HealthCheckResponse.NOT_SERVING,
    ]


@pytest.fixture
def loggers() -> Iterator[None]:
    """The root logger without handlers; afterwards all is as it was."""
    kept = [(logger, logger.level) for logger in map(logging.getLogger, ("", "offramp"))]
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    yield
    root.handlers = handlers
    for logger, level in kept:
        logger.setLevel(level)


@pytest.mark.usefixtures("loggers")
def test_logs_are_for_people_or_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    for log_format in FORMATS:
        set_up_logging(level="info", log_format=log_format)
        logging.getLogger("offramp.x").info("hello")
        logging.getLogger("offramp.x").debug("not of this level")
        logging.getLogger("another").info("nor is another package's")
        logging.getLogger().handlers[0].flush()
    human, machine = capsys.readouterr().err.splitlines()
    assert FORMATS == ("human", "json")
    assert human.endswith("INFO    offramp.x: hello")
    assert json.loads(machine)["message"] == "hello"


@pytest.mark.usefixtures("loggers")
def test_what_a_client_breaks_is_a_line_in_the_log_and_printed_nowhere_else(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC logs a broken call with a traceback and prints it once more; aiohttp logs one, too."""
    cygrpc = importlib.import_module("grpc._cython.cygrpc")
    monkeypatch.setattr(cygrpc, "traceback", traceback)
    set_up_logging(level="info", log_format="human")
    for name in ("grpc._cython.cygrpc", "aiohttp.server"):
        try:
            int("broken\nby a client")
        except ValueError:
            logging.getLogger(name).exception("failed")
            cygrpc.traceback.print_exc()
    logging.getLogger().handlers[0].flush()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all("failed: ValueError(" in line for line in lines)
    assert os.environ["GRPC_VERBOSITY"]
