"""Health probes, metrics and status page over HTTP."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import urllib.error
import urllib.request
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from offramp.client import Client
from offramp.server.pages.history import HistoryRecorder
from offramp.server.ports import http_endpoint
from offramp.server.services.protocol_services import ProtocolServices
from offramp.testing.engine import FakeEngine, fake_model
from offramp.testing.server import FakeServer


def get(url: str) -> tuple[int, str, Any]:
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            return response.status, response.read().decode(), response.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), error.headers


def test_probes(served: Any) -> None:
    assert get(f"{served.url}/health/live")[:2] == (200, "live\n")
    assert get(f"{served.url}/health/ready")[:2] == (200, "ready\n")
    served.engine.unready.add("fake")
    status, reason, _ = get(f"{served.url}/health/ready")
    assert (status, reason[:16]) == (503, "not ready: fake ")
    served.engine.unready.clear()
    served.engine.draining = True
    assert get(f"{served.url}/health/live")[0] == 200
    status, reason, _ = get(f"{served.url}/health/ready")
    assert status == 503
    assert reason.startswith("not ready: fake")
    served.engine.given_up = True
    status, reason, _ = get(f"{served.url}/health/live")
    assert (status, reason[:8]) == (503, "not live")


def test_metrics_count_what_was_answered(served: Any) -> None:
    x = np.array([[0, 0, 0, 0.95], [0, 0, 0, 0.5], [0, 0, 0, 0.1]], np.float32)
    with Client(served.address) as client:
        client.infer("fake", {"x": x})
    status, text, headers = get(f"{served.url}/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain; version=")
    samples = {
        (sample.name, sample.labels.get("exit")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["offramp_answers_total", "exit 0"] == 1
    assert samples["offramp_answers_total", "final"] == 2
    assert samples["offramp_requests_total", None] == 1
    assert samples["offramp_samples_total", None] == 3


def test_the_status_page_loads_nothing_from_elsewhere(served: Any) -> None:
    status, page, headers = get(f"{served.url}/")
    assert status == 200
    assert headers.get_content_type() == "text/html"
    assert headers["Content-Security-Policy"] == "default-src 'none'; style-src 'unsafe-inline'"
    assert "src=" not in page
    assert "<script" not in page
    assert re.findall('href="([^"]*)"', page) == ["history.json", "?refresh=10"]
    assert "<h2>fake" in page


@pytest.mark.parametrize(
    ("query", "content"),
    [
        ("", None),
        ("?refresh=10", "10"),
        ("?refresh=1", "1"),
        ("?refresh=3600", "3600"),
        ("?refresh=0", None),
        ("?refresh=3601", None),
        ("?refresh=-5", None),
        ("?refresh=1.5", None),
        ("?refresh=%D9%A3", None),  # a digit, but no ASCII one
        ("?refresh=", None),
        ("?refresh=10%22%3E%3Cscript%3E", None),
    ],
)
def test_the_page_renews_itself_where_it_is_asked_to(
    served: Any, query: str, content: str | None
) -> None:
    status, page, _ = get(f"{served.url}/{query}")
    assert status == 200
    assert re.findall('http-equiv="refresh" content="([^"]*)"', page) == [content] * bool(content)
    assert ('href="./"' in page, 'href="?refresh=10"' in page) == (bool(content), not content)
    assert "<script" not in page


def test_the_history_is_recorded_from_the_start_on(served: Any) -> None:
    served.engine.served = (fake_model("a<b"),)
    status, text, headers = get(f"{served.url}/history.json")
    assert status == 200
    assert headers["Content-Type"] == "application/json; charset=utf-8"
    assert headers["Cache-Control"] == "no-store"
    found = json.loads(text)
    assert found["models"] == {"fake": {"points": [], "events": []}}
    assert found["interval_s"] == 5.0
    page = get(f"{served.url}/")[1]  # of a model that no snapshot has yet
    assert "a&lt;b" in page
    assert "No interval is complete yet: the first one takes 5 s." in page


def test_nothing_is_recorded_once_the_server_has_stopped() -> None:
    with FakeServer(FakeEngine()) as server:
        running = [task.get_name() for task in asyncio.all_tasks(server.loop)]
    assert "history" in running
    assert [t.get_name() for t in asyncio.all_tasks(server.loop)] == []


def test_a_history_that_fails_stops_no_page(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no statistics")

    monkeypatch.setattr(HistoryRecorder, "record", fail)
    with FakeServer(FakeEngine()) as server:
        assert get(f"{server.url}/")[0] == 200
        assert get(f"{server.url}/history.json")[0] == 200
    assert [r.getMessage() for r in caplog.records if r.name.endswith("history")] == [
        "the history of the status page stops after an error"
    ]


def test_the_event_loop_does_other_things_between_pages(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = served.url.removeprefix("http://").split(":")
    turns, rendered_in, hold, held = [0], [], threading.Event(), threading.Event()

    def count() -> None:
        turns[0] += 1
        served.loop.call_soon(count)

    def render(*_: object, **__: object) -> bytes:
        rendered_in.append(turns[0])
        return b"page"

    def hold_up() -> None:
        held.set()
        hold.wait(30)

    monkeypatch.setattr(http_endpoint, "render_metrics", render)
    with ExitStack() as stack:
        peers = [stack.enter_context(socket.create_connection(address, 30)) for _ in range(10)]
        for peer in peers:
            peer.sendall(b"GET /health/live HTTP/1.1\r\nHost: here\r\n\r\n")
            receive(peer, b"live\n", 1)
        served.loop.call_soon_threadsafe(count)
        served.loop.call_soon_threadsafe(hold_up)  # until all have asked
        assert held.wait(30)
        for peer in peers:
            peer.sendall(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n" * 20)
        hold.set()
        for peer in peers:
            receive(peer, b"page", 20)
    assert len(rendered_in) == len(set(rendered_in)) == 200


def receive(peer: socket.socket, end: bytes, pages: int) -> None:
    """Read until so many pages are there."""
    answer = b""
    while answer.count(end) < pages:
        more = peer.recv(65536)
        assert more, "the server hung up"
        answer += more


PATHS = ("/", "/history.json", "/health/live", "/health/ready", "/metrics")


def test_every_page_only_reads() -> None:
    router = http_endpoint.make_application(ProtocolServices(FakeEngine()), 2**20).router
    found = {
        (route.resource.canonical, route.method)
        for route in router.routes()
        if route.resource and not route.resource.canonical.startswith("/v2")
    }
    assert found == {(path, method) for path in PATHS for method in ("GET", "HEAD")}


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_changed_over_http(served: Any, path: str, method: str) -> None:
    request = urllib.request.Request(f"{served.url}{path}", method=method, data=b"stop")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)
    with refused.value as answer:
        assert answer.code == 405
        assert answer.headers["Allow"] == "GET,HEAD"
    assert get(f"{served.url}/health/live")[:2] == (200, "live\n")


@pytest.mark.parametrize("path", ["/nothing", "/metrics/x"])
def test_other_paths_are_not_found(served: Any, path: str) -> None:
    assert get(f"{served.url}{path}")[0] == 404
