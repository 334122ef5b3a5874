"""Arrival traces: the intended send times of a load. They are deterministic for a seed.

Synthetic traces are those of SuperServe (NSDI '25, section 6.1): constant, gamma renewal (Poisson
has CV² 1), bursty, and accelerating. Real traces are read from files. The name of a trace states
whether its time was rescaled. Millions of arrivals take a fraction of a second.
"""

from __future__ import annotations

import csv
import gzip
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_MOST = 50_000_000
"""Largest number of arrivals in a trace; more is assumed to be a mistake."""
_RAMP_FROM = 0.25
"""Share of an accelerating trace's duration that passes before its rate moves."""


class TraceError(ValueError):
    """A requested trace cannot be made; the message names possible ones."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """The arrival times of a load's requests."""

    name: str
    """Readable name; it states the factor if time was rescaled."""
    arrivals_s: NDArray[np.float64]
    """[n]: arrival times from the start of the trace, rising; all before its end."""
    duration_s: float

    def __post_init__(self) -> None:
        arrivals = self.arrivals_s
        if not arrivals.size:
            raise TraceError(
                f"no request arrives in {self.duration_s:g} s of '{self.name}'; "
                "give a higher rate or a longer duration"
            )
        rising = bool(np.all(arrivals[1:] >= arrivals[:-1]))
        if not (rising and arrivals[0] >= 0 and arrivals[-1] < self.duration_s):
            raise TraceError(
                f"arrivals of '{self.name}' must increase within [0, {self.duration_s:g}) s; they "
                f"go from {arrivals.min():g} to {arrivals.max():g} s, "
                f"{'' if rising else 'not '}increasing"
            )

    @property
    def rate(self) -> float:
        """Mean requests per second."""
        return self.arrivals_s.size / self.duration_s

    @property
    def cv2(self) -> float:
        """Squared coefficient of variation of the gaps; NaN with fewer than two gaps."""
        gaps = np.diff(self.arrivals_s)
        if gaps.size < 2 or not gaps.any():
            return math.nan
        return float(gaps.var() / gaps.mean() ** 2)


def constant(rate: float, duration_s: float) -> Trace:
    """Space ``rate`` requests per second evenly, the first at 0."""
    arrivals = np.arange(math.ceil(_expected(rate, duration_s))) / rate
    return _trace(f"constant, {rate:g}/s", arrivals, duration_s)


def poisson(rate: float, duration_s: float, seed: int) -> Trace:
    """Draw independent arrivals: exponential gaps."""
    arrivals = _renewals(_expected(rate, duration_s), 1.0, seed) / rate
    return _trace(f"poisson, {rate:g}/s", arrivals, duration_s)


def gamma(rate: float, cv2: float, duration_s: float, seed: int) -> Trace:
    """Draw a renewal process with gamma gaps of mean 1/``rate`` and shape 1/``cv2``."""
    arrivals = _renewals(_expected(rate, duration_s), cv2, seed) / rate
    return _trace(f"gamma, {rate:g}/s, CV² {cv2:g}", arrivals, duration_s)


def bursty(
    base_rate: float, variable_rate: float, cv2: float, duration_s: float, seed: int
) -> Trace:
    """Merge a constant stream of ``base_rate`` with a gamma renewal stream (SuperServe 6.1).

    The paper calls the rates λ_b and λ_v, in requests per second; ``cv2`` is that of the gamma
    stream's gaps, in the paper 2, 4 or 8.
    """
    base = constant(base_rate, duration_s).arrivals_s
    variable = gamma(variable_rate, cv2, duration_s, seed).arrivals_s
    # stable sorting merges two sorted runs instead of sorting again
    merged = np.sort(np.concatenate([base, variable]), kind="stable")
    name = f"bursty, {base_rate:g}/s constant + gamma {variable_rate:g}/s of CV² {cv2:g}"
    return _trace(name, merged, duration_s)


