"""TLS of both ports: who is trusted, and certificates that are exchanged while serving."""

from __future__ import annotations

import json
import logging
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.certificates import Authority
from tests.facts import Told, facts

from offramp.client import Client, ConnectionFailedError, Tls
from offramp.server.arguments.options import SecurityOptions, ServerOptions
from offramp.server.common.errors import StartError
from offramp.server.security.tls import open_tls
from offramp.testing.engine import FakeEngine
from offramp.testing.server import FakeServer

X = np.zeros((1, 4), np.float32)
LIMIT_S = 10.0


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@pytest.fixture
def other(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "others")


@contextmanager
def serving(security: SecurityOptions) -> Iterator[FakeServer[FakeEngine]]:
    with FakeServer(FakeEngine(), ServerOptions(security=security)) as server:
        yield server


def by_grpc(server: FakeServer[FakeEngine], tls: Tls) -> int:
    """Return how many rows a request is answered with."""
    with Client(server.address, tls=tls, timeout_s=LIMIT_S) as client:
        return len(client.infer("fake", {"x": X}).exits)


def by_http(server: FakeServer[FakeEngine], context: ssl.SSLContext) -> int:
    """Return the status of a probe."""
    with urllib.request.urlopen(f"{server.url}/health/live", timeout=30, context=context) as found:
        return int(found.status)


def shown_by(server: FakeServer[FakeEngine], port: str) -> str:
    """Return the certificate that a new connection sees."""
    address = server.address if port == "grpc" else server.url.rpartition("/")[2]
    return ssl.get_server_certificate(("127.0.0.1", int(address.rpartition(":")[2])))


def refused_by_http(server: FakeServer[FakeEngine], context: ssl.SSLContext) -> None:
    with pytest.raises(OSError, match=r"SSL|certificate|reset|closed|EOF|alert"):
        by_http(server, context)


def test_both_ports_answer_whoever_trusts_the_certificate(authority: Authority) -> None:
    with serving(authority.options()) as server:
        assert by_grpc(server, authority.client()) == 1
        assert by_http(server, authority.context()) == 200


