"""A load on an engine in the same process, without the network and the server's front.

Open loop: arrivals do not wait for answers, and a latency begins when a request was due. Closed
loop, for throughput: a fixed number of requests is always in flight.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.calibration.data.dataset import Dataset
from offramp.engine.common.errors import CapacityError, DeadlineExceededError, EngineError
from offramp.engine.core import Engine
from offramp.tools.bench.common.outcomes import Outcomes, Status
from offramp.tools.bench.load.alarm import make_alarm
from offramp.tools.bench.load.request_log import Reply, RequestLog, percentiles_ms

COUNTED = 0.9
"""Share of a closed loop's time that is measured: its last part."""
_HEAD_START_S = 0.05
"""Seconds before the first arrival, in which the load is set up."""


def single_samples(dataset: Dataset, count: int) -> list[dict[str, NDArray[Any]]]:
    """Return the first samples of a data set, each as the inputs of its own request."""
    return [
        {name: np.ascontiguousarray(array[i : i + 1]) for name, array in dataset.inputs.items()}
        for i in range(min(count, len(dataset)))
    ]


def altered(sample: Mapping[str, NDArray[Any]], turn: int) -> dict[str, NDArray[Any]]:
    """Return a copy of a sample whose first element is changed a little, by ``turn`` small steps.

    Controllers count equal samples once, so a sample must be altered before it is sent again.
    """
    changed = {name: array.copy() for name, array in sample.items()}
    first = next(iter(changed.values()))
    first.flat[0] += first.dtype.type(turn if first.dtype.kind in "iu" else 1e-4 * turn)
    return changed


class Replay:
    """Sends samples to an engine one by one and notes how each request ends."""

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
        self._lateness_s = np.empty(0)

    def stages_s(self) -> float:
        """Total seconds that stages have run so far."""
        return sum(stage.run_s.total for stage in self._engine.statistics()[self._model].stages)

    async def answers(self) -> NDArray[np.int64]:
        """Class that the engine answered for each sample."""
        found = []
        for sample in self._samples:
            (answer,) = (await self._engine.infer(self._model, sample)).outputs.values()
            found.append(int(answer[0].argmax()))
        return np.array(found)

    async def lone(self, requests: int) -> tuple[float, float]:
        """Return mean seconds of requests sent one after the other: in total, and within stages."""
        before = self.stages_s()
        times = []
        for number in range(requests):
            started_s = time.monotonic()
            await self._engine.infer(self._model, self._samples[number % len(self._samples)])
            times.append(time.monotonic() - started_s)
        return float(np.mean(times)), (self.stages_s() - before) / requests

    def lateness_ms(self) -> dict[str, float]:
        """Return how late the last open loop sent its requests.

        The loop shares the engine's event loop.
        """
        return percentiles_ms(self._lateness_s)

    async def open_loop(
        self, arrivals_s: NDArray[np.float64], duration_s: float, slo_s: float | None
    ) -> Outcomes:
        """Send every sample when it is due; its deadline is ``slo_s`` after that."""
        count = len(arrivals_s)
        log = RequestLog()
        start_s = time.monotonic() + _HEAD_START_S
        due: list[float] = (arrivals_s + start_s).tolist()
        tasks: list[asyncio.Task[None]] = []
        sent = asyncio.Event()

        def send_due() -> None:
            now_s = time.monotonic()
            while len(tasks) < count and due[len(tasks)] <= now_s:
                number = len(tasks)
                deadline_s = None if slo_s is None else due[number] + slo_s
                line = log.open(
                    sample=number % len(self._samples), intended_s=float(arrivals_s[number])
                )
                tasks.append(asyncio.ensure_future(self._send(log, line, start_s, deadline_s)))
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
        records = log.close()
        self._lateness_s = records.lateness_s(0.0)
        return records.to_outcomes(self._reference, duration_s)

    async def closed_loop(self, concurrency: int, duration_s: float) -> float:
        """Keep requests in flight; return answers per second, without the first tenth."""
        return len(await self.saturate(concurrency, duration_s)) / (COUNTED * duration_s)

    async def saturate(self, concurrency: int, duration_s: float) -> NDArray[np.float64]:
        """Keep requests in flight; return the seconds of each, without the first tenth."""
        started_s = time.monotonic()
        counted_from_s = started_s + (1 - COUNTED) * duration_s
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

    async def _send(
        self, log: RequestLog, line: int, start_s: float, deadline_s: float | None
    ) -> None:
        log.sent(line, time.monotonic() - start_s)
        sample = self._samples[line % len(self._samples)]
        try:
            result = await self._engine.infer(self._model, sample, deadline_s=deadline_s)
        except EngineError as error:
            log.failed(line, time.monotonic() - start_s, _status(error))
        else:
            (answer,) = result.outputs.values()
            reply = Reply(int(result.exits[0]), bool(result.forced[0]), int(answer[0].argmax()))
            log.answered(line, time.monotonic() - start_s, reply)


def _status(error: EngineError) -> Status:
    match error:
        case DeadlineExceededError():
            return Status.EXPIRED
        case CapacityError():
            return Status.REJECTED
    return Status.FAILED
