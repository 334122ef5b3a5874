"""Answers that gRPC has and has not written yet, and connections that are closed for what they do.

gRPC keeps an answer, and some 20 KiB for its call, until flow control lets it be written: a client
that answers pings and reads nothing keeps both for ever. Neither a call nor a single answer can be
given up from here, so the connection is closed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

UNREAD_S: Final = 60.0
"""How long a client may take to read an answer; and longer for large ones:"""

SLOWEST_BYTES_PER_S: Final = 128 * 1024

CROWDED_S: Final = 2.0
"""How long it may take where requests and answers fill half of the room that there is."""

MAX_RESETS: Final = 500
"""Calls of a connection that may be cancelled before their message is taken, within a window.
Envoy's number (``premature_reset_total_stream_count``)."""

RESET_WINDOW_S: Final = 10.0

_LONGEST_HOLD_S: Final = 0.2
_LOOK_S: Final = 0.001


@dataclass(slots=True, eq=False)
class PendingAnswer:
    """An answer that gRPC has not written yet."""

    peer: str
    size_bytes: int
    since_s: float
    """Monotonic."""
    streamed: bool
    """Whether it is one of a stream, which its client may read as slowly as it likes."""

    def overdue(self, now_s: float, *, crowded: bool) -> bool:
        """Return whether its client has had more than enough time to read it.

        A message of a stream never is: it takes no other request's room.
        """
        allowed_s = CROWDED_S if crowded else UNREAD_S
        allowed_s += self.size_bytes / SLOWEST_BYTES_PER_S
        return not self.streamed and now_s - self.since_s > allowed_s


class PendingAnswers:
    """All answers that gRPC has not written yet; used on the event loop's thread."""

    def __init__(self) -> None:
        self._pending: dict[PendingAnswer, None] = {}
        """In the order in which they came."""
        self._released: asyncio.Event | None = None
        """Set once answers may go to gRPC again; ``None`` while they may."""

    async def turn(self) -> None:
        """Wait until an answer may go to gRPC."""
        if self._released is not None:
            await self._released.wait()

    def add(
        self, peer: str, size_bytes: int, now_s: float, *, streamed: bool = False
    ) -> PendingAnswer:
        """Note an answer that goes to gRPC now."""
        answer = PendingAnswer(peer, size_bytes, now_s, streamed)
        self._pending[answer] = None
        return answer

    def remove(self, answer: PendingAnswer) -> None:
        """Note that an answer is written, or that its call has ended otherwise."""
        del self._pending[answer]

    def unread(self, now_s: float, *, crowded: bool) -> dict[str, str]:
        """Return the connections whose clients do not read, by peer, with the reason to close."""
        found: dict[str, str] = {}
        for answer in self._pending:
            age_s = now_s - answer.since_s
            if age_s <= CROWDED_S:
                break
            if answer.overdue(now_s, crowded=crowded):
                reason = f"an answer of {answer.size_bytes} bytes was not read for {age_s:.0f} s"
                found.setdefault(answer.peer, reason)
        return found

    @asynccontextmanager
    async def held(self) -> AsyncIterator[frozenset[str]]:
        """Hold answers back, and yield the peers for which some are being written all the same."""
        self._released = asyncio.Event()
        try:
            for _ in range(round(_LONGEST_HOLD_S / _LOOK_S)):
                if not self._pending:
                    break
                await asyncio.sleep(_LOOK_S)
            yield frozenset(answer.peer for answer in self._pending)
        finally:
            self._released.set()
            self._released = None


class ResetCounts:
    """Calls that were cancelled before their message was taken, by connection (CVE-2023-44487)."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._until_s = 0.0

    def add(self, peer: str, now_s: float) -> None:
        """Note a call that was cancelled."""
        if now_s >= self._until_s:
            self._counts.clear()
            self._until_s = now_s + RESET_WINDOW_S
        self._counts[peer] += 1

    def excessive(self, peer: str) -> bool:
        """Return whether a connection has just had one too many."""
        return self._counts[peer] == MAX_RESETS

    def take_beyond(self) -> Mapping[str, str]:
        """Return the connections that reset too much, by peer, with the reason to close them.

        Each is returned once: the next connection of a peer is another one.
        """
        reason = f"{MAX_RESETS} calls were cancelled as soon as they were opened"
        found = {peer: reason for peer, count in self._counts.items() if count >= MAX_RESETS}
        for peer in found:
            del self._counts[peer]
        return found
