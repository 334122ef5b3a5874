"""Start of the sending processes, and collection of their reports."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Final, TypeVar

from offramp.tools.bench.load.load_settings import LoadError
from offramp.tools.bench.load.request_log import Causes, RequestRecords, merge, percentiles_ms
from offramp.tools.bench.load.sender import READY, Report, Task, run_worker

_START_LIMIT_S: Final = 120.0
"""Time limit, in seconds, for all processes to import and connect."""
_HEAD_START_S: Final = 0.2
"""Time from when all processes are ready to the start of the load: longer than notifying them
takes."""
_RESULT_LIMIT_S: Final = 60.0
"""Time limit for the processes' results, in seconds after the load and its drain."""
_TICK_S: Final = 0.1

_Expected = TypeVar("_Expected")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GeneratedLoad:
    """Measurements of the requests of one load."""

    records: RequestRecords
    causes: dict[str, int]
    """Number of failures by message, without the warm-up, the most frequent first."""
    cpu_us_per_request: float
    """Processor time of the generator."""
    lateness_ms: dict[str, float] | None
    """``p50``, ``p99`` and ``max`` of the delay between due time and sending, without the warm-up;
    ``None`` in a closed loop, where requests have no due time."""


def generate(
    tasks: Sequence[Task], *, on_tick: Callable[[float], None] = lambda _: None
) -> GeneratedLoad:
    """Run ``tasks``, which have the same settings, each in a separate process.

    ``on_tick`` is called several times a second with the seconds since the load began. Raises
    LoadError if a process could not connect, or ended.
    """
    settings = tasks[0].settings
    limit_s = settings.duration_s + settings.drain_s + _RESULT_LIMIT_S
    with _started(tasks) as crew:
        _gather(crew, str, limit_s=_START_LIMIT_S, on_tick=lambda: None)
        start_s = time.monotonic() + _HEAD_START_S
        for _, pipe in crew:
            pipe.send(start_s)
        reports = _gather(
            crew, Report, limit_s=limit_s, on_tick=lambda: on_tick(time.monotonic() - start_s)
        )
    records = merge([report.records for report in reports])
    lateness_s = records.lateness_s(settings.warm_up_s)
    open_loop = settings.concurrency is None and lateness_s.size
    cpu_s = sum(report.cpu_s for report in reports)
    return GeneratedLoad(
        records=records,
        causes=Causes.merge([report.causes for report in reports]).to_json(),
        cpu_us_per_request=cpu_s / max(1, len(records.sample)) * 1e6,
        lateness_ms=percentiles_ms(lateness_s) if open_loop else None,
    )


_Crew = list[tuple[BaseProcess, Connection]]


@contextmanager
def _started(tasks: Sequence[Task]) -> Iterator[_Crew]:
    """Yield processes and the pipes to them; always end the processes afterwards."""
    context = multiprocessing.get_context("spawn")
    crew: _Crew = []
    try:
        for task in tasks:
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(
                target=run_worker, args=(task, theirs), daemon=True
            )
            crew.append((process, ours))
            process.start()
            theirs.close()
        yield crew
    finally:
        for process, pipe in crew:
            pipe.close()
            if process.pid is not None:
                process.join(1.0)
                process.kill()
                process.join()
                process.close()


def _gather(
    crew: _Crew, expected: type[_Expected], *, limit_s: float, on_tick: Callable[[], None]
) -> list[_Expected]:
    """Return one message from each process, in the order of the processes."""
    end_s = time.monotonic() + limit_s
    found: dict[Connection, _Expected] = {}
    missing = {pipe: process for process, pipe in crew}
    while missing:
        for pipe in wait(list(missing), timeout=_TICK_S):
            assert isinstance(pipe, Connection)
            found[pipe] = _receive(missing.pop(pipe), pipe, expected)
        on_tick()
        if missing and time.monotonic() > end_s:
            raise LoadError(
                f"{len(missing)} of {len(crew)} generator processes did not answer within "
                f"{limit_s:.0f} s; is the machine overloaded? Give fewer --processes"
            )
    return [found[pipe] for _, pipe in crew]


def _receive(process: BaseProcess, pipe: Connection, expected: type[_Expected]) -> _Expected:
    try:
        message: Any = pipe.recv()
    except (EOFError, ConnectionError):
        process.join(5.0)
        raise LoadError(
            f"a generator process ended (exit code {process.exitcode}) before it had sent its "
            "load; what it wrote above says why"
        ) from None
    if isinstance(message, str) and message != READY:
        raise LoadError(message)
    assert isinstance(message, expected)
    return message
