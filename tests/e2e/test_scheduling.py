"""Policies, deadlines and the configuration file, at real servers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.bundles import EXAMPLE
from tests.facts import tells
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from offramp.client import Client, DeadlineError

AMPLE_MS = 600_000
ROWS = 16
TIMEOUTS_MS = tuple(2.0 ** (step / 4) for step in range(40, -20, -1))
"""1 s to 0.04 ms: among them are, on any machine, some for which only a shallow exit is in time."""


@pytest.fixture(scope="module")
def hard(server: Any) -> np.ndarray[Any, Any]:
    """Images that no exit is sure of."""
    with np.load(EXAMPLE / "test.npz") as data:
        images = data["image"][:2000]
    with Client(server.address) as client:
        exits = client.infer(server.model, {"image": images}).exits
    return images[exits == -1][:ROWS]


def ask(
    server: Any, images: np.ndarray[Any, Any], timeout_ms: float | None = None
) -> dict[str, list[int]] | None:
    """Exits and marks as tritonclient gets them; ``None`` where there was no time."""
    tensor = triton.InferInput("image", list(images.shape), np_to_triton_dtype(images.dtype))
    tensor.set_data_from_numpy(images)
    timeout_us = None if timeout_ms is None else int(timeout_ms * 1e3)
    with triton.InferenceServerClient(server.address) as client:
        try:
            response = client.infer(server.model, [tensor], timeout=timeout_us).get_response()
        except InferenceServerException as error:
            assert error.status() == "StatusCode.DEADLINE_EXCEEDED"
            return None
    names = ("offramp_exits", "offramp_forced")
    told = {n: response.parameters[n].string_param for n in names if n in response.parameters}
    return {name: [int(number) for number in text.split(",")] for name, text in told.items()}


def answers(server: Any, images: np.ndarray[Any, Any]) -> Iterator[dict[str, list[int]]]:
    """Yield the answers under decreasing deadlines."""
    for timeout_ms in TIMEOUTS_MS:
        answer = ask(server, images, timeout_ms)
        if answer is not None:
            yield answer


def test_forced_samples_are_marked_when_the_deadline_is_tight(
    launch: Any, bundle_path: Path, hard: np.ndarray[Any, Any]
) -> None:
    assert len(hard) == ROWS
    server = launch(bundle_path, "--policy=slackfit", f"--slo-ms={AMPLE_MS}")
    assert ask(server, hard) == {"offramp_exits": [-1] * ROWS}
    assert "being forced" not in server.get("/")
    rounds = itertools.chain.from_iterable(answers(server, hard) for _ in range(20))
    forced = next(answer for answer in rounds if "offramp_forced" in answer)
    marks = np.array(forced["offramp_forced"])
    assert set(marks) <= {0, 1}
    assert (np.array(forced["offramp_exits"])[marks == 1] >= 0).all()
    assert server.metric("offramp_forced_total") >= marks.sum() > 0
    assert server.metric("offramp_forced_total", exit="final") == 0
    assert server.metric("offramp_model_info", scheduling="slackfit") == 1
    assert "Exits are being forced" in server.get("/")


def test_nothing_is_forced_where_that_is_forbidden(
    launch: Any, bundle_path: Path, hard: np.ndarray[Any, Any]
) -> None:
    server = launch(
        bundle_path, "--policy=slackfit", f"--slo-ms={AMPLE_MS}", "--forbid-forced-exits"
    )
    for answer in [ask(server, hard), *answers(server, hard)]:
        assert answer == {"offramp_exits": [-1] * ROWS}
    assert server.metric("offramp_forced_total") == 0


def test_the_slo_is_the_deadline_of_requests_that_bring_none(
    launch: Any, bundle_path: Path, hard: np.ndarray[Any, Any]
) -> None:
    server = launch(bundle_path, "--policy=slackfit", "--slo-ms=0.001")
    assert ask(server, hard) is None
    with Client(server.address) as client:
        assert client.infer(server.model, {"image": hard}, timeout_s=600).exits.shape == (ROWS,)
    failed = server.metric("offramp_failures_total")
    assert failed == ROWS


def test_a_timeout_that_is_too_short_is_an_exceeded_deadline(
    server: Any, hard: np.ndarray[Any, Any]
) -> None:
    assert ask(server, hard, 0.001) is None
    assert ask(server, hard, AMPLE_MS) is not None


def test_two_models_from_one_file(
    launch: Any, bundle_path: Path, tmp_path: Path, hard: np.ndarray[Any, Any]
) -> None:
    (tmp_path / "bundle.ee").symlink_to(bundle_path)
    file = tmp_path / "serve.toml"
    file.write_text("""
        [engine]
        streams = 1
        [defaults]
        max_batch_size = 4
        [models.exact]
        path = "bundle.ee"
        policy = "clockwork"
        [models.tight]
        path = "bundle.ee"
        policy = "cheapest"
        slo_ms = 0.001
    """)
    server = launch("--config", file)
    assert server.models == ("exact", "tight")
    inputs = {"image": hard}
    with Client(server.address) as client:
        exact = client.infer("exact", inputs, timeout_s=600)
        cheap = client.infer("tight", inputs, timeout_s=600)
        assert (exact.exits == -1).all()
        assert not exact.forced.any()
        assert len(set(cheap.exits.tolist())) == 1
        assert cheap.exits[0] >= 0
        assert cheap.forced.all()
        with pytest.raises(DeadlineError):
            client.infer("tight", inputs)
    for name, policy in (("exact", "clockwork"), ("tight", "cheapest")):
        assert server.metric("offramp_model_info", model=name, scheduling=policy) == 1
    assert server.get("/").count("batches up to 4 ") == 2


def test_a_wrong_file_is_one_line(refused: Any, tmp_path: Path) -> None:
    """The server runs in its own process, so its output is what an operator reads."""
    file = tmp_path / "serve.toml"
    file.write_text('[models.fashion]\npath = "fashion.ee"\nslo = 20')
    status, told = refused("--config", file)
    assert status == 2
    tells(told, f"eeserve: {file}", "[models.fashion]", "'slo'", "'slo_ms'", "path, policy,")


def test_a_policy_that_does_not_fit_is_one_line(refused: Any, bundle_path: Path) -> None:
    status, told = refused(bundle_path, "--policy=fixed:999", "--grpc-port=0", "--http-port=0")
    assert status == 1
    (line,) = [line for line in told.splitlines() if line.startswith("eeserve: ")]
    tells(line, "fixed:999", "exit 999")
    assert "Traceback" not in told
