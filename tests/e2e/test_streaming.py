"""Early answers and final ones, from real servers."""

from __future__ import annotations

import asyncio
import queue
import signal
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.bundles import EXAMPLE
from tests.e2e.conftest import launcher, wait_until

from offramp.client import AnswerKind, AsyncClient, Client, StreamedResult

SAMPLES, ROWS = 1200, 8
"""Sent in requests of so many rows."""
OBSERVED = ("--controller=static", "--ramp-budget=100", "--no-state")
"""Flags that keep all exits in use as compiled, so that all answers are comparable."""

Pair = tuple[StreamedResult, StreamedResult | None]


@pytest.fixture(scope="module")
def images() -> np.ndarray[Any, Any]:
    with np.load(EXAMPLE / "test.npz") as data:
        return np.asarray(data["image"][:SAMPLES])


@pytest.fixture(scope="module")
def launch_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with ExitStack() as stack:
        yield launcher(stack, tmp_path_factory.mktemp("streaming"))


@pytest.fixture(scope="module")
def unmodified(launch_here: Any, bundle_path: Path, images: Any) -> np.ndarray[Any, Any]:
    """The unmodified model's answers."""
    server = launch_here(bundle_path, "--mode=off")
    with Client(server.address) as client:
        parts = [
            next(iter(client.infer(server.model, inputs).outputs.values()))
            for inputs in requests(server, images)
        ]
    return np.concatenate(parts)


def requests(server: Any, images: Any) -> list[dict[str, Any]]:
    (name,) = server.metadata().inputs
    return [{name: images[first : first + ROWS]} for first in range(0, len(images), ROWS)]


def stream_all(server: Any, images: Any) -> list[Pair]:
    """Each request on a stream of its own, a few at a time: its first result and its second."""

    async def ask(client: AsyncClient, inputs: Any, gate: asyncio.Semaphore) -> Pair:
        async with gate:
            results = [result async for result in client.infer_stream(server.model, inputs)]
        assert 1 <= len(results) <= 2
        return results[0], results[1] if len(results) == 2 else None

    async def ask_all() -> list[Pair]:
        gate = asyncio.Semaphore(16)
        inputs = requests(server, images)
        async with AsyncClient(server.address) as client:
            return await asyncio.gather(*(ask(client, part, gate) for part in inputs))

    return asyncio.run(ask_all())


def logits_of(results: list[StreamedResult]) -> np.ndarray[Any, Any]:
    return np.concatenate([next(iter(result.outputs.values())) for result in results])


def field(results: list[StreamedResult], name: str) -> np.ndarray[Any, Any]:
    return np.concatenate([getattr(result, name) for result in results])


def check_kinds(pairs: list[Pair]) -> None:
    for first, second in pairs:
        if second is None:
            assert first.kind is AnswerKind.ANSWER
        else:
            assert first.kind is AnswerKind.EARLY
            wrong = second.corrected.any()
            assert second.kind is (AnswerKind.CORRECTION if wrong else AnswerKind.CONFIRMATION)


def test_in_release_mode_every_sample_gets_the_unmodified_models_answer(
    launch_here: Any, bundle_path: Path, images: Any, unmodified: Any
) -> None:
    server = launch_here(bundle_path, "--mode=release", *OBSERVED)
    pairs = stream_all(server, images)
    check_kinds(pairs)
    first = [pair[0] for pair in pairs]
    last = [pair[1] or pair[0] for pair in pairs]
    early = field(first, "exits") >= 0
    assert early.any()
    assert field(last, "final").all()
    for one, two in pairs:
        assert (two is not None) == (one.exits >= 0).any()
    # Other batch sizes may take other kernels: float32 rounding, no more.
    np.testing.assert_allclose(logits_of(last), unmodified, rtol=1e-3, atol=1e-3)
    differs = logits_of(first).argmax(axis=1) != logits_of(last).argmax(axis=1)
    np.testing.assert_array_equal(field(last, "corrected"), differs)

    wait_until(lambda: server.metric("offramp_observed_total") == SAMPLES)
    assert server.metric("offramp_audited_total") == early.sum()
    assert server.metric("offramp_disagreed_total") == differs.sum()
    assert server.metric("offramp_auditing_samples") == 0
    assert "Agreement with the unmodified model, as observed while serving" in server.get("/")


