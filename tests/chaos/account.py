"""The account of a chaos run: every request has one outcome, and every status its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final


class Outcome(StrEnum):
    """Outcome of a request; each has exactly one."""

    ANSWERED = "answered"
    REFUSED = "refused"
    """The server said that it would not answer."""
    FAILED = "failed"
    """The server, or the connection to it, broke while it was being answered; or it was late."""
    CANCELLED = "cancelled"
    """The client left before the answer came."""


class Trouble(StrEnum):
    """Disturbances caused on purpose, for a while."""

    ABSENT = "absent"
    """No server listens: it was killed or has left."""
    LEAVING = "leaving"
    """The server was asked to leave."""
    STOPPED = "stopped"
    """The server is stopped (SIGSTOP)."""
    BACKEND = "backend fails"
    DISK = "disk full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """End of a request without an answer."""

    kind: str
    """Kind of the client that sent it."""
    status: str
    """gRPC's name of the status."""
    by_server: bool
    """True if the server's own code set the status, not gRPC on either side."""
    began_s: float
    ended_s: float
    detail: str = ""


OWN_FAULT: Final[Mapping[str, frozenset[str]]] = {
    "hostile": frozenset({"INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED"}),
    "oversized": frozenset({"RESOURCE_EXHAUSTED"}),
    "wrong dtype": frozenset({"INVALID_ARGUMENT"}),
    "hurried": frozenset({"DEADLINE_EXCEEDED"}),
}
"""Statuses that a kind of client brings upon itself."""

UNCONFIRMED: Final = "unconfirmed"
"""Placeholder of a status: an early answer without a final one, since the samples were lost."""

_EXCUSES: Final[Mapping[str, frozenset[Trouble]]] = {
    "UNAVAILABLE": frozenset({Trouble.ABSENT, Trouble.LEAVING, Trouble.BACKEND}),
    "INTERNAL": frozenset({Trouble.BACKEND}),
    "DEADLINE_EXCEEDED": frozenset({Trouble.STOPPED}),
    UNCONFIRMED: frozenset({Trouble.BACKEND}),
}
"""Possible causes of statuses that are nobody's fault. CANCELLED and UNKNOWN are never allowed."""

OVERLOAD: Final = "RESOURCE_EXHAUSTED"
"""Bursts may fill the queue: any kind may be refused with it, if the server's code says so."""


@dataclass(slots=True, kw_only=True)
class Disturbance:
    """Trouble from one instant to another, its after-effects included."""

    trouble: Trouble
    began_s: float
    ended_s: float = float("inf")

    def overlaps(self, ending: Ending) -> bool:
        return self.began_s <= ending.ended_s and ending.began_s <= self.ended_s


def unexpected(endings: Sequence[Ending], disturbances: Sequence[Disturbance]) -> list[Ending]:
    """Return the endings whose status has no cause."""
    return [ending for ending in endings if not _has_reason(ending, disturbances)]


def _has_reason(ending: Ending, disturbances: Sequence[Disturbance]) -> bool:
    if ending.status in OWN_FAULT.get(ending.kind, ()):
        return True
    if ending.status == OVERLOAD and ending.by_server:
        return True
    excuses = _EXCUSES.get(ending.status, frozenset())
    return any(d.trouble in excuses and d.overlaps(ending) for d in disturbances)


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """One request, from sending to its one outcome."""

    kind: str
    began_s: float
    outcome: Outcome | None = None


@dataclass(slots=True)
class LifeCounts:
    """Counts of clients for one life of the server, in samples."""

    answered: int = 0
    doubtful: int = 0
    """Sent and not answered: the server may have computed them all the same."""


