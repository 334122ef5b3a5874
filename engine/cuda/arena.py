"""A slot's buffers: all sizes are known when it opens, and from then on addresses are fixed.

::

    inputs 0, 1   what a stage reads; the stage after it reads from the other one
    outputs       what a stage gives before rows that leave are taken out
    scratch       of the executables, between the beginning and the end of a stage
    kernels       counters of the stage end, predictions that nobody reads, row numbers

and, pinned on the host: uploads, answers, row numbers, and what the stage end writes.

Only a stage that is prepared after the slot was opened, or a sample larger than was foreseen, can
make one of them grow.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from offramp.engine.cuda.driver import Driver, Pinned
from offramp.engine.cuda.layout import aligned
from offramp.engine.kernels.arguments import Results, Scratch


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What stages need of a slot; all 0 for none."""

    input_bytes: int = 0
    """Of a batch before or after a stage."""
    output_bytes: int = 0
    scratch_bytes: int = 0
    upload_bytes: int = 0
    answer_bytes: int = 0
    rows: int = 0
    """Of a batch."""

    def most(self, other: Needs) -> Needs:
        """What does for both, one after the other."""
        names = (each.name for each in fields(self))
        return Needs(**{name: max(getattr(self, name), getattr(other, name)) for name in names})

    @property
    def device_bytes(self) -> int:
        """Of device memory, for one slot."""
        sizes = (self.input_bytes, self.input_bytes, self.output_bytes, self.scratch_bytes)
        return sum(map(aligned, sizes)) + _KernelMemory.size_of(self.rows)

    def describe(self) -> str:
        """``inputs 2 × 1.0 MiB, …``: of device memory, for messages."""
        return (
            f"inputs 2 × {mib(self.input_bytes)}, outputs {mib(self.output_bytes)}, "
            f"scratch {mib(self.scratch_bytes)}, kernels {mib(_KernelMemory.size_of(self.rows))}"
        )


def mib(size_bytes: int) -> str:
    """``1.5 MiB``."""
    return f"{size_bytes / 2**20:,.1f} MiB"


class Region:
    """A piece of device memory that can grow; what it held is lost then."""

    def __init__(self, driver: Driver) -> None:
        """Nothing is allocated yet."""
        self._driver = driver
        self.address = 0
        """0 while there is none."""
        self.size_bytes = 0
        self.version = 0
        """Counts how often its content was replaced: what was read from it before is void."""

    def reserve(self, size_bytes: int) -> bool:
        """Have room; says whether the address changed. The host must have waited for its use."""
        if size_bytes <= self.size_bytes:
            return False
        self.free()  # first: both may not fit
        self.address = self._driver.allocate(size_bytes)
        self.size_bytes = size_bytes
        return True

    def replace(self) -> int:
        """Void what it holds; gives its new version."""
        self.version += 1
        return self.version

    def free(self) -> None:
        """Give it back; may be called again."""
        address, self.address, self.size_bytes = self.address, 0, 0
        self.version += 1
        if address:
            self._driver.free(address)


class HostRegion:
    """Pinned memory that can grow; what it held is lost then."""

    def __init__(self, driver: Driver) -> None:
        """Nothing is allocated yet."""
        self._driver = driver
        self._pinned: Pinned | None = None
        self.array: NDArray[np.uint8] = np.empty(0, np.uint8)
        """Its content."""
        self.address = 0
        """Where kernels see it; 0 while there is none."""

    def reserve(self, size_bytes: int) -> bool:
        """Have room; says whether it moved. The host must have waited for its use."""
        if size_bytes <= self.array.size:
            return False
        self.free()
        self._pinned = self._driver.allocate_pinned(size_bytes)
        self.array, self.address = self._pinned.array, self._pinned.address
        return True

    def free(self) -> None:
        """Give it back; may be called again."""
        pinned, self._pinned = self._pinned, None
        self.array, self.address = np.empty(0, np.uint8), 0
        if pinned is not None:
            pinned.free()


class _KernelMemory:
    """Device memory of our kernels, for batches of some rows."""

    def __init__(self, driver: Driver) -> None:
        self._region = Region(driver)
        self.rows = 0

    @staticmethod
    def size_of(rows: int) -> int:
        return aligned(Scratch.bytes_for(rows)) + 2 * aligned(4 * rows) if rows else 0

    def reserve(self, rows: int) -> bool:
        if rows <= self.rows:
            return False
        self.rows = 0
        self._region.reserve(self.size_of(rows))
        self.rows = rows
        return True

    @property
    def scratch(self) -> Scratch:
        return Scratch(address=self._region.address, rows=self.rows)

    @property
    def principal(self) -> int:
        """Address of int32 [rows]: written by the kernel, read by nobody."""
        return self._region.address + aligned(Scratch.bytes_for(self.rows))

    @property
    def row_numbers(self) -> int:
        """Address of int32 [rows]."""
        return self.principal + aligned(4 * self.rows)

    def free(self) -> None:
        self.rows = 0
        self._region.free()


