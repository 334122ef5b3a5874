"""Generating models as clients see them: gRPC, tritonclient, our clients, JSON and events."""

from __future__ import annotations

import asyncio
import json
import queue
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import aclosing, closing
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from offramp.client import (
    AsyncClient,
    Client,
    DeadlineError,
    GeneratedToken,
    InvalidInputError,
    RestClient,
    UnknownModelError,
)
from offramp.engine.common.errors import BadInputError
from offramp.generation.serving.text_engine import TextEngine
from offramp.generation.serving.text_status import text_status
from offramp.server.arguments.options import ServerOptions
from offramp.testing.server import FakeServer
from tests.e2e.conftest import wait_until
from tests.facts import tells
from tests.generation.scripted_backend import ScriptedTextBackend
from tests.generation.test_text_engine import expected, of_letters
from tests.generation.texts import served_text

PROMPT = "cad"
TOKENS, EXITS = expected((2, 0, 3))
TEXT = of_letters(TOKENS)


def serving(*, frontends: int = 0, **more: Any) -> Iterator[FakeServer[TextEngine]]:
    backend = ScriptedTextBackend(length=more.pop("length", 32))
    engine = TextEngine()
    engine.put("text", served_text(backend, **more))
    server = FakeServer(engine, ServerOptions(frontends=frontends))

    async def opened() -> None:
        for served in engine._served.values():
            await served.open()

    with server:
        server.run(opened())
        yield server
        server.run(engine.close())


@pytest.fixture
def server() -> Iterator[FakeServer[TextEngine]]:
    yield from serving()


@pytest.fixture(params=[0, 1], ids=["one process", "front end"])
def endless(request: pytest.FixtureRequest) -> Iterator[FakeServer[TextEngine]]:
    """Answers that do not end."""
    endless: Any = {"length": 1_000_000, "longest_answer": 900_000, "stop_tokens": ()}
    yield from serving(frontends=request.param, **endless)


def slots_in_use(server: FakeServer[TextEngine]) -> int:
    async def ask() -> int:
        status = text_status(server.engine.statistics()["text"])
        assert status is not None
        return status.statistics.slots_in_use

    return server.run(ask())


def post(server: FakeServer[Any], path: str, **body: Any) -> Any:
    request = urllib.request.Request(f"{server.url}/v2/models/{path}", json.dumps(body).encode())
    return urllib.request.urlopen(request, timeout=30)


def test_tokens_come_one_by_one(server: FakeServer[TextEngine]) -> None:
    assert len(TOKENS) > 3 and TEXT
    with Client(server.address) as client:
        tokens = list(client.generate("text", PROMPT))
        by_ids = list(client.generate("text", [2, 0, 3], priority=1))
        few = list(client.generate("text", np.array([2, 0, 3], np.int32), max_tokens=2))
    assert tokens == by_ids
    assert all(isinstance(token, GeneratedToken) for token in tokens)
    assert tuple(token.token for token in tokens) == TOKENS
    assert "".join(token.text for token in tokens) == TEXT
    assert [token.exit for token in tokens] == EXITS
    assert [token.confidence == 1.0 for token in tokens if token.exit == -1].count(False) == 0
    assert [token.end for token in tokens[:-1]] == [None] * (len(tokens) - 1)
    assert tokens[-1].end == "stop" if TOKENS[-1] == 3 else "most_tokens"
    assert tuple(token.token for token in few) == TOKENS[:2]
    assert few[-1].end == "most_tokens"


def test_tokens_come_one_by_one_in_asyncio(server: FakeServer[TextEngine]) -> None:
    async def ask() -> str:
        async with AsyncClient(server.address) as client:
            return "".join([token.text async for token in client.generate("text", PROMPT)])

    assert asyncio.run(ask()) == TEXT


