from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.facts import tells

from offramp.tools.bench.common.outcomes import Status
from offramp.tools.bench.load.generator import GeneratedLoad
from offramp.tools.bench.load.load_settings import LoadSettings
from offramp.tools.bench.load.metrics_poll import Reading
from offramp.tools.bench.load.report import (
    WINDOWS,
    LoadReport,
    make_report,
    print_report,
    rows,
    settings_json,
    warning,
)
from offramp.tools.bench.load.request_log import Reply, RequestLog

SETTINGS = LoadSettings(address="a:1", model="m", duration_s=7.0, slo_ms=20.0)


def report(late_ms: float | None = 0.1, readings: tuple[Reading, ...] = ()) -> LoadReport:
    """A request every 100 ms for 7 s; after the warm-up of 1 s, 55 are answered in 10 to 30 ms."""
    log = RequestLog()
    for k in range(70):
        line = log.open(sample=k % 5, intended_s=k / 10)
        log.sent(line, k / 10)
        if k >= 65:
            log.failed(line, k / 10 + 0.5, Status.REJECTED)
        else:
            latency_s = 0.01 if k % 2 else 0.03
            log.answered(line, k / 10 + latency_s, Reply(k % 2 - 1, False, 0))
    load = GeneratedLoad(
        records=log.close(),
        causes={"full [7]": 4, "b": 1},
        cpu_us_per_request=150.0,
        lateness_ms=None if late_ms is None else {"p50": 0.0, "p99": late_ms, "max": late_ms},
    )
    outcomes = load.records.to_outcomes(None, SETTINGS.duration_s)
    environment = {"cpu": "c", **settings_json(SETTINGS)}
    return make_report(SETTINGS, load, outcomes, readings=readings, environment=environment)


def test_the_warm_up_is_left_out() -> None:
    made = report()
    assert made.summary.requests == 60
    assert made.summary.failures["rejected"] == 5
    assert made.environment["all_requests"] == 70
    assert made.environment["measured_requests"] == 60
    assert made.environment["generator_cpu_us_per_request"] == 150.0
    assert made.environment["generator_peak_in_flight"] == 5
    assert len(made.timeline.start_s) == WINDOWS
    assert made.timeline.window_s == pytest.approx(0.1)
    assert made.summary.latency_ms["p50"] == pytest.approx(30.0)  # 28 of 55


def test_batch_sizes_are_the_servers() -> None:
    def read(at_s: float, rows: float, runs: float) -> Reading:
        return Reading(at_s=at_s, rows={"final": rows}, runs={"final": runs}, queued=2.0)

    made = report(readings=(read(1.0, 0, 0), read(4.0, 90, 30), read(7.0, 110, 40)))
    assert made.summary.mean_batch_size == 110 / 40
    assert made.timeline.batch_size.tolist() == [3.0] * 30 + [2.0] * 30
    assert made.to_json()["server"]["queued_samples"] == [2.0, 2.0]
    assert report().to_json()["server"] is None


@pytest.mark.parametrize(
    ("late_ms", "warned"), [(0.9, False), (1.1, True), (1.0, False), (None, False), (50.0, True)]
)
def test_a_generator_that_measures_itself_is_told_of(late_ms: float | None, warned: bool) -> None:
    assert (warning(report(late_ms)) is not None) is warned


def test_a_tenth_of_the_median_latency_is_late_too() -> None:
    made = report(0.9)
    latency = {**made.summary.latency_ms, "p50": 8.0}
    object.__setattr__(made.summary, "latency_ms", latency)
    tells(str(warning(made)), "late", "0.9 ms", "8 ms")


def test_json_has_all_and_no_nan(tmp_path: Path) -> None:
    report().write_json(tmp_path / "a.json")
    found: dict[str, Any] = json.loads((tmp_path / "a.json").read_text())
    assert set(found) == {
        "summary",
        "timeline",
        "percentiles",
        "causes",
        "server",
        "environment",
    }
    assert found["summary"]["requests"] == 60
    assert found["timeline"]["batch_size"] == [None] * WINDOWS
    assert found["environment"]["loop"] == "open loop"
    assert found["environment"]["slo_ms"] == 20.0


def test_the_table_says_shares_and_failures() -> None:
    told = dict(rows(report().summary))
    assert told["requests"] == "60"
    assert told["offered"] == "10.0/s"
    assert told["attainment (within 20 ms)"] == "45.00%"  # the 27 odd ones from 10 to 64
    assert told["latency p90"] == "30 ms"
    assert told["agreement"] == "unknown (--reference)"
    assert told["answered at exit 0"] == "49.1%"
    assert told["rejected"] == "5 (8.33%)"
    assert "expired" not in told


def test_causes_are_printed_as_they_are() -> None:
    out = io.StringIO()
    print_report(Console(file=out, width=80), report(), title="m at a:1, [bold]")
    assert "4 × full [7]\n1 × b\n" in out.getvalue()
