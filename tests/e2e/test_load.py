"""``eebench load`` in processes of its own, against a real server."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.bundles import EXAMPLE

LIMIT_S = 180
SHORT = ("--warm-up-s=0", "--samples=200")


def run(address: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "offramp.tools.bench.cli", "load", address, *arguments]
    if "--data" not in arguments:
        command += ["--data", EXAMPLE / "test.npz"]
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def loaded(server: Any, folder: Path, *arguments: str | Path) -> dict[str, Any]:
    """The figures of a load that went well."""
    path = folder / "load.json"
    done = run(server.address, f"--model={server.model}", *SHORT, "--json", path, *arguments)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_an_open_loop_of_two_processes_sends_every_request_once(
    server: Any, bundle_path: Path, tmp_path: Path
) -> None:
    before = server.metric("offramp_samples_total")
    answered = server.metric("offramp_answers_total")
    found = loaded(
        server,
        tmp_path,
        *("--trace=constant", "--rate=150", "--duration-s=2", "--processes=2"),
        *("--slo-ms=60000", "--reference", bundle_path, "--html", tmp_path / "load.html"),
        *("--metrics", server.url.removeprefix("http://")),
    )
    summary = found["summary"]
    assert summary["requests"] == 300
    assert summary["offered_rps"] == 150.0
    assert sum(summary["failures"].values()) == 0
    assert summary["attainment"] == 1.0
    assert summary["agreement"] > 0.9
    assert sum(summary["exit_shares"].values()) == pytest.approx(1.0)
    assert len(summary["exit_shares"]) > 1
    assert server.metric("offramp_samples_total") == before + 300
    assert server.metric("offramp_answers_total") == answered + 300
    assert sum(found["timeline"]["offered_rps"]) * 2 / 60 == pytest.approx(300)
    assert found["percentiles"][-1][2] == 300
    assert found["environment"]["trace"] == "constant, 150/s"
    assert found["environment"]["data_is_calibration_data"] is False
    assert found["server"]["edges_s"]
    assert "measured" in (tmp_path / "load.html").read_text()


def test_a_closed_loop_sends_when_it_is_answered(server: Any, tmp_path: Path) -> None:
    before = server.metric("offramp_answers_total")
    found = loaded(server, tmp_path, "--closed-loop=3", "--duration-s=1", "--processes=2")
    requests = found["summary"]["requests"]
    assert requests > 0
    assert sum(found["summary"]["failures"].values()) == 0
    assert server.metric("offramp_answers_total") == before + requests
    assert found["environment"]["generator_lateness_ms"] is None
    assert found["environment"]["generator_peak_in_flight"] <= 3
    assert found["summary"]["agreement"] is None


def test_a_full_queue_rejects(launch: Any, bundle_path: Path, tmp_path: Path) -> None:
    server = launch(bundle_path, "--max-queue-samples=1", "--max-queue-delay-ms=60000")
    found = loaded(
        server, tmp_path, "--trace=constant", "--rate=100", "--duration-s=0.5", "--drain-s=0.5"
    )
    failures = found["summary"]["failures"]
    assert failures == {"expired": 0, "rejected": 49, "failed": 0, "unanswered": 1}
    assert found["summary"]["latency_ms"] == {}
    told = next(cause for cause, count in found["causes"].items() if count == 49)
    assert told.startswith("RESOURCE_EXHAUSTED: ")
    assert "queue is full" in told


def test_a_deadline_of_a_microsecond_expires(server: Any, tmp_path: Path) -> None:
    found = loaded(
        server, tmp_path, "--trace=constant", "--rate=100", "--duration-s=0.5", "--slo-ms=0.001"
    )
    failures = found["summary"]["failures"]
    assert (
        failures["expired"] + failures["rejected"] == 50
    )  # rejected where that counts as overload
    assert failures["failed"] + failures["unanswered"] == 0
    assert found["summary"]["attainment"] == 0.0
    assert found["summary"]["goodput_rps"] == 0.0


def test_a_deadline_that_is_not_sent_only_judges(server: Any, tmp_path: Path) -> None:
    arrivals = ("--trace=constant", "--rate=100", "--duration-s=0.5")
    found = loaded(server, tmp_path, *arrivals, "--slo-ms=0.001", "--no-deadline")
    assert sum(found["summary"]["failures"].values()) == 0
    assert found["summary"]["attainment"] == 0.0
    assert found["summary"]["latency_ms"]["p50"] > 0.001


def refused(address: str, *arguments: str | Path) -> str:
    done = run(address, *arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("eebench: ")
    return done.stderr


def test_nobody_at_the_address_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and never listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        told = refused(address, "--model=m", "--rate=10")
    assert f"{address}: UNAVAILABLE" in told
    assert "is eeserve running there" in told


def test_what_cannot_be_asked_is_one_line(server: Any, tmp_path: Path) -> None:
    assert "no model 'absent' is served" in refused(server.address, "--model=absent", "--rate=10")
    model = f"--model={server.model}"
    np.savez(tmp_path / "other.npz", other=np.zeros((3, 2), np.float32))
    told = refused(server.address, model, "--rate=10", "--data", tmp_path / "other.npz")
    assert "there is no input 'other'" in told
    assert "no request arrives" in refused(server.address, model, "--rate=0.001")
    told = refused(server.address, model, "--rate=10", "--metrics=127.0.0.1:1")
    assert "--metrics is HOST:PORT" in told