def test_whole_answers(server: FakeServer[TextEngine]) -> None:
    inputs = {"text_input": np.array([PROMPT.encode()], np.object_)}
    with Client(server.address) as client, RestClient(server.url) as rest:
        for asked in (client, rest):
            result = asked.infer("text", inputs)
            assert tuple(result.outputs["output_ids"].tolist()) == TOKENS
            assert result.outputs["text_output"].tolist() == [TEXT.encode()]
            assert result.exits.tolist() == EXITS
        metadata = client.metadata("text")
        assert client.optional_inputs("text") == {"input_ids", "text_input", "max_tokens"}
    assert metadata.inputs["text_input"].dtype == np.object_
    assert metadata.inputs["input_ids"].shape == (-1,)
    assert metadata.outputs["text_output"].shape == (1,)


@pytest.mark.parametrize("wait", [False, True])
def test_leaving_frees_the_slot(endless: FakeServer[TextEngine], wait: bool) -> None:
    async def leave() -> None:
        async with (
            AsyncClient(endless.address) as client,
            aclosing(client.generate("text", PROMPT)) as tokens,
        ):
            await anext(tokens)

    if wait:
        asyncio.run(leave())
    else:
        with Client(endless.address) as client, closing(client.generate("text", PROMPT)) as tokens:
            next(tokens)
            assert slots_in_use(endless) == 1
    wait_until(lambda: slots_in_use(endless) == 0)


def test_a_deadline_ends_a_stream_after_some_tokens(endless: FakeServer[TextEngine]) -> None:
    got = []
    with Client(endless.address) as client, pytest.raises(DeadlineError, match="passed after"):
        for token in client.generate("text", PROMPT, timeout_s=0.5):
            got.append(token)  # noqa: PERF402 - the error comes amid them
    assert got
    wait_until(lambda: slots_in_use(endless) == 0)


def test_wrong_prompts_are_refused(server: FakeServer[TextEngine]) -> None:
    with Client(server.address) as client:
        with pytest.raises(InvalidInputError, match="expected a string or token ids"):
            list(client.generate("text", [0.5]))
        for most in (0, 2**31):
            with pytest.raises(InvalidInputError, match=f"max_tokens is {most}, expected 1 to"):
                list(client.generate("text", PROMPT, max_tokens=most))
        with pytest.raises(InvalidInputError, match="UTF-8"):
            list(client.generate("text", "half \ud800"))
        with pytest.raises(InvalidInputError, match="send at most 31"):
            list(client.generate("text", "a" * 40))
        with pytest.raises(UnknownModelError):
            list(client.generate("other", PROMPT))


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        ("text_input", np.zeros(1, np.int64), ("int64 [1]", "bytes [1]", "UTF-8")),
        ("input_ids", np.array([b"a"], np.object_), ("bytes [1]", "int64 [prompt]", "numbers")),
        ("input_ids", np.zeros(3, np.int32), ("int32 [3]", ".astype('int64')")),
        ("input_ids", np.zeros((1, 3), np.int64), ("int64 [1, 3]", "int64 [prompt]")),
    ],
)
def test_inputs_of_another_kind_are_refused(
    server: FakeServer[TextEngine], name: str, values: Any, told: tuple[str, ...]
) -> None:
    with pytest.raises(BadInputError) as refused:
        server.run(server.engine.infer("text", {name: values}))
    tells(str(refused.value), f"input '{name}' is", *told)


def triton_stream(address: str, count: int, **inputs: Any) -> list[Any]:
    """All responses to requests on one stream of Triton's client, unmodified."""
    arrived: queue.Queue[tuple[Any, Any]] = queue.Queue()
    tensors = []
    for name, values in inputs.items():
        kinds = {"O": "BYTES", "i": "INT64" if values.itemsize == 8 else "INT32"}
        tensor = triton.InferInput(name, list(values.shape), kinds[values.dtype.kind])
        tensor.set_data_from_numpy(values)
        tensors.append(tensor)
    found, ends = [], 0
    with triton.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: arrived.put((result, error)))
        for number in range(count):
            client.async_stream_infer("text", tensors, request_id=str(number))
        while ends < count:
            result, error = arrived.get(timeout=30)
            assert error is None, error
            found.append(result)
            ends += result.get_response().parameters["triton_final_response"].bool_param
        client.stop_stream()
    return found


