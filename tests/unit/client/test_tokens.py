"""Tokens of the clients: where they are sent, and where not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from tests.facts import facts

from offramp.client import AsyncClient, AuthenticationError, Client, Tls
from offramp.client.connection import ConnectionSettings
from offramp.server.arguments.options import SecurityOptions, ServerOptions
from offramp.testing.engine import FakeEngine
from offramp.testing.server import FakeServer

X = np.zeros((1, 4), np.float32)
TOKEN = "ann-0123456789abcdef"


@pytest.mark.parametrize("address", ["127.0.0.1:8001", "[::1]:8001", "localhost:8001"])
def test_a_token_may_be_sent_in_the_clear_within_this_machine(address: str) -> None:
    settings = ConnectionSettings(address=address, token=TOKEN)
    assert settings.metadata() == (("authorization", f"Bearer {TOKEN}"),)
    assert TOKEN not in repr(settings)


@pytest.mark.parametrize("address", ["10.0.0.1:8001", "localhost.example:8001", "[fe80::1]:8001"])
def test_elsewhere_it_needs_encryption_or_consent(address: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match=facts("in the clear", "tls=Tls(...)", "insecure")):
            kind(address, token=TOKEN)
    with Client(address, token=TOKEN, tls=Tls()), Client(address, token=TOKEN, insecure_token=True):
        pass


@pytest.mark.parametrize("token", ["", " ", "a\nb", "ä"])
def test_what_is_no_token_is_refused_and_not_repeated(token: str) -> None:
    with pytest.raises(ValueError, match=facts("token", "may not have")):
        Client("127.0.0.1:8001", token=token)


def test_without_a_token_none_is_sent() -> None:
    settings = ConnectionSettings(address="10.0.0.1:8001")
    assert settings.metadata() == ()
    assert settings.limit(3.0) == {"timeout": 3.0, "metadata": ()}


def test_every_call_of_both_clients_has_it(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"ann:{TOKEN}\n")
    tokens.chmod(0o600)
    security = SecurityOptions(token_file=tokens)

    async def ask(address: str) -> None:
        async with AsyncClient(address, token=TOKEN) as client:
            assert len((await client.infer("fake", {"x": X}, timeout_s=30)).exits) == 1
            assert [len(one.exits) async for one in client.infer_stream("fake", {"x": X})] == [1]
            assert (await client.metadata("fake")).inputs.keys() == {"x"}
            assert await client.optional_inputs("fake") == frozenset()
            assert await client.model_ready("fake")
        async with AsyncClient(address) as client:
            assert await client.server_ready()
            with pytest.raises(AuthenticationError, match=r"pass the token as Client\(\.\.\., tok"):
                await client.infer("fake", {"x": X})

    with FakeServer(FakeEngine(), ServerOptions(security=security)) as server:
        asyncio.run(ask(server.address))
        with Client(server.address, token=f"{TOKEN}\n") as client:
            assert len(client.infer("fake", {"x": X}, timeout_s=30).exits) == 1
            assert [len(one.exits) for one in client.infer_stream("fake", {"x": X})] == [1]
            assert client.metadata("fake").inputs.keys() == {"x"}
            assert client.optional_inputs("fake") == frozenset()
            assert client.model_ready("fake")
