"""A bundle as a deployment of Ray Serve: the engine runs inside each replica.

    pip install 'offramp[ray]' 'ray[serve]'
    ray start --head
    BUNDLE=fashion.ee serve run examples.ray_serve:app

It answers ``{"input": [[…], …]}`` with the outputs, and the exit of each sample. Here Ray Serve
transports the requests. For gRPC of the Open Inference Protocol, serve with ``eeserve --cluster
ray`` instead; then Ray only starts workers.
"""

from __future__ import annotations

import os
from typing import Any

from ray import serve
from starlette.requests import Request

import offramp


@serve.deployment(ray_actor_options={"num_cpus": 1}, max_ongoing_requests=64)
class MultiExitModel:
    """One replica: an engine of one stream, on one CPU."""

    async def __init__(self, bundle: str) -> None:  # type: ignore[misc] # Ray Serve awaits it
        self.model = await offramp.AsyncModel.open(
            bundle, backend="onnxruntime", threads=1, state=False
        )

    async def __call__(self, request: Request) -> dict[str, Any]:
        """Answer a request of n samples; all requests of a replica share batches."""
        result = await self.model.predict(await request.json())
        outputs = {name: array.tolist() for name, array in result.outputs.items()}
        return {"outputs": outputs, "exits": result.exits.tolist()}


app = MultiExitModel.bind(os.environ.get("BUNDLE", "fashion.ee"))
