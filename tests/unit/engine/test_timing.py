"""Estimates are right where machines are busy, and say how sure they are; no clock is read."""

from __future__ import annotations

import itertools
import time
from math import comb

import numpy as np
import pytest
from tests.facts import tells

from offramp.calibration.measure.estimates import fit_borders, rising
from offramp.engine.common.timing import (
    WARM_UP_ROUNDS,
    Effort,
    MachineLoad,
    Rounds,
    Sweeps,
    clock_of,
    disturbances,
    estimate,
    repeats_of,
    time_rounds,
)


def rounds_of(rng: np.random.Generator, count: int, *factors: float, sigma: float = 0.2) -> Rounds:
    """A machine whose speed changes from round to round, and noise of 2 % a run."""
    speed = rng.lognormal(0, sigma, (count, 1))
    noise = rng.lognormal(0, 0.02, (count, 1 + len(factors)))
    return Rounds(times_ms=10.0 * speed * noise * np.array([1.0, *factors]))


def test_what_one_thread_runs_is_not_charged_for_others() -> None:
    """While this thread sleeps, as while a neighbour has its core, its own time stands still."""
    passed = {}
    for threads in (1, 2):
        clock = clock_of(threads)
        started = clock()
        time.sleep(0.05)
        passed[threads] = clock() - started
    assert passed[1] < 0.05 <= passed[2]


def test_ratios_are_of_the_same_round() -> None:
    rounds = rounds_of(np.random.default_rng(0), 200, 1.1, 0.5)
    slower, faster = rounds.ratios()
    assert slower.value == pytest.approx(1.1, abs=0.005)  # 2 % √2 √(π/2) / √200 = 0.25 %
    assert faster.value == pytest.approx(0.5, abs=0.003)
    assert slower.half_width < 0.01 < rounds.base().half_width / rounds.base().value


def test_spikes_move_no_median() -> None:
    quiet = np.full((21, 2), [10.0, 11.0])
    spiky = quiet.copy()
    spiky[::3, 1] *= 3
    spiky[1::5, 0] *= 3
    (ratio,) = Rounds(times_ms=spiky).ratios()
    assert ratio.value == pytest.approx(1.1)
    (beyond,) = Rounds(times_ms=spiky).differences()
    assert beyond.value == pytest.approx(1.0)


@pytest.mark.parametrize("count", [6, 7, 15, 40])
def test_the_interval_holds_the_median_as_often_as_it_says(count: int) -> None:
    """The order statistics' coverage, by the binomial distribution."""
    values = np.arange(count, dtype=float)
    found = estimate(values)
    rank = (count - 1) / 2 - found.half_width
    outside = 2 * sum(comb(count, r) for r in range(int(rank) + 1)) / 2**count
    assert outside <= 0.05
    assert outside + 2 * comb(count, int(rank) + 1) / 2**count > 0.05, "the narrowest that does"
    assert (found.value, found.rounds) == ((count - 1) / 2, count)


def test_few_rounds_give_their_range() -> None:
    assert estimate(np.array([3.0, 1.0])).half_width == 1.0
    assert estimate(np.array([3.0])).half_width == 0.0


def test_a_sweep_visits_all_sizes_and_systems_take_turns() -> None:
    sweeps = Sweeps(systems=3, repeats=[2, 1], effort=Effort())
    assert list(sweeps.order()) == [(0, [0, 1, 2]), (0, [1, 2, 0]), (1, [0, 1, 2])]
    assert next(iter(sweeps.order())) == (0, [2, 0, 1])
    assert sweeps.done == 1


@pytest.mark.parametrize("systems", [2, 3, 4, 5])
def test_every_system_is_first_as_often_at_every_size(systems: int) -> None:
    repeats = repeats_of([1, 2, 4, 8, 16, 32])
    sweeps = Sweeps(systems=systems, repeats=repeats, effort=Effort())
    first = [(size, order[0]) for _ in range(systems) for size, order in sweeps.order()]
    for size, often in enumerate(repeats):
        assert [first.count((size, system)) for system in range(systems)] == [often] * systems


