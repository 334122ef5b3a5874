"""Random events that happen to the server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
from collections.abc import Awaitable, Callable
from random import Random
from typing import Final

from tests.chaos.account import Trouble
from tests.chaos.supervisor import Supervisor
from tests.chaos.watch import tuning_processes

Event = Callable[[Supervisor, Random], Awaitable[None]]


async def terminate(server: Supervisor, random: Random) -> None:
    """SIGTERM, or another signal that asks to leave, and a new server."""
    await server.leave(random.choice((signal.SIGTERM, signal.SIGTERM, signal.SIGHUP)))
    await server.start()


async def kill(server: Supervisor, random: Random) -> None:
    """SIGKILL, and a new server after a while."""
    await server.kill()
    await asyncio.sleep(random.uniform(0.0, 1.0))
    await server.start()


async def stop_and_continue(server: Supervisor, random: Random) -> None:
    """SIGSTOP, for up to three seconds."""
    with server.trouble(Trouble.STOPPED):
        os.kill(server.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(random.uniform(0.2, 3.0))
        finally:
            os.kill(server.pid, signal.SIGCONT)


async def kill_tuning(server: Supervisor, _random: Random) -> None:
    """SIGKILL to the process that tunes, if there is one now."""
    for child in tuning_processes(server.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


async def fail_backend(server: Supervisor, random: Random) -> None:
    """A share of all stages' runs fail for a moment."""
    with server.trouble(Trouble.BACKEND):
        server.switch.touch()
        try:
            await asyncio.sleep(random.uniform(0.1, 1.0))
        finally:
            server.switch.unlink()


async def fill_disk(server: Supervisor, random: Random) -> None:
    """Stop all files from growing for some seconds: every write fails, as on a full disk."""
    with server.trouble(Trouble.DISK):
        pid = server.pid
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        try:
            await asyncio.sleep(random.uniform(1.0, 5.0))
        finally:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))


GENTLE: Final = (stop_and_continue, kill_tuning, fail_backend, fill_disk)
"""Events that the server has to live through."""
ALL: Final = (*GENTLE, terminate, kill, terminate)


class Deck:
    """Draws events by chance, so that each comes before any comes again."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._left: list[Event] = []

    def draw(self, *, gentle: bool) -> Event:
        """The next event."""
        allowed = GENTLE if gentle else ALL
        if not any(event in allowed for event in self._left):
            self._left = self._random.sample(allowed, len(allowed))
        index = next(i for i, event in enumerate(self._left) if event in allowed)
        return self._left.pop(index)