def test_in_audit_mode_a_few_are_compared_and_the_others_left_alone(
    launch_here: Any, bundle_path: Path, images: Any, unmodified: Any
) -> None:
    server = launch_here(bundle_path, "--mode=audit", *OBSERVED)
    pairs = stream_all(server, images)
    check_kinds(pairs)
    first = [pair[0] for pair in pairs]
    last = [pair[1] or pair[0] for pair in pairs]
    early, final = field(first, "exits") >= 0, field(last, "final")
    audited = early & final
    # One in twenty of at least 200: that none is drawn has a chance of 0.95^200 < 4e-5.
    assert early.sum() >= 200
    assert 0 < audited.sum() < early.sum() / 2
    np.testing.assert_allclose(logits_of(last)[final], unmodified[final], rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(logits_of(last)[~final], logits_of(first)[~final])
    assert not field(last, "corrected")[~audited].any()

    wait_until(lambda: server.metric("offramp_observed_total") == SAMPLES)
    assert server.metric("offramp_audited_total") == audited.sum()
    assert server.metric("offramp_disagreed_total") == field(last, "corrected").sum()


def test_in_leave_mode_the_first_answer_is_the_only_one(
    launch_here: Any, bundle_path: Path, images: Any
) -> None:
    server = launch_here(bundle_path, "--mode=leave")
    pairs = stream_all(server, images[:80])
    assert all(first.kind is AnswerKind.ANSWER and second is None for first, second in pairs)
    with Client(server.address) as client:
        for inputs, (first, _) in zip(requests(server, images[:80]), pairs, strict=True):
            unary = client.infer(server.model, inputs)
            np.testing.assert_array_equal(unary.exits, first.exits)
    assert "offramp_observed" not in server.get("/metrics")


def triton_input(inputs: dict[str, Any]) -> Any:
    ((name, array),) = inputs.items()
    tensor = triton.InferInput(name, list(array.shape), "UINT8")
    tensor.set_data_from_numpy(array)
    return tensor


def test_tritonclient_gets_both_answers_of_many_requests_on_one_stream(
    launch_here: Any, bundle_path: Path, images: Any, unmodified: Any
) -> None:
    server = launch_here(bundle_path, "--mode=release", *OBSERVED)
    told: queue.Queue[tuple[Any, Any]] = queue.Queue()
    asked = requests(server, images[:400])
    with triton.InferenceServerClient(server.address) as client:
        client.start_stream(lambda result, error: told.put((result, error)))
        for number, inputs in enumerate(asked):
            client.async_stream_infer(
                server.model, [triton_input(inputs)], request_id=str(number),
                parameters={"offramp_decoupled": True},
            )  # fmt: skip
        responses = defaultdict(list)
        ended = 0
        while ended < len(asked):
            result, error = told.get(timeout=60)
            assert error is None
            response = result.get_response()
            responses[int(response.id)].append(result)
            ended += response.parameters["triton_final_response"].bool_param
        client.stop_stream()
    assert told.empty()
    (output,) = server.metadata().outputs
    for number, results in responses.items():
        kinds = [r.get_response().parameters["offramp_answer"].string_param for r in results]
        assert kinds in (["answer"], ["early", "confirmation"], ["early", "correction"])
        rows = unmodified[number * ROWS : (number + 1) * ROWS]
        np.testing.assert_allclose(results[-1].as_numpy(output), rows, rtol=1e-3, atol=1e-3)
    assert any(len(results) == 2 for results in responses.values())


@pytest.mark.parametrize("mode", ["audit", "release"])
def test_tritonclient_gets_one_answer_a_request_in_the_order_of_requests(
    launch_here: Any, bundle_path: Path, images: Any, unmodified: Any, mode: str
) -> None:
    """Requests are read one by one first, then sent together; classes identify the answers."""
    server = launch_here(bundle_path, f"--mode={mode}", *OBSERVED)
    (name,), (output,) = server.metadata().inputs, server.metadata().outputs
    told: queue.Queue[tuple[Any, Any]] = queue.Queue()
    asked = [{name: images[number : number + 1]} for number in range(600)]
    classes = []
    with triton.InferenceServerClient(server.address) as client:
        client.start_stream(lambda result, error: told.put((result, error)))
        for number, inputs in enumerate(asked[:200]):
            client.async_stream_infer(server.model, [triton_input(inputs)], request_id=str(number))
            classes.append(answer(told, number, output))
        for number, inputs in enumerate(asked[200:], 200):
            client.async_stream_infer(server.model, [triton_input(inputs)], request_id=str(number))
        classes += [answer(told, number, output) for number in range(200, 600)]
        client.stop_stream()
    assert told.empty()
    # Exits may answer otherwise than the model, in a few cases in a hundred; those of another
    # request would in nine of ten.
    assert np.mean(np.array(classes) == unmodified[:600].argmax(axis=1)) > 0.9
    wait_until(lambda: server.metric("offramp_observed_total") == 600)


def answer(told: queue.Queue[tuple[Any, Any]], number: int, output: str) -> int:
    """The class that the next response gives, which must be the last one to that request."""
    result, error = told.get(timeout=60)
    assert error is None
    response = result.get_response()
    assert response.id == str(number)
    assert response.parameters["triton_final_response"].bool_param
    return int(result.as_numpy(output).argmax())


def test_an_open_stream_does_not_keep_a_server_from_leaving(
    launch_here: Any, bundle_path: Path, images: Any
) -> None:
    server = launch_here(bundle_path, "--mode=release", *OBSERVED)
    told: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with triton.InferenceServerClient(server.address) as client:
        client.start_stream(lambda result, error: told.put((result, error)))
        ((name, array),) = requests(server, images[:ROWS])[0].items()
        tensor = triton.InferInput(name, list(array.shape), "UINT8")
        tensor.set_data_from_numpy(array)
        client.async_stream_infer(server.model, [tensor])
        _, error = told.get(timeout=60)
        assert error is None
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        client.stop_stream(cancel_requests=True)
    log = server.log.read_text()
    assert "Traceback" not in log
    assert log.endswith("stopped\n")
