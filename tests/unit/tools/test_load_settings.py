from __future__ import annotations

import argparse
from typing import Any

import pytest
from tests.facts import Told, facts

from offramp.commands.parser import LayeredParser
from offramp.tools.bench.common.traces import TraceError
from offramp.tools.bench.load.load_settings import LoadError, LoadSettings, read_options
from offramp.tools.bench.load_command import add_parser


def parsed(*words: str) -> argparse.Namespace:
    parser = LayeredParser()
    add_parser(parser.add_subparsers())
    given = ["load", "localhost:8001", "--model", "m", "--data", "d.npz", *words]
    return parser.parse_args(given)


def made(**changes: Any) -> LoadSettings:
    return LoadSettings(**{"address": "a:1", "model": "m", "duration_s": 10.0, **changes})


def test_an_open_loop_takes_its_duration_from_the_trace() -> None:
    settings, trace = read_options(
        parsed("--trace=constant", "--rate=5", "--duration-s=4", "--slo-ms=2.5", "--processes=3")
    )
    assert trace is not None
    assert trace.arrivals_s.tolist() == pytest.approx([0.2 * k for k in range(20)])
    assert (settings.duration_s, settings.slo_ms, settings.processes) == (4.0, 2.5, 3)
    assert (settings.warm_up_s, settings.drain_s, settings.max_in_flight) == (1.0, 10.0, 10_000)
    assert settings.loop == "open loop"


def test_a_closed_loop_has_no_trace() -> None:
    settings, trace = read_options(parsed("--closed-loop=8", "--duration-s=3"))
    assert trace is None
    assert (settings.concurrency, settings.duration_s) == (8, 3.0)
    assert settings.loop == "closed loop of 8"
    assert read_options(parsed("--closed-loop=8"))[0].duration_s == 10.0


def test_a_trace_without_arrivals_is_refused() -> None:
    with pytest.raises(TraceError, match="no request arrives"):
        read_options(parsed("--rate=0.001"))
    with pytest.raises(LoadError, match=facts("'constant, 0.1/s'", "1 s")):
        read_options(parsed("--trace=constant", "--rate=0.1"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"processes": 0}, ("--processes is 0", "at least 1")),
        ({"priority": -1}, ("--priority is -1", "at least 0")),
        ({"drain_s": -1.0}, ("--drain-s is -1",)),
        ({"drain_s": float("inf")}, ("--drain-s is inf",)),
        ({"duration_s": 0.0}, ("--duration-s is 0", "more than 0")),
        ({"slo_ms": 0.0}, ("--slo-ms is 0", "more than 0")),
        ({"max_in_flight": 0}, ("--max-in-flight is 0",)),
        ({"concurrency": 0}, ("--closed-loop is 0",)),
        ({"concurrency": 2, "processes": 3}, ("at most as many processes",)),
        ({"warm_up_s": 10.0}, ("--warm-up-s 10", "10 s")),
    ],
)
def test_what_makes_no_load_is_refused(changes: dict[str, Any], message: Told) -> None:
    with pytest.raises(LoadError, match=facts(*message)):
        made(**changes)


def test_samples_must_be_some() -> None:
    with pytest.raises(LoadError, match="--samples is 0"):
        read_options(parsed("--rate=5", "--samples=0"))


@pytest.mark.parametrize(
    ("slo_ms", "send", "timeout_us"),
    [(None, True, None), (20.0, True, 20_000), (0.0001, True, 1), (20.0, False, None)],
)
def test_the_deadline_is_sent_in_whole_microseconds(
    slo_ms: float | None, send: bool, timeout_us: int | None
) -> None:
    assert made(slo_ms=slo_ms, send_deadline=send).timeout_us == timeout_us
