"""A variant's bundle served over real gRPC on loopback, and its answers compared."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from offramp.client import AsyncClient, InferResult
from offramp.compiler.common.rounding import rounding_of
from offramp.engine.core import Engine
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.stages.plan import Mode
from offramp.server.grpc_endpoint import GrpcEndpoint
from offramp.server.services.protocol_services import ProtocolServices
from tests.zoo.exits import Arrays, draw_policy, give_exits
from tests.zoo.trial import bundle_with, original_answers, right_answers, sliced
from tests.zoo.variants import Variant, export

MODEL = "m"
_SIZES = (1, 7, 16, 3, 32, 5)
"""Rows of concurrent requests: they are batched together."""
_LIMIT_S = 60.0


def served(variant: Variant, folder: Path) -> tuple[NDArray[np.int64], float]:
    """Ask a server for samples in requests of several sizes; give the exits that they should leave
    at, and the largest difference from what they should be answered, relative to the largest value.

    AssertionError where one leaves at another exit than its confidence says.
    """
    given = export(variant, folder)
    inputs = given.inputs[0]
    pieces = sliced(given.path)
    rng = np.random.default_rng(1)
    exits = give_exits(pieces, inputs, rng)
    drawn = draw_policy(exits, rng)
    path = bundle_with(pieces, exits, drawn, inputs, folder / f"{MODEL}.ee").path
    answers = right_answers(exits, original_answers(given, inputs))
    rounding = rounding_of(pieces.model.proto).batches
    requests = list(_requests(len(drawn.exits)))
    worst = 0.0
    for rows, result in zip(requests, asyncio.run(_asked(path, inputs, requests)), strict=True):
        where = zip(rows.tolist(), result.exits.tolist(), strict=True)
        assert all(drawn.allows(row, exit_, rounding) for row, exit_ in where)
        (found,) = result.outputs.values()
        for row, exit_, answer in zip(rows, result.exits.tolist(), found, strict=True):
            scale = float(np.abs(answers[exit_]).max())
            worst = max(worst, float(np.abs(answer - answers[exit_][row]).max()) / scale)
    return drawn.exits, worst


def _requests(rows: int) -> Iterator[NDArray[np.intp]]:
    """Rows of requests that hold every sample, those of the last one for the second time."""
    order = np.random.default_rng(2).permutation(rows)
    for size in _SIZES:
        yield order[:size]
        order = np.roll(order, -size)
    yield np.arange(rows)[::-1]


async def _asked(path: Path, inputs: Arrays, requests: list[NDArray[np.intp]]) -> list[InferResult]:
    """Serve a bundle in this process, and send the requests at the same time."""
    options = EngineOptions(
        mode=Mode.LEAVE,
        keep_state=False,
        defaults=ModelOptions(max_batch_size=64, controller="static"),
    )
    async with await Engine.open({MODEL: path}, options) as engine:
        endpoint = GrpcEndpoint(ProtocolServices(engine), max_message_bytes=2**24)
        port = await endpoint.start("127.0.0.1", 0)
        await endpoint.serving()
        try:
            async with AsyncClient(f"127.0.0.1:{port}", timeout_s=_LIMIT_S) as client:
                asked = [{k: v[rows] for k, v in inputs.items()} for rows in requests]
                return await asyncio.gather(*(client.infer(MODEL, each) for each in asked))
        finally:
            await endpoint.stop(0.0)
