"""The whole engine under load on a GPU: parallel batches (PAME, figure 18), and a long run.

Clients run in the engine's own event loop and send the next request when the last is answered, so
that there is always work. Which samples leave is replayed; all times are measured.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from offramp.bundle import Bundle
from offramp.engine.common.errors import EngineError
from offramp.engine.core import Engine
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.stages.plan import Mode
from offramp.tools.gpu.machine import Machine
from offramp.tools.gpu.models import BenchModel, Recorded, Samples

MODEL = "model"
"""Name of the model in the engine."""
SOURCE_MODEL, ONE_STREAM = "source model, one stream", "stages, one stream"
_MIB = 2**20
FLAT_BYTES = 16 * _MIB
"""Growth of device memory over a long run that still counts as flat: caches of libraries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests that concurrent clients send to a model."""

    clients: int = 16
    """Concurrent clients; enough for full batches."""
    rows: tuple[int, int] = (1, 16)
    """Smallest and largest number of rows of a request; drawn uniformly."""
    seed: int = 0


@dataclass(slots=True)
class Outcome:
    """Counts and latencies of the requests of a :class:`Load`."""

    sent: int = 0
    answered: int = 0
    samples: int = 0
    """Number of samples in answered requests."""
    elapsed_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    """Latencies of answered requests."""
    errors: dict[str, int] = field(default_factory=dict)
    """Number of failed requests by message."""

    @property
    def lost(self) -> int:
        """Number of requests that were neither answered nor refused with a reason."""
        return self.sent - self.answered - sum(self.errors.values())

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        latencies = np.asarray(self.latencies_s) * 1e3
        return {
            "sent": self.sent,
            "answered": self.answered,
            "lost": self.lost,
            "errors": self.errors,
            "measured_s": self.elapsed_s,
            "samples_per_s": self.samples / self.elapsed_s,
            "mean_ms": float(latencies.mean()) if len(latencies) else None,
            "p99_ms": float(np.quantile(latencies, 0.99)) if len(latencies) else None,
        }


async def drive(
    engine: Engine,
    samples: Samples,
    load: Load,
    *,
    until: Callable[[int], bool],
) -> Outcome:
    """Send requests to an engine in a closed loop.

    Args:
        engine: Engine that serves :data:`MODEL`.
        samples: Samples to send, repeatedly.
        load: Clients and sizes of requests.
        until: Called before each request with its number; returns whether to stop.
    """
    outcome, numbers = Outcome(), itertools.count()
    least, most = load.rows

    async def client() -> None:
        while not until(number := next(numbers)):
            rng = np.random.default_rng([load.seed, number])
            rows = int(rng.integers(least, most + 1))
            start = int(rng.integers(0, max(len(samples) - rows, 1)))
            inputs = samples.take(slice(start, start + rows))
            began = time.perf_counter()
            outcome.sent += 1
            try:
                await engine.infer(MODEL, inputs)
            except EngineError as error:
                said = f"{type(error).__name__}: {error}"[:200]
                outcome.errors[said] = outcome.errors.get(said, 0) + 1
            else:
                outcome.answered += 1
                outcome.samples += rows
                outcome.latencies_s.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(load.clients)))
    outcome.elapsed_s = time.perf_counter() - began
    return outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSettings:
    """Settings of measuring parallel batches."""

    go_on: float | Recorded = 0.3
    limits: tuple[int, ...] = (1, 2, 4, 6, 8, 16)
    """Values of PAME's τ_b."""
    streams: int = 2
    max_batch_size: int = 32
    rounds: int = 5
    requests: int = 600
    """Number of requests for each round and system."""
    graphs: tuple[bool, ...] = (True, False)
    load: Load = Load()


def parallel(
    machine: Machine, model: BenchModel, bundle: Bundle, settings: ParallelSettings
) -> list[dict[str, Any]]:
    """Measure throughput by τ_b, with and without graphs: ours, one stream's, the source model's.

    All systems are open at the same time and take turns in every round.

    Returns:
        JSON values: a row for every system. ``slower_than_source`` is the share of requests that
        took longer than the source model's 99th percentile.
    """
    return asyncio.run(_parallel(machine, model, bundle, settings))


