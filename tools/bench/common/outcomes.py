"""Outcomes of a load's requests, and the figures computed from them.

A load generator and a simulator both write ``Outcomes``; figures are defined here, once. A latency
begins at the intended send time: from the actual send time, it would hide the delay that a stalled
client or server causes for the next requests (Tene, "How not to measure latency": coordinated
omission). Success is SuperServe's (section 6.1): the share of all requests that were answered
within the latency objective (SLO), and the quality of their answers, which is agreement here.
Goodput is E3's (section 5): the number of answers per second that are within the objective.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.certify.decision import MODEL_END
from offramp.engine.stages.plan import exit_label

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}


class Status(IntEnum):
    """The way in which a request ended."""

    OK = 0
    EXPIRED = 1
    """The deadline passed, or could not be met any more."""
    REJECTED = 2
    """The queue was full, or the server unavailable."""
    FAILED = 3
    """The request failed with an error."""
    UNANSWERED = 4
    """The run ended before an answer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcomes:
    """The outcome of every request, of one sample each, in order of intended send times."""

    intended_s: NDArray[np.float64]
    """[n]: intended send time, from the start of the run."""
    latency_s: NDArray[np.float64]
    """[n]: time from the intended send time to the answer; NaN without an answer."""
    status: NDArray[np.uint8]
    """[n]: ``Status`` of each request."""
    exit: NDArray[np.int16]
    """[n]: index of the exit that answered, or ``MODEL_END``; valid if the status is OK."""
    forced: NDArray[np.bool_]
    """[n]: true if an exit had to answer below its threshold."""
    agrees: NDArray[np.int8]
    """[n]: 1 if the answer is the source model's, 0 if it differs, -1 if unknown."""
    batch_size: NDArray[np.int16] | None = None
    """[n]: number of rows in the first batch of the request; 0 or less if unknown."""
    duration_s: float
    """Duration of the offered load, in seconds."""

    def __post_init__(self) -> None:
        sizes = {name: array.shape for name, array in _arrays(self).items()}
        if set(sizes.values()) != {(len(self.intended_s),)}:
            raise ValueError(f"every array of outcomes needs one element per request; got {sizes}")
        if not self.duration_s > 0:
            raise ValueError(f"duration_s is {self.duration_s}; it must be more than 0")
        if lost := np.count_nonzero(~np.isfinite(self.latency_s[self.answered])):
            raise ValueError(f"{lost} requests are OK without a latency; OK means answered")

    @property
    def answered(self) -> NDArray[np.bool_]:
        """[n]: true for requests that were answered."""
        return np.asarray(self.status == Status.OK)

    def within(self, slo_ms: float | None) -> NDArray[np.bool_]:
        """[n]: true for requests that were answered, within the objective if there is one."""
        if slo_ms is None:
            return self.answered
        # NaN compares as false; failed requests may have a latency, and count as missed
        return self.answered & (self.latency_s * 1e3 <= slo_ms)

    def drop_warm_up(self, seconds: float) -> Outcomes:
        """Drop requests due in the first seconds; time then starts after them."""
        if not 0 <= seconds < self.duration_s:
            raise ValueError(
                f"a warm-up of {seconds:g} s is not within the load's {self.duration_s:g} s"
            )
        kept = self.intended_s >= seconds
        arrays = {name: array[kept] for name, array in _arrays(self).items()}
        arrays["intended_s"] = arrays["intended_s"] - seconds
        return replace(self, **arrays, duration_s=self.duration_s - seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures of a run. Rates are per second; shares are from 0 to 1."""

    requests: int
    offered_rps: float
    """Number of requests divided by the duration of the load."""
    throughput_rps: float
    """Number of answers divided by the duration of the load, or by the time to the last answer if
    that is longer."""
    goodput_rps: float
    """Answers within the objective, divided by the same time; without an objective, the
    throughput."""
    slo_ms: float | None
    attainment: float | None
    """Share of all requests that were answered within the objective."""
    latency_ms: dict[str, float]
    """Mean, percentiles (latencies that requests had) and maximum of answered requests; empty if
    none."""
    failures: dict[str, int]
    """Number of failed requests by status; every status is a key."""
    agreement: float | None
    """Share of answers that are the source model's, among those for which this is known."""
    exit_shares: dict[str, float]
    """Shares of the answered requests by exit, in depth order."""
    forced_share: float
    """Share of the answered requests that an exit had to answer below its threshold."""
    mean_batch_size: float | None
    """Mean batch size over the requests for which it is known."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)


def summarise(outcomes: Outcomes, *, slo_ms: float | None) -> Summary:
    """Compute the figures of a run, with a latency objective if there is one."""
    ok = outcomes.answered
    requests, answers = len(ok), int(ok.sum())
    good = int(outcomes.within(slo_ms).sum())
    ends = (outcomes.intended_s + outcomes.latency_s)[ok]
    span_s = max(outcomes.duration_s, float(ends.max(initial=0.0)))
    labels, place = _places(outcomes)
    shares = np.bincount(place, minlength=len(labels)) / max(answers, 1)
    known = outcomes.agrees[ok & (outcomes.agrees >= 0)]
    sizes = np.empty(0) if outcomes.batch_size is None else outcomes.batch_size
    sizes = sizes[sizes > 0]
    return Summary(
        requests=requests,
        offered_rps=requests / outcomes.duration_s,
        throughput_rps=answers / span_s,
        goodput_rps=good / span_s,
        slo_ms=slo_ms,
        attainment=None if slo_ms is None or not requests else good / requests,
        latency_ms=_latencies(outcomes.latency_s[ok] * 1e3),
        failures={
            status.name.lower(): int((outcomes.status == status).sum())
            for status in Status
            if status is not Status.OK
        },
        agreement=float(known.mean()) if known.size else None,
        exit_shares=dict(zip(labels, shares.tolist(), strict=True)) if answers else {},
        forced_share=float(outcomes.forced[ok].mean()) if answers else 0.0,
        mean_batch_size=float(sizes.mean()) if sizes.size else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """A run by windows of equal length; a request belongs to the window of its intended send time.

    Requests due after the duration belong to the last window. A window without data has NaN (in
    JSON null).
    """

    window_s: float
    start_s: NDArray[np.float64]
    """[windows]: start of each window, in seconds from the start of the run."""
    offered_rps: NDArray[np.float64]
    """[windows]: requests due in the window, divided by its length."""
    answered_rps: NDArray[np.float64]
    """[windows]: requests of the window that were answered at any time, divided by its length."""
    attainment: NDArray[np.float64]
    """[windows]: share of requests answered within the objective; NaN without an objective."""
    p50_ms: NDArray[np.float64]
    """[windows]: median latency of the answered requests."""
    p99_ms: NDArray[np.float64]
    """[windows]: 99th percentile of the latency of the answered requests."""
    agreement: NDArray[np.float64]
    """[windows]: share of answers that are the source model's, among those for which this is
    known."""
    mean_depth: NDArray[np.float64]
    """[windows]: mean depth of answers: the depth is the position in ``labels`` of what answered,
    counted from 1."""
    batch_size: NDArray[np.float64]
    """[windows]: mean batch size over requests."""
    exit_shares: NDArray[np.float64]
    """[windows, labels]: share of the answered requests."""
    labels: tuple[str, ...]
    """Indices of the exits that answered in this run, then ``final``."""

    def to_json(self) -> dict[str, Any]:
        """Return the timeline as plain values; NaN, which JSON does not have, becomes None."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


def timeline(outcomes: Outcomes, *, slo_ms: float | None, windows: int = 60) -> Timeline:
    """Compute a run's figures for each of ``windows`` equal parts of the load's duration."""
    if windows < 1:
        raise ValueError(f"{windows} windows are not possible; expected 1 or more")
    window_s = outcomes.duration_s / windows
    window = np.clip((outcomes.intended_s / window_s).astype(np.int64), 0, windows - 1)
    ok = outcomes.answered

    def count(which: NDArray[np.bool_]) -> NDArray[np.float64]:
        return np.bincount(window[which], minlength=windows).astype(np.float64)

    requests, answers = count(np.ones_like(ok)), count(ok)
    known = ok & (outcomes.agrees >= 0)
    labels, place = _places(outcomes)
    cells = np.bincount(window[ok] * len(labels) + place, minlength=windows * len(labels))
    shares = _ratio(cells.reshape(windows, len(labels)), answers[:, None])
    none = np.full(windows, np.nan)
    p50_ms, p99_ms = _by_window(window[ok], outcomes.latency_s[ok] * 1e3, answers, (0.5, 0.99))
    return Timeline(
        window_s=window_s,
        start_s=np.arange(windows, dtype=np.float64) * window_s,
        offered_rps=requests / window_s,
        answered_rps=answers / window_s,
        attainment=none if slo_ms is None else _ratio(count(outcomes.within(slo_ms)), requests),
        p50_ms=p50_ms,
        p99_ms=p99_ms,
        agreement=_ratio(count(known & (outcomes.agrees == 1)), count(known)),
        mean_depth=shares @ np.arange(1.0, len(labels) + 1),
        batch_size=_mean_sizes(outcomes, window, windows),
        exit_shares=shares,
        labels=labels,
    )


def hdr_table(latency_s: NDArray[np.float64]) -> list[tuple[float, float, int]]:
    """Return a distribution as HdrHistogram prints it: each step halves the remaining tail.

    Rows are a percentile (0, 50, 75, 87.5 … while a sample is above it, then 100), its latency in
    ms, and the number of samples up to this latency; NaN is ignored. The table is empty without
    samples.
    """
    ordered = np.sort(latency_s[np.isfinite(latency_s)]) * 1e3
    if not ordered.size:
        return []
    halvings = math.floor(math.log2(ordered.size)) + 1
    quantiles = [1 - 0.5**k for k in range(halvings)] + [1.0]
    values = [_at(ordered, q) for q in quantiles]
    counts = np.searchsorted(ordered, values, side="right").tolist()
    return [(100 * q, v, c) for q, v, c in zip(quantiles, values, counts, strict=True)]


def _arrays(outcomes: Outcomes) -> dict[str, NDArray[Any]]:
    """Return the arrays by field; absent ones are omitted."""
    found = {f.name: getattr(outcomes, f.name) for f in fields(outcomes)}
    return {name: value for name, value in found.items() if isinstance(value, np.ndarray)}


def _latencies(latency_ms: NDArray[np.float64]) -> dict[str, float]:
    ordered = np.sort(latency_ms)
    if not ordered.size:
        return {}
    percentiles = {name: _at(ordered, q) for name, q in _QUANTILES.items()}
    return {"mean": float(ordered.mean()), **percentiles, "max": float(ordered[-1])}


def _at(ordered: NDArray[np.float64], quantile: float) -> float:
    """Return the smallest sample such that this share of all samples is at most as large."""
    return float(ordered[int(_rank(ordered.size, quantile))])


def _rank(count: float | NDArray[np.float64], quantile: float) -> NDArray[np.int64]:
    """Return the index of a quantile among ``count`` values.

    A small tolerance compensates the rounding of ``count`` times ``quantile``.
    """
    rank = np.ceil(np.asarray(count) * quantile - 1e-9) - 1
    return np.asarray(np.maximum(rank, 0), np.int64)


def _by_window(
    window: NDArray[np.int64],
    value: NDArray[np.float64],
    count: NDArray[np.float64],
    quantiles: Sequence[float],
) -> list[NDArray[np.float64]]:
    """Return quantiles of each window's values, ``count`` in number; NaN without values."""
    ordered = value[np.lexsort((value, window))]
    first = (np.cumsum(count) - count).astype(np.int64)
    found = []
    for quantile in quantiles:
        at = np.full(len(count), np.nan)
        some = count > 0
        at[some] = ordered[(first + _rank(count, quantile))[some]]
        found.append(at)
    return found


def _places(outcomes: Outcomes) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Return the labels of exits and end that answered, and for each answer its label's index."""
    taken = outcomes.exit[outcomes.answered]
    exits = np.unique(taken[taken != MODEL_END])
    labels = (*(exit_label(int(index)) for index in exits), exit_label(MODEL_END))
    return labels, np.where(taken == MODEL_END, len(exits), np.searchsorted(exits, taken))


def _mean_sizes(outcomes: Outcomes, window: NDArray[np.int64], windows: int) -> NDArray[np.float64]:
    if (sizes := outcomes.batch_size) is None:
        return np.full(windows, np.nan)
    known = sizes > 0
    total = np.bincount(window[known], weights=sizes[known], minlength=windows)
    return _ratio(total, np.bincount(window[known], minlength=windows))


def _ratio(part: NDArray[Any], whole: NDArray[Any]) -> NDArray[np.float64]:
    """Divide; return NaN where the divisor is 0."""
    result = np.full(np.broadcast_shapes(part.shape, whole.shape), np.nan)
    np.divide(part, whole, out=result, where=whole > 0)
    return result


def _plain(value: object) -> object:
    if not isinstance(value, np.ndarray):
        return value
    return np.where(np.isnan(value), np.array(None), value).tolist()
