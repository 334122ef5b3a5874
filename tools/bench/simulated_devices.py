"""Devices of a simulation: durations of stages on each stream, and transfers of rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from offramp.engine.scheduling import DeviceKind, Placement, Run

SecondsTable: TypeAlias = Sequence[Sequence[float]]
"""[stages][max_batch_size + 1]: durations of stages in seconds by batch size."""


class SimulatedDevices:
    """Streams of a simulation, each with its own durations, and the locations of buffered rows.

    Rows that wait at a split are on the device of the stage before it. A stream that merges them is
    busy until all have arrived: rows from devices of one kind arrive together; rows from several
    kinds arrive one after the other, because they share the stream's link. Streams do not slow each
    other's links down.
    """

    def __init__(
        self,
        tables: Sequence[SecondsTable],
        streams: int,
        placement: Placement | None = None,
        slower: Mapping[int, float] | None = None,
    ) -> None:
        """Create the streams; ``tables`` are by variant, ``slower`` are factors by stream."""
        factors = [(slower or {}).get(stream, 1.0) for stream in range(streams)]
        if placement is not None and len(placement.streams) != streams:
            raise ValueError(
                f"{len(placement.streams)} streams are placed, expected {streams}; place each"
            )
        if unknown := sorted(set(slower or ()) - set(range(streams))):
            raise ValueError(f"the slower streams are {unknown}, expected numbers below {streams}")
        self._placement = placement
        self._seconds: list[Sequence[SecondsTable]] = [tables] * streams
        """[streams][variants][stages][max_batch_size + 1]: durations in seconds."""
        if placement is not None:
            of_kind = {kind.name: _tables_of(kind, tables) for kind in placement.kinds}
            self._seconds = [of_kind[stream.kind] for stream in placement.streams]
        for stream, factor in enumerate(factors):
            if factor != 1.0:
                self._seconds[stream] = [_times(table, factor) for table in self._seconds[stream]]
        self._buffered_on: dict[int, int] = {}
        """Stream that each buffered batch was on, by the batch's number."""

    def takes_s(self, stream: int, run: Run) -> float:
        """Return the seconds for which a run keeps a stream busy."""
        own_s = self._seconds[stream][run.variant][run.stage][len(run.samples.requests)]
        if self._placement is None or not run.pieces:
            return own_s
        return own_s + self._moving_s(self._placement, stream, run)

    def keep(self, number: int, stream: int) -> None:
        """Record that a stream buffered a batch."""
        if self._placement is not None:
            self._buffered_on[number] = stream

    def forget(self, numbers: Iterable[int]) -> None:
        """Forget buffered batches of which no row waits any more."""
        for number in numbers:
            self._buffered_on.pop(number, None)

    def _moving_s(self, placement: Placement, stream: int, run: Run) -> float:
        """Return the seconds until all rows of a merged batch have arrived at a stream."""
        rows: dict[str, int] = {}
        for piece in run.pieces:
            source = self._buffered_on[piece.number]
            if source != stream:
                kind = placement.streams[source].kind
                rows[kind] = rows.get(kind, 0) + len(piece.positions)
        target = placement.streams[stream].kind
        return sum(placement.moving_s(kind, target, run.stage, n) for kind, n in rows.items())


def _tables_of(kind: DeviceKind, tables: Sequence[SecondsTable]) -> list[SecondsTable]:
    """Return the durations of the variants' stages on a kind of device; speed scales them."""
    full, *smaller = tables
    return [kind.own_s(full), *(_times(table, kind.speed) for table in smaller)]


def _times(table: SecondsTable, factor: float) -> SecondsTable:
    return [[factor * seconds for seconds in row] for row in table]
