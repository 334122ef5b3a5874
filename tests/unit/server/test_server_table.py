"""The table [server] of the configuration file: all that the command line says of a server."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from tests.facts import Told, facts

from offramp.server.arguments import Arguments, make_parser, parse_arguments
from offramp.server.arguments.command_line import read_arguments
from offramp.server.arguments.configuration import SERVER_PARTS, ConfigurationError
from offramp.server.arguments.logging_setup import LoggingOptions
from offramp.server.arguments.options import (
    KeepaliveOptions,
    ModelRepositoryOptions,
    RepositoryControl,
    SecurityOptions,
    ServerOptions,
    VersionChoice,
)

SETTINGS: dict[str, Any] = {
    "host": "::1",
    "grpc_port": 9001,
    "http_port": 9000,
    "frontends": 2,
    "max_message_mib": 32,
    "max_connections": 20,
    "max_concurrent_requests": 30,
    "max_queue_mib": 40,
    "trace_endpoint": "http://localhost:4317",
    "trace_rate": 5,
    "access_log": True,
    "drain_delay_s": 1,
    "shutdown_timeout_s": 2.5,
    "model_repository": "models",
    "model_control": "explicit",
    "load_model": ["a", "b"],
    "model_versions": "latest:2",
    "grpc_keepalive_time_ms": 1000,
    "grpc_keepalive_timeout_ms": 2000,
    "grpc_keepalive_permit_without_calls": False,
    "grpc_http2_max_pings_without_data": 3,
    "grpc_http2_min_recv_ping_interval_without_data_ms": 4000,
    "grpc_http2_max_ping_strikes": 5,
    "tls_certificate": "server.pem",
    "tls_key": "/keys/server.key",
    "tls_client_ca": "ca.pem",
    "token_file": "tokens",
    "admin_token_file": "admins",
    "log_level": "debug",
    "log_format": "json",
}


def write(folder: Path, settings: dict[str, Any]) -> Path:
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    file = folder / "serve.toml"
    file.write_text("\n".join(["[server]", *lines, "[models.m]", 'path = "m.ee"', ""]))
    return file


def arguments(folder: Path, settings: dict[str, Any], *line: str) -> Arguments:
    return parse_arguments([f"--config={write(folder, settings)}", *line])


def test_the_file_sets_what_the_command_line_can(tmp_path: Path) -> None:
    read = arguments(tmp_path, SETTINGS)
    assert read.server == ServerOptions(
        host="::1",
        grpc_port=9001,
        http_port=9000,
        frontends=2,
        max_message_mib=32,
        max_connections=20,
        max_concurrent_requests=30,
        max_queue_mib=40,
        trace_endpoint="http://localhost:4317",
        trace_rate=5,
        access_log=True,
        drain_delay_s=1.0,
        shutdown_timeout_s=2.5,
        repository=ModelRepositoryOptions(
            model_repository=tmp_path / "models",
            model_control=RepositoryControl.EXPLICIT,
            load_model=("a", "b"),
            model_versions=VersionChoice(latest=2),
        ),
        keepalive=KeepaliveOptions(
            grpc_keepalive_time_ms=1000,
            grpc_keepalive_timeout_ms=2000,
            grpc_keepalive_permit_without_calls=False,
            grpc_http2_max_pings_without_data=3,
            grpc_http2_min_recv_ping_interval_without_data_ms=4000,
            grpc_http2_max_ping_strikes=5,
        ),
        security=SecurityOptions(
            tls_certificate=tmp_path / "server.pem",
            tls_key=Path("/keys/server.key"),
            tls_client_ca=tmp_path / "ca.pem",
            token_file=tmp_path / "tokens",
            admin_token_file=tmp_path / "admins",
        ),
    )
    assert (read.log_level, read.log_format) == ("debug", "json")


def test_no_option_is_left_out() -> None:
    kinds = (ServerOptions, LoggingOptions, *SERVER_PARTS.values())
    names = {each.name for kind in kinds for each in fields(kind)} - SERVER_PARTS.keys()
    assert {*SETTINGS, "repository_poll_s"} == names
    assert names <= {action.dest for action in make_parser().options()}


@pytest.mark.parametrize("control", ["none", "explicit", "poll"])
def test_a_time_between_checks_needs_checks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], control: str
) -> None:
    settings = {"model_repository": "models", "model_control": control, "repository_poll_s": 3.0}
    if control == "poll":
        assert arguments(tmp_path, settings).server.repository.repository_poll_s == 3.0
        return
    with pytest.raises(SystemExit) as ended:
        arguments(tmp_path, settings)
    assert ended.value.code == 2
    assert f"--model-control is {control} here" in " ".join(capsys.readouterr().err.split())


def test_the_command_line_overrules_the_file(tmp_path: Path) -> None:
    line = ("--grpc-port=7", "--token-file=here", "--grpc-http2-max-ping-strikes=8",
            "--log-level=error", "--model-versions=all", "--load-model=c")  # fmt: skip
    read = arguments(tmp_path, SETTINGS, *line)
    assert read.server.grpc_port == 7
    assert read.server.http_port == 9000
    assert read.server.security.token_file == Path("here")
    assert read.server.security.admin_token_file == tmp_path / "admins"
    assert read.server.keepalive.grpc_http2_max_ping_strikes == 8
    assert read.server.repository.load_model == ("c",)
    assert (read.log_level, read.log_format) == ("error", "json")


def test_without_the_table_the_defaults_hold(tmp_path: Path) -> None:
    read = arguments(tmp_path, {})
    assert read.server == ServerOptions()
    assert (read.log_level, read.log_format) == ("info", "human")


def test_a_repository_in_the_file_needs_no_model_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('[server]\nmodel_repository = "models"\n')
    read = parse_arguments([f"--config={file}", "--learn"])
    assert read.server.repository.model_repository == tmp_path / "models"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"grpc_port": "9001"}, ('[server] grpc_port is "9001" (a string)', "whole")),
        ({"access_log": 1}, ("[server] access_log is 1 (an integer)", "true or false")),
        ({"log_level": "loud"}, ("[server] log_level", "'loud'", "debug, info, warning")),
        ({"model_control": "pol"}, ("[server] model_control", "'pol'", "'poll'")),
        ({"model_versions": "x"}, ("[server] model_versions", "'x'", "latest")),
        ({"load_model": ["a", 1]}, ("[server] load_model", "1 (an integer)")),
        ({"token_fil": "x"}, ("[server]", "'token_fil'", "'token_file'")),
        ({"keepalive": 1}, ("[server]", "'keepalive'")),
        ({"grpc_port": 70000}, ("[server]", "grpc_port 70000", "0 to 65535")),
        ({"tls_key": "x"}, ("[server]", "--tls-certificate and --tls-key")),
    ],
)
def test_wrong_settings_are_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], told: Told
) -> None:
    file = write(tmp_path, settings)
    with pytest.raises(ConfigurationError, match=facts(*told)) as refused:
        read_arguments([f"--config={file}"])
    assert str(refused.value).startswith(str(file))


def test_what_only_the_command_line_says_is_no_fault_of_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, {"grpc_port": 5})
    line = [f"--config={file}", "--grpc-port=6", "--http-port=6"]
    with pytest.raises(ValueError, match="are both 6") as refused:
        read_arguments(line)
    assert not isinstance(refused.value, ConfigurationError)
