"""Slots of workers that hold parts of a model: what the own one does not have runs on another's.

While serving, a stream is asked for stages that its worker holds. Whoever warms up or probes runs
all of them, one after the other, and need not know who has which.
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
    """A slot of worker ``number``; the stages that it does not hold run elsewhere.

    ``route`` gives the worker that runs a stage, that number if it can; ``open_other`` opens a slot
    of another one.
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
        """Take the arrays as they are; they are copied once a stage is run on them."""
        return self._own.upload(tensors)

    def run(
        self, stage: RemoteStage, batch: TensorBatch, threshold: float | None = None
    ) -> StageResult:
        """Have a worker that holds the stage execute it; errors as of :class:`RemoteSlot`.

        What is known of the stages of others is not run again: so a stream can be probed, and be
        in service, while workers that hold other stages are not.
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
        """Copy the given rows, unless they are all there are, to where the own worker reads."""
        return self._own.select(batch, rows)

    def buffer(self, batch: TensorBatch, rows: Rows) -> RemoteBatch:
        """Copy the given rows, for any slot."""
        return self._own.buffer(batch, rows)

    def merge(self, parts: Sequence[tuple[TensorBatch, Rows]]) -> RemoteBatch:
        """Concatenate rows of the parts, in their order, where the own worker reads."""
        return self._own.merge(parts)

    def close(self) -> None:
        """Close it, and what it opened of others."""
        for slot in (self._own, *self._others.values()):
            slot.close()
