"""Timing that holds on a busy machine: paired rounds, and estimates with a spread.

Everything that is compared runs once a round, and is compared within the round: with the model
timed a moment before or after, at the same clock rate and beside the same neighbours. Medians over
rounds then ignore rounds in which something else got in between.
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
"""Runs something once; gives its milliseconds."""

WARM_UP_ROUNDS = 2
LEVEL = 0.95
"""The confidence level of every interval."""


def clock_of(threads: int) -> Callable[[], float]:
    """Give the clock, in seconds, for what runs on so many threads and ends in the one that asks.

    One thread is timed by its own CPU time, of which neighbours take nothing. By the wall, two
    processes on a core made the border of a small model, 0.07 ms, look like 2.5 ms: a batch that is
    preempted once is late by more than borders and heads take. What several threads compute at the
    same time only the wall can tell.
    """
    return time.thread_time if threads == 1 else time.perf_counter


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long to measure: until estimates are narrow enough, or time is up."""

    least: int = 6
    """Sweeps over all batch sizes that are always run."""
    most: int = 40
    """Sweeps that are never passed."""
    seconds: float = 2.0
    """After which no sweep begins, once there are ``least``."""
    half_width: float = 0.004
    """What is narrow enough: half of an interval, as a share of the scale it is judged by."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rounds:
    """Milliseconds of some systems at one batch size, all of them in every round."""

    times_ms: FloatArray
    """float64[rounds, systems]; the first system is the one that others are compared with."""

    @property
    def count(self) -> int:
        """Number of rounds."""
        return len(self.times_ms)

    def base(self) -> Estimate:
        """The first system's own time, in ms; its width is that of its median over rounds."""
        return estimate(self.times_ms[:, 0])

    def ratios(self) -> list[Estimate]:
        """[systems - 1]: time over the first system's in the same round."""
        ratio = self.times_ms[:, 1:] / self.times_ms[:, :1]
        return [estimate(column) for column in ratio.T]

    def differences(self) -> list[Estimate]:
        """[systems - 1]: ms beyond the first system's in the same round."""
        beyond = self.times_ms[:, 1:] - self.times_ms[:, :1]
        return [estimate(column) for column in beyond.T]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A median over rounds, and how sure it is."""

    value: float
    half_width: float
    """Half of the interval of order statistics that holds the median with :data:`LEVEL`, in the
    unit of ``value``; with too few rounds for that, half of their range."""
    rounds: int


def estimate(values: FloatArray) -> Estimate:
    """Take the median of float64[rounds], with the interval that order statistics give it.

    The interval assumes nothing of how times are spread: the number of rounds below the true
    median is binomial (David and Nagaraja, Order Statistics, 7.1).
    """
    ordered = np.sort(values)
    rank = _rank(len(ordered))
    return Estimate(
        value=float(np.median(ordered)),
        half_width=float(ordered[len(ordered) - 1 - rank] - ordered[rank]) / 2,
        rounds=len(ordered),
    )


def _rank(rounds: int) -> int:
    """Largest r so that the r-th smallest and r-th largest hold the median with LEVEL."""
    below, rank = 0.0, 0
    for r in range(rounds // 2):
        below += comb(rounds, r) / 2**rounds
        if 2 * below > 1 - LEVEL:
            break
        rank = r
    return rank


@dataclass(slots=True)
class Sweeps:
    """The order in which systems are run, sweep after sweep, and the rule that ends it.

    A sweep visits every batch size, so that whatever disturbs the machine for a while does so at
    all of them. Within a round the systems take turns in being first, since whoever is first
    finds cold caches.
    """

    systems: int
    repeats: Sequence[int]
    """Rounds of each batch size in a sweep; more of the short ones, which noise hits harder."""
    effort: Effort
    done: int = 0

    def order(self) -> Iterator[tuple[int, list[int]]]:
        """Give the rounds of the next sweep: batch size's index, and systems in running order."""
        for size, repeats in enumerate(self.repeats):
            for repeat in range(repeats):
                # counted for each size: a count over all of them may fit the number of systems
                first = (self.done * repeats + repeat) % self.systems
                yield size, [(first + place) % self.systems for place in range(self.systems)]
        self.done += 1

    def enough(
        self,
        elapsed_s: float,
        rounds: Sequence[Rounds],
        half_widths: Callable[[Sequence[Rounds]], float],
    ) -> bool:
        """Whether to stop: ``half_widths`` gives the widest of what is wanted, as a share."""
        if self.done < self.effort.least:
            return False
        if self.done >= self.effort.most or elapsed_s >= self.effort.seconds:
            return True
        return half_widths(rounds) <= self.effort.half_width


def repeats_of(batch_sizes: Sequence[int]) -> list[int]:
    """Rounds of each batch size in a sweep: about as long at each, at most 4."""
    return [max(1, min(4, batch_sizes[-1] // (2 * size))) for size in batch_sizes]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLoad:
    """The load of the machine during some sweeps."""

    wall_s: float
    own_cpu_s: float
    """Seconds of this process, of all its threads."""

    @property
    def own_share(self) -> float:
        """Cores that this process had in the mean; below 1 something else had them."""
        return self.own_cpu_s / self.wall_s if self.wall_s else 1.0


class Timed(NamedTuple):
    """Rounds by batch size, and what the machine did meanwhile."""

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
    """Run interleaved rounds until what is wanted is narrow enough, or time is up.

    Args:
        timers: [batch sizes][systems]; the first system is what others are compared with.
        repeats: [batch sizes]: rounds in a sweep.
        effort: How long.
        half_widths: Of what is wanted, the widest, as a share; given the rounds so far.
        clock: Seconds.
        cpu_clock: Seconds of this process.
        progress: Called with 1 after each of the sweeps that are run at least.
        one_by_one: Run all of a system's rounds in a sweep before the next system's: where they
            cannot all be loaded at once.
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
"""A system's place, that of a batch size, and the milliseconds of the round, by system."""


def _by_system(runs: Iterable[_Run]) -> list[_Run]:
    return sorted(runs, key=itemgetter(0))


LEAST_OWN_SHARE = 0.9
MOST_SPREAD = 0.05
MOST_DRIFT = 0.05


def disturbances(what: str, load: MachineLoad, rounds: Sequence[Rounds]) -> tuple[str, ...]:
    """Say in what ways a machine was disturbed while ``what`` was measured; empty if it was not.

    Of the rounds, one a batch size, the first system is looked at.
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
                     f"{'slower' if drift > 0 else 'faster'} meanwhile")  # fmt: skip
    return tuple(notes)


def _drift(times_ms: FloatArray) -> float:
    """Give how much slower the second half was, as a share."""
    half = len(times_ms) // 2
    if not half:
        return 0.0
    before, after = np.median(times_ms[:half]), np.median(times_ms[half:])
    return float(after / before) - 1 if before > 0 else 0.0
