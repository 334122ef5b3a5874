"""The account of a chaos run, printed, and as JSON; and its verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from tests.chaos import watch
from tests.chaos.account import Account, Ending, Outcome, unexpected
from tests.chaos.supervisor import Supervisor

_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Results of a run."""

    options: Any
    account: Account
    server: Supervisor
    beats: Sequence[watch.Beat]
    readings: Sequence[watch.Reading]
    settled: int
    rate: float
    capacity: float
    withheld: int
    events: Mapping[str, int]
    faults: Sequence[str]
    max_disagreement: float
    pool: int
    """Inputs that were sent again and again."""

    def problems(self) -> list[str]:
        """Return all problems; none if the run went well."""
        return list(self._problems())

    def _problems(self) -> Iterator[str]:
        account = self.account
        if account.difference:
            yield f"{account.difference} requests have no outcome"
        yield from grouped(account.wrong, "wrong answers")
        for group, endings in grouped_endings(self._unexpected()).items():
            yield _told(group, endings)
        for fault, count in Counter(self.faults).items():
            yield fault if count == 1 else f"{count} times: {fault}"
        yield from watch.leaks(self.readings)
        allowed = self.allowed_disagreement()
        if account.samples and account.disagreed / account.samples > allowed:
            share = account.disagreed / account.samples
            yield f"{share:.2%} of the answers disagree with the source, above {allowed:.2%}"
        for line, count in self.server.tracebacks.most_common():
            yield f"{count} tracebacks in the server's log, after: {line}"
        yield from self._without_pulse()
        if not account.total(Outcome.ANSWERED):
            yield "nothing was answered"

    def _without_pulse(self) -> Iterator[str]:
        beats, limit_ms = self._beats(), self.options.live_limit_ms
        if not beats:
            yield "ServerLive was never asked while a server ran"
        dead = Counter(beat.status for beat in beats if beat.status != "OK")
        for status, count in dead.items():
            yield f"{count} times ServerLive ended with {status} while a server ran"
        if limit_ms is not None and (late := [t for t in self._live_ms() if t > limit_ms]):
            yield f"{len(late)} times ServerLive took more than {limit_ms:g} ms, {max(late):.0f} ms"

    def allowed_disagreement(self) -> float:
        """The promise, and three standard deviations for the inputs' being but a sample.

        The pool is small, and the same inputs come again and again: its own size counts.
        """
        bound = self.max_disagreement
        return float(bound + 3 * np.sqrt(bound * (1 - bound) / self.pool))

    def _unexpected(self) -> list[Ending]:
        return unexpected(self.account.endings, self.server.disturbances)

    def lines(self) -> Iterator[str]:
        """The report as text."""
        account = self.account
        parts = " + ".join(f"{outcome} {account.total(outcome):,}" for outcome in Outcome)
        yield f"capacity {self.capacity:.0f}/s, load {self.rate:.0f}/s, withheld {self.withheld}"
        yield f"sent {account.sent.total():,} = {parts}; difference {account.difference}"
        for kind, count in sorted(account.sent.items()):
            statuses = {s: n for (k, s), n in sorted(account.statuses.items()) if k == kind}
            told = ", ".join(f"{status} {n:,}" for status, n in statuses.items())
            yield f"  {kind:<14}{count:>9,}  {told}"
        yield f"answers wrong: {len(account.wrong)} of {account.total(Outcome.ANSWERED):,}"
        if account.samples:
            share = account.disagreed / account.samples
            yield (
                f"samples {account.samples:,}, unlike the source {share:.3%} "
                f"(promised {self.max_disagreement:.2%})"
            )
        ended = Counter(life.ended for life in self.server.lives)
        yield f"lives {len(self.server.lives)}: {_counts(ended)}; events: {_counts(self.events)}"
        yield f"accounts compared with the server's at {self.settled} rests"
        yield from self._resources()
        yield from self._pulse()
        problems = self.problems()
        yield f"problems: {len(problems) or 'none'}"
        yield from (f"  {problem}" for problem in problems[:60])

    def _resources(self) -> Iterator[str]:
        lives: dict[int, list[watch.Reading]] = {}
        for reading in self.readings:
            lives.setdefault(reading.life, []).append(reading)
        shown = [life for life in lives.values() if len(life) > 1] or list(lives.values())
        for life in shown[:_SHOWN]:
            first, last = life[0], life[-1]
            yield (
                f"life {first.life}, {first.at_s:.0f} to {last.at_s:.0f} s: "
                f"{first.rss_mib:.0f} to {last.rss_mib:.0f} MiB, "
                f"{first.descriptors} to {last.descriptors} descriptors, "
                f"{first.threads} to {last.threads} threads"
            )

    def _pulse(self) -> Iterator[str]:
        times = self._live_ms()
        if not times:
            yield "ServerLive: not asked"
            return
        p50, p99, most = np.percentile(times, [50, 99, 100])
        late = sum(took > 100.0 for took in times)
        others = Counter(beat.status for beat in self._beats() if beat.status != "OK")
        yield (
            f"ServerLive: {len(times):,} calls, median {p50:.1f} ms, 99 % {p99:.1f} ms, "
            f"largest {most:.0f} ms, {late} above 100 ms; not OK: {_counts(others)}"
        )

    def _live_ms(self) -> list[float]:
        """Return the time of each ``ServerLive`` while a server ran, whatever its outcome."""
        return [beat.took_s * 1e3 for beat in self._beats()]

    def _beats(self) -> list[watch.Beat]:
        return watch.undisturbed(self.beats, self.server.disturbances)

    def plain(self) -> dict[str, Any]:
        """The report as JSON values."""
        account = self.account
        times = self._live_ms()
        return {
            "minutes": self.options.minutes,
            "seed": self.options.seed,
            "capacity_rps": self.capacity,
            "load_rps": self.rate,
            "sent": account.sent.total(),
            **{str(outcome): account.total(outcome) for outcome in Outcome},
            "difference": account.difference,
            "statuses": {f"{k}: {s}": n for (k, s), n in sorted(account.statuses.items())},
            "wrong_answers": len(account.wrong),
            "samples": account.samples,
            "disagreed": account.disagreed,
            "lives": [life.ended for life in self.server.lives],
            "events": dict(self.events),
            "rests": self.settled,
            "readings": [{name: getattr(r, name) for name in r.__slots__} for r in self.readings],
            "server_live_ms": {
                "calls": len(times),
                "median": float(np.median(times)) if times else None,
                "largest": max(times, default=None),
            },
            "unexpected": [
                {name: getattr(ending, name) for name in ending.__slots__}
                for ending in self._unexpected()[:50]
            ],
            "disturbances": [
                {
                    "trouble": d.trouble,
                    "began_s": d.began_s,
                    "ended_s": d.ended_s if isfinite(d.ended_s) else None,
                }
                for d in self.server.disturbances
            ],
            "problems": self.problems(),
        }


def grouped(told: Sequence[str], what: str) -> Iterator[str]:
    """One line for all, with the first as an example."""
    if told:
        yield f"{len(told)} {what}, for instance: {told[0]}"


def grouped_endings(endings: Sequence[Ending]) -> dict[tuple[str, str, bool], list[Ending]]:
    """Return endings by kind, status, and origin of the status."""
    groups: dict[tuple[str, str, bool], list[Ending]] = {}
    for ending in endings:
        groups.setdefault((ending.kind, ending.status, ending.by_server), []).append(ending)
    return groups


def _told(group: tuple[str, str, bool], endings: Sequence[Ending]) -> str:
    kind, status, by_server = group
    first = endings[0]
    giver = "the server" if by_server else "gRPC"
    return (
        f"{len(endings)} requests of kind {kind!r} ended with {status} from {giver} without a "
        f"reason, for instance after {first.ended_s - first.began_s:.1f} s: {first.detail}"
    )


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in counts.items()) or "none"