class Outcome:
    """What the stage end writes, in pinned memory: no copy is needed to read it."""

    def __init__(self, driver: Driver) -> None:
        """Nothing is allocated yet."""
        self._region = HostRegion(driver)
        self._rows = 0

    def reserve(self, rows: int) -> bool:
        """Have room for batches of ``rows``; says whether it moved."""
        if rows <= self._rows:
            return False
        self._rows = 0  # until there is memory: what failed is tried again
        moved = self._region.reserve(4 * aligned(4 * rows))
        self._rows = rows
        return moved

    def results(self, principal: int) -> Results:
        """Where the kernel shall write."""
        base, step = self._region.address, self._step
        return Results(
            principal=principal,
            confidence=base,
            survivors=base + step,
            survivor_count=base + 2 * step,
            exits=base + 3 * step,
        )

    def views(self, rows: int) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.int32]]:
        """Confidence [rows], survivors [rows] of which the first are valid, their number [1]."""
        words = self._region.array.view(np.float32).reshape(4, -1)
        confidence, survivors, count, _ = words
        return confidence[:rows], survivors[:rows].view(np.int32), count[:1].view(np.int32)

    def free(self) -> None:
        """Give it back; may be called again."""
        self._rows = 0
        self._region.free()

    @property
    def _step(self) -> int:
        return aligned(4 * self._rows)


class Arena:
    """All buffers of a slot."""

    def __init__(self, driver: Driver, moving: Callable[[], None]) -> None:
        """Allocate nothing yet.

        Args:
            driver: Current whenever the arena is used.
            moving: Called before a buffer moves: must wait for what uses it, and forget addresses.
        """
        self._moving = moving
        self.inputs = (Region(driver), Region(driver))
        self.outputs = Region(driver)
        self.scratch = Region(driver)
        self.kernels = _KernelMemory(driver)
        self.uploads = HostRegion(driver)
        self.answers = HostRegion(driver)
        self.row_numbers = HostRegion(driver)
        self.outcome = Outcome(driver)
        self._rows = 0
        self.growths = 0
        """How often a buffer was allocated anew after :meth:`open`."""
        self.scratch_is_clear = False
        """Whether the kernels' scratch is as they take it."""

    def open(self, needs: Needs) -> None:
        """Allocate everything that stages need.

        Raises:
            DeviceMemoryError: There is not so much. What was allocated stays until :meth:`free`.
        """
        for region in self.inputs:
            region.reserve(needs.input_bytes)
        self.outputs.reserve(needs.output_bytes)
        self.scratch.reserve(needs.scratch_bytes)
        self.uploads.reserve(needs.upload_bytes)
        self.answers.reserve(needs.answer_bytes)
        self._reserve_rows(needs.rows)

    def settle(self) -> None:
        """Wait for all that uses the buffers, and forget their addresses."""
        self._moving()

    def grow(self, region: Region | HostRegion, size_bytes: int) -> None:
        """Have room in a region whose content is not needed any more."""
        have = region.array.size if isinstance(region, HostRegion) else region.size_bytes
        if size_bytes > have:
            self._moving()
            region.reserve(size_bytes)
            self.growths += 1

    def grow_rows(self, rows: int) -> None:
        """Have room for batches of ``rows`` in all that is by row."""
        if rows > self._rows:
            self._moving()
            self._reserve_rows(rows)
            self.growths += 1

    @property
    def sizes(self) -> Needs:
        """What there is room for now."""
        return Needs(
            input_bytes=max(region.size_bytes for region in self.inputs),
            output_bytes=self.outputs.size_bytes,
            scratch_bytes=self.scratch.size_bytes,
            upload_bytes=self.uploads.array.size,
            answer_bytes=self.answers.array.size,
            rows=self._rows,
        )

    def free(self) -> None:
        """Give everything back, whatever goes wrong on the way; may be called again."""
        regions = (*self.inputs, self.outputs, self.scratch, self.kernels)
        pinned = (self.uploads, self.answers, self.row_numbers, self.outcome)
        with ExitStack() as releases:
            for each in (*regions, *pinned):
                releases.callback(each.free)

    def _reserve_rows(self, rows: int) -> None:
        if not rows:
            return
        self._rows = 0  # until there is memory for all: what failed is tried again
        if self.kernels.reserve(rows):
            self.scratch_is_clear = False
        self.row_numbers.reserve(4 * rows)
        self.outcome.reserve(rows)
        self._rows = rows
