"""The requests of a load as bytes, made before it begins so that sending one is cheap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.client.wire import build_request
from offramp.tools.bench.load.settings import LoadSettings


def serialise_requests(
    settings: LoadSettings, inputs: Mapping[str, NDArray[Any]], samples: NDArray[np.int64]
) -> dict[int, bytes]:
    """Give the ``ModelInferRequest`` of each sample, by its index.

    Args:
        settings: Name the model, the deadline, the priority.
        inputs: By name, first dimension n.
        samples: Rows of ``inputs``; each becomes one request of one sample.
    """
    return {
        int(row): serialise_request(
            settings, {name: array[row : row + 1] for name, array in inputs.items()}
        )
        for row in np.unique(samples)
    }


def serialise_request(settings: LoadSettings, inputs: Mapping[str, NDArray[Any]]) -> bytes:
    """Give one request for the inputs as they are."""
    request = build_request(settings.model, inputs, outputs=None, priority=settings.priority)
    if settings.timeout_us is not None:
        request.parameters["timeout"].int64_param = settings.timeout_us
    return request.SerializeToString()
