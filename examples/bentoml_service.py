"""A BentoML service around a model; BentoML calls it from many threads, which share its batches.

    pip install bentoml
    BUNDLE=fashion.ee bentoml serve examples.bentoml_service:MultiExitService
    curl -H 'Content-Type: application/json' -d '{"inputs": {"image": [[[[0, …]]]]}}' \
        localhost:3000/predict

The page of the service is ``http://localhost:3000/``.
"""

from __future__ import annotations

import os
from typing import Any

import bentoml

import offramp


@bentoml.service(workers=1, threads=64)  # type: ignore[untyped-decorator]
class MultiExitService:
    """A service with one process and one engine; several workers would not share batches."""

    def __init__(self) -> None:
        self.model = offramp.load(os.environ.get("BUNDLE", "fashion.ee"))

    @bentoml.api  # type: ignore[untyped-decorator]
    def predict(self, inputs: dict[str, list[Any]]) -> dict[str, Any]:
        """Answer n samples, which are lists by input name; the first dimension is n."""
        result = self.model.predict(inputs)
        return {
            "outputs": {name: array.tolist() for name, array in result.outputs.items()},
            "exits": result.exits.tolist(),
            "confidences": result.confidences.tolist(),
        }

    @bentoml.on_shutdown  # type: ignore[untyped-decorator]
    def close(self) -> None:
        """Answer the requests in flight, and save the learned state."""
        self.model.close()
