"""The requests that each process of a load sends: their times and their bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.client.conversion import build_request
from offramp.tools.bench.load.load_settings import LoadSettings


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Share:
    """The requests that one process sends.

    The k-th request of a whole load is the k-th sample of the data, which repeats; so the load is
    the same for any number of processes.
    """

    arrivals_s: NDArray[np.float64] | None
    """[n]: send times from the start; ``None`` in a closed loop."""
    concurrency: int | None
    """Number of concurrent requests of this process in a closed loop."""
    samples: NDArray[np.int64]
    """[n]: the sample of each request; a closed loop repeats them in order."""


def deal(arrivals_s: NDArray[np.float64], samples: int, processes: int) -> Iterator[Share]:
    """Distribute n rising arrivals over processes in turn; omit processes without arrivals.

    ``samples`` is the number of samples in the data.
    """
    index = np.arange(len(arrivals_s), dtype=np.int64) % samples
    for process in range(min(processes, len(arrivals_s))):
        mine = slice(process, None, processes)
        yield Share(arrivals_s=arrivals_s[mine], concurrency=None, samples=index[mine])


def deal_concurrency(concurrency: int, samples: int, processes: int) -> Iterator[Share]:
    """Distribute the concurrent requests of a closed loop, and the samples, evenly."""
    for process in range(processes):
        places = concurrency // processes + (process < concurrency % processes)
        mine = np.arange(process, samples, processes, dtype=np.int64)
        if not mine.size:
            mine = np.array([process % samples], np.int64)
        yield Share(arrivals_s=None, concurrency=places, samples=mine)


def used_samples(shares: Sequence[Share]) -> NDArray[np.int64]:
    """Return the samples that any process sends, rising."""
    return np.unique(np.concatenate([share.samples for share in shares]))


def serialise_requests(
    settings: LoadSettings, inputs: Mapping[str, NDArray[Any]], samples: NDArray[np.int64]
) -> dict[int, bytes]:
    """Return a serialised ``ModelInferRequest`` for each sample, by the sample's index."""
    found = {}
    for row in np.unique(samples).tolist():
        one = {name: array[row : row + 1] for name, array in inputs.items()}
        request = build_request(settings.model, one, outputs=None, priority=settings.priority)
        if settings.timeout_us is not None:
            request.parameters["timeout"].int64_param = settings.timeout_us
        found[row] = request.SerializeToString()
    return found