def accelerate(
    rate_from: float,
    rate_to: float,
    acceleration: float,
    cv2: float,
    duration_s: float,
    *,
    seed: int,
) -> Trace:
    """Return a trace whose mean rate changes from one value to another (SuperServe 6.1).

    The first quarter of the duration has ``rate_from``, λ_1; then the rate changes by
    ``acceleration`` (τ, requests per second per second, positive in either direction) until it is
    ``rate_to``, λ_2, and stays. A ramp that the duration cuts off is shorter, as the name states.
    Unit-mean gamma gaps are mapped through the inverse of the cumulative rate, so burstiness is the
    same at every rate.
    """
    _positive(rate_from, "--rate (the rate to start from)", "requests per second")
    _positive(rate_to, "--rate-to", "requests per second")
    _positive(acceleration, "--acceleration", "requests per second per second")
    _positive(duration_s, "--duration-s", "seconds")
    begin_s = _RAMP_FROM * duration_s
    needed_s = abs(rate_to - rate_from) / acceleration
    ramp_s = min(needed_s, duration_s - begin_s)
    slope = math.copysign(acceleration, rate_to - rate_from)
    reached = rate_to if ramp_s == needed_s else rate_from + slope * ramp_s
    before, within = rate_from * begin_s, 0.5 * (rate_from + reached) * ramp_s
    after = reached * (duration_s - begin_s - ramp_s)
    expected = _expected((before + within + after) / duration_s, duration_s)
    count = _renewals(expected, cv2, seed)
    # the inverse of the cumulative rate: linear, then a root, then linear
    into_ramp = np.clip(count - before, 0, within)
    speed = np.sqrt(rate_from**2 + 2 * slope * into_ramp)
    arrivals = (
        np.minimum(count, before) / rate_from
        + 2 * into_ramp / (rate_from + speed)
        + np.maximum(count - before - within, 0) / reached
    )
    cut = "" if reached == rate_to else f", cut off at {reached:.4g}/s"
    name = (
        f"accelerating, {rate_from:g}/s to {rate_to:g}/s at {acceleration:g}/s² "
        f"from {begin_s:g} s{cut}, CV² {cv2:g}"
    )
    # at the joints of the pieces, rounding may swap two arrivals
    return _trace(name, np.maximum.accumulate(arrivals), duration_s)


