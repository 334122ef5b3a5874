"""Hosts: how they are written, and which addresses both ports answer at."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from urllib.request import urlopen

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.facts import facts

from offramp.client import Client
from offramp.server.arguments.options import MIB, ServerOptions, parse_host
from offramp.server.common.errors import StartError
from offramp.server.grpc_endpoint import GrpcEndpoint
from offramp.server.ports.http_endpoint import HttpEndpoint
from offramp.server.ports.sockets import bind, join_address
from offramp.server.services.protocol_services import ProtocolServices
from offramp.testing.engine import FakeEngine

needs_ipv6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="there is no IPv6 here")


def test_ipv6_addresses_are_bracketed_before_a_port() -> None:
    assert join_address("::1", 8001) == "[::1]:8001"
    assert join_address("localhost", 8001) == "localhost:8001"


@given(st.ip_addresses(v=6))
def test_an_ipv6_address_may_have_brackets(address: ipaddress.IPv6Address) -> None:
    expected = str(address.ipv4_mapped or address)
    assert parse_host(f"[{address}]") == parse_host(f"{address}") == expected


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_stays_as_it_is(address: ipaddress.IPv4Address) -> None:
    assert parse_host(f"{address}") == parse_host(f"::ffff:{address}") == str(address)


def test_the_options_of_a_server_have_the_host_without_brackets() -> None:
    assert ServerOptions(host="[::1]").host == "::1"


def test_a_star_is_every_interface() -> None:
    assert ServerOptions(host="*").host == "0.0.0.0"


@pytest.mark.parametrize(
    "host", ["", "[", "[]", "[127.0.0.1]", "127.0.0.1:8001", "[::1]:8001", "a b", "a" * 300, ".x"]
)
def test_what_is_no_host_is_refused_with_examples(host: str) -> None:
    with pytest.raises(ValueError, match=facts("host", "name or an address")):
        ServerOptions(host=host)


@needs_ipv6
@pytest.mark.parametrize("host", ["::", "0.0.0.0"])
def test_every_interface_is_served_by_ipv4_and_ipv6_on_both_ports(host: str) -> None:
    async def scenario() -> None:
        services = ProtocolServices(FakeEngine())
        grpc = GrpcEndpoint(services, max_message_bytes=MIB)
        http = HttpEndpoint(services, max_message_bytes=MIB)
        grpc_port, http_port = await grpc.start(host, 0), http.listen(host, 0)
        await http.start()
        await grpc.serving()
        for address in ("127.0.0.1", "[::1]"):
            assert await asyncio.to_thread(ready, address, grpc_port)
            assert await asyncio.to_thread(page, address, http_port) == b"live\n"
        await http.stop()
        await grpc.stop(0.0)

    asyncio.run(scenario())


def ready(address: str, port: int) -> bool:
    with Client(f"{address}:{port}") as client:
        return client.server_ready(timeout_s=30)


def page(address: str, port: int) -> bytes:
    with urlopen(f"http://{address}:{port}/health/live", timeout=30) as response:
        return bytes(response.read())


@needs_ipv6
def test_one_address_is_not_another() -> None:
    (bound,) = bind("::1", 0, option="--http-port")
    with bound, pytest.raises(ConnectionRefusedError):
        bound.listen()
        socket.create_connection(("127.0.0.1", bound.getsockname()[1]), 5)


def test_all_addresses_of_a_name_have_one_port() -> None:
    sockets = bind("localhost", 0, option="--http-port")
    assert len({one.getsockname()[1] for one in sockets}) == 1
    for one in sockets:
        one.close()


def test_addresses_of_a_name_that_are_not_of_this_machine_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = (socket.SOCK_STREAM, 6, "")
    elsewhere = (socket.AF_INET, *stream, ("192.0.2.1", 0))  # for documentation (RFC 5737)
    here = (socket.AF_INET, *stream, ("127.0.0.1", 0))
    found = [elsewhere, here]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    (only,) = bind("name", 0, option="--http-port")
    with only:
        assert only.getsockname()[0] == "127.0.0.1"
    found.remove(here)
    with pytest.raises(StartError, match="'name' is not an address of this machine"):
        bind("name", 0, option="--http-port")
