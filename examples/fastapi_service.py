"""A FastAPI service around a model: requests share batches, and easy ones return early.

    pip install fastapi uvicorn
    BUNDLE=fashion.ee uvicorn examples.fastapi_service:app
    curl -H 'Content-Type: application/json' -d '{"image": [[[[0, …]]]]}' localhost:8000/predict

Forms to try it are at ``http://localhost:8000/docs``.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException, Request

import offramp
from offramp.engine.common.errors import CapacityError, InvalidRequestError


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Open the model before the first request, and close it after the last."""
    async with offramp.AsyncModel.open(os.environ.get("BUNDLE", "fashion.ee")) as model:
        app.state.model = model
        yield


app = FastAPI(title="A multi-exit model", lifespan=lifespan)


@app.post("/predict")
async def predict(inputs: dict[str, list[Any]], request: Request) -> dict[str, Any]:
    """Answer n samples, which are lists by input name; the first dimension is n."""
    model: offramp.AsyncModel = request.app.state.model
    try:
        result = await model.predict(inputs)
    except InvalidRequestError as error:
        raise HTTPException(422, str(error)) from error
    except CapacityError as error:
        raise HTTPException(503, str(error)) from error
    return {
        "outputs": {name: array.tolist() for name, array in result.outputs.items()},
        "exits": result.exits.tolist(),
        "confidences": result.confidences.tolist(),
    }


@app.get("/exits")
async def exits(request: Request) -> dict[str, float]:
    """Return the share of the samples that each exit has answered so far."""
    model: offramp.AsyncModel = request.app.state.model
    return model.statistics().exit_shares()
