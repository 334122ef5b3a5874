"""Watches a server from outside: memory, descriptors, threads, and how soon it says it is live."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from tests.chaos.account import Disturbance, Trouble


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Resources of an idle server, without open requests."""

    life: int
    at_s: float
    """Since the run began."""
    rss_mib: float
    descriptors: int
    threads: int


def read_resources(pid: int, *, life: int, at_s: float) -> Reading:
    """Read /proc of a process."""
    return Reading(
        life=life,
        at_s=at_s,
        rss_mib=resident_mib(pid),
        descriptors=sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()),
        threads=int(_status(pid)["Threads"]),
    )


def resident_mib(pid: int) -> float:
    """Read from /proc how much memory of a process is resident."""
    return int(_status(pid)["VmRSS"].split()[0]) / 1024  # of kB, which are KiB


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def tuning_processes(pid: int) -> list[int]:
    """The processes that a server started to tune its thresholds, and that are there still."""
    return [child for child in _children(pid) if b"job_worker" in _command(child)]


def _children(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # threads end meanwhile
            yield from map(int, (task / "children").read_text().split())


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


MAX_GROWTH: Final = 0.05
"""Allowed growth of memory, as a share."""
SLACK_MIB: Final = 4.0
"""Growth allowed for the allocator's pages, independent of the size of the process."""
MAX_MORE: Final = 8
"""Descriptors and threads that may be more at the end: connections come and go."""
ENOUGH: Final = 4
"""Readings of a life, from which on its growth is judged."""


def leaks(readings: Sequence[Reading]) -> Iterator[str]:
    """Growth between the warmed-up server and its end, in each life and over all of them."""
    lives: dict[int, list[Reading]] = {}
    for reading in readings:
        lives.setdefault(reading.life, []).append(reading)
    for number, life in lives.items():
        if len(life) >= ENOUGH:
            third = max(1, len(life) // 3)
            yield from _grown(f"life {number}", life[third : 2 * third], life[-third:])
    if len(lives) >= ENOUGH:
        firsts = [life[0] for life in lives.values()]
        third = max(1, len(firsts) // 3)
        yield from _grown("from life to life", firsts[:third], firsts[-third:])


def _grown(where: str, before: Sequence[Reading], after: Sequence[Reading]) -> Iterator[str]:
    was, now = (median(r.rss_mib for r in part) for part in (before, after))
    if now > was * (1 + MAX_GROWTH) + SLACK_MIB:
        yield f"{where}: memory grew from {was:.1f} to {now:.1f} MiB ({now / was - 1:+.1%})"
    for what in ("descriptors", "threads"):
        was, now = (median(getattr(r, what) for r in part) for part in (before, after))
        if now > was + MAX_MORE:
            yield f"{where}: {what} grew from {was:g} to {now:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """One ``ServerLive``."""

    sent_s: float
    """Monotonic."""
    took_s: float
    status: str


_NO_PULSE: Final = frozenset({Trouble.ABSENT, Trouble.LEAVING, Trouble.STOPPED})


def undisturbed(beats: Sequence[Beat], disturbances: Sequence[Disturbance]) -> list[Beat]:
    """The beats while a server was there and running."""
    away = [(d.began_s, d.ended_s) for d in disturbances if d.trouble in _NO_PULSE]
    return [
        beat
        for beat in beats
        if not any(
            began <= beat.sent_s + beat.took_s and beat.sent_s <= ended for began, ended in away
        )
    ]


@asynccontextmanager
async def pulse(address: str) -> AsyncIterator[list[Beat]]:
    """Call ``ServerLive`` repeatedly; yield the growing list, with a first beat."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.chaos.pulse", address),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    beats: list[Beat] = []
    begun = asyncio.Event()
    reading = asyncio.create_task(_read(process, beats, begun))
    try:
        await begun.wait()
        yield beats
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(10):
                await reading
        except TimeoutError:
            process.kill()
        await process.wait()


async def _read(
    process: asyncio.subprocess.Process, beats: list[Beat], begun: asyncio.Event
) -> None:
    assert process.stdout is not None
    try:
        while line := await process.stdout.readline():
            sent, took, status = line.decode().split()
            beats.append(Beat(sent_s=float(sent), took_s=float(took), status=status))
            begun.set()
    finally:
        begun.set()  # with no beat, which the report tells
