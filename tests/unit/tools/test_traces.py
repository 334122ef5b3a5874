"""Arrivals: exact where nothing is drawn, statistical with fixed seeds where something is."""

from __future__ import annotations

import argparse
import gzip
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.facts import Told, facts

from offramp.commands.parser import LayeredParser
from offramp.tools.bench.common import bench_flags, traces
from offramp.tools.bench.common.traces import Trace, TraceError

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_flags.add_trace_arguments(parser)
    return parser.parse_args(given)


def azure_file(folder: Path, *seconds: str, zone: str = "") -> Path:
    path = folder / "code.csv.gz"
    rows = [f"2023-11-16 18:17:{second}{zone},4808,10" for second in seconds]
    path.write_bytes(gzip.compress("\n".join([AZURE, *rows, ""]).encode()))
    return path


def rates_file(folder: Path, text: str) -> Path:
    path = folder / "rates.csv"
    path.write_text(f"t_s,rate_rps\n{text}")
    return path


def test_constant_arrivals_are_evenly_spaced_from_zero() -> None:
    trace = traces.constant(4, 1)
    assert trace.arrivals_s.tolist() == [0, 0.25, 0.5, 0.75]
    assert (trace.rate, trace.cv2, trace.name) == (4, 0, "constant, 4/s")


def test_an_arrival_at_the_end_is_left_out() -> None:
    assert traces.constant(10, 0.3).arrivals_s.tolist() == [0, 0.1, 0.2]


@pytest.mark.parametrize("cv2", [0.25, 1.0, 2.0, 8.0])
def test_gamma_gaps_have_the_mean_and_the_cv2(cv2: float) -> None:
    """200,000 gaps: the mean's standard error is 0.6 % at most, that of CV² below 2 %."""
    trace = traces.gamma(1000, cv2, 200, seed=1)
    assert trace.rate == pytest.approx(1000, rel=0.02)
    assert trace.cv2 == pytest.approx(cv2, rel=0.05)


def test_poisson_counts_have_a_variance_of_their_mean() -> None:
    trace = traces.poisson(1000, 200, seed=2)
    counts = np.bincount(trace.arrivals_s.astype(int), minlength=200)
    assert trace.cv2 == pytest.approx(1, rel=0.05)
    assert counts.var() / counts.mean() == pytest.approx(1, abs=0.3)  # 3 standard errors


def test_a_bursty_trace_is_the_sum_of_its_streams() -> None:
    trace = traces.bursty(100, 300, 8, 50, seed=3)
    base = traces.constant(100, 50).arrivals_s
    variable = traces.gamma(300, 8, 50, seed=3).arrivals_s
    assert trace.arrivals_s.tolist() == sorted([*base, *variable])


def test_an_accelerating_trace_has_its_rate_in_each_part() -> None:
    """1000/s for 10 s, up by 500/s² for 4 s, then 3000/s: 10,000, 8,000 and 78,000 arrivals."""
    trace = traces.accelerate(1000, 3000, 500, 1, 40, seed=4)
    counts, _ = np.histogram(trace.arrivals_s, [0, 10, 12, 14, 40])
    expected = [10_000, 3_000, 5_000, 78_000]
    assert np.all(np.abs(counts - expected) <= 4 * np.sqrt(expected))  # 4 standard errors
    assert trace.name == "accelerating, 1000/s to 3000/s at 500/s² from 10 s, CV² 1"


def test_acceleration_with_hardly_any_spread_follows_the_formula() -> None:
    """CV² 1e-12 makes arrival k the time at which the cumulative rate is k."""
    trace = traces.accelerate(2, 6, 2, 1e-12, 4, seed=0)

    # 2/s until 1 s (2 arrivals), 2 + 2(t-1) until 3 s (8 more), 6/s until 4 s (6 more)
    def cumulative(t: float) -> float:
        ramp = min(max(t - 1, 0), 2)
        return 2 * min(t, 1) + 2 * ramp + ramp**2 + 6 * max(t - 3, 0)

    counted = [cumulative(t) for t in trace.arrivals_s]
    assert counted == pytest.approx(range(1, len(counted) + 1), abs=1e-4)
    assert len(counted) in (15, 16)  # the sixteenth is due at the very end