def test_the_loop_of_eeserve_exchanges_certificates_too(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    uvloop = pytest.importorskip("uvloop", reason="eeserve runs on it where there is one")
    monkeypatch.setattr("asyncio.new_event_loop", uvloop.new_event_loop)
    with serving(authority.options()) as server:
        assert type(server.loop).__module__ == "uvloop"
        first = shown_by(server, "http"), shown_by(server, "grpc")
        authority.issue()
        assert by_grpc(server, authority.client()) == 1
        assert by_http(server, authority.context()) == 200
        assert shown_by(server, "http") == shown_by(server, "grpc") not in first


def test_a_stream_is_encrypted_too(authority: Authority) -> None:
    with (
        serving(authority.options()) as server,
        Client(server.address, tls=authority.client(), timeout_s=LIMIT_S) as client,
    ):
        assert len(list(client.infer_stream("fake", {"x": X}))) >= 1


def test_the_protocol_over_http_is_encrypted(authority: Authority) -> None:
    with serving(authority.options()) as server:
        context = authority.context()
        with urllib.request.urlopen(f"{server.url}/v2", timeout=30, context=context) as answer:
            assert json.load(answer)["name"] == "offramp"


def test_clients_do_not_trust_another_authority(authority: Authority, other: Authority) -> None:
    with serving(authority.options()) as server:
        with pytest.raises(ConnectionFailedError):
            by_grpc(server, other.client())
        refused_by_http(server, other.context())


def test_clients_do_not_trust_an_expired_certificate(authority: Authority) -> None:
    with serving(authority.options(expired=True)) as server:
        with pytest.raises(ConnectionFailedError):
            by_grpc(server, authority.client())
        with pytest.raises(urllib.error.URLError, match="certificate has expired"):
            by_http(server, authority.context())


def test_nothing_is_answered_in_the_clear(authority: Authority) -> None:
    with serving(authority.options()) as server:
        with (
            Client(server.address, timeout_s=LIMIT_S) as client,
            pytest.raises(ConnectionFailedError),
        ):
            client.server_ready()
        host, _, port = server.url.rpartition("/")[2].rpartition(":")
        with socket.create_connection((host, int(port)), 30) as peer:
            peer.sendall(b"GET /health/live HTTP/1.1\r\nHost: here\r\n\r\n")
            assert b"HTTP" not in received(peer)


def received(peer: socket.socket) -> bytes:
    """Return what comes until the connection ends."""
    found = b""
    try:
        while more := peer.recv(4096):
            found += more
    except ConnectionResetError:
        pass
    return found


def test_clients_show_certificates_where_an_authority_is_named(
    authority: Authority, other: Authority
) -> None:
    right, wrong = authority.issue("client"), other.issue("client")
    with serving(authority.options(clients=authority.ca)) as server:
        assert by_grpc(server, authority.client(right)) == 1
        assert by_http(server, authority.context(right)) == 200
        for shown in (None, wrong, authority.issue("late", expired=True)):
            with pytest.raises(ConnectionFailedError):
                by_grpc(server, authority.client(shown))
            refused_by_http(server, authority.context(shown))


@pytest.mark.parametrize("port", ["grpc", "http"])
def test_new_connections_see_a_new_certificate(authority: Authority, port: str) -> None:
    options = authority.options()
    with serving(options) as server:
        first = shown_by(server, port)
        assert shown_by(server, port) == first
        authority.issue()
        second = shown_by(server, port)
        assert second != first
        assert second.strip() in certificates_in(options.tls_certificate)
        assert by_grpc(server, authority.client()) == 1


def certificates_in(path: Path | None) -> str:
    assert path is not None
    return path.read_text()


def test_connections_that_are_open_go_on_with_the_old_certificate(authority: Authority) -> None:
    with (
        serving(authority.options()) as server,
        Client(server.address, tls=authority.client(), timeout_s=LIMIT_S) as client,
    ):
        assert client.server_ready()
        authority.issue()
        assert client.server_ready()


def test_a_new_authority_of_clients_is_used_at_once(authority: Authority, other: Authority) -> None:
    ours, theirs = authority.issue("client"), other.issue("client")
    clients = authority.ca.with_name("clients.pem")
    clients.write_bytes(authority.pem)
    with serving(authority.options(clients=clients)) as server:
        assert by_grpc(server, authority.client(ours)) == 1
        assert by_http(server, authority.context(ours)) == 200
        clients.write_bytes(other.pem)
        assert by_grpc(server, authority.client(theirs)) == 1
        assert by_http(server, authority.context(theirs)) == 200
        with pytest.raises(ConnectionFailedError):
            by_grpc(server, authority.client(ours))
        refused_by_http(server, authority.context(ours))


@pytest.mark.parametrize("port", ["grpc", "http"])
@pytest.mark.parametrize("broken", ["", "no certificate", "another key"])
def test_a_broken_exchange_keeps_the_old_certificate_and_is_logged_once(
    authority: Authority, port: str, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = authority.options()
    with serving(options) as server:
        first = shown_by(server, port)
        assert options.tls_key is not None
        if broken == "another key":
            options.tls_key.write_bytes(authority.issue("other")[1].read_bytes())
        else:
            options.tls_key.write_text(broken)
        with caplog.at_level(logging.WARNING, "offramp.server"):
            for _ in range(3):
                assert shown_by(server, port) == first
        (line,) = [r.getMessage() for r in caplog.records if "TLS" in r.getMessage()]
        assert str(options.tls_key) in line
        assert "the old content is kept" in line
        authority.issue()
        assert shown_by(server, port) != first


def missing(authority: Authority) -> SecurityOptions:
    certificate, key = authority.issue()
    key.unlink()
    return SecurityOptions(tls_certificate=certificate, tls_key=key)


def swapped(authority: Authority) -> SecurityOptions:
    return SecurityOptions(
        tls_certificate=authority.issue("one")[0], tls_key=authority.issue("two")[1]
    )


def no_authority(authority: Authority) -> SecurityOptions:
    certificate, key = authority.issue()
    return SecurityOptions(tls_certificate=certificate, tls_key=key, tls_client_ca=key)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (missing, ("server.key", "No such file or directory", "PEM")),
        (swapped, ("one.pem", "two.key", "PEM")),
        (no_authority, ("authorities", "server.key", "PEM")),
    ],
)
def test_wrong_files_end_the_start(
    make: Callable[[Authority], SecurityOptions], told: Told, authority: Authority
) -> None:
    with pytest.raises(StartError, match=facts(*told)):
        open_tls(make(authority))


def test_halves_of_tls_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--tls-certificate and --tls-key belong together"):
        SecurityOptions(tls_certificate=tmp_path)
    with pytest.raises(ValueError, match="add --tls-certificate and --tls-key"):
        SecurityOptions(tls_client_ca=tmp_path)


def test_without_certificates_there_is_no_tls() -> None:
    assert open_tls(SecurityOptions()) is None