def test_short_batches_are_repeated() -> None:
    assert repeats_of([1, 2, 4, 8, 16, 32]) == [4, 4, 4, 2, 1, 1]
    assert repeats_of([8]) == [1]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]),
        ([2.0, 1.0, 3.0], [1.5, 1.5, 3.0]),
        ([-0.5, 1.5, 1.0], [0.0, 1.25, 1.25]),
        ([3.0, 2.0, 1.0], [2.0, 2.0, 2.0]),
        ([1.0, -1.0], [0.0, 0.0]),
    ],
)
def test_costs_rise_with_the_batch(values: list[float], expected: list[float]) -> None:
    assert rising(np.array(values)).tolist() == pytest.approx(expected)


SIZES = (1, 2, 4, 8, 16, 32)
SETS = [(0, 1, 2, 3), (0, 1), (2, 3)]
BYTES = np.array([4000.0, 4000.0, 2000.0, 1000.0])
SCALE = np.array([1.5 * b for b in SIZES])


def added(call: float, per_byte: float) -> np.ndarray:
    return np.array([[len(s) * call + per_byte * b * BYTES[list(s)].sum() for s in SETS]
                     for b in SIZES])  # fmt: skip


def test_borders_are_found_exactly_without_noise() -> None:
    found = fit_borders(added(0.02, 1e-6), SIZES, SETS, BYTES, SCALE)
    assert (found.call_ms, found.ms_per_byte) == (pytest.approx(0.02), pytest.approx(1e-6))
    assert found.at(8, BYTES).tolist() == pytest.approx([0.052, 0.052, 0.036, 0.028])


def test_borders_are_unbiased_and_surer_than_a_single_size() -> None:
    rng = np.random.default_rng(1)
    truth = added(0.02, 4e-7)
    noise = rng.normal(0, 0.01, (100, *truth.shape)) * SCALE[:, None]
    fits = [fit_borders(truth + n, SIZES, SETS, BYTES, SCALE).at(8, BYTES).sum() for n in noise]
    assert truth[3, 0] / SCALE[3] == pytest.approx(0.0095, abs=1e-4)  # as large as the noise
    assert np.mean(fits) == pytest.approx(truth[3, 0], rel=0.1)  # at least 0 each
    assert np.std(fits) < 0.5 * np.std(noise[:, 3, 0])


def test_a_batch_size_that_was_disturbed_does_not_decide() -> None:
    clean = added(0.02, 1e-6) * (1 + np.random.default_rng(2).normal(0, 0.02, (6, 3)))
    bad = clean.copy()
    bad[3] += 0.3 * SCALE[3]
    assert fit_borders(bad, SIZES, SETS, BYTES, SCALE).at(8, BYTES).sum() == pytest.approx(
        added(0.02, 1e-6)[3, 0], rel=0.2
    )


def test_nothing_is_negative() -> None:
    found = fit_borders(-added(0.02, 1e-6), SIZES, SETS, BYTES, SCALE)
    assert (found.call_ms, found.ms_per_byte) == (0.0, 0.0)
    one = fit_borders(np.full((6, 3), 0.3) * SCALE[:, None] ** 0, SIZES, SETS, BYTES, SCALE)
    assert one.call_ms > 0
    assert one.ms_per_byte == 0.0


def test_a_quiet_machine_is_not_called_disturbed() -> None:
    quiet = rounds_of(np.random.default_rng(3), 30, 1.1, sigma=0.01)
    assert disturbances("stages", MachineLoad(wall_s=2.0, own_cpu_s=1.99), [quiet]) == ()


