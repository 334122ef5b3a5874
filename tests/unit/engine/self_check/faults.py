"""Faults that a device, a runtime or our own code could have, planted in backends that have none.

Those of slots are on ONNX Runtime's; those of CUDA are in the fake driver and its kernels.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.cuda_fakes import FakeExecutable, FakeExecutables

from offramp.certify import leaves
from offramp.engine.answers.exit_check import confidence_of
from offramp.engine.backends import Backend, StageResult, TensorBatch
from offramp.engine.backends.host import HostBatch, HostSlot
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.common.errors import BackendError
from offramp.engine.cuda.cuda_backend import CudaBackend
from offramp.engine.cuda.driver import StreamEvent
from offramp.engine.kernels.kernel_arguments import Launch
from offramp.engine.self_check.slots import THREAD_NAME
from offramp.engine.stages.backend_protocol import Rows
from offramp.testing import cuda_handles, cuda_kernels
from offramp.testing.cuda_driver import FakeDriver
from offramp.testing.cuda_memory import ByteRange

LEAKED_BYTES = 1 << 17


class SlotMaker(OnnxRuntimeBackend):
    """Opens slots of another class."""

    def __init__(self, kind: Callable[[], HostSlot]) -> None:
        super().__init__()
        self._kind = kind

    def open_slot(self) -> HostSlot:
        return self._kind()


class ReversesClasses(HostSlot):
    """Reverses its answers: same confidences, wrong classes."""

    def run(self, stage: Any, batch: TensorBatch, threshold: float | None = None) -> StageResult:
        result = super().run(stage, batch, threshold)
        return result if result.answer is None else result._replace(answer=result.answer[:, ::-1])


class OverflowsAnswers(HostSlot):
    """Returns infinite answers."""

    def run(self, stage: Any, batch: TensorBatch, threshold: float | None = None) -> StageResult:
        result = super().run(stage, batch, threshold)
        infinite = None if result.answer is None else result.answer + np.float32(np.inf)
        return result._replace(answer=infinite)


class ScalesCarry(HostSlot):
    """Hands on activations that are 1 % too large."""

    def run(self, stage: Any, batch: TensorBatch, threshold: float | None = None) -> StageResult:
        result = super().run(stage, batch, threshold)
        if result.carry is None:
            return result
        assert isinstance(result.carry, HostBatch)
        scaled = {name: array * np.float32(1.01) for name, array in result.carry.tensors.items()}
        return result._replace(carry=HostBatch(scaled, result.carry.rows))


class SpreadsNan(HostSlot):
    """Sums over the batch somewhere: one row that is no number makes all of them none."""

    def run(self, stage: Any, batch: TensorBatch, threshold: float | None = None) -> StageResult:
        result = super().run(stage, batch, threshold)
        if result.answer is None or np.isfinite(result.answer).all():
            return result
        answer = result.answer + np.float32(np.nan)
        return result._replace(answer=answer, confidence=confidence_of(answer, stage.spec.form))


class IsSureOfNan(HostSlot):
    """Computes a maximum that ignores NaN, as the hardware does."""

    def run(self, stage: Any, batch: TensorBatch, threshold: float | None = None) -> StageResult:
        result = super().run(stage, batch, threshold)
        if result.answer is None:
            return result
        none = np.isnan(result.answer).any(axis=1)
        return result._replace(confidence=np.where(none, np.float32(1), result.confidence))


class PermutesRows(HostSlot):
    """Brings those that go on together in another order."""

    def select(self, batch: TensorBatch, rows: Rows) -> HostBatch:
        return super().select(batch, rows if len(rows) == len(batch) else rows[::-1])

    def buffer(self, batch: TensorBatch, rows: Rows) -> HostBatch:
        return HostSlot().buffer(batch, rows)

    def merge(self, parts: Sequence[tuple[TensorBatch, Rows]]) -> HostBatch:
        return HostSlot().merge(parts)


class LosesARow(HostSlot):
    """Merges all rows but the last."""

    def merge(self, parts: Sequence[tuple[TensorBatch, Rows]]) -> HostBatch:
        merged = super().merge(parts)
        few = max(1, len(merged) - 1)
        return HostBatch({name: array[:few] for name, array in merged.tensors.items()}, few)


class Leaks(HostSlot):
    """Keeps some memory with every run."""

    kept: list[mmap.mmap]

    def run(self, stage: Any, batch: TensorBatch, threshold: float | None = None) -> StageResult:
        # Of its own: what other tests have freed could hold all that leaks.
        self.kept.append(mmap.mmap(-1, LEAKED_BYTES))
        self.kept[-1].write(bytes([1]) * LEAKED_BYTES)
        return super().run(stage, batch, threshold)


class KeepsDescriptor(HostSlot):
    """Opens a descriptor, and does not close it."""

    opened: list[int]

    def __init__(self) -> None:
        self.opened.append(os.open(os.devnull, os.O_RDONLY))


class DoesNotWait(HostSlot):
    """Shares the memory of inputs with other slots, and does not wait until they are read."""

    place: dict[str, HostBatch]
    both: threading.Barrier

    def run(self, stage: Any, batch: TensorBatch, threshold: float | None = None) -> StageResult:
        assert isinstance(batch, HostBatch)
        side_by_side = threading.current_thread().name.startswith(THREAD_NAME)
        if not side_by_side or stage.spec.index:
            return super().run(stage, batch, threshold)
        self.place["inputs"] = batch
        self.both.wait()
        there = self.place["inputs"].tensors  # whoever came last
        self.both.wait()
        read = {n: np.resize(there[n], array.shape) for n, array in batch.tensors.items()}
        return super().run(stage, HostBatch(read, batch.rows), threshold)


class DoesNotRecover(HostSlot):
    """Answers nonsense once a batch has failed."""

    def __init__(self) -> None:
        self.failed = False

    def run(self, stage: Any, batch: TensorBatch, threshold: float | None = None) -> StageResult:
        try:
            result = super().run(stage, batch, threshold)
        except BackendError:
            self.failed = True
            raise
        if self.failed and result.answer is not None:
            return result._replace(answer=np.zeros_like(result.answer))
        return result


class NeverEnds(HostSlot):
    """Waits for what does not come."""

    comes: threading.Event

    def run(self, stage: Any, batch: TensorBatch, threshold: float | None = None) -> StageResult:
        self.comes.wait()
        return super().run(stage, batch, threshold)


@contextmanager
def leaking() -> Iterator[Backend]:
    kept: list[mmap.mmap] = []
    yield SlotMaker(type("Leaking", (Leaks,), {"kept": kept}))
    kept.clear()


@contextmanager
def keeping_descriptors() -> Iterator[Backend]:
    opened: list[int] = []
    yield SlotMaker(type("Keeping", (KeepsDescriptor,), {"opened": opened}))
    for descriptor in opened:
        os.close(descriptor)


@contextmanager
def not_waiting() -> Iterator[Backend]:
    shared: Mapping[str, Any] = {"place": {}, "both": threading.Barrier(2)}
    yield SlotMaker(type("NotWaiting", (DoesNotWait,), dict(shared)))


@contextmanager
def comparing_strictly() -> Iterator[Backend]:
    """A sample leaves above the threshold only."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            "offramp.engine.stages.pipeline.leaves",
            lambda sure, threshold: leaves(sure, np.nextafter(threshold, np.float32(2))),
        )
        yield OnnxRuntimeBackend()