def test_tritons_client_streams(server: FakeServer[TextEngine]) -> None:
    results = triton_stream(
        server.address, 2, text_input=np.array([PROMPT.encode()], np.object_),
        max_tokens=np.array([5], np.int32),
    )  # fmt: skip
    for number in ("0", "1"):
        mine = [r for r in results if r.get_response().id == number]
        assert [int(r.as_numpy("output_ids")[0]) for r in mine] == list(TOKENS[:5])
        pieces = [r.as_numpy("text_output")[0].decode() for r in mine]
        assert "".join(pieces) == of_letters(TOKENS[:5])
        exits = [r.get_response().parameters["offramp_exits"].string_param for r in mine]
        assert exits == [str(each) for each in EXITS[:5]]
        finals = [r.get_response().parameters["triton_final_response"].bool_param for r in mine]
        assert finals == [False] * (len(mine) - 1) + [True]
    with triton.InferenceServerClient(server.address) as client:
        config = client.get_model_config("text").config
    assert config.model_transaction_policy.decoupled
    assert [(i.name, list(i.dims), i.optional) for i in config.input] == [
        ("input_ids", [-1], True), ("text_input", [1], True), ("max_tokens", [1], True),
    ]  # fmt: skip


def test_generate_answers_in_json(server: FakeServer[TextEngine]) -> None:
    with post(server, "text/generate", text_input=PROMPT, max_tokens=4, id="7") as response:
        told = json.load(response)
    assert told["text_output"] == of_letters(TOKENS[:4])
    assert told["output_ids"] == list(TOKENS[:4])
    assert (told["model_name"], told["id"], told["offramp_end"]) == ("text", "7", "most_tokens")
    with post(server, "text/versions/1/generate", input_ids=[2, 0, 3], priority=1) as response:
        assert json.load(response)["text_output"] == TEXT


def events_of(response: Any) -> list[Any]:
    parts = response.read().decode().split("\n\n")
    assert parts.pop() == ""
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def test_generate_streams_events(server: FakeServer[TextEngine]) -> None:
    with post(server, "text/generate_stream", text_input=PROMPT) as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        events = events_of(response)
    assert tuple(event["output_ids"] for event in events) == TOKENS
    assert "".join(event["text_output"] for event in events) == TEXT
    assert [event["triton_final_response"] for event in events] == [False] * (len(TOKENS) - 1) + [
        True
    ]


def test_generate_refuses_and_fails(endless: FakeServer[TextEngine]) -> None:
    refused: list[tuple[Callable[[], Any], int, str]] = [
        (lambda: post(endless, "text/generate_stream", max_tokens=4), 400, "the prompt is missing"),
        (lambda: post(endless, "text/generate", text_input=5), 400, "expected a flat list of str"),
        (lambda: post(endless, "text/generate", input_ids="a"), 400, "elements such as 'a'"),
        (lambda: post(endless, "text/generate", text_input=PROMPT, more={}), 400, "'more' is an o"),
        (lambda: post(endless, "other/generate", text_input=PROMPT), 404, "no model 'other'"),
    ]
    for ask, status, message in refused:
        with pytest.raises(urllib.error.HTTPError) as error:
            ask()
        assert error.value.code == status
        assert message in json.load(error.value)["error"]
    with post(endless, "text/generate_stream", text_input=PROMPT, timeout=500_000) as response:
        *events, last = events_of(response)
    assert events and "the deadline passed after" in last["error"]
    response = post(endless, "text/generate_stream", text_input=PROMPT)
    assert response.readline().startswith(b"data: ")
    assert slots_in_use(endless) == 1
    response.close()
    wait_until(lambda: slots_in_use(endless) == 0)
