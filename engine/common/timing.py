"""Timing for busy machines: paired rounds, and estimates with a spread.

All compared systems run once a round and are compared within the round: they run moments apart, at
the same clock rate and with the same other load. Medians over rounds then ignore disturbed rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import comb
from operator import itemgetter
from typing import NamedTuple, TypeAlias

import numpy as np

from offramp.certify import FloatArray

Timer = Callable[[], float]
"""Function that runs a system once, and returns its time in milliseconds."""

WARM_UP_ROUNDS = 2
LEVEL = 0.95
"""Confidence level of every interval."""


def clock_of(threads: int) -> Callable[[], float]:
    """Return the clock, in seconds, for work on this many threads that ends in the calling thread.

    One thread is timed by its own CPU time, which excludes other processes. For example, the border
    of a small model (the cost of a cut between two stages) takes 0.07 ms. By wall time, with two
    processes on a core, it appeared as 2.5 ms, because one preemption of a batch takes longer than
    borders and heads. Parallel work of several threads can only be timed by wall time.
    """
    return time.thread_time if threads == 1 else time.perf_counter


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Effort of a measurement: it ends when estimates are narrow enough, or time is up."""

    least: int = 6
    """Smallest number of sweeps over all batch sizes."""
    most: int = 40
    """Largest number of sweeps."""
    seconds: float = 2.0
    """Seconds after which no sweep begins, once there were ``least`` sweeps."""
    half_width: float = 0.004
    """Sufficient half-width of an interval, as a share of its scale."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rounds:
    """Times of some systems at one batch size; every round has all systems."""

    times_ms: FloatArray
    """Milliseconds, float64[rounds, systems]; the other systems are compared with the first."""

    @property
    def count(self) -> int:
        """Number of rounds that were measured."""
        return len(self.times_ms)

    def base(self) -> Estimate:
        """Return the first system's time, in ms, with the width of its median over rounds."""
        return estimate(self.times_ms[:, 0])

    def ratios(self) -> list[Estimate]:
        """Return each other system's time divided by the first system's time in the same round."""
        ratio = self.times_ms[:, 1:] / self.times_ms[:, :1]
        return [estimate(column) for column in ratio.T]

    def differences(self) -> list[Estimate]:
        """Return each other system's time minus the first system's, in the same round, in ms."""
        beyond = self.times_ms[:, 1:] - self.times_ms[:, :1]
        return [estimate(column) for column in beyond.T]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A median over rounds, with its uncertainty."""

    value: float
    half_width: float
    """Half-width of the interval of order statistics that holds the median with :data:`LEVEL`, in
    the unit of ``value``; with too few rounds for that, half of their range."""
    rounds: int


def estimate(values: FloatArray) -> Estimate:
    """Return the median of float64[rounds], with its interval from order statistics.

    The interval assumes no distribution of times: the number of rounds below the true median is
    binomial (David and Nagaraja, Order Statistics, 7.1).
    """
    ordered = np.sort(values)
    rank = _rank(len(ordered))
    return Estimate(
        value=float(np.median(ordered)),
        half_width=float(ordered[len(ordered) - 1 - rank] - ordered[rank]) / 2,
        rounds=len(ordered),
    )


def _rank(rounds: int) -> int:
    """Return the largest r for which r-th smallest to r-th largest holds the median with LEVEL."""
    below, rank = 0.0, 0
    for r in range(rounds // 2):
        below += comb(rounds, r) / 2**rounds
        if 2 * below > 1 - LEVEL:
            break
        rank = r
    return rank


@dataclass(slots=True)
class Sweeps:
    """The order in which systems run, sweep after sweep, and the rule to stop.

    A sweep covers every batch size, so that a temporary disturbance affects all of them. The first
    system of a round finds cold caches, so another system is first in each round.
    """

    systems: int
    repeats: Sequence[int]
    """Rounds of each batch size in a sweep; short ones, which noise affects more, have more
    rounds."""
    effort: Effort
    done: int = 0

    def order(self) -> Iterator[tuple[int, list[int]]]:
        """Yield the rounds of the next sweep: index of batch size, and systems in running order."""
        for size, repeats in enumerate(self.repeats):
            for repeat in range(repeats):
                # counted for each size: a common count may be a multiple of the number of systems
                first = (self.done * repeats + repeat) % self.systems
                yield size, [(first + place) % self.systems for place in range(self.systems)]
        self.done += 1

    def enough(
        self,
        elapsed_s: float,
        rounds: Sequence[Rounds],
        half_widths: Callable[[Sequence[Rounds]], float],
    ) -> bool:
        """Return whether to stop; ``half_widths`` returns the widest interval, as a share."""
        if self.done < self.effort.least:
            return False
        if self.done >= self.effort.most or elapsed_s >= self.effort.seconds:
            return True
        return half_widths(rounds) <= self.effort.half_width


def repeats_of(batch_sizes: Sequence[int]) -> list[int]:
    """Return the rounds of each batch size in a sweep: about equal time each, at most 4."""
    return [max(1, min(4, batch_sizes[-1] // (2 * size))) for size in batch_sizes]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLoad:
    """The load of the machine during some sweeps."""

    wall_s: float
    own_cpu_s: float
    """CPU seconds of this process, in all its threads."""

    @property
    def own_share(self) -> float:
        """Mean number of cores that this process used; below 1, other processes took time."""
        return self.own_cpu_s / self.wall_s if self.wall_s else 1.0


class Timed(NamedTuple):
    """Rounds by batch size, and the load of the machine during them."""

    rounds: Sequence[Rounds]
    load: MachineLoad


def time_rounds(
    timers: Sequence[Sequence[Timer]],
    repeats: Sequence[int],
    effort: Effort,
    half_widths: Callable[[Sequence[Rounds]], float],
    *,
    clock: Callable[[], float] = time.perf_counter,
    cpu_clock: Callable[[], float] = time.process_time,
    progress: Callable[[int], None] = lambda _: None,
    one_by_one: bool = False,
) -> Timed:
    """Run interleaved rounds until the estimates are narrow enough, or time is up.

    Args:
        timers: [batch sizes][systems]; the other systems are compared with the first.
        repeats: [batch sizes]: rounds in a sweep.
        effort: When to stop.
        half_widths: Returns the largest half-width of the wanted estimates so far, as a share.
        clock: Returns the time in seconds.
        cpu_clock: Returns the CPU seconds of this process.
        progress: Called with 1 after each of the first ``effort.least`` sweeps.
        one_by_one: Run all of a system's rounds in a sweep before the next system's, if the systems
            cannot all be loaded at the same time.
    """
    sweeps = Sweeps(systems=len(timers[0]), repeats=repeats, effort=effort)
    order = _by_system if one_by_one else list[_Run]
    warming = [
        (system, size, [0.0] * sweeps.systems)
        for size in range(len(timers))
        for _ in range(WARM_UP_ROUNDS)
        for system in range(sweeps.systems)
    ]
    for system, size, _ in order(warming):
        timers[size][system]()
    times: list[list[list[float]]] = [[] for _ in timers]
    rounds: list[Rounds] = []
    started_s, started_cpu_s = clock(), cpu_clock()
    while not sweeps.enough(clock() - started_s, rounds, half_widths):
        turns = [(size, [0.0] * len(turn), turn) for size, turn in sweeps.order()]
        runs = [(system, size, found) for size, found, turn in turns for system in turn]
        for system, size, found in order(runs):
            found[system] = timers[size][system]()
        for size, found, _ in turns:
            times[size].append(found)
        rounds = [Rounds(times_ms=np.array(of_size)) for of_size in times]
        if sweeps.done <= effort.least:
            progress(1)
    load = MachineLoad(wall_s=clock() - started_s, own_cpu_s=cpu_clock() - started_cpu_s)
    return Timed(rounds, load)


_Run: TypeAlias = "tuple[int, int, list[float]]"
"""Index of the system, index of the batch size, and milliseconds of the round by system."""


def _by_system(runs: Iterable[_Run]) -> list[_Run]:
    return sorted(runs, key=itemgetter(0))


LEAST_OWN_SHARE = 0.9
MOST_SPREAD = 0.05
MOST_DRIFT = 0.05


def disturbances(what: str, load: MachineLoad, rounds: Sequence[Rounds]) -> tuple[str, ...]:
    """Describe how the machine was disturbed while ``what`` was measured; empty if it was not.

    Only the first system of the rounds (one item a batch size) is considered.
    """
    notes = []
    if load.own_share < LEAST_OWN_SHARE:
        notes.append(
            f"{what}: this process had {load.own_share:.0%} of a core (at least "
            f"{LEAST_OWN_SHARE:.0%} expected): the machine was busy with something else"
        )
    bases = [r.base() for r in rounds]
    spread = float(np.median([b.half_width / b.value if b.value > 0 else 0.0 for b in bases]))
    if spread > MOST_SPREAD:
        notes.append(f"{what}: times are sure to ±{spread:.0%} only (±{MOST_SPREAD:.0%} expected)")
    drift = float(np.median([_drift(r.times_ms[:, 0]) for r in rounds]))
    if abs(drift) > MOST_DRIFT:
        notes.append(f"{what}: the machine became {abs(drift):.0%} "
                     f"{'slower' if drift > 0 else 'faster'} during the measurement")  # fmt: skip
    return tuple(notes)


def _drift(times_ms: FloatArray) -> float:
    """Return the slowdown of the second half, as a share."""
    half = len(times_ms) // 2
    if not half:
        return 0.0
    before, after = np.median(times_ms[:half]), np.median(times_ms[half:])
    return float(after / before) - 1 if before > 0 else 0.0
