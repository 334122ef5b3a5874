"""Holds a backend against ONNX Runtime on the CPU, over everything that a scheduler may do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import ActiveExit, Bundle, ExitPolicy
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.stages.backend_protocol import Backend, Rows, Slot, TensorBatch
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import Plan, make_plan

Inputs = Callable[[int, int], Mapping[str, NDArray[Any]]]
"""Makes the model's inputs: (rows, seed)."""


def random_policy(bundle: Bundle, rng: np.random.Generator) -> ExitPolicy:
    """Some of the exits, at thresholds that some samples reach and others do not."""
    chosen = np.flatnonzero(rng.random(len(bundle.manifest.exits)) < 0.7)
    classes = bundle.manifest.answer.classes
    active = [
        ActiveExit(exit=int(index), threshold=float(rng.uniform(1 / classes, 1.0)))
        for index in chosen
    ]
    return ExitPolicy(version=1, active=tuple(active))


@dataclass
class Pair:
    """The same rows on both sides."""

    ours: TensorBatch
    cpu: TensorBatch


@dataclass
class Waiting:
    """Buffered rows, and the stage that they wait for."""

    stage: int
    pair: Pair


@dataclass
class Twin:
    """Runs stages on both sides, in the same batches, and compares all that comes out."""

    ours: Pipeline
    cpu: Pipeline
    slot: Slot
    rng: np.random.Generator
    tolerance: float = 0.0
    """Greatest difference of an answer, relative to the largest; 0: bit for bit."""
    cpu_slot: Slot = field(init=False)
    stages: int = 0
    """Run so far."""
    left: int = 0
    """Rows that left at an exit."""

    def __post_init__(self) -> None:
        self.cpu_slot = self.cpu.backend.open_slot()

    def new(self, inputs: Mapping[str, NDArray[Any]]) -> Pair:
        """Upload on both sides."""
        return Pair(self.slot.upload(inputs), self.cpu_slot.upload(inputs))

    def step(self, stage: int, pair: Pair) -> Pair | Waiting | None:
        """Run a stage; those that go on are kept in the slot or buffered, or there are none."""
        ours, cpu = (
            self.ours.step(self.slot, stage, pair.ours),
            self.cpu.step(self.cpu_slot, stage, pair.cpu),
        )
        self.stages += 1
        self._compare(ours.result.answer, cpu.result.answer)
        if cpu.result.carry is None and not self.tolerance:
            # of the model's own answer: nothing is decided by it, and on the CPU it is a softmax
            # of ONNX Runtime's, which sums in another order than the kernel
            np.testing.assert_array_max_ulp(ours.result.confidence, cpu.result.confidence, maxulp=4)
        else:
            self._compare(ours.result.confidence, cpu.result.confidence)
        if not self.tolerance:
            np.testing.assert_array_equal(ours.exited, cpu.exited)
        rows = self._going_on(cpu.exited, last=cpu.result.carry is None)
        self.left += len(pair.cpu) - len(rows)
        if not len(rows):
            return None
        assert ours.result.carry is not None
        assert cpu.result.carry is not None
        if self.rng.random() < 0.3:
            return Waiting(
                stage + 1,
                Pair(
                    self.slot.buffer(ours.result.carry, rows),
                    self.cpu_slot.buffer(cpu.result.carry, rows),
                ),
            )
        return Pair(
            self.slot.select(ours.result.carry, rows),
            self.cpu_slot.select(cpu.result.carry, rows),
        )

    def merge(self, parts: list[Pair]) -> Pair:
        """Some rows of buffered batches, on both sides."""
        chosen = [self._some(len(part.cpu)) for part in parts]
        return Pair(
            self.slot.merge([(p.ours, rows) for p, rows in zip(parts, chosen, strict=True)]),
            self.cpu_slot.merge([(p.cpu, rows) for p, rows in zip(parts, chosen, strict=True)]),
        )

    def run(self, inputs: Inputs, batches: int, *, rows: int) -> None:
        """Run batches of up to so many rows, each to its end, and what was buffered among them."""
        waiting: list[Waiting] = []
        for _ in range(batches):
            size = int(self.rng.integers(1, rows + 1))
            waiting += self.follow(0, self.new(inputs(size, int(self.rng.integers(1 << 30)))))
            while waiting and self.rng.random() < 0.6:
                stage = waiting[0].stage
                ready = [w for w in waiting if w.stage == stage][:2]
                waiting = [w for w in waiting if w not in ready]
                waiting += self.follow(stage, self.merge([w.pair for w in ready]))

    def follow(self, stage: int, pair: Pair) -> list[Waiting]:
        """Run a batch until no row is left in it; return the buffered rows."""
        while True:
            after = self.step(stage, pair)
            if after is None:
                return []
            if isinstance(after, Waiting):
                return [after]
            stage, pair = stage + 1, after

    def _going_on(self, exited: NDArray[np.bool_], *, last: bool) -> Rows:
        """Return rows below the threshold; sometimes fewer, as if forced, or more, as in audits."""
        going = ~exited
        if last:
            return np.flatnonzero(np.zeros(len(exited), np.bool_))
        manner = self.rng.random()
        if manner < 0.15:
            going &= self.rng.random(len(going)) < 0.5
        elif manner < 0.3:
            going |= self.rng.random(len(going)) < 0.5
        return np.flatnonzero(going)

    def _some(self, rows: int) -> Rows:
        if self.rng.random() < 0.5:
            return np.arange(rows)
        return np.sort(self.rng.choice(rows, int(self.rng.integers(1, rows + 1)), replace=False))

    def _compare(self, ours: NDArray[Any] | None, cpu: NDArray[Any] | None) -> None:
        if cpu is None:
            assert ours is None
            return
        assert ours is not None
        assert ours.dtype == cpu.dtype
        if not self.tolerance:
            np.testing.assert_array_equal(ours, cpu)
            return
        scale = max(float(np.abs(cpu).max(initial=0.0)), 1.0)
        np.testing.assert_allclose(ours, cpu, rtol=0, atol=self.tolerance * scale)


def twin(
    backend: Backend,
    slot: Slot,
    bundle: Bundle,
    *,
    seed: int,
    plan: Plan | None = None,
    tolerance: float = 0.0,
) -> Twin:
    """Both sides under a policy of the seed's choice, or a given plan."""
    rng = np.random.default_rng(seed)
    plan = plan or make_plan(bundle, random_policy(bundle, rng))
    cpu = Pipeline(OnnxRuntimeBackend(), plan)
    return Twin(Pipeline(backend, plan), cpu, slot, rng, tolerance)


__all__ = ["Inputs", "Pair", "Twin", "Waiting", "random_policy", "twin"]
