"""Inputs of planning: facts of a model, its devices, and links between devices."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from offramp.bundle.schema.serde import check_numbers
from offramp.cluster.planning.cluster_plan import PlanError
from offramp.engine.scheduling.placement import NO_DELAY, DeviceLink

LEAST_SHARE = 1e-6
"""Smallest share of rows that planning assumes to pass an exit; it replaces smaller forecasts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts of a model for planning: segments, exits with their forecast, and sizes.

    Rows that leave at one exit are assumed to leave at any later exit, too. So the share of rows
    after an exit does not depend on which earlier exits are on.
    """

    segments: int
    exit_after: tuple[int, ...]
    """[exits]: the segment before each exit; ascending, less than the last segment."""
    going_on: tuple[float, ...]
    """[exits]: forecast share of the rows entering the model that continues after each exit; at
    most 1, never rising."""
    row_bytes: tuple[float, ...] = ()
    """[segments - 1]: bytes that each row sends from a segment to the next; empty means 0."""
    weight_bytes: tuple[float, ...] = ()
    """[segments]: bytes of the weights of each segment and of its exit; empty means 0."""
    exits: tuple[int, ...] = ()
    """[exits]: index of each exit in the bundle; plans and :class:`DeviceTimes` use this index,
    because some exits of a bundle may not be in use. Empty means consecutive indices."""
    begins: int = 0
    """First segment of the unmodified model. It is 0, except in a cascade: there the first segments
    are an int8 copy, which has the exits, and the last segment is the unmodified model."""

    def __post_init__(self) -> None:
        check_numbers(self, "segments", least=1)
        check_numbers(self, "begins", least=0, below=self.segments)
        rising = [-1, *self.exit_after, self.segments - 1]
        if any(a >= b for a, b in itertools.pairwise(rising)) and self.exit_after:
            raise ValueError(
                f"exit_after {self.exit_after} must increase from 0, and stay below "
                f"{self.segments - 1}"
            )
        for name, expected in (
            ("going_on", len(self.exit_after)),
            ("row_bytes", self.segments - 1),
            ("weight_bytes", self.segments),
            ("exits", len(self.exit_after)),
        ):
            found = len(getattr(self, name))
            if found != expected and (found or name == "going_on"):
                raise ValueError(f"{name} has {found} values, expected {expected}")
        check_numbers(self, "going_on", least=0, most=1)
        check_numbers(self, "row_bytes", "weight_bytes", least=0)
        if any(a < b for a, b in itertools.pairwise(self.going_on)):
            raise ValueError(f"going_on {self.going_on} must not rise with depth")
        if any(a >= b for a, b in itertools.pairwise((-1, *self.exits))):
            raise ValueError(f"exits {self.exits} must increase from 0, as indices in a bundle do")

    @property
    def exit_names(self) -> tuple[int, ...]:
        """[exits]: index of each exit in the bundle."""
        return self.exits or tuple(range(len(self.exit_after)))

    @property
    def exit_at(self) -> NDArray[np.int64]:
        """[segments + 1]: index in the bundle of the exit at each border; -1 without an exit.

        Border k is the cut before segment k.
        """
        at = np.full(self.segments + 1, -1)
        at[np.array(self.exit_after, np.int64) + 1] = self.exit_names
        return at

    @property
    def shares(self) -> NDArray[np.float64]:
        """[segments]: share of the rows entering the model that reaches each segment."""
        shares = np.ones(self.segments)
        for after, share in zip(self.exit_after, self.going_on, strict=True):
            shares[after + 1 :] = max(share, LEAST_SHARE)
        return shares

    def crossing_bytes(self, border: int) -> float:
        """Return the bytes that each row sends across a border, which is 1 or more."""
        return self.row_bytes[border - 1] if self.row_bytes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceTimes:
    """Seconds that a batch takes on one type of device, by batch size; size 0 takes 0 s."""

    segments_s: NDArray[np.float64]
    """Times of segments, [segments, sizes + 1]."""
    exits_s: NDArray[np.float64]
    """[exits of the bundle, sizes + 1]: times of each exit's graph and check, also of exits that
    are off."""

    def __post_init__(self) -> None:
        for name in ("segments_s", "exits_s"):
            table = getattr(self, name)
            if table.ndim != 2 or not np.isfinite(table).all() or (table < 0).any():
                raise ValueError(
                    f"{name}: expected seconds of at least 0, of shape [parts, sizes + 1]"
                )
        if self.segments_s.shape[1] < 2 or self.exits_s.shape[1] != self.segments_s.shape[1]:
            raise ValueError("segments_s and exits_s must have the same batch sizes, at least one")

    @property
    def max_batch_size(self) -> int:
        """Largest batch size that has a time."""
        return int(self.segments_s.shape[1]) - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceType:
    """Devices of equal speed, cost and memory."""

    name: str
    count: int
    cost_per_hour: float
    """Cost of one device, in any currency."""
    times: DeviceTimes
    memory_bytes: float = math.inf
    """Memory of one device for weights, in bytes."""

    def __post_init__(self) -> None:
        check_numbers(self, "count", least=1)
        check_numbers(self, "cost_per_hour", least=0)
        if not self.memory_bytes > 0:
            raise ValueError(f"memory_bytes {self.memory_bytes}: expected more than 0")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cluster:
    """Devices by type, and their links."""

    types: tuple[DeviceType, ...]
    link: DeviceLink = NO_DELAY
    """Link between two types for which ``links`` has no entry."""
    links: tuple[tuple[str, str, DeviceLink], ...] = ()
    """Source type, target type, and the link from the source to the target."""

    def __post_init__(self) -> None:
        names = [kind.name for kind in self.types]
        if not names or len(set(names)) < len(names):
            raise ValueError(
                f"device types {names}: expected at least one type, and a different name for each"
            )
        pairs = [(a, b) for a, b, _ in self.links]
        strangers = sorted({name for pair in pairs for name in pair} - set(names))
        if strangers:
            raise ValueError(f"links name {strangers}, expected types among {names}")
        if len(set(pairs)) < len(pairs):
            raise ValueError(f"links {pairs}: one pair occurs twice; expected each once")

    @property
    def cost_per_hour(self) -> float:
        """Cost of all devices for one hour, in the currency of the types."""
        return math.fsum(kind.count * kind.cost_per_hour for kind in self.types)

    @property
    def device_types(self) -> tuple[str, ...]:
        """Type of every device, in the order of types."""
        return tuple(kind.name for kind in self.types for _ in range(kind.count))

    def of_devices(self, device_types: Sequence[str]) -> Cluster:
        """Return this cluster reduced to the given devices; PlanError if a type is unknown.

        ``device_types`` has the type of each device.
        """
        counts = Counter(device_types)
        strangers = sorted(set(counts) - {kind.name for kind in self.types})
        types = [replace(k, count=counts[k.name]) for k in self.types if counts[k.name]]
        if strangers or not types:
            raise PlanError(f"workers have types {strangers}, which the cluster does not have")
        links = tuple(link for link in self.links if counts.keys() >= {*link[:2]})
        return replace(self, types=tuple(types), links=links)

    def link_between(self, source: str, target: str) -> DeviceLink:
        """Return the link from one type to another."""
        own = {(a, b): link for a, b, link in self.links}
        return own.get((source, target), self.link)
