"""Memory of the fake driver: real addresses on the host, with detection of misuse.

Unwritten memory and freed memory contain a pattern; both ends of every block have guard bytes.
Accesses are compared with each other: if two accesses overlap and one is a write, streams, events
or waits of the host must order them. Vector clocks define this order, so a missing event is found
even if the work happened to run in the right order.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offramp.engine.cuda.driver import ALIGNMENT

UNWRITTEN = 0xA5
"""Byte of memory that was never written; as float32 it is near −3e-16."""
FREED = 0xDD
_GUARD = 0xFD
_GUARD_BYTES = ALIGNMENT
_KEPT_BYTES = 16 << 20
"""Number of bytes of freed memory that are kept, to detect writes to them."""

Clock: TypeAlias = Mapping[int, int]
"""Vector clock: the number of operations of each stream that are known to be over."""
Kind: TypeAlias = Literal["device", "pinned"]


class MisuseError(AssertionError):
    """A fault of the code under test that CUDA would not detect, or that would end the process."""


class ByteRange(NamedTuple):
    """Bytes that an operation reads or writes."""

    address: int
    size_bytes: int
    writes: bool

    @property
    def end(self) -> int:
        """The address after the last byte."""
        return self.address + self.size_bytes

    def conflicts(self, other: ByteRange) -> bool:
        """Return whether the order of the two accesses matters."""
        overlap = self.address < other.end and other.address < self.end
        return overlap and (self.writes or other.writes)

    def covers(self, other: ByteRange) -> bool:
        """Return whether accesses ordered after this one need no comparison with ``other``."""
        within = self.address <= other.address and other.end <= self.end
        return within and (self.writes or not other.writes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """An access to a range by an operation."""

    used: ByteRange
    stream: int
    number: int
    """Number of the operation in its stream, from 1 on."""
    label: str


@dataclass(slots=True, kw_only=True)
class Block:
    """One allocation of fake memory, and the accesses to it."""

    kind: Kind
    room: NDArray[np.uint8]
    content: NDArray[np.uint8]
    accesses: list[Access] = field(default_factory=list)

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return int(self.content.ctypes.data)

    def check_guards(self) -> None:
        """Check that nothing wrote next to the block; otherwise MisuseError."""
        start = self.address - int(self.room.ctypes.data)
        before = self.room[start - _GUARD_BYTES : start]
        after = self.room[start + self.content.size : start + self.content.size + _GUARD_BYTES]
        for side, guard in (("before", before), ("behind", after)):
            if (guard != _GUARD).any():
                raise MisuseError(f"something wrote {side} {self}")

    def __str__(self) -> str:
        return f"{self.kind} memory at {self.address:#x}, {self.content.size} bytes"


class FakeMemory:
    """All blocks of a fake device and of pinned host memory; not locked."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self._addresses: list[int] = []
        self._freed: deque[Block] = deque()
        self._freed_bytes = 0

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Blocks that are not freed."""
        return tuple(self._blocks.values())

    def used_bytes(self, kind: Kind) -> int:
        """Return the number of allocated bytes."""
        return sum(block.content.size for block in self.blocks if block.kind == kind)

    def allocate(self, size_bytes: int, kind: Kind) -> Block:
        """Return a new block, filled with a pattern."""
        room = np.full(size_bytes + 3 * _GUARD_BYTES, _GUARD, np.uint8)
        start = _GUARD_BYTES + (-(room.ctypes.data + _GUARD_BYTES)) % ALIGNMENT
        content = room[start : start + size_bytes]
        content.fill(UNWRITTEN)
        block = Block(kind=kind, room=room, content=content)
        self._blocks[block.address] = block
        insort(self._addresses, block.address)
        return block

    def owned(self, address: int) -> Block:
        """Return the block of device memory that begins at an address; otherwise MisuseError."""
        block = self._blocks.get(address)
        if block is None or block.kind != "device":
            freed = any(block.address == address for block in self._freed)
            why = "was freed before" if freed else "was never allocated"
            raise MisuseError(f"{address:#x} cannot be freed: it {why}")
        return block

    def free(self, block: Block) -> None:
        """Remove a block; its memory is kept for a while, filled with a pattern."""
        block.check_guards()
        block.content.fill(FREED)
        del self._blocks[block.address]
        self._addresses.remove(block.address)
        self._freed.append(block)
        self._freed_bytes += block.content.size
        while self._freed_bytes > _KEPT_BYTES:
            oldest = self._freed.popleft()
            self._freed_bytes -= oldest.content.size
            _check_freed(oldest)

    def block_of(self, used: ByteRange, label: str) -> Block:
        """Return the block that contains a range; MisuseError if no block does."""
        place = bisect_right(self._addresses, used.address)
        if place:
            block = self._blocks[self._addresses[place - 1]]
            if used.end <= block.address + block.content.size:
                return block
        verb = "writes" if used.writes else "reads"
        what = f"{label} {verb} {used.size_bytes} bytes at {used.address:#x}"
        for block in self._freed:
            if block.address <= used.address < block.address + block.content.size:
                raise MisuseError(f"{what}, in {block}, which was freed")
        if place and used.address <= block.address + block.content.size:
            raise MisuseError(f"{what}, beyond the end of {block}")
        raise MisuseError(f"{what}, where nothing is allocated")

    def of_kind(self, kind: Kind, used: ByteRange) -> ByteRange:
        """Return the range of a copy; MisuseError if its memory is not of this kind."""
        if used.size_bytes:
            found = self.block_of(used, "a copy")
            if found.kind != kind:
                raise MisuseError(f"a copy at {used.address:#x}: {found} instead of {kind} memory")
        return used

    def use(self, access: Access, clock: Clock) -> NDArray[np.uint8]:
        """Return the content of a range, for the operation that is running.

        ``clock`` contains the operations that are known to be over. MisuseError if the range is not
        allocated, or if a conflicting access is not ordered before this operation.
        """
        block = self.block_of(access.used, access.label)
        for other in block.accesses:
            known = clock.get(other.stream, 0) >= other.number
            if not known and other.stream != access.stream and other.used.conflicts(access.used):
                mine, theirs = _verb(access), _verb(other)
                raise MisuseError(
                    f"{access.label} on stream {access.stream} {mine} what {other.label} on "
                    f"stream {other.stream} {theirs}, and nothing orders the two: {block}"
                )
        block.accesses = [
            other
            for other in block.accesses
            if not (other.stream == access.stream and access.used.covers(other.used))
        ]
        block.accesses.append(access)
        start = access.used.address - block.address
        content = block.content[start : start + access.used.size_bytes]
        if not access.used.writes:
            content = content.view()
            content.flags.writeable = False
        return content

    def check(self) -> None:
        """Check that guard bytes and freed memory are unchanged; otherwise MisuseError."""
        for block in self.blocks:
            block.check_guards()
        for block in self._freed:
            _check_freed(block)


def _check_freed(block: Block) -> None:
    block.check_guards()
    if (block.content != FREED).any():
        raise MisuseError(f"something wrote to {block}, which was freed")


def _verb(access: Access) -> str:
    return "writes" if access.used.writes else "reads"