async def _parallel(
    machine: Machine, model: BenchModel, bundle: Bundle, settings: ParallelSettings
) -> list[dict[str, Any]]:
    samples = model.samples(2048, settings.go_on, seed=settings.load.seed)
    systems: dict[tuple[str, int | None], dict[str, Any]] = {
        (SOURCE_MODEL, None): {"mode": Mode.OFF},
        (ONE_STREAM, None): {"mode": Mode.LEAVE},
        **{
            (f"stages, {settings.streams} streams", limit): {
                "mode": Mode.LEAVE,
                "streams": settings.streams,
                "parallel_below": limit,
            }
            for limit in settings.limits
        },
    }
    outcomes: dict[tuple[str, int | None, bool], list[Outcome]] = {}
    async with AsyncExitStack() as stack:
        engines = {}
        for graphs in settings.graphs:
            made = machine.ingredients(bundle.path, graphs=graphs, max_rows=settings.max_batch_size)
            backend = made.backend(graphs=graphs)
            stack.callback(backend.close)
            for (name, limit), how in systems.items():
                options = _options(settings.max_batch_size, **how)
                engine = await Engine.open({MODEL: bundle.path}, options, backend=backend)
                engines[name, limit, graphs] = await stack.enter_async_context(engine)
        for round_ in range(-1, settings.rounds):
            for key, engine in engines.items():
                outcome = await drive(
                    engine, samples, settings.load, until=lambda n: n >= settings.requests
                )
                if round_ >= 0:  # the first round fills caches and captures graphs
                    outcomes.setdefault(key, []).append(outcome)
    return [{"max_batch_size": settings.max_batch_size, **_row(*key, outcomes)} for key in outcomes]


def _row(
    name: str,
    limit: int | None,
    graphs: bool,  # noqa: FBT001
    outcomes: dict[tuple[str, int | None, bool], list[Outcome]],
) -> dict[str, Any]:
    source = np.concatenate([o.latencies_s for o in outcomes[SOURCE_MODEL, None, graphs]])
    mine = outcomes[name, limit, graphs]
    latencies = np.concatenate([o.latencies_s for o in mine])
    return {
        "system": name,
        "parallel_below": limit,
        "graphs": graphs,
        "samples_per_s": statistics.median(o.samples / o.elapsed_s for o in mine),
        "mean_ms": statistics.median(float(np.mean(o.latencies_s)) for o in mine) * 1e3,
        "p99_ms": float(np.quantile(latencies, 0.99)) * 1e3,
        "slower_than_source": float((latencies > np.quantile(source, 0.99)).mean()),
        "failed": sum(o.sent - o.answered for o in mine),
    }


def _options(max_batch_size: int, **how: Any) -> EngineOptions:
    defaults = ModelOptions(max_batch_size=max_batch_size, controller="static")
    return EngineOptions(defaults=defaults, keep_state=False, **how)


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakSettings:
    """Settings of a long run."""

    seconds: float = 300.0
    every_s: float = 2.0
    """Interval of memory readings."""
    go_on: float | Recorded = 0.3
    streams: int = 2
    max_batch_size: int = 32
    graphs: bool = True
    load: Load = Load(clients=32, rows=(1, 32))


def soak(
    machine: Machine, model: BenchModel, bundle: Bundle, settings: SoakSettings
) -> dict[str, Any]:
    """Load an engine in audit mode for a while, to see if memory grows or requests are lost.

    Returns:
        JSON values. Growth is from the highest memory use in the second tenth of the readings to
        the highest in the last tenth; the first tenth is for warm-up.
    """
    return asyncio.run(_soak(machine, model, bundle, settings))


async def _soak(
    machine: Machine, model: BenchModel, bundle: Bundle, settings: SoakSettings
) -> dict[str, Any]:
    samples = model.samples(4096, settings.go_on, seed=settings.load.seed)
    made = machine.ingredients(
        bundle.path, graphs=settings.graphs, max_rows=settings.max_batch_size
    )
    backend = made.backend(graphs=settings.graphs)
    options = _options(settings.max_batch_size, mode=Mode.AUDIT, streams=settings.streams)
    free: list[int] = []
    try:
        async with await Engine.open({MODEL: bundle.path}, options, backend=backend) as engine:
            ends_s = time.monotonic() + settings.seconds
            watch = asyncio.create_task(_watch(machine, free, settings.every_s))
            outcome = await drive(
                engine, samples, settings.load, until=lambda _: time.monotonic() >= ends_s
            )
            watch.cancel()
            free.append(machine.free_bytes())
            drained = await engine.drain(30.0)
            audited = engine.statistics()[MODEL]
    finally:
        backend.close()
    growth = growth_bytes(free)
    return {
        **outcome.to_json(),
        "drained": drained,
        "streams_restarted": audited.restarts,
        "free_bytes": free,
        "growth_bytes": growth,
        "flat": growth <= FLAT_BYTES,
    }


async def _watch(machine: Machine, free: list[int], every_s: float) -> None:
    while True:
        free.append(await asyncio.to_thread(machine.free_bytes))
        await asyncio.sleep(every_s)


def growth_bytes(free: Sequence[int]) -> int:
    """Return how much less memory is free in the last tenth of the time than in the second."""
    tenth = max(len(free) // 10, 1)
    before = free[tenth : 2 * tenth] or free[:1]
    return min(before) - min(free[-tenth:])
