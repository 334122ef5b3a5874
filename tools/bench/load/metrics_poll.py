"""Batch sizes and queue lengths over time, from the server's Prometheus metrics."""

from __future__ import annotations

import http.client
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families

from offramp.tools.bench.load.load_settings import LoadError
from offramp.tools.bench.load.server_access import ServerAccess

_LIMIT_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The server's metrics at one time."""

    at_s: float
    """Seconds from the start of the load."""
    rows: Mapping[str, float]
    """Number of samples that each stage has run so far, by the stage's exit."""
    runs: Mapping[str, float]
    """Number of batches that each stage has run so far, by the stage's exit."""
    queued: float
    """Number of samples that wait."""


def read_metrics(text: str, *, model: str, at_s: float) -> Reading | None:
    """Read the text of ``/metrics``; ``None`` if it has no data of the model's batches.

    The versions of a model in a repository (``model="fashion:1"``) are added up.
    """
    rows: dict[str, float] = {}
    runs: dict[str, float] = {}
    queued = 0.0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name, exit_ = sample.labels.get("model", ""), sample.labels.get("exit", "")
            if model not in (name, name.rpartition(":")[0]):
                continue
            if sample.name == "offramp_batch_size_sum":
                rows[exit_] = rows.get(exit_, 0.0) + sample.value
            elif sample.name == "offramp_batch_size_count":
                runs[exit_] = runs.get(exit_, 0.0) + sample.value
            elif sample.name == "offramp_queued_samples":
                queued += sample.value
    return Reading(at_s=at_s, rows=rows, runs=runs, queued=queued) if runs else None


def first_batch_size(before: Reading, after: Reading) -> float:
    """Return the mean rows per batch of the first stage between two readings; NaN if none ran.

    The first stage is the stage with the largest number of rows, because all samples run it. When
    the policy changes, another stage may be the first, with its own counts.
    """
    rows = {exit_: after.rows[exit_] - before.rows.get(exit_, 0.0) for exit_ in after.rows}
    first = max(rows, key=rows.__getitem__)
    runs = after.runs[first] - before.runs.get(first, 0.0)
    return rows[first] / runs if runs > 0 else float("nan")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServerSeries:
    """The server's batch sizes and queue lengths, between each reading and the next."""

    edges_s: NDArray[np.float64]
    """[m + 1]: times of the readings, in seconds from the start of the load."""
    batch_size: NDArray[np.float64]
    """[m]: mean rows per batch of the first stage; NaN if none ran."""
    queued: NDArray[np.float64]
    """[m]: number of samples that waited at the later reading."""

    def batch_size_at(self, at_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the batch size at each of some times; NaN if no readings are around a time."""
        place = np.searchsorted(self.edges_s, at_s, side="right") - 1
        inside = (place >= 0) & (place < len(self.batch_size))
        found = np.full(len(at_s), np.nan)
        found[inside] = self.batch_size[place[inside]]
        return found

    def to_json(self) -> dict[str, list[float | None]]:
        """The fields as plain values."""
        return {
            "edges_s": self.edges_s.tolist(),
            "batch_size": [None if np.isnan(v) else v for v in self.batch_size.tolist()],
            "queued_samples": self.queued.tolist(),
        }


def series(readings: Sequence[Reading]) -> ServerSeries:
    """Make a series of readings, in order of time."""
    pairs = list(pairwise(readings))
    return ServerSeries(
        edges_s=np.array([reading.at_s for reading in readings]),
        batch_size=np.array([first_batch_size(before, after) for before, after in pairs]),
        queued=np.array([after.queued for _, after in pairs]),
    )


def mean_batch_size(readings: Sequence[Reading], from_s: float, until_s: float) -> float | None:
    """Return the first stage's mean rows per batch in a period; ``None`` with too few readings."""
    inside = [reading for reading in readings if from_s <= reading.at_s <= until_s]
    mean = first_batch_size(inside[0], inside[-1]) if len(inside) > 1 else float("nan")
    return None if np.isnan(mean) else mean


class MetricsPoll:
    """Reads a model's metrics at intervals, from ``host:port`` of the server's HTTP port.

    Raises LoadError if the server has no metrics of this model.
    """

    def __init__(
        self, address: str, model: str, *, every_s: float, access: ServerAccess | None = None
    ) -> None:
        access = access or ServerAccess()
        self._context = access.context()
        self._url = f"{'http' if self._context is None else 'https'}://{address}/metrics"
        self._headers = access.headers
        self._model, self._every_s = model, every_s
        self.readings: list[Reading] = []
        try:
            reading = self._read(-1.0)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise LoadError(
                f"{self._url} cannot be read ({error}); --metrics is HOST:PORT of the status page "
                "that eeserve names when it is ready"
            ) from error
        if reading is None:
            raise LoadError(f"{self._url} has no metrics of model {model!r}; is it served there?")

    def poll(self, at_s: float) -> None:
        """Read the metrics if the next reading is due; a reading that fails leaves a gap."""
        if at_s < 0 or (self.readings and at_s < self.readings[-1].at_s + self._every_s):
            return
        try:
            reading = self._read(at_s)
        except (OSError, ValueError, http.client.HTTPException):
            return
        if reading is not None:
            self.readings.append(reading)

    def _read(self, at_s: float) -> Reading | None:
        request = urllib.request.Request(self._url)
        for name, value in self._headers.items():
            request.add_unredirected_header(name, value)
        with urllib.request.urlopen(request, timeout=_LIMIT_S, context=self._context) as response:
            text = response.read().decode()
        return read_metrics(text, model=self._model, at_s=at_s)
