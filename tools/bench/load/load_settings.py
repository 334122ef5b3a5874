"""The settings of a load, checked before anything is sent."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Final

from offramp.tools.bench.common.bench_flags import trace_of
from offramp.tools.bench.common.traces import Trace

CLOSED_LOOP_DURATION_S: Final = 10.0


class LoadError(ValueError):
    """The load cannot be made, or did not run to its end; the message states the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """The settings that all processes of a load share."""

    address: str
    """``host:port`` of the server's gRPC port."""
    model: str
    protocol: str = "grpc"
    """One of :data:`.transports.PROTOCOLS`."""
    http: str | None = None
    """``host:port`` of the server's HTTP port, for the protocol ``rest``."""
    duration_s: float
    """Duration of the trace; for a closed loop, the time in which new requests are sent."""
    processes: int = 1
    """Number of sending processes."""
    concurrency: int | None = None
    """Concurrent requests of a closed loop, over all processes; ``None`` is an open loop, where
    requests are sent when they are due, independent of those in flight."""
    slo_ms: float | None = None
    """Latency objective; ``None`` for no objective."""
    send_deadline: bool = True
    """True if the server receives ``slo_ms``, as Triton's parameter ``timeout``."""
    priority: int = 0
    """Priority as in Triton: 1 is served first, 0 is the server's default."""
    warm_up_s: float = 1.0
    """Requests due before this time are excluded from the figures."""
    drain_s: float = 10.0
    """Longest wait for answers after the last request."""
    max_in_flight: int = 10_000
    """Largest number of requests in flight per process; further requests are not sent, and count as
    unanswered."""

    def __post_init__(self) -> None:
        _at_least("--processes", self.processes, 1)
        _at_least("--priority", self.priority, 0)
        _at_least("--warm-up-s", self.warm_up_s, 0)
        _at_least("--drain-s", self.drain_s, 0)
        _at_least("--max-in-flight", self.max_in_flight, 1)
        _above_0("--duration-s", self.duration_s)
        if self.slo_ms is not None:
            _above_0("--slo-ms", self.slo_ms)
        if self.concurrency is not None:
            _at_least("--closed-loop", self.concurrency, 1)
            if self.concurrency < self.processes:
                raise LoadError(
                    f"--closed-loop {self.concurrency} leaves some of {self.processes} --processes "
                    "without a request; give at most as many processes"
                )
        if self.protocol == "rest" and self.http is None:
            raise LoadError("--protocol rest needs the server's HTTP port: --http HOST:PORT")
        if self.warm_up_s >= self.duration_s:
            raise LoadError(
                f"--warm-up-s {self.warm_up_s:g} leaves nothing of {self.duration_s:g} s to "
                "measure; give a longer --duration-s, or a shorter warm-up"
            )

    @property
    def asked_at(self) -> str:
        """Address to which requests are sent."""
        return self.http if self.protocol == "rest" and self.http else self.address

    @property
    def timeout_us(self) -> int | None:
        """Deadline sent to the server in µs; ``None`` if none is sent."""
        if self.slo_ms is None or not self.send_deadline:
            return None
        return max(1, round(self.slo_ms * 1e3))

    @property
    def loop(self) -> str:
        """Kind of the loop, open or closed, in words."""
        return "open loop" if self.concurrency is None else f"closed loop of {self.concurrency}"


def read_options(options: argparse.Namespace) -> tuple[LoadSettings, Trace | None]:
    """Return settings, and the trace of an open loop; raise LoadError or TraceError."""
    trace = None
    if options.closed_loop is None:
        trace = trace_of(options)
        duration_s = trace.duration_s
    else:
        duration_s = CLOSED_LOOP_DURATION_S if options.duration_s is None else options.duration_s
    _at_least("--samples", options.samples, 1)
    settings = LoadSettings(
        address=options.address,
        model=options.model,
        protocol=options.protocol,
        http=options.http,
        duration_s=duration_s,
        processes=options.processes,
        concurrency=options.closed_loop,
        slo_ms=options.slo_ms,
        send_deadline=not options.no_deadline,
        priority=options.priority,
        warm_up_s=options.warm_up_s,
        drain_s=options.drain_s,
        max_in_flight=options.max_in_flight,
    )
    if trace is not None and trace.arrivals_s[-1] < settings.warm_up_s:
        raise LoadError(
            f"all requests of '{trace.name}' fall into the {settings.warm_up_s:g} s of --warm-up-s "
            "that are not measured; give a higher rate, or a shorter warm-up"
        )
    return settings, trace


def _at_least(option: str, value: float, least: float) -> None:
    if not (math.isfinite(value) and value >= least):
        raise LoadError(f"{option} is {value:g}; it must be at least {least:g}")


def _above_0(option: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise LoadError(f"{option} is {value:g}; it must be more than 0")
