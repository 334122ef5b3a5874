"""The load: arrivals by chance, in bursts, of clients of every sort."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from random import Random
from typing import Final

from tests.chaos.account import Account
from tests.chaos.clients import (
    Clients,
    Kind,
    departing,
    hurried,
    slow_reader,
    stream,
    triton_stream,
    triton_unary,
    unary,
)
from tests.chaos.hostile import garbage, hostile, oversized, wrong_dtype

MIX: Final[dict[Kind, float]] = {
    unary: 0.50,
    stream: 0.15,
    triton_stream: 0.08,
    triton_unary: 0.04,
    slow_reader: 0.003,
    departing: 0.08,
    hurried: 0.05,
    hostile: 0.06,
    wrong_dtype: 0.02,
    oversized: 0.002,
    garbage: 0.01,
}
"""Shares of arrivals."""

BURST: Final = 3.0
"""Times the mean rate, for a share of the time; the rest of it is as much quieter."""
_BURSTING: Final = 0.15
_QUIET: Final = (1.0 - BURST * _BURSTING) / (1.0 - _BURSTING)
_PHASE_S: Final = 0.5
"""Mean of a burst."""
MOST_OPEN: Final = 1500
"""Most concurrent requests: more would test the harness, not the server."""


@dataclass(slots=True)
class Load:
    """Sends at a mean rate until it is stopped; may be paused."""

    clients: Clients
    random: Random
    rate: float
    """Arrivals a second, on average."""
    withheld: int = 0
    """Arrivals that found too many open."""
    errors: list[str] = field(default_factory=list)
    """Errors of the harness itself."""
    _paused: bool = False
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self) -> None:
        """Send, until cancelled."""
        kinds, weights = list(MIX), list(MIX.values())
        next_s = time.monotonic()
        factor, until_s = _QUIET, next_s
        while True:
            if next_s > until_s:
                bursting = factor == _QUIET
                factor = BURST if bursting else _QUIET
                mean_s = _PHASE_S * (1.0 if bursting else (1 - _BURSTING) / _BURSTING)
                until_s = next_s + self.random.expovariate(1 / mean_s)
            next_s += self.random.expovariate(self.rate * factor)
            now_s = time.monotonic()
            if next_s > now_s:
                await asyncio.sleep(next_s - now_s)
            elif now_s - next_s > 1.0:
                next_s = now_s  # the harness was held up itself: what was not sent is not sent
            if not self._paused:
                self._start(self.random.choices(kinds, weights)[0])

    def _start(self, kind: Kind) -> None:
        if len(self.clients.account.open) >= MOST_OPEN:
            self.withheld += 1
            return
        task = asyncio.create_task(self._one(kind))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _one(self, kind: Kind) -> None:
        try:
            await kind(self.clients)
        except Exception as error:
            self.errors.append(f"{kind.__name__}: {error!r}")

    async def pause(self, limit_s: float) -> bool:
        """Send nothing, and wait for what is open; whether all was closed in time."""
        self._paused = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=limit_s)
        return not self._tasks

    def resume(self) -> None:
        """Send again."""
        self._paused = False


async def measure_capacity(clients: Clients, *, seconds: float, at_once: int = 24) -> float:
    """Requests a second of so many clients that each wait for their answer, through the SDK."""
    account: Account = clients.account
    before, began_s = account.sent.total(), time.monotonic()

    async def ask() -> None:
        while time.monotonic() < began_s + seconds:
            await unary(clients)

    await asyncio.gather(*(ask() for _ in range(at_once)))
    return (account.sent.total() - before) / (time.monotonic() - began_s)
