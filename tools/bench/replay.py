"""A load on an engine in the same process: the server's inside, without the network.

Open loop: arrivals do not wait for answers, and latency counts from when a request was to be sent.
Closed loop, for throughput: so many requests are always under way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.engine.core import Engine
from offramp.engine.errors import CapacityError, DeadlineExceededError, EngineError
from offramp.engine.results import EngineResult
from offramp.tools.bench.load.alarm import make_alarm
from offramp.tools.bench.outcomes import Outcomes, Status

_HEAD_START_S = 0.05
"""Before the first arrival: the load is set up by then."""


class Replay:
    """Sends samples one by one and writes down what becomes of them."""

    def __init__(
        self,
        engine: Engine,
        model: str,
        samples: Sequence[Mapping[str, NDArray[Any]]],
        reference: NDArray[np.int64],
    ) -> None:
        """Take the data.

        Args:
            engine: Serves ``model``.
            model: Its name.
            samples: Inputs with a first dimension of 1; sent in turn.
            reference: [samples]: the source model's class of each.
        """
        self._engine = engine
        self._model = model
        self._samples = samples
        self._reference = reference
        self._late_s: list[float] = []

    def lateness_ms(self) -> dict[str, float]:
        """How late the last open loop sent its requests: it shares the engine's event loop."""
        p50, p99 = np.quantile(self._late_s, (0.5, 0.99)) * 1e3
        return {"p50": float(p50), "p99": float(p99), "max": max(self._late_s) * 1e3}

    async def open_loop(
        self, arrivals_s: NDArray[np.float64], duration_s: float, slo_s: float | None
    ) -> Outcomes:
        """Send every sample when it is due; its deadline is ``slo_s`` after that."""
        count = len(arrivals_s)
        log = _Log(count)
        self._late_s = []
        start_s = time.monotonic() + _HEAD_START_S
        due: list[float] = (arrivals_s + start_s).tolist()
        tasks: list[asyncio.Task[None]] = []
        sent = asyncio.Event()

        def send_due() -> None:
            now_s = time.monotonic()
            while len(tasks) < count and due[len(tasks)] <= now_s:
                number = len(tasks)
                deadline_s = None if slo_s is None else due[number] + slo_s
                tasks.append(
                    asyncio.ensure_future(self._send(log, number, due[number], deadline_s))
                )
            if len(tasks) < count:
                alarm.set(due[len(tasks)])
            else:
                sent.set()

        alarm = make_alarm(send_due)
        try:
            alarm.set(due[0])
            await sent.wait()
        finally:
            alarm.close()
        await asyncio.gather(*tasks)
        return log.outcomes(arrivals_s, duration_s)

    async def closed_loop(self, concurrency: int, duration_s: float) -> float:
        """Keep requests under way; gives answers a second, the first tenth left out."""
        return len(await self.saturate(concurrency, duration_s)) / (0.9 * duration_s)

    async def saturate(self, concurrency: int, duration_s: float) -> NDArray[np.float64]:
        """Keep requests under way; gives the seconds that each took, the first tenth left out."""
        started_s = time.monotonic()
        counted_from_s = started_s + 0.1 * duration_s
        end_s = started_s + duration_s
        took_s: list[float] = []

        async def keep_one(first: int) -> None:
            number, sent_s = first, time.monotonic()
            while sent_s < end_s:
                await self._engine.infer(self._model, self._samples[number % len(self._samples)])
                number += concurrency
                now_s = time.monotonic()
                if counted_from_s <= now_s < end_s:
                    took_s.append(now_s - sent_s)
                sent_s = now_s

        await asyncio.gather(*(keep_one(first) for first in range(concurrency)))
        return np.array(took_s)

    async def _send(self, log: _Log, number: int, due_s: float, deadline_s: float | None) -> None:
        sample = number % len(self._samples)
        self._late_s.append(time.monotonic() - due_s)
        try:
            result = await self._engine.infer(
                self._model, self._samples[sample], deadline_s=deadline_s
            )
        except DeadlineExceededError:
            log.status[number] = Status.EXPIRED
        except CapacityError:
            log.status[number] = Status.REJECTED
        except EngineError:
            log.status[number] = Status.FAILED
        else:
            log.answered(number, result, time.monotonic() - due_s, int(self._reference[sample]))


class _Log:
    """What became of each request."""

    def __init__(self, count: int) -> None:
        self.status = np.full(count, Status.UNANSWERED, np.uint8)
        self._latency_s = np.full(count, np.nan)
        self._exit = np.zeros(count, np.int16)
        self._forced = np.zeros(count, np.bool_)
        self._agrees = np.full(count, -1, np.int8)

    def answered(self, number: int, result: EngineResult, latency_s: float, right: int) -> None:
        (answer,) = result.outputs.values()
        self.status[number] = Status.OK
        self._latency_s[number] = latency_s
        self._exit[number] = result.exits[0]
        self._forced[number] = result.forced[0]
        self._agrees[number] = int(answer[0].argmax()) == right

    def outcomes(self, arrivals_s: NDArray[np.float64], duration_s: float) -> Outcomes:
        return Outcomes(
            intended_s=arrivals_s,
            latency_s=self._latency_s,
            status=self.status,
            exit=self._exit,
            forced=self._forced,
            agrees=self._agrees,
            duration_s=duration_s,
        )
