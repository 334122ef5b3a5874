"""One sending process: an event loop that sends requests over a channel when they are due.

An open loop does not wait for answers, and measures latency from the intended send time. So delays
by a slow server or a slow generator are part of the latency (no coordinated omission).

Calls have no gRPC deadline: the server would treat it as the caller's deadline, even if no deadline
should be sent. Requests in flight after the last wait are cancelled instead.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final

from offramp.tools.bench.common.outcomes import Status
from offramp.tools.bench.load.alarm import make_alarm
from offramp.tools.bench.load.load_settings import LoadError, LoadSettings
from offramp.tools.bench.load.request_log import (
    Causes,
    RequestLog,
    RequestRecords,
    read_reply,
    status_of,
)
from offramp.tools.bench.load.server_access import ServerAccess
from offramp.tools.bench.load.shares import Share
from offramp.tools.bench.load.transports import RequestFailedError, Transport, make_transport

READY: Final = "ready"
"""Message to the generator after connecting; the generator answers with the start time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    """The part of a load that one process sends."""

    settings: LoadSettings
    share: Share
    requests: Mapping[int, bytes]
    """Serialised request of each sample, by the sample's index."""
    answer: str | None
    """Name of the output that is the answer; ``None`` if answers are not compared."""
    access: ServerAccess = field(default_factory=ServerAccess)
    """Encryption and credentials for the server."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Report:
    """The log of a process and its use of the processor."""

    records: RequestRecords
    causes: Mapping[str, int]
    """Number of failures by message, without the warm-up."""
    cpu_s: float
    """Processor time from the start to the last answer."""


def run_worker(task: Task, pipe: Connection) -> None:
    """Connect, send :data:`READY`, receive the start, send the load, send a :class:`Report`.

    After an error a ``str`` with the reason is sent instead.
    """
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            pipe.send(runner.run(_work(task, pipe)))
    except LoadError as error:
        pipe.send(str(error))
    except (EOFError, KeyboardInterrupt):
        pass  # the generator has ended, or is ending
    finally:
        pipe.close()


async def _work(task: Task, pipe: Connection) -> Report:
    transport = make_transport(
        task.settings.protocol, task.settings.asked_at, task.requests, task.access
    )
    try:
        await transport.open()
        # Existing objects are frozen: the collector need not scan them while requests wait.
        gc.collect()
        gc.freeze()
        pipe.send(READY)
        sender = Sender(task, transport, start_s=pipe.recv())
        if task.share.concurrency is None:
            return await sender.open_loop()
        return await sender.closed_loop(task.share.concurrency)
    finally:
        await transport.close()


class Sender:
    """Sends a process's share of a load from ``start_s`` on, and logs how each request ends."""

    def __init__(self, task: Task, transport: Transport, *, start_s: float) -> None:
        self._settings, self._share, self._answer = task.settings, task.share, task.answer
        self._transport = transport
        self._start_s = start_s
        self._log, self._causes = RequestLog(), Causes()
        self._under_way: set[asyncio.Task[None]] = set()
        self._mistake: BaseException | None = None

    async def open_loop(self) -> Report:
        """Send each request when it is due; send late requests immediately."""
        assert self._share.arrivals_s is not None
        due = zip(self._share.arrivals_s.tolist(), self._share.samples.tolist(), strict=True)
        arrival_s, sample = next(due)
        all_sent = asyncio.Event()

        def send_due() -> None:
            nonlocal arrival_s, sample
            now_s = self._now_s()
            while arrival_s <= now_s:
                self._send(arrival_s, sample)
                if (following := next(due, None)) is None:
                    all_sent.set()
                    return
                arrival_s, sample = following
            alarm.set(self._start_s + arrival_s)

        cpu_s = time.process_time()
        alarm = make_alarm(send_due)
        try:
            alarm.set(self._start_s + arrival_s)
            await all_sent.wait()
        finally:
            alarm.close()
        await self._drain()
        return self._report(cpu_s)

    async def closed_loop(self, concurrency: int) -> Report:
        """Keep ``concurrency`` requests in flight until the time is over."""
        samples = itertools.cycle(self._share.samples.tolist())

        async def keep_sending() -> None:
            while (now_s := self._now_s()) < self._settings.duration_s:
                sample = next(samples)
                line = self._log.open(sample=sample, intended_s=now_s)
                await self._call(line, now_s, sample)

        cpu_s = time.process_time()
        # A timer may ring slightly early, and requests sent before 0 are not counted.
        while (early_s := -self._now_s()) > 0.0:  # noqa: ASYNC110 - only time can be awaited here
            await asyncio.sleep(early_s)
        for _ in range(concurrency):
            self._start(keep_sending())
        await asyncio.sleep(self._settings.duration_s)
        await self._drain()
        return self._report(cpu_s)

    def _send(self, intended_s: float, sample: int) -> None:
        line = self._log.open(sample=sample, intended_s=intended_s)
        if len(self._under_way) < self._settings.max_in_flight:
            self._start(self._call(line, intended_s, sample))
        else:
            most = self._settings.max_in_flight
            self._blame(intended_s, f"not sent: {most} were under way (--max-in-flight)")

    async def _call(self, line: int, intended_s: float, sample: int) -> None:
        """Send one request and log how it ends; a cancelled request stays unanswered."""
        self._log.sent(line, self._now_s())
        try:
            reply = read_reply(await self._transport.ask(sample), self._answer)
        except RequestFailedError as error:
            self._log.failed(line, self._now_s(), status_of(error.code))
            self._blame(intended_s, str(error))
        except asyncio.CancelledError:
            limit_s = self._settings.drain_s
            self._blame(intended_s, f"no answer within {limit_s:g} s of the end (--drain-s)")
        except ValueError as error:
            self._log.failed(line, self._now_s(), Status.FAILED)
            self._blame(intended_s, f"unreadable response: {error}")
        else:
            self._log.answered(line, self._now_s(), reply)

    def _blame(self, intended_s: float, cause: str) -> None:
        if intended_s >= self._settings.warm_up_s:
            self._causes.count(cause)

    async def _drain(self) -> None:
        """Wait for answers, at most ``drain_s``; then cancel the requests in flight."""
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=self._settings.drain_s)
        withdrawn = list(self._under_way)
        for task in withdrawn:
            task.cancel()
        await asyncio.gather(*withdrawn, return_exceptions=True)
        if self._mistake is not None:
            raise self._mistake

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        if not task.cancelled() and (mistake := task.exception()) is not None:
            self._mistake = mistake

    def _now_s(self) -> float:
        """Return the seconds since the start of the load."""
        return time.monotonic() - self._start_s

    def _report(self, cpu_s: float) -> Report:
        return Report(
            cpu_s=time.process_time() - cpu_s,
            records=self._log.close(),
            causes=self._causes.to_json(),
        )


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's loop factory if it is installed, as in the server, else ``None``."""
    try:
        import uvloop  # noqa: PLC0415 - there is none on Windows
    except ImportError:
        return None
    return uvloop.new_event_loop
