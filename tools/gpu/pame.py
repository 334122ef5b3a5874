"""Stages against the source model as one engine: PAME's figures 9 and 17.

Which samples leave is replayed (:mod:`offramp.tools.gpu.staged`); all times are measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Bundle
from offramp.calibration.measure.paired import BatchRunner
from offramp.engine.stages.backend_protocol import Slot
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import Mode, make_plan
from offramp.tools.bench.common.compare import baseline_of, compare
from offramp.tools.gpu.machine import Machine
from offramp.tools.gpu.models import GOES_ON, BenchModel, Recorded
from offramp.tools.gpu.staged import REPLAY
from offramp.tools.gpu.timing import COPIES_IN, PARTS, STAGE_ENDS, TimedDriver

Tensors = Mapping[str, NDArray[Any]]

BARE = "bare"
"""Name of the system that is the source model's engine without our runtime."""
NOBODY_LEAVES, SOURCE_MODEL = "nobody leaves", "source model"
_RUNS_UNTIL_STEADY = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the measurements of each model."""

    batches: tuple[int, ...] = (16, 32, 64)
    """Batch sizes, rising (PAME, table 1)."""
    go_on: tuple[float | Recorded, ...] = (0.2, 0.3, 0.5)
    """Shares of samples that continue after the first exit, or recorded confidences."""
    rounds: int = 7
    """Number of rounds, over which medians are taken."""
    batches_a_round: int = 15
    """Batches of the largest size in a round; smaller sizes get more batches, with equally many
    samples."""
    graphs: bool = True
    """True if stages are captured into CUDA graphs."""
    seed: int = 0

    @property
    def samples(self) -> int:
        """Number of samples that all rounds need."""
        return self.rounds * self.batches_a_round * self.batches[-1]


def latencies(
    machine: Machine, model: BenchModel, bundle: Bundle, settings: Settings
) -> list[dict[str, Any]]:
    """Compare mean and tail latency, for every share that continues and every batch size.

    Returns:
        JSON values: a row for every system, size and share.
    """
    found: list[dict[str, Any]] = []
    most = settings.batches[-1]
    made = machine.ingredients(bundle.path, graphs=settings.graphs, max_rows=most)
    backend = made.backend(graphs=settings.graphs)
    try:
        for share in settings.go_on:
            data = model.samples(settings.samples, share, seed=settings.seed)
            with ExitStack() as stack:
                others: dict[str, BatchRunner] = {}
                bare = machine.bare(bundle, settings.batches)
                if bare is not None:
                    others[BARE] = stack.enter_context(bare)
                rows = compare(
                    bundle,
                    backend,
                    data,
                    threads=1,
                    batch_sizes=settings.batches,
                    rounds=settings.rounds,
                    samples=settings.samples,
                    others=others,
                )
            found += [{"go_on_replayed": share_name(share), **asdict(row)} for row in rows]
    finally:
        backend.close()
    return [{**row, "baseline": baseline_of(backend, 1)} for row in found]


def share_name(share: float | Recorded) -> str:
    """Return such as ``30%``, or the name for recorded confidences."""
    return "recorded" if isinstance(share, Recorded) else f"{share:.0%}"


@dataclass(slots=True)
class _Stage:
    """Measurements of a stage, one number per batch."""

    rows: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    parts_ms: list[Mapping[str, float]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        host = statistics.median(self.host_ms)
        parts = {
            part: statistics.median(times.get(part, 0.0) for times in self.parts_ms)
            for part in PARTS
        }
        device = sum(parts.values()) - parts[COPIES_IN]
        return {
            "mean_rows": statistics.mean(self.rows),
            "measured_host_ms": host,
            "measured_parts_ms": {part: ms for part, ms in parts.items() if ms},
            "python_us": (host - device) * 1e3,
            "stage_end_share": parts[STAGE_ENDS] / device if device else 0.0,
        }


def breakdown(
    machine: Machine, model: BenchModel, bundle: Bundle, settings: Settings
) -> list[dict[str, Any]]:
    """Divide the time of batches by stage, into parts of the device's and the host's time.

    A stage's time on the host is from its call until its surviving rows are chosen; it is measured
    on another backend than the device's time, which reads events. Both run the same batches in
    turn. Python's time is the host's time of a stage minus the device's time, in which copies of
    inputs do not count: the first stage's time includes the host's wait for these copies.

    Returns:
        JSON values: cases for every batch size: with each share, without leaving rows, and for the
        source model.
    """
    most = settings.batches[-1]
    made = [
        machine.ingredients(bundle.path, graphs=settings.graphs, max_rows=most) for _ in range(2)
    ]
    found = []
    with ExitStack() as stack:
        plain = made[0].backend(graphs=settings.graphs)
        stack.callback(plain.close)
        timed, driver = made[1].timed(graphs=settings.graphs)
        stack.callback(timed.close)
        plans = {Mode.LEAVE: make_plan(bundle), Mode.OFF: make_plan(bundle, mode=Mode.OFF)}
        on_host = {mode: Pipeline(plain, plan) for mode, plan in plans.items()}
        on_device = {mode: Pipeline(timed, plan) for mode, plan in plans.items()}
        slots = [plain.open_slot(), timed.open_slot()]
        for slot in slots:
            stack.callback(slot.close)
        cases: dict[str, tuple[Mode, float | Recorded]] = {
            **{share_name(share): (Mode.LEAVE, share) for share in settings.go_on},
            NOBODY_LEAVES: (Mode.LEAVE, 1.0),
            SOURCE_MODEL: (Mode.OFF, 1.0),
        }
        for size in settings.batches:
            for name, (mode, share) in cases.items():
                batches = _batches(model, settings, size, share, alike=name == NOBODY_LEAVES)
                case = _Case(on_host[mode], slots[0], on_device[mode], slots[1], driver)
                found.append({"case": name, "batch": size, **case.measure(batches)})
    return found


def _batches(
    model: BenchModel,
    settings: Settings,
    size: int,
    share: float | Recorded,
    *,
    alike: bool,
) -> list[Tensors]:
    count = settings.rounds * settings.batches_a_round
    data = model.samples(count * size, share, seed=settings.seed)
    batches = [data.take(slice(i * size, (i + 1) * size)) for i in range(count)]
    if alike:  # no row leaves at a later exit either
        for batch in batches:
            batch[REPLAY] = np.full_like(batch[REPLAY], GOES_ON)
    return list(batches)


class _Case:
    """The same batches on two backends, for times of the host and of the device."""

    def __init__(
        self,
        host: Pipeline,
        host_slot: Slot,
        device: Pipeline,
        device_slot: Slot,
        driver: TimedDriver,
    ) -> None:
        self._host, self._host_slot = host, host_slot
        self._device, self._device_slot = device, device_slot
        self._driver = driver
        self._stages = [_Stage() for _ in host.plan.stages]
        self._uploads_ms: list[float] = []
        self._batches_ms: list[float] = []

    def measure(self, batches: Sequence[Tensors]) -> dict[str, Any]:
        self._warm_up(batches[0])
        for batch in batches:
            self._on_host(batch)
            self._on_device(batch)
        return {
            "batches": len(batches),
            "measured_batch_ms": statistics.median(self._batches_ms),
            "measured_upload_host_ms": statistics.median(self._uploads_ms),
            "stages": [stage.to_json() for stage in self._stages if stage.host_ms],
        }

    def _warm_up(self, batch: Tensors) -> None:
        size = len(next(iter(batch.values())))
        for rows in self._host.backend.sizes(size):
            some = {name: array[:rows] for name, array in batch.items()}
            for pipeline, slot in (
                (self._host, self._host_slot),
                (self._device, self._device_slot),
            ):
                for _ in range(_RUNS_UNTIL_STEADY):
                    pipeline.warm_up(slot, some)
        self._driver.spans.take()

    def _on_host(self, tensors: Tensors) -> None:
        began = time.perf_counter()
        batch = self._host_slot.upload(tensors)
        self._uploads_ms.append((time.perf_counter() - began) * 1e3)
        for index, stage in enumerate(self._stages):
            started = time.perf_counter()
            step = self._host.step(self._host_slot, index, batch)
            going_on = np.flatnonzero(~step.exited)
            if step.result.carry is not None and len(going_on):
                batch = self._host_slot.select(step.result.carry, going_on)
            stage.host_ms.append((time.perf_counter() - started) * 1e3)
            if not len(going_on):
                break
        self._batches_ms.append((time.perf_counter() - began) * 1e3)

    def _on_device(self, tensors: Tensors) -> None:
        batch = self._device_slot.upload(tensors)
        for index, stage in enumerate(self._stages):
            rows = len(batch)
            step = self._device.step(self._device_slot, index, batch)
            stage.rows.append(rows)
            stage.parts_ms.append(self._driver.spans.take())
            going_on = np.flatnonzero(~step.exited)
            if step.result.carry is None or not len(going_on):
                return
            batch = self._device_slot.select(step.result.carry, going_on)
