"""Slots of workers that hold only parts of a model; other stages run on other workers.

While serving, a stream only gets stages that its worker holds. Warm-up and probes run all stages in
order, without regard to which worker holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.cluster.remote.slot_tensors import RemoteBatch
from offramp.cluster.remote.worker_slot import KnownRun, RemoteSlot, RemoteStage
from offramp.engine.common.errors import WorkerLostError
from offramp.engine.stages.backend_protocol import Rows, StageResult, TensorBatch


class RoutedSlot:
    """A slot of worker ``number``; stages that this worker does not hold run on other workers.

    ``route`` returns the worker that runs a stage, which is ``number`` if that worker holds it;
    ``open_other`` opens a slot of another worker.
    """

    def __init__(
        self,
        number: int,
        own: RemoteSlot,
        *,
        route: Callable[[int, RemoteStage], int],
        open_other: Callable[[int], RemoteSlot],
    ) -> None:
        self._number = number
        self._own = own
        self._route = route
        self._open_other = open_other
        self._others: dict[int, RemoteSlot] = {}

    def upload(self, tensors: Mapping[str, NDArray[Any]]) -> RemoteBatch:
        """Return a batch of the arrays; they are copied when a stage runs on them."""
        return self._own.upload(tensors)

    def run(
        self, stage: RemoteStage, batch: TensorBatch, threshold: float | None = None
    ) -> StageResult:
        """Execute a stage on a worker that holds it; errors as :class:`RemoteSlot`.

        Known results of other workers' stages are reused. So a stream can be probed, and be in
        service, while workers with other stages are out of service.
        """
        number = self._route(self._number, stage)
        if number == self._number:
            result = self._own.run(stage, batch, threshold)
        else:
            assert isinstance(batch, RemoteBatch)
            if stage.known is not None and stage.known.is_of(batch):
                return stage.known.result
            result = self._run_elsewhere(number, stage, batch, threshold)
        if stage.known is None and len(batch) == 1:
            stage.known = self._remember(batch, result)
        return result

    def _remember(self, batch: TensorBatch, result: StageResult) -> KnownRun:
        row, carry = np.arange(1), result.carry
        kept = None if carry is None else self._own.buffer(carry, row)
        return KnownRun(self._own.buffer(batch, row).tensors, result._replace(carry=kept))

    def _run_elsewhere(
        self, number: int, stage: RemoteStage, batch: RemoteBatch, threshold: float | None
    ) -> StageResult:
        slot = self._others.get(number)
        if slot is None:
            slot = self._others[number] = self._open_other(number)
        try:
            return slot.run(stage, batch, threshold)
        except WorkerLostError:
            self._others.pop(number).close()
            raise

    def select(self, batch: TensorBatch, rows: Rows) -> RemoteBatch:
        """Return a batch of the given rows.

        It is the batch itself if these are all rows; else they are copied to memory for this slot's
        worker.
        """
        return self._own.select(batch, rows)

    def buffer(self, batch: TensorBatch, rows: Rows) -> RemoteBatch:
        """Return copies of the given rows, which any slot can use."""
        return self._own.buffer(batch, rows)

    def merge(self, parts: Sequence[tuple[TensorBatch, Rows]]) -> RemoteBatch:
        """Concatenate the rows of the parts, in order, in memory that this slot's worker reads."""
        return self._own.merge(parts)

    def close(self) -> None:
        """Close the slot, and the slots of other workers that it opened."""
        for slot in (self._own, *self._others.values()):
            slot.close()
