"""A backend without a model, for tests of the code around it.

The fake model's input ``script`` [n, stages, classes] holds the answer of each stage for each row,
so that a test writes down the behaviour that it needs. Failures and durations can be scripted, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Bundle
from offramp.engine.answers.exit_check import confidence_of
from offramp.engine.common.errors import BackendError
from offramp.engine.stages.backend_protocol import Rows, StageResult, TensorBatch
from offramp.engine.stages.plan import StageSpec

SCRIPT = "script"
"""Name of the fake model's input."""

BUFFERED = -1
"""Epoch of a batch that does not belong to a slot."""


@dataclass(frozen=True, slots=True)
class FakeBatch:
    """Rows of the script; the epoch detects use of the batch after the slot's next upload."""

    script: NDArray[Any]
    epoch: int
    """Number of uploads of the slot; :data:`BUFFERED` stays valid after all of them."""

    def __len__(self) -> int:
        return len(self.script)


@dataclass(slots=True, kw_only=True)
class FakeBackend:
    """A backend that answers from a script.

    Use of a batch after its slot's next ``upload`` raises BackendError. So tests find misuse of a
    slot's buffers that a CPU backend would not notice.
    """

    on_run: Callable[[int, int], None] = lambda _stage, _rows: None
    """Function that every run calls with (stage, rows). The function may wait for an event, advance
    a clock, or raise :class:`BackendError`."""
    name: str = "fake"
    on_cpu: bool = True
    """Whether the backend counts as a CPU backend; tests of behaviour on GPUs set this to false."""
    open_slots: int = field(default=0, init=False)
    runs: list[tuple[int, int]] = field(default_factory=list, init=False)
    """Pairs (stage, rows) of all runs, in order."""

    def as_computed(self, bundle: Bundle) -> Bundle:
        """Return the bundle itself."""
        return bundle

    def sizes(self, most: int) -> Sequence[int]:
        """Return all sizes from 1 to ``most``."""
        return range(1, most + 1)

    def missing(self, stage: StageSpec) -> None:
        """Return ``None``: nothing has to be built."""

    def prepare(self, spec: StageSpec) -> StageSpec:
        """Return the stage unchanged."""
        return spec

    def open_slot(self) -> FakeSlot:
        """Return a new slot, and count it as open."""
        self.open_slots += 1
        return FakeSlot(self)

    def close(self) -> None:
        """Check that every slot was closed; otherwise BackendError."""
        if self.open_slots:
            raise BackendError(f"{self.open_slots} slots are still open")


@dataclass
class FakeSlot:
    """A slot of the fake backend, which answers from the script."""

    backend: FakeBackend
    _epoch: int = 0

    def upload(self, tensors: Mapping[str, NDArray[Any]]) -> FakeBatch:
        """Accept the script; batches of earlier uploads become invalid."""
        self._epoch += 1
        return FakeBatch(tensors[SCRIPT], self._epoch)

    def run(
        self,
        stage: StageSpec,
        batch: TensorBatch,
        threshold: float | None = None,  # noqa: ARG002
    ) -> StageResult:
        """Return the script's answer at the last segment of the stage."""
        script = self._current(batch)
        self.backend.runs.append((stage.index, len(script)))
        self.backend.on_run(stage.index, len(script))
        carry = None if stage.final else FakeBatch(script, self._epoch)
        if stage.answer is None:
            return StageResult(None, np.empty(0, np.float32), carry)
        answer = np.array(script[:, stage.last_segment])
        return StageResult(answer, confidence_of(answer, stage.form), carry)

    def select(self, batch: TensorBatch, rows: Rows) -> FakeBatch:
        """Return the given rows of the script."""
        return FakeBatch(self._current(batch)[rows], self._epoch)

    def buffer(self, batch: TensorBatch, rows: Rows) -> FakeBatch:
        """Return copies of rows, which any slot may use."""
        return FakeBatch(self._current(batch)[rows], BUFFERED)

    def merge(self, parts: Sequence[tuple[TensorBatch, Rows]]) -> FakeBatch:
        """Return concatenated buffered rows; batches of earlier uploads become invalid."""
        self._epoch += 1
        scripts = []
        for batch, rows in parts:
            assert isinstance(batch, FakeBatch)
            if batch.epoch != BUFFERED:
                raise BackendError("only buffered batches can be merged")
            scripts.append(batch.script[rows])
        return FakeBatch(np.concatenate(scripts), self._epoch)

    def close(self) -> None:
        """Count the slot as closed."""
        self.backend.open_slots -= 1

    def _current(self, batch: TensorBatch) -> NDArray[Any]:
        assert isinstance(batch, FakeBatch)
        if batch.epoch != self._epoch:
            raise BackendError("a batch was used after its slot's next upload")
        return batch.script
