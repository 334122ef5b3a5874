"""Clusters as the E3 paper has them, with batch curves that are assumed: it prints none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from offramp.cluster.planning.cluster import Cluster, DeviceTimes, DeviceType, ModelFacts
from offramp.engine.scheduling import DeviceLink

LAYERS = 12
CURVES = {"V100": (10e-3, 8.0), "P100": (16e-3, 4.0), "K80": (40e-3, 1.0)}
"""Seconds of a batch of 8 rows through the whole model, and rows below which a batch gains nothing:
L(b) = a (h + b) / (h + 8). ASSUMED."""
PRICES = {"V100": 2.93, "P100": 1.97, "K80": 0.90}
"""Dollars an hour, with which both sums of the paper's 5.2 come to $0.013 a second. ASSUMED."""
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
    """Devices of the paper's types."""
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
    """Easy rows leave evenly over the first half of the layers; the others go to the end."""
    left = np.minimum(np.arange(1, layers) / (layers / 2), 1.0)
    return tuple((1 - easy * left).tolist())


def model_of(shares: Sequence[float]) -> ModelFacts:
    """Return a model with an exit after every layer but the last; ``shares`` of rows go on."""
    return ModelFacts(
        segments=len(shares) + 1,
        exit_after=tuple(range(len(shares))),
        going_on=tuple(float(share) for share in shares),
        row_bytes=(float(ROW_BYTES),) * len(shares),
    )
