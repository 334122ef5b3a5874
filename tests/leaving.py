"""Clients that go on while their server leaves."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections import Counter
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from offramp.proto.messages import ModelInferRequest, ModelInferResponse


async def codes_while_leaving(
    address: str, process: subprocess.Popen[Any], request: ModelInferRequest
) -> Counter[grpc.StatusCode]:
    """Return the codes of calls until none is answered, on old and on new connections."""
    codes: Counter[grpc.StatusCode] = Counter()
    options = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]

    async def call(channel: grpc.aio.Channel) -> None:
        infer = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=ModelInferRequest.SerializeToString,
            response_deserializer=ModelInferResponse.FromString,
        )
        try:
            await infer(request, timeout=30)
            codes[grpc.StatusCode.OK] += 1
        except grpc.aio.AioRpcError as error:
            codes[error.code()] += 1

    async def old() -> None:
        async with grpc.aio.insecure_channel(address, options) as channel:

            async def ask() -> None:
                while process.poll() is None:
                    await call(channel)

            await asyncio.gather(*(ask() for _ in range(8)))

    async def new() -> None:
        while process.poll() is None:
            async with grpc.aio.insecure_channel(address, options) as channel:
                await call(channel)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(4):
            tasks.create_task(old())
            tasks.create_task(new())
        while codes[grpc.StatusCode.OK] < 100:  # noqa: ASYNC110 - the load is under way
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGTERM)
    return codes


async def codes_of_two_replicas(
    addresses: Sequence[str], process: subprocess.Popen[Any], request: ModelInferRequest
) -> Counter[grpc.StatusCode]:
    """Return the codes of calls that are spread over replicas, one of which shuts down."""
    codes: Counter[grpc.StatusCode] = Counter()
    config = json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})
    options = [("grpc.service_config", config)]
    gone = asyncio.Event()

    async def ask(infer: Any) -> None:
        while not gone.is_set():
            try:
                await infer(request, timeout=30)
                codes[grpc.StatusCode.OK] += 1
            except grpc.aio.AioRpcError as error:
                codes[error.code()] += 1

    target = f"ipv4:{','.join(addresses)}"
    async with grpc.aio.insecure_channel(target, options) as channel, asyncio.TaskGroup() as tasks:
        infer = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=ModelInferRequest.SerializeToString,
        )
        for _ in range(32):
            tasks.create_task(ask(infer))
        while codes[grpc.StatusCode.OK] < 100:  # noqa: ASYNC110 - the load is under way
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.wait)
        await asyncio.sleep(0.1)
        gone.set()
    return codes