def test_a_trace_may_slow_down_and_says_where_the_end_cut_its_ramp() -> None:
    trace = traces.accelerate(3000, 1000, 100, 1, 16, seed=5)
    assert "to 1000/s at 100/s² from 4 s, cut off at 1800/s" in trace.name
    counts, _ = np.histogram(trace.arrivals_s, [0, 4, 16])
    assert counts == pytest.approx([12_000, 28_800], rel=0.03)  # 12 s from 3000/s to 1800/s


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: traces.poisson(500, 2, seed),
        lambda seed: traces.gamma(500, 8, 2, seed),
        lambda seed: traces.bursty(100, 400, 4, 2, seed),
        lambda seed: traces.accelerate(100, 900, 800, 2, 2, seed=seed),
    ],
)
def test_the_same_seed_gives_the_same_arrivals_and_another_others(
    make: Callable[[int], Trace],
) -> None:
    first, again, other = make(7), make(7), make(8)
    assert first.arrivals_s.tolist() == again.arrivals_s.tolist()
    assert first.arrivals_s.tolist() != other.arrivals_s.tolist()
    assert np.all(np.diff(first.arrivals_s) >= 0)
    assert 0 <= first.arrivals_s[0] <= first.arrivals_s[-1] < first.duration_s == 2


def test_an_azure_trace_starts_at_zero_and_ends_a_mean_gap_after_its_last(tmp_path: Path) -> None:
    trace = traces.azure(azure_file(tmp_path, "03.9799600", "04.0319600", "06.9799600"))
    assert trace.arrivals_s.tolist() == [0, 0.052, 3]
    assert (trace.duration_s, trace.name) == (4.5, "code.csv.gz")
    assert trace.rate == 3 / 4.5


def test_an_azure_trace_is_rescaled_then_cut(tmp_path: Path) -> None:
    path = azure_file(tmp_path, "10.0", "11.0", "12.0", "16.0", zone="+00:00")  # 0.5/s
    trace = traces.azure(path, rate=5, duration_s=0.25)
    assert trace.arrivals_s == pytest.approx([0, 0.1, 0.2])
    assert trace.duration_s == 0.25
    assert trace.name == "code.csv.gz, time rescaled ×0.1"


def test_rescaling_keeps_the_shape(tmp_path: Path) -> None:
    path = azure_file(tmp_path, "10.0", "11.0", "12.0", "16.0")
    assert traces.azure(path, rate=800).cv2 == pytest.approx(traces.azure(path).cv2)
    assert traces.azure(path, rate=800).rate == pytest.approx(800)


def test_unsorted_rows_are_sorted(tmp_path: Path) -> None:
    assert traces.azure(azure_file(tmp_path, "12.0", "10.0")).arrivals_s.tolist() == [0, 2]


def test_a_rate_file_squeezes_time_and_scales_rates(tmp_path: Path) -> None:
    """Rows of 100 s: 10/s, 0/s, 50/s, mean 20/s; to 2000/s within 30 s."""
    path = rates_file(tmp_path, "100,10\n200,0\n300,50\n")
    trace = traces.rate_file(path, rate=2000, duration_s=30, seed=6)
    counts, _ = np.histogram(trace.arrivals_s, [0, 10, 20, 30])
    assert counts[1] == 0
    assert counts[[0, 2]] == pytest.approx([10_000, 50_000], rel=0.03)
    assert trace.duration_s == pytest.approx(30)
    assert trace.name == (
        "rates.csv (Poisson at the rates of each row), time rescaled ×0.1, rates ×100"
    )


def test_a_squeezed_rate_file_keeps_its_rates(tmp_path: Path) -> None:
    path = rates_file(tmp_path, "0,100\n600,300\n")
    own = traces.rate_file(path, seed=6)
    squeezed = traces.rate_file(path, duration_s=60, seed=6)
    assert (own.duration_s, squeezed.duration_s) == (1200, 60)
    assert [own.rate, squeezed.rate] == pytest.approx([200, 200], rel=0.03)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0,1\n", "2 rows or more"),
        ("0,1\n0,2\n", "must increase"),
        ("0,1\n1,x\n", "must be numbers"),
        ("0,1\n1,-2\n", "0 or more"),
        ("0,0\n1,0\n", "not all 0"),
        ("0,1\n1\n", "1 rows do not have 2 values"),
        ("", "no rows"),
    ],
)
def test_what_is_no_rate_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        traces.rate_file(rates_file(tmp_path, text), seed=0)


def test_what_is_no_azure_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"columns .*TIMESTAMP.* found \('t_s', 'rate_rps'\)"):
        traces.azure(rates_file(tmp_path, "0,1\n"))
    with pytest.raises(TraceError, match="cannot be read"):
        traces.azure(tmp_path / "missing.csv")
    with pytest.raises(TraceError, match="cannot be read"):
        (tmp_path / "plain.csv.gz").write_text(AZURE)
        traces.azure(tmp_path / "plain.csv.gz")
    with pytest.raises(TraceError, match="1 row"):
        traces.azure(azure_file(tmp_path, "10.0"))
    with pytest.raises(TraceError, match="must differ"):
        traces.azure(azure_file(tmp_path, "10.0", "10.0"))
    with pytest.raises(TraceError, match="must be like 2023"):
        traces.azure(azure_file(tmp_path, "10.0", "soon"))