def cuda(driver: FakeDriver, factory: FakeExecutables | None = None) -> CudaBackend:
    factory = factory or FakeExecutables(driver=driver)
    return CudaBackend(factory, driver, kernels=b"cubin")


@contextmanager
def stale_graphs() -> Iterator[Backend]:
    """A graph gives what its stage gave when it was captured."""
    last: dict[Any, dict[str, NDArray[np.uint8]]] = {}
    enqueue = FakeExecutable.enqueue

    def stale(self: FakeExecutable, inputs: Any, addresses: Any, stream: Any, *, graph: Any = None):  # type: ignore[no-untyped-def]
        factory = self._prepared.factory
        captures = threading.get_ident() in factory.driver._capturing
        enqueue(self, inputs, addresses, stream, graph=graph)
        outputs = self.output_shapes(inputs)
        key = (id(self), next(iter(inputs.values())))
        driver = factory.driver

        def after() -> None:
            for name in outputs:
                size = self._bytes(name, outputs)
                if captures:
                    driver.write(addresses[name], size)[:] = last[key][name]
                else:
                    last.setdefault(key, {})[name] = driver.read(addresses[name], size).copy()

        driver.call(stream, after)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(FakeExecutable, "enqueue", stale)
        yield cuda(FakeDriver())


@contextmanager
def compaction_off_by_one() -> Iterator[Backend]:
    """Beyond the rows of one block's pass, survivors are copied one row too far."""
    real = cuda_kernels._stage_end

    def shifted(launch: Launch, use: cuda_kernels.Use) -> None:
        real(launch, use)
        end = launch.arguments
        rows = int(end["rows"])
        if rows <= 256:
            return
        for source, target, row_bytes in cuda_kernels._tensors(end):
            content = use(ByteRange(source, rows * row_bytes, writes=False))
            wrong = np.roll(content.reshape(rows, row_bytes), 1, axis=0)
            use(ByteRange(target, rows * row_bytes, writes=True))[:] = wrong.reshape(-1)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cuda_kernels, "_stage_end", shifted)
        yield cuda(FakeDriver())


@contextmanager
def kernel_sure_of_nan() -> Iterator[Backend]:
    """The kernel's maximum passes NaN over."""

    def sure(answer: NDArray[Any], form: Any) -> NDArray[np.float32]:
        found = confidence_of(answer, form)
        return np.where(np.isnan(answer).any(axis=1), np.float32(1), found)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cuda_kernels, "confidence_of", sure)
        yield cuda(FakeDriver())


@contextmanager
def kernel_comparing_strictly() -> Iterator[Backend]:
    """The kernel lets rows leave above the threshold only."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cuda_kernels, "exits", lambda sure, threshold: sure > np.float32(threshold))
        yield cuda(FakeDriver())


@contextmanager
def streams_left_open() -> Iterator[Backend]:
    """Streams are not given back."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cuda_handles.FakeStream, "close", lambda self: None)
        yield cuda(FakeDriver())


class LeakyDriver(FakeDriver):
    """Loses some device memory with every wait; gives it back only when it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: list[int] = []

    def synchronize(self, event: StreamEvent) -> None:
        super().synchronize(event)
        self.lost.append(self.allocate(256))

    def close(self) -> None:
        with self.current():
            while self.lost:
                self.free(self.lost.pop())
        super().close()


@contextmanager
def leaking_device() -> Iterator[Backend]:
    yield cuda(LeakyDriver())


@contextmanager
def of(kind: type[HostSlot]) -> Iterator[Backend]:
    yield SlotMaker(kind)
