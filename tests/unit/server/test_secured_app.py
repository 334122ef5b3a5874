"""A whole server with certificates and tokens: its start, its warnings, and how it leaves."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import numpy as np
import pytest
from tests.certificates import Authority

from offramp.client import AsyncClient
from offramp.engine.models.options import EngineOptions
from offramp.server.app import (
    ConfigurationReload,
    Listening,
    ModelsToServe,
    StopSignals,
    serve_until_stopped,
)
from offramp.server.arguments.options import SecurityOptions, ServerOptions
from offramp.server.common.errors import StartError
from offramp.server.repository.repository import ModelRepository
from offramp.testing.engine import FakeEngine

X = np.zeros((1, 4), np.float32)
TOKEN = "ann-0123456789abcdef"


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"ann:{TOKEN}\n")
    path.chmod(0o600)
    return path


async def open_engine() -> FakeEngine:
    return FakeEngine()


async def start_and_stop(options: ServerOptions) -> int:
    stop = StopSignals()
    return await serve_until_stopped(
        open_engine, options, stop, on_ready=lambda _: stop.request("SIGINT")
    )


def options_of(host: str, security: SecurityOptions) -> ServerOptions:
    return ServerOptions(host=host, grpc_port=0, http_port=0, security=security)


@pytest.mark.parametrize(
    ("host", "tls", "tokens_too", "told"),
    [
        ("127.0.0.1", False, False, None),
        ("localhost", False, False, None),
        ("0.0.0.0", False, False, "TLS (--tls-certificate) and without tokens (--token-file)"),
        ("0.0.0.0", True, False, "tokens (--token-file)"),
        ("0.0.0.0", False, True, "TLS (--tls-certificate)"),
        ("0.0.0.0", True, True, None),
    ],
)
def test_a_server_that_others_reach_says_what_it_is_without(
    host: str,
    tls: bool,
    tokens_too: bool,
    told: str | None,
    tmp_path: Path,
    tokens: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    security = Authority(tmp_path / "ca").options() if tls else SecurityOptions()
    security = SecurityOptions(
        tls_certificate=security.tls_certificate,
        tls_key=security.tls_key,
        token_file=tokens if tokens_too else None,
    )
    with caplog.at_level(logging.INFO, "offramp.server.app"):
        assert asyncio.run(start_and_stop(options_of(host, security))) == 0
    lines = [each.getMessage() for each in caplog.records]
    expected = (
        [] if told is None else [f"others on the network can reach the server without {told}"]
    )
    assert [line for line in lines if "others on the network" in line] == expected
    assert any(f"status page on {'https' if tls else 'http'}://" in line for line in lines)


def test_wrong_files_end_the_start_before_models_are_loaded(tokens: Path, tmp_path: Path) -> None:
    async def unwanted() -> FakeEngine:
        raise AssertionError("models must not be loaded for nothing")

    tokens.chmod(0o644)
    wrong = {
        "run: chmod 600": SecurityOptions(token_file=tokens),
        "cannot be read": SecurityOptions(tls_certificate=tmp_path / "no", tls_key=tmp_path / "no"),
    }
    for told, security in wrong.items():
        options = options_of("127.0.0.1", security)
        with pytest.raises(StartError, match=told):
            asyncio.run(serve_until_stopped(unwanted, options, StopSignals()))


def test_encrypted_connections_are_answered_while_the_server_leaves(
    tmp_path: Path, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No frame of ours is sent between encrypted ones, and closed connections are not awaited."""
    monkeypatch.setattr("offramp.server.ports.grpc_listener.QUIET_S", 3600.0)
    authority = Authority(tmp_path / "ca")
    certificate, key = authority.issue()
    options = ServerOptions(
        grpc_port=0,
        http_port=0,
        drain_delay_s=0.0,
        shutdown_timeout_s=3600.0,
        security=SecurityOptions(tls_certificate=certificate, tls_key=key, token_file=tokens),
    )

    async def scenario() -> int:
        stop = StopSignals()
        ready: asyncio.Future[Listening] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(
            serve_until_stopped(open_engine, options, stop, ready.set_result)
        )
        address = (await ready).grpc
        async with AsyncClient(address, tls=authority.client(), token=TOKEN) as client:
            assert await client.server_ready()
            stop.request("SIGTERM")
            while await client.server_ready():
                pass
            for _ in range(20):
                assert len((await client.infer("fake", {"x": X})).exits) == 1
        return await serving

    assert asyncio.run(asyncio.wait_for(scenario(), 60)) == 0


def test_a_changed_setting_of_the_server_waits_for_the_next_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = (
        ModelsToServe(
            named={"fake": Path()}, engine=EngineOptions(), fixed=ServerOptions(host=host)
        )
        for host in ("127.0.0.1", "::1")
    )
    answers = [first, second]

    async def scenario() -> None:
        repository = ModelRepository(FakeEngine(), named=first.named)
        await repository.start()
        reload = ConfigurationReload(repository, first, lambda: answers.pop(0))
        for _ in range(2):
            reload.request()
            assert reload._reloading is not None
            await reload._reloading
        await repository.stop()

    with caplog.at_level(logging.INFO, "offramp.server.app"):
        asyncio.run(scenario())
    warned = [each.levelname for each in caplog.records]
    assert warned == ["INFO", "WARNING", "INFO"]
    assert "take effect when the server is started again" in caplog.text