def test_a_longer_duration_than_the_file_has_is_refused_with_its_length(tmp_path: Path) -> None:
    path = azure_file(tmp_path, "10.0", "11.0", "12.0", "16.0")
    with pytest.raises(TraceError, match=facts("0.8 s at 5/s", "1 s")):
        traces.azure(path, rate=5, duration_s=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: traces.constant(0, 1), ("rate is 0", "more than 0")),
        (lambda: traces.poisson(math.nan, 1, 0), ("the rate is nan",)),
        (lambda: traces.poisson(5, -1, 0), ("--duration-s is -1",)),
        (lambda: traces.gamma(5, 0, 1, 0), ("--cv2 is 0",)),
        (lambda: traces.accelerate(5, 0, 1, 1, 1, seed=0), ("--rate-to is 0",)),
        (lambda: traces.accelerate(5, 9, -1, 1, 1, seed=0), ("--acceleration is -1",)),
        (lambda: traces.poisson(1e6, 1e6, 0), ("1e+12 requests", "50,000,000")),
        (lambda: traces.poisson(1e-6, 1, 0), ("no request arrives in 1 s",)),
    ],
)
def test_impossible_figures_are_refused(make: Callable[[], Trace], message: Told) -> None:
    with pytest.raises(TraceError, match=facts(*message)):
        make()


@pytest.mark.parametrize("arrivals", [[0.2, 0.1], [-0.1, 0.5], [0.5, 1.0]])
def test_a_trace_rises_within_its_duration(arrivals: list[float]) -> None:
    with pytest.raises(TraceError, match=r"must increase within \[0, 1\)"):
        Trace(name="x", arrivals_s=np.array(arrivals), duration_s=1.0)


def test_the_cv2_of_one_gap_is_unknown() -> None:
    assert math.isnan(traces.constant(2, 1).cv2)


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("--rate 50", lambda: traces.poisson(50, 10, 0)),
        ("--rate 50 --seed 3 --duration-s 2", lambda: traces.poisson(50, 2, 3)),
        ("--trace constant --rate 50", lambda: traces.constant(50, 10)),
        ("--trace gamma --rate 50 --cv2 4", lambda: traces.gamma(50, 4, 10, 0)),
        ("--trace bursty --base-rate 9 --rate 50", lambda: traces.bursty(9, 50, 1, 10, 0)),
        (
            "--trace accelerate --rate 50 --rate-to 90 --acceleration 20 --cv2 2",
            lambda: traces.accelerate(50, 90, 20, 2, 10, seed=0),
        ),
    ],
)
def test_options_make_the_trace_that_they_name(given: str, made: Callable[[], Trace]) -> None:
    found, expected = bench_flags.trace_of(options(*given.split())), made()
    assert found.arrivals_s.tolist() == expected.arrivals_s.tolist()
    assert (found.name, found.duration_s) == (expected.name, expected.duration_s)


def test_options_name_files(tmp_path: Path) -> None:
    path = azure_file(tmp_path, "10.0", "11.0", "12.0", "36.0")
    whole = bench_flags.trace_of(options("--trace", f"azure:{path}", "--rate", "5"))
    assert whole.duration_s == pytest.approx(0.8)
    cut = bench_flags.trace_of(options("--trace", f"azure:{path}"))
    assert cut.arrivals_s.tolist() == [0, 1, 2, 26]
    rates = rates_file(tmp_path, "0,100\n600,300\n")
    squeezed = bench_flags.trace_of(options("--trace", f"rate:{rates}"))
    assert squeezed.duration_s == pytest.approx(10)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--trace poison --rate 5", ("'poison'", "poisson")),
        ("--trace xyz", ("'xyz'", "constant, poisson")),
        ("", ("--trace poisson", "--rate")),
        ("--trace bursty --rate 5", ("needs --base-rate",)),
        ("--rate 5 --cv2 2", ("poisson", "--cv2", "gamma, bursty, accelerate")),
        ("--trace constant --rate 5 --rate-to 9", ("constant has no --rate-to",)),
        ("--trace azure", ("--trace azure must be --trace azure:FILE",)),
        ("--trace gamma:x.csv --rate 5", ("--trace gamma:x.csv", "--trace gamma")),
        ("--trace rate:x.csv --base-rate 5", ("rate has no --base-rate",)),
        ("--trace azure:nowhere.csv", ("nowhere.csv cannot be read",)),
    ],
)
def test_options_that_do_not_fit_are_refused(given: str, message: Told) -> None:
    with pytest.raises(TraceError, match=facts(*message)):
        bench_flags.trace_of(options(*given.split()))


def test_help_names_real_defaults_only() -> None:
    parser = LayeredParser()
    bench_flags.add_trace_arguments(parser)
    text = parser.format_help()
    assert "None" not in text
    assert all(f"(default: {value})" in text for value in ("poisson", "0", "1"))
    assert "(default: 10, or all" in text