def azure(path: Path, rate: float | None = None, duration_s: float | None = None) -> Trace:
    """Read the arrivals of an Azure LLM inference trace (Azure/AzurePublicDataset, CC-BY-4.0).

    The file is CSV, possibly gzipped, with TIMESTAMP, ContextTokens, GeneratedTokens; one request
    per row. The first request is at 0, and the file ends one mean gap after its last request. If
    ``rate`` is given, time is rescaled such that the whole file has this number of requests per
    second; the shape stays. Then the trace is cut at ``duration_s``, so its rate is that of the
    file's beginning.
    """
    rows = _read(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
    if len(rows) < 2:
        raise TraceError(f"{path}: {len(rows)} row(s) are too few for a trace, expected 2 or more")
    # all of these traces are in UTC, some with a suffix, but numpy cannot read time zones
    stamps = [row[0].removesuffix("+00:00") for row in rows]
    try:
        times = np.sort(np.array(stamps, "datetime64[ns]"))
    except ValueError as error:
        raise TraceError(
            f"{path}: TIMESTAMP must be like 2023-11-16 18:17:03.9799600: {error}"
        ) from error
    arrivals = (times - times[0]) / np.timedelta64(1, "s")
    if not arrivals[-1] > 0:
        raise TraceError(f"{path}: all requests have one TIMESTAMP; times must differ")
    length_s = float(arrivals[-1]) * arrivals.size / (arrivals.size - 1)
    factor = 1.0
    if rate is not None:
        factor = arrivals.size / _positive(rate, "--rate", "requests per second") / length_s
    whole_s = factor * length_s
    if duration_s is not None and _positive(duration_s, "--duration-s", "seconds") > whole_s:
        raise TraceError(
            f"{path.name} lasts {whole_s:.4g} s at {arrivals.size / whole_s:.4g}/s, not "
            f"{duration_s:g} s; give a --duration-s of at most that, or a lower --rate"
        )
    name = path.name if rate is None else f"{path.name}, time rescaled ×{factor:.4g}"
    return _trace(name, factor * arrivals, whole_s if duration_s is None else duration_s)


def rate_file(
    path: Path, rate: float | None = None, duration_s: float | None = None, *, seed: int
) -> Trace:
    """Draw Poisson arrivals at the rates of a file, constant within each row.

    Such files have fitted rates, not arrivals. They are CSV, possibly gzipped, with t_s and
    rate_rps. A row's rate is valid until the next row; the last row is as long as the row before
    it. All rates are multiplied to reach a mean of ``rate``, if given. If ``duration_s`` is given,
    the file's time is scaled to it without a change of the rates: the same rises and falls in less
    time, with fewer requests.
    """
    rows = _read(path, ("t_s", "rate_rps"))
    try:
        table = np.array(rows, float).reshape(-1, 2)
    except ValueError as error:
        raise TraceError(f"{path}: t_s and rate_rps must be numbers: {error}") from error
    starts, rates = table[:, 0], table[:, 1]
    if len(table) < 2 or not np.all(np.diff(starts) > 0):
        raise TraceError(f"{path}: t_s must increase from row to row, over 2 rows or more")
    if not (np.all(np.isfinite(table)) and np.all(rates >= 0) and rates.any()):
        raise TraceError(f"{path}: rate_rps must be numbers of 0 or more, and not all 0")
    edges = np.append(starts, 2 * starts[-1] - starts[-2]) - starts[0]
    length_s = float(edges[-1])
    mean = float(rates @ np.diff(edges)) / length_s
    factor = 1.0 if duration_s is None else _positive(duration_s, "--duration-s", "s") / length_s
    scale = 1.0 if rate is None else _positive(rate, "--rate", "requests per second") / mean
    expected = _expected(scale * mean, factor * length_s)
    reached = np.append(0.0, np.cumsum(scale * rates * np.diff(factor * edges)))
    arrivals = np.interp(_renewals(expected, 1.0, seed), reached, factor * edges)
    changes = [f"time rescaled ×{factor:.4g}"] if duration_s is not None else []
    changes += [f"rates ×{scale:.4g}"] if rate is not None else []
    name = ", ".join([f"{path.name} (Poisson at the rates of each row)", *changes])
    return _trace(name, arrivals, factor * length_s)


def _read(path: Path, columns: tuple[str, ...]) -> list[list[str]]:
    """Return the rows of a CSV file with these columns."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            header, *rows = [row for row in csv.reader(file) if row] or [[]]
    except (OSError, UnicodeDecodeError, csv.Error, EOFError) as error:
        raise TraceError(
            f"{path} cannot be read as CSV (gzipped if it ends in .gz): {error}"
        ) from error
    if tuple(header) != columns:
        raise TraceError(f"{path} must have the columns {columns}; found {tuple(header)}")
    if wrong := [row for row in rows if len(row) != len(columns)]:
        raise TraceError(f"{path}: {len(wrong)} rows do not have {len(columns)} values: {wrong[0]}")
    if not rows:
        raise TraceError(f"{path} has no rows below its header")
    return rows


def _renewals(end: float, cv2: float, seed: int) -> NDArray[np.float64]:
    """Return the times of a gamma renewal process with unit-mean gaps, all before ``end``."""
    _positive(cv2, "--cv2", "squared coefficient of variation; 1 is Poisson's")
    random = np.random.default_rng(seed)
    times = np.empty(0)
    while not times.size or times[-1] < end:
        start = times[-1] if times.size else 0.0
        rest = end - start
        # this number is nearly always enough; if not, the loop draws more
        gaps = random.gamma(1 / cv2, cv2, math.ceil(rest + 6 * math.sqrt(cv2 * rest) + 16))
        times = np.concatenate([times, start + np.cumsum(gaps)])
    return times[: np.searchsorted(times, end, side="left")]


def _trace(name: str, arrivals_s: NDArray[np.float64], duration_s: float) -> Trace:
    """Return a trace without the arrivals after its end.

    Rounding may put an arrival there, and a file may be longer than the trace.
    """
    kept = arrivals_s[: np.searchsorted(arrivals_s, duration_s, side="left")]
    return Trace(name=name, arrivals_s=kept, duration_s=duration_s)


def _expected(rate: float, duration_s: float) -> float:
    """Return the expected number of arrivals; TraceError if it is too large for a machine."""
    _positive(rate, "the rate", "requests per second")
    expected = rate * _positive(duration_s, "--duration-s", "seconds")
    if expected > _MOST:
        raise TraceError(
            f"{rate:g}/s for {duration_s:g} s are {expected:.3g} requests, expected at most "
            f"{_MOST:,}: pass a lower --rate or --duration-s"
        )
    return expected


def _positive(value: float, option: str, unit: str) -> float:
    if not (value > 0 and math.isfinite(value)):
        raise TraceError(f"{option} is {value:g}; it must be more than 0 ({unit})")
    return value
