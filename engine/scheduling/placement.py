"""Placements: stages that each stream prefers and holds, its speed, and links between streams.

E3 assigns each split of a model its own devices (3.2, 3.3); because numbers of devices are whole
and forecasts may be wrong, some devices stay idle. Here a plan is a preference: a stream serves its
own split first. Without work there, it takes waiting samples of other stages whose weights it holds
(work stealing), unless a stream that prefers these stages is idle, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Self

from offramp.bundle.schema.serde import check_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLink:
    """The link between replicas of adjacent splits, T_x of the paper's 3.2.1.

    In plans, all rows that pass from one split to the next share one link, whatever the number of
    replicas.
    """

    bytes_per_s: float = math.inf
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(self, "latency_s", least=0)
        if not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s {self.bytes_per_s}: expected more than 0")

    def seconds(self, size_bytes: float) -> float:
        """Return the seconds until ``size_bytes`` have arrived."""
        return self.latency_s + size_bytes / self.bytes_per_s


NO_DELAY: Final = DeviceLink()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """A kind of equal devices, and the seconds that stages take on one device of this kind."""

    name: str
    speed: float = 1.0
    """Seconds relative to the model's table: 2 takes twice as long."""
    seconds: tuple[tuple[float, ...], ...] = ()
    """[stages][max_batch_size + 1]: the kind's own table, before it is multiplied by ``speed``; if
    empty, the model's table is used."""

    def __post_init__(self) -> None:
        check_numbers(self, "speed", above=0)

    def own_s(self, table: Sequence[Sequence[float]]) -> list[list[float]]:
        """Return this kind's own seconds; ``table`` is the model's table, of equal shape."""
        own = self.seconds or table
        if (len(own), len(own[0])) != (len(table), len(table[0])):
            raise ValueError(
                f"the table of {self.name!r} has {len(own)} stages and batches of up to "
                f"{len(own[0]) - 1}, expected {len(table)} and {len(table[0]) - 1} as the model's"
            )
        return [[self.speed * seconds for seconds in row] for row in own]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlacement:
    """A stream (a device, a replica): its kind, and its stages."""

    kind: str
    prefers: frozenset[int]
    """Stages of its own split; empty for a spare device."""
    holds: frozenset[int]
    """Stages whose weights it has, including those that it prefers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The streams on which the stages of one plan of a model run."""

    stages: int
    streams: tuple[StreamPlacement, ...]
    kinds: tuple[DeviceKind, ...]
    row_bytes: tuple[float, ...] = ()
    """[stages]: bytes of a row that moves to each stage; if empty, moving takes no bytes."""
    link: DeviceLink = NO_DELAY
    """Link between any two streams whose kinds have no link of their own."""
    links: tuple[tuple[str, str, DeviceLink], ...] = ()
    """Links from a kind to a kind, one way."""

    def __post_init__(self) -> None:
        check_numbers(self, "stages", least=1)
        names = [kind.name for kind in self.kinds]
        if len(set(names)) < len(names):
            raise ValueError(f"kinds {names}: expected each name once; rename one of them")
        every = frozenset(range(self.stages))
        for number, stream in enumerate(self.streams):
            if stream.kind not in names:
                raise ValueError(
                    f"stream {number} is of kind {stream.kind!r}, expected one of {names}"
                )
            if not stream.prefers <= stream.holds <= every:
                raise ValueError(
                    f"stream {number} prefers {sorted(stream.prefers)} and holds "
                    f"{sorted(stream.holds)}; it must hold what it prefers, of {self.stages} stages"
                )
        missing = every - self.preferred(range(len(self.streams)))
        if missing:
            raise ValueError(f"no stream prefers stages {sorted(missing)}; expected one for each")
        if len(self.row_bytes) not in (0, self.stages):
            raise ValueError(f"row_bytes has {len(self.row_bytes)} values, expected {self.stages}")

    @classmethod
    def shared(cls, streams: int, stages: int) -> Self:
        """Return a placement where each stream serves all stages, equally fast: one device."""
        every = frozenset(range(stages))
        stream = StreamPlacement(kind="device", prefers=every, holds=every)
        return cls(stages=stages, streams=(stream,) * streams, kinds=(DeviceKind(name="device"),))

    @property
    def is_shared(self) -> bool:
        """True if all streams are equal and serve all stages, with the model's own table."""
        alike = all(kind.speed == 1.0 and not kind.seconds for kind in self.kinds)
        return alike and len(self.kinds) == 1 and not self.is_split

    @property
    def is_split(self) -> bool:
        """True if a stream prefers some stages and not others."""
        return any(len(stream.prefers) < self.stages for stream in self.streams)

    def preferred(self, streams: Iterable[int]) -> frozenset[int]:
        """Return all stages that at least one of these streams prefers."""
        return frozenset().union(*(self.streams[stream].prefers for stream in streams))

    def kind_of(self, stream: int) -> DeviceKind:
        """Return the kind of device that a stream runs on."""
        return self._kind(self.streams[stream].kind)

    def moving_s(self, source: str, target: str, stage: int, rows: int) -> float:
        """Return the seconds to move rows for a stage from one kind of device to another."""
        size_bytes = rows * self.row_bytes[stage] if self.row_bytes else 0.0
        for a, b, link in self.links:
            if (a, b) == (source, target):
                return link.seconds(size_bytes)
        return self.link.seconds(size_bytes)

    def expected_s(self, kind: str, table: Sequence[Sequence[float]]) -> list[list[float]]:
        """Return the expected seconds of all stages, for batches that start on a kind's streams.

        The result is [stages][max_batch_size + 1]. Stages that these streams prefer run on them.
        Other stages run on the slowest kind that prefers them; where a split begins, moving the
        rows is included.
        """
        own = {k.name: k.own_s(table) for k in self.kinds}
        mine = self.preferred([n for n, s in enumerate(self.streams) if s.kind == kind])
        expected = []
        for stage, row in enumerate(own[kind]):
            if stage in mine:
                expected.append(row)
                continue
            moving_s = self._crossing_s(stage, len(row))
            others = [own[name][stage] for name in self._preferring(stage)]
            slowest = [max(seconds) for seconds in zip(*others, strict=True)]
            expected.append([a + b for a, b in zip(slowest, moving_s, strict=True)])
        return expected

    def continued_stages(self, table: Sequence[Sequence[float]]) -> list[frozenset[int]]:
        """Return, for each stream, the stages that a batch goes on to on the same stream.

        Of the stages that a stream holds, a batch goes on to all stages inside a split. It goes on
        to the first stage of another split if the stream is not slower than some stream that
        prefers this stage: moving the rows would be useless.
        """
        own = {kind.name: kind.own_s(table) for kind in self.kinds}
        slowest_s = [
            max(own[name][stage][-1] for name in self._preferring(stage))
            for stage in range(self.stages)
        ]
        inside = {
            stage
            for stage in range(1, self.stages)
            if any({stage - 1, stage} <= stream.prefers for stream in self.streams)
        }
        by_stream = {
            stream: frozenset(
                stage
                for stage in stream.holds
                if stage in inside or own[stream.kind][stage][-1] <= slowest_s[stage]
            )
            for stream in set(self.streams)
        }
        return [by_stream[stream] for stream in self.streams]

    def _crossing_s(self, stage: int, sizes: int) -> list[float]:
        """Return the longest time to move rows to a stage, if a split begins there: [sizes]."""
        inside = any({stage - 1, stage} <= stream.prefers for stream in self.streams)
        if not stage or inside:
            return [0.0] * sizes
        pairs = [(a, b) for a in self._preferring(stage - 1) for b in self._preferring(stage)]
        longest = [max(self.moving_s(a, b, stage, n) for a, b in pairs) for n in range(1, sizes)]
        return [0.0, *longest]

    def _preferring(self, stage: int) -> list[str]:
        """Return the kinds of the streams that prefer a stage."""
        return list(dict.fromkeys(s.kind for s in self.streams if stage in s.prefers))

    def _kind(self, name: str) -> DeviceKind:
        return next(kind for kind in self.kinds if kind.name == name)
