"""A bundle served over gRPC on a real socket, and its answers held against those of alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from offramp.bundle import Bundle
from offramp.certify import MODEL_END
from offramp.client import AsyncClient, InferResult
from offramp.compiler.common.rounding import SINGLE
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.core import Engine
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.stages.plan import Mode
from offramp.server.grpc_endpoint import GrpcEndpoint
from offramp.server.services.protocol_services import ProtocolServices
from tests.padded import Arrays, answers

MODEL = "served"


@asynccontextmanager
async def serving(
    bundle: Bundle, mode: Mode = Mode.LEAVE, **options: Any
) -> AsyncIterator[tuple[Engine, AsyncClient]]:
    """Yield the bundle on a real socket; concurrent requests wait for each other."""
    settings = {"max_queue_delay_ms": 20.0, "controller": "static", **options}
    how = EngineOptions(mode=mode, keep_state=False, defaults=ModelOptions(**settings))
    engine = await Engine.open({MODEL: bundle.path}, how, backend=OnnxRuntimeBackend())
    endpoint = GrpcEndpoint(ProtocolServices(engine), max_message_bytes=2**20)
    try:
        port = await endpoint.start("127.0.0.1", 0)
        await endpoint.serving()
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            yield engine, client
    finally:
        await endpoint.stop(0.0)
        await engine.close()


async def ask(client: AsyncClient, requests: Sequence[Arrays]) -> list[InferResult]:
    return await asyncio.gather(*(client.infer(MODEL, inputs) for inputs in requests))


def check(bundle: Bundle, inputs: Arrays, result: InferResult) -> None:
    """Each sample is answered by an exit that it may leave at, as that one answers it alone."""
    thresholds = {active.exit: active.threshold for active in bundle.policy.active}
    for row, exit_ in enumerate(result.exits.tolist()):
        alone = answers(bundle, {name: array[row : row + 1] for name, array in inputs.items()})
        passed = bundle.manifest.exits if exit_ == MODEL_END else bundle.manifest.exits[:exit_]
        for e in passed:
            assert alone[e.confidence][0] < thresholds[e.index] + SINGLE.batches
        name = given = bundle.manifest.answer.output
        if exit_ != MODEL_END:
            here = bundle.manifest.exits[exit_]
            name, sure = here.output, alone[here.confidence][0]
            assert result.forced[row] or sure >= thresholds[exit_] - SINGLE.batches
            assert abs(sure - result.confidences[row]) <= SINGLE.batches
        wanted = alone[name][0]
        allowed = SINGLE.batches * max(1.0, float(np.abs(wanted).max()))
        assert np.abs(result.outputs[given][row] - wanted).max() <= allowed