@dataclass(slots=True)
class Account:
    """Counts requests by kind and outcome; inconsistencies are in :attr:`faults`."""

    sent: Counter[str] = field(default_factory=Counter)
    ended: Counter[tuple[str, Outcome]] = field(default_factory=Counter)
    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Counts by kind and status."""
    endings: list[Ending] = field(default_factory=list)
    open: set[Ticket] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    """Answers that are no answer to their request."""
    faults: list[str] = field(default_factory=list)
    life: LifeCounts = field(default_factory=LifeCounts)
    """Counts of the server that runs now, or is starting."""
    life_began_s: float = float("-inf")
    listens: Callable[[], bool] = lambda: True
    """True if it may have received a request by now."""
    samples: int = 0
    disagreed: int = 0
    """Samples answered, and those of them whose class is not the source model's."""

    def send(self, kind: str, now_s: float) -> Ticket:
        """Open a request."""
        ticket = Ticket(kind=kind, began_s=now_s)
        self.sent[kind] += 1
        self.open.add(ticket)
        return ticket

    def answered(self, ticket: Ticket, samples: int) -> None:
        """Close a request that was answered.

        One that was sent before the server of now was started may have been answered by it, or by
        the one before it.
        """
        if self._close(ticket, Outcome.ANSWERED, "OK"):
            if ticket.began_s < self.life_began_s:
                self.life.doubtful += samples
            else:
                self.life.answered += samples

    def ended_with(
        self,
        ticket: Ticket,
        *,
        status: str,
        by_server: bool,
        now_s: float,
        samples: int,
        detail: str = "",
    ) -> None:
        """Close a request that has a status instead of an answer.

        ``now_s`` is when it got it; earlier than it was sent, if its stream had ended by then.
        """
        if self._close(ticket, outcome_of(status, by_server=by_server), status):
            self._doubt(samples)
            self.endings.append(
                Ending(
                    kind=ticket.kind,
                    status=status,
                    by_server=by_server,
                    began_s=min(ticket.began_s, now_s),
                    ended_s=now_s,
                    detail=detail,
                )
            )

    def unconfirmed(self, ticket: Ticket, *, now_s: float) -> None:
        """Note that nothing followed an early answer, which is an answer all the same."""
        self.endings.append(
            Ending(
                kind=ticket.kind,
                status=UNCONFIRMED,
                by_server=True,
                began_s=ticket.began_s,
                ended_s=now_s,
            )
        )

    def cancelled(self, ticket: Ticket, samples: int) -> None:
        """Close a request that its client withdrew."""
        if self._close(ticket, Outcome.CANCELLED, "withdrawn"):
            self._doubt(samples)

    def _doubt(self, samples: int) -> None:
        """A server that does not listen yet has computed nothing."""
        if self.listens():
            self.life.doubtful += samples

    def _close(self, ticket: Ticket, outcome: Outcome, status: str) -> bool:
        if ticket.outcome is not None:
            self.faults.append(
                f"a request of kind {ticket.kind!r} was {outcome} ({status}) after it had been "
                f"{ticket.outcome}"
            )
            return False
        ticket.outcome = outcome
        self.open.remove(ticket)
        self.ended[ticket.kind, outcome] += 1
        self.statuses[ticket.kind, status] += 1
        return True

    def total(self, outcome: Outcome) -> int:
        """Requests of one outcome."""
        return sum(n for (_, found), n in self.ended.items() if found is outcome)

    @property
    def difference(self) -> int:
        """Requests without an outcome."""
        return self.sent.total() - self.ended.total()

    def new_life(self, now_s: float) -> None:
        """The server before has ended, and another one is about to be started."""
        self.life, self.life_began_s = LifeCounts(), now_s


def outcome_of(status: str, *, by_server: bool) -> Outcome:
    """Return the outcome of a request with a status other than OK that its client did not
    cancel.
    """
    refusals = {"INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED"}
    if status in refusals or (status == "UNAVAILABLE" and by_server):
        return Outcome.REFUSED
    return Outcome.FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCounts:
    """Counts that a server without open requests reports, in samples."""

    accepted: int
    answered: int
    failed: int
    """Failed samples among the accepted ones: all causes but ``rejected``."""
    held: int
    """Queued, in flight, or being audited."""


def differences(server: ServerCounts, clients: LifeCounts) -> Iterator[str]:
    """Yield the inconsistencies between an idle server and its clients."""
    if server.held:
        yield f"the server holds {server.held} samples, and nobody waits for one"
    if server.accepted != server.answered + server.failed + server.held:
        yield (
            f"the server accepted {server.accepted} samples, answered {server.answered}, "
            f"failed {server.failed} and holds {server.held}"
        )
    if not clients.answered <= server.answered <= clients.answered + clients.doubtful:
        yield (
            f"the server answered {server.answered} samples, clients have {clients.answered} "
            f"answers, and {clients.doubtful} samples that may have been answered in vain"
        )