def test_a_disturbed_machine_is_noticed() -> None:
    quiet = rounds_of(np.random.default_rng(3), 30, 1.1, sigma=0.01)
    (note,) = disturbances("stages", MachineLoad(wall_s=2.0, own_cpu_s=1.0), [quiet])
    tells(note, "stages", "50% of a core", "90%")
    restless = Rounds(times_ms=np.array([[10.0], [15.0], [12.0]] * 10))
    (note,) = disturbances("stages", MachineLoad(wall_s=2.0, own_cpu_s=2.0), [restless])
    assert "times are sure to ±" in note
    drifting = Rounds(times_ms=quiet.times_ms * np.linspace(1.0, 1.06, 30)[:, None] ** 4)
    (*_, note) = disturbances("stages", MachineLoad(wall_s=2.0, own_cpu_s=2.0), [drifting])
    assert "slower during the measurement" in note
    (*_, note) = disturbances(
        "stages", MachineLoad(wall_s=2.0, own_cpu_s=2.0), [Rounds(times_ms=drifting.times_ms[::-1])]
    )
    assert "faster during the measurement" in note


def test_systems_take_turns_in_every_round_and_warm_ups_are_forgotten() -> None:
    calls: list[str] = []

    def timer(name: str, warm: float, hot: float):
        times = itertools.chain([warm] * WARM_UP_ROUNDS, itertools.repeat(hot))

        def once() -> float:
            calls.append(name)
            return next(times)

        return once

    found = time_rounds(
        [[timer("a", 100.0, 2.0), timer("b", 50.0, 3.0)]], [2], Effort(least=2, most=2), lambda _: 0
    )
    assert found.rounds[0].times_ms.tolist() == [[2.0, 3.0]] * 4
    warm = ["a", "b"] * WARM_UP_ROUNDS
    assert calls == [*warm, "a", "b", "b", "a", "a", "b", "b", "a"]


def test_systems_that_are_not_loaded_together_have_their_rounds_one_by_one() -> None:
    calls: list[str] = []

    def timer(name: str):
        def once() -> float:
            calls.append(name)
            return float(ord(name[0]))

        return once

    timers = [[timer("a1"), timer("b1")], [timer("a8"), timer("b8")]]
    found = time_rounds(timers, [2, 1], Effort(least=2, most=2), lambda _: 0, one_by_one=True)
    a, b = (["1", "1", "8"], ["1", "1", "8"])
    warm = [f"{name}{size}" for name in "ab" for size in ("1", "1", "8", "8")]
    sweep = [*(f"a{size}" for size in a), *(f"b{size}" for size in b)]
    assert calls == [*warm, *sweep, *sweep]
    assert [r.times_ms.tolist() for r in found.rounds] == [[[97.0, 98.0]] * 4, [[97.0, 98.0]] * 2]


def measured(widths: list[float], *, seconds: float) -> int:
    """Sweeps of a second each, with these widths after each of them."""
    clock = itertools.count()
    return (
        time_rounds(
            [[lambda: 1.0]],
            [1],
            Effort(least=2, most=6, seconds=seconds, half_width=0.01),
            lambda rounds: widths[rounds[0].count - 1],
            clock=lambda: float(next(clock)),
            cpu_clock=lambda: 0.0,
        )
        .rounds[0]
        .count
    )


def test_measuring_ends_when_it_is_narrow_enough_or_time_is_up() -> None:
    wide = [1.0] * 6
    assert measured([0.0] * 6, seconds=100) == 2, "never less than the least"
    assert measured([1.0, 1.0, 1.0, 0.01, 1.0, 1.0], seconds=100) == 4
    assert measured(wide, seconds=100) == 6, "never more than the most"
    assert measured(wide, seconds=3) == 2  # the clock is read once before the first sweep
    assert measured(wide, seconds=5) == 4
    assert measured(wide, seconds=0) == 2


def test_what_the_machine_did_is_kept() -> None:
    wall, cpu = itertools.count(), itertools.count(step=0.25)
    found = time_rounds(
        [[lambda: 1.0]],
        [1],
        Effort(least=3, most=3),
        lambda _: 0.0,
        clock=lambda: float(next(wall)),
        cpu_clock=lambda: float(next(cpu)),
    )
    assert found.load.own_cpu_s == 0.25
    assert found.load.own_share == pytest.approx(0.25 / found.load.wall_s)
