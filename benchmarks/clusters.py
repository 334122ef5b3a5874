"""Devices of the E3 paper. Their batch curves are assumed, since the paper prints none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from offramp.cluster.planning.cluster import Cluster, DeviceTimes, DeviceType, ModelFacts
from offramp.engine.scheduling import DeviceLink

LAYERS = 12
CURVES = {"V100": (10e-3, 8.0), "P100": (16e-3, 4.0), "K80": (40e-3, 1.0)}
"""Parameters a and h of each device's curve L(b) = a (h + b) / (h + 8), the seconds of a batch of b
rows through the whole model: a is the time of 8 rows, and h the fixed cost of a batch in rows.
ASSUMED."""
PRICES = {"V100": 2.93, "P100": 1.97, "K80": 0.90}
"""Dollars per hour of a device. With these prices both clusters of the paper's section 5.2 cost
$0.013 per second. ASSUMED."""
HOMOGENEOUS = {"V100": 16}
HETEROGENEOUS = {"V100": 6, "P100": 8, "K80": 15}
EXIT_COST = 0.02
"""Cost of an exit (head, check and border) relative to a layer. ASSUMED."""
ROW_BYTES = 128 * 768 * 4
"""Row size of the paper's BERT-base: 128 tokens. ASSUMED."""
LINK = DeviceLink(bytes_per_s=8 * 10e9 / 8, latency_s=1e-4)
"""Eight parallel links of 10 Gb/s between two splits; each server of the paper has one. ASSUMED."""
MOST_ROWS = 64


def cluster_of(
    counts: Mapping[str, int], layers: int = LAYERS, exit_cost: float = EXIT_COST
) -> Cluster:
    """Return a cluster of devices of the paper's types, with ``counts`` of each type."""
    sizes = np.arange(MOST_ROWS + 1)
    kinds = []
    for name, count in counts.items():
        seconds, half = CURVES[name]
        layer = np.where(sizes > 0, seconds / layers * (half + sizes) / (half + 8), 0.0)
        segments = np.tile(layer, (layers, 1))
        kinds.append(
            DeviceType(
                name=name,
                count=count,
                cost_per_hour=PRICES[name],
                times=DeviceTimes(segments_s=segments, exits_s=exit_cost * segments[:-1]),
            )
        )
    return Cluster(types=tuple(kinds), link=LINK)


def going_on(easy: float, layers: int = LAYERS) -> tuple[float, ...]:
    """Return the share of rows that continue after each layer but the last.

    Easy rows leave evenly over the first half of the layers; the others go to the end.
    """
    left = np.minimum(np.arange(1, layers) / (layers / 2), 1.0)
    return tuple((1 - easy * left).tolist())


def model_of(shares: Sequence[float]) -> ModelFacts:
    """Return a model with an exit after each layer but the last; ``shares`` of rows continue."""
    return ModelFacts(
        segments=len(shares) + 1,
        exit_after=tuple(range(len(shares))),
        going_on=tuple(float(share) for share in shares),
        row_bytes=(float(ROW_BYTES),) * len(shares),
    )
