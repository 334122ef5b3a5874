"""A bundle as a deployment of Ray Serve: the engine runs inside each replica.

    pip install 'offramp[ray]' 'ray[serve]'
    ray start --head
    BUNDLE=fashion.ee serve run examples.ray_serve:app

Answers ``{"input": [[…], …]}`` with the outputs, and where each sample left the model. Ray Serve
carries requests by its own means; for gRPC of the Open Inference Protocol, serve with ``eeserve
--cluster ray`` instead, which has Ray start workers and nothing else.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
from ray import serve
from starlette.requests import Request

from offramp.engine.core import Engine
from offramp.engine.options import EngineOptions


@serve.deployment(ray_actor_options={"num_cpus": 1}, max_ongoing_requests=64)
class MultiExitModel:
    """One replica: an engine of one stream, on one CPU."""

    def __init__(self, bundle: str) -> None:
        self._bundle = Path(bundle)
        self._engine: Engine | None = None
        self._opening = asyncio.Lock()

    async def _opened(self) -> Engine:
        async with self._opening:
            if self._engine is None:
                options = EngineOptions(backend="onnxruntime", threads=1, keep_state=False)
                self._engine = await Engine.open({"model": self._bundle}, options)
            return self._engine

    async def __call__(self, request: Request) -> dict[str, Any]:
        """Answer a request of n samples; all of a replica's requests share its batches."""
        engine, sent = await self._opened(), await request.json()
        inputs = {
            spec.name: np.asarray(sent[spec.name], spec.dtype)
            for spec in engine.model("model").inputs
        }
        result = await engine.infer("model", inputs)
        outputs = {name: array.tolist() for name, array in result.outputs.items()}
        return {"outputs": outputs, "exits": result.exits.tolist()}


app = MultiExitModel.bind(os.environ.get("BUNDLE", "fashion.ee"))
