"""A chaos run from beginning to end, and its report."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Bundle, TensorSpec
from tests.chaos import watch
from tests.chaos.account import Account, Outcome, differences
from tests.chaos.clients import Clients
from tests.chaos.events import Deck
from tests.chaos.load import Load, measure_capacity
from tests.chaos.report import Report
from tests.chaos.supervisor import Supervisor
from tests.chaos.truth import Truth

POOL: Final = 600
"""Inputs that are sent again and again."""
PATIENCE_S: Final = 600.0
"""Seconds that a run may last beyond its duration until the required events have happened."""
SERVER: Final = ("--max-message-mib=4",)
"""Arguments of the server: a limit that a message of some MiB is above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    """Options of a run."""

    minutes: float
    seed: int
    bundle: Path
    """Copied before it is served."""
    inputs: Path | None
    """Archive of inputs; ``None`` draws them."""
    folder: Path
    """For the copy and the log."""
    load: float
    """Share of the measured capacity."""
    most_rps: float
    """Limit of the rate, for models that are faster than the harness."""
    every_s: float = 8.0
    """Mean time between two events."""
    settle_s: float = 25.0
    """Time between two rests of the load, in which accounts are compared."""
    one_life: float = 0.5
    """Share of the run in which the server is not ended."""
    capacity_s: float = 4.0
    least_rests: int = 1
    """Rests of the load, at the end of which the run may end at the earliest."""
    least_answers: int = 1
    """Requests answered, likewise: on a machine that is slow, or busy, the run is a longer one."""
    live_limit_ms: float | None = None
    """Longest that ``ServerLive`` may take while a server runs; ``None`` reports only."""
    arguments: tuple[str, ...] = ()
    """More of the server's."""


async def run(options: ChaosOptions) -> Report:
    """Do it."""
    bundle = options.folder / "chaos.ee"
    shutil.copytree(options.bundle, bundle)
    truth = Truth.of(Bundle.open(bundle), read_inputs(options, Bundle.open(bundle)))
    if len(truth) < 20:
        raise ValueError(
            f"only {len(truth)} inputs of {options.inputs} can be told apart by their answers; "
            "20 are needed for a mixed-up answer to be seen"
        )
    server = Supervisor(bundle, options.folder, (*SERVER, *options.arguments))
    account = Account()
    # one source of chance each, so that the order of events follows from the seed alone
    events, load, contents = (Random(f"{options.seed}/{part}") for part in range(3))
    clients = Clients(account, truth, server.address, server.model, contents)
    chaos = Chaos(options, server, clients, account, events, load, Deck(events))
    server.starting = lambda: account.new_life(time.monotonic())
    account.listens = server.listens
    await server.start()
    try:
        clients.renew()
        async with watch.pulse(server.address) as beats:
            await chaos.run()
        await clients.close()
    finally:
        if not server.lives[-1].ended:
            await server.kill()
    return Report(
        options=options,
        account=account,
        server=server,
        beats=beats,
        readings=chaos.readings,
        settled=chaos.settled,
        rate=chaos.rate,
        capacity=chaos.capacity,
        withheld=chaos.withheld,
        events=chaos.events,
        faults=[*account.faults, *server.faults, *chaos.faults],
        max_disagreement=truth.max_disagreement,
        pool=len(truth),
    )


@dataclass(slots=True)
class Chaos:
    """The middle of a run: load, events and rests of the load."""

    options: ChaosOptions
    server: Supervisor
    clients: Clients
    account: Account
    random: Random
    """Random generator of events: their times and actions."""
    arrivals: Random
    deck: Deck
    readings: list[watch.Reading] = field(default_factory=list)
    settled: int = 0
    """Rests in which accounts were compared."""
    rate: float = 0.0
    capacity: float = 0.0
    withheld: int = 0
    events: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    _began_s: float = field(default_factory=time.monotonic)

    async def run(self) -> None:
        options = self.options
        self.capacity = await measure_capacity(self.clients, seconds=options.capacity_s)
        self.rate = min(self.capacity * options.load, options.most_rps)
        load = Load(self.clients, self.arrivals, self.rate)
        sending = asyncio.create_task(load.run())
        began_s = time.monotonic()
        until_s = began_s + options.minutes * 60
        next_rest_s = began_s + options.settle_s
        while (now_s := time.monotonic()) < until_s or self._unfinished(until_s):
            wait_s = self.random.expovariate(1 / options.every_s)
            await asyncio.sleep(min(wait_s, until_s - now_s) if now_s < until_s else wait_s)
            await self._revive()
            if time.monotonic() > next_rest_s:
                await self._rest(load)
                next_rest_s = time.monotonic() + options.settle_s
            gentle = time.monotonic() < began_s + options.one_life * options.minutes * 60
            await self._event(gentle=gentle)
        await self._rest(load)
        sending.cancel()
        await asyncio.wait((sending,))
        self.withheld = load.withheld
        self.faults += [f"the harness: {error}" for error in load.errors[:20]]
        await self.server.leave()

    def _unfinished(self, until_s: float) -> bool:
        """Return True if required events are missing; the final rest is still to come."""
        few = self.account.total(Outcome.ANSWERED) < self.options.least_answers
        return (few or self.settled + 1 < self.options.least_rests) and (
            time.monotonic() < until_s + PATIENCE_S
        )

    async def _event(self, *, gentle: bool) -> None:
        event = self.deck.draw(gentle=gentle)
        self.events[event.__name__] = self.events.get(event.__name__, 0) + 1
        life = len(self.server.lives)
        try:
            await event(self.server, self.random)
        except (OSError, RuntimeError, TimeoutError) as error:
            self.faults.append(f"{event.__name__}: {error!r}")
        if len(self.server.lives) != life:
            self.clients.renew()

    async def _revive(self) -> None:
        """Restart the server if it ended without being asked, which is a fault."""
        if self.server.died():
            await self.server.start()
            self.clients.renew()

    async def _rest(self, load: Load) -> None:
        """Compare accounts and read resources while no request is open."""
        if not await load.pause(limit_s=45.0):
            open_now = sorted({ticket.kind for ticket in self.account.open})
            self.faults.append(f"requests were open after 45 s without load: {', '.join(open_now)}")
        await asyncio.sleep(1.0)
        try:
            await self._compare()
        except OSError as error:
            self.faults.append(f"the server's accounts could not be read: {error!r}")
        load.resume()

    async def _compare(self) -> None:
        life = self.server.lives[-1].number
        counts = await self.server.counts()
        self.settled += 1
        at_s = time.monotonic() - self._began_s
        self.faults += [
            f"life {life}, {at_s:.0f} s: {difference}"
            for difference in differences(counts, self.account.life)
        ]
        self.readings.append(watch.read_resources(self.server.pid, life=life, at_s=at_s))


def read_inputs(options: ChaosOptions, bundle: Bundle) -> Mapping[str, NDArray[Any]]:
    """The inputs of the run: the first of an archive, or drawn."""
    specs = bundle.manifest.inputs
    if options.inputs is not None:
        with np.load(options.inputs) as archive:
            return {spec.name: archive[spec.name][:POOL] for spec in specs}
    rng = np.random.default_rng(options.seed)
    return {spec.name: _drawn(spec, rng) for spec in specs}


def _drawn(spec: TensorSpec, rng: np.random.Generator) -> NDArray[Any]:
    shape = (POOL, *(8 if isinstance(size, str) else size for size in spec.shape[1:]))
    if spec.dtype.startswith("float"):
        return rng.standard_normal(shape).astype(spec.dtype)
    return rng.integers(0, 100, shape).astype(spec.dtype)


__all__ = ["ChaosOptions", "run"]
