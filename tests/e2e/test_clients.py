"""Our clients and tritonclient against a real server."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from offramp.client import AsyncClient, Client, InvalidInputError, UnknownModelError


def test_our_client(server: Any) -> None:
    inputs = server.inputs(5)
    with Client(server.address) as client:
        assert client.server_ready()
        assert client.model_ready(server.model)
        result = client.infer(server.model, inputs, priority=1)
    for name, tensor in server.metadata().outputs.items():
        assert result.outputs[name].shape[0] == 5
        assert result.outputs[name].shape[1:] == tensor.shape[1:]
        assert result.outputs[name].dtype == tensor.dtype
    assert result.exits.shape == result.confidences.shape == (5,)
    assert (result.exits >= -1).all()
    assert ((result.confidences >= 0) & (result.confidences <= 1)).all()
    assert result.policy_version >= 1


def test_many_requests_at_once_get_their_own_answers(server: Any) -> None:
    batches = [server.inputs(1 + seed % 3, seed) for seed in range(24)]

    async def ask() -> list[Any]:
        async with AsyncClient(server.address) as client:
            return await asyncio.gather(*(client.infer(server.model, b) for b in batches))

    together = asyncio.run(ask())
    with Client(server.address) as client:
        for inputs, result in zip(batches, together, strict=True):
            alone = client.infer(server.model, inputs)
            np.testing.assert_array_equal(alone.exits, result.exits)
            for name, array in alone.outputs.items():
                # Batches of other sizes may take other kernels: float32 rounding, no more.
                np.testing.assert_allclose(result.outputs[name], array, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda inputs: {f"{name}_": array for name, array in inputs.items()}, InvalidInputError),
        (lambda _: {}, InvalidInputError),
        (lambda inputs: {n: a[:, :0] for n, a in inputs.items()}, InvalidInputError),
        (lambda inputs: {n: a[:0] for n, a in inputs.items()}, InvalidInputError),
        (lambda inputs: {n: a.astype(bool) for n, a in inputs.items()}, InvalidInputError),
    ],
    ids=["name", "missing", "shape", "empty", "dtype"],
)
def test_wrong_inputs_are_refused(server: Any, change: Any, error: type[Exception]) -> None:
    with Client(server.address) as client, pytest.raises(error, match=server.model):
        client.infer(server.model, change(server.inputs(2)))


def test_an_unknown_model_is_named_with_the_nearest(server: Any) -> None:
    with Client(server.address) as client, pytest.raises(UnknownModelError) as caught:
        client.infer(f"{server.model}x", server.inputs(1))
    assert f"did you mean {server.model!r}" in str(caught.value)


def triton_inputs(inputs: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
    tensors = []
    for name, array in inputs.items():
        tensor = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensors.append(tensor.set_data_from_numpy(array))
    return tensors


def test_tritonclient_gets_the_same_answer(server: Any) -> None:
    inputs = server.inputs(3)
    with Client(server.address) as client:
        ours = client.infer(server.model, inputs)
    with triton.InferenceServerClient(server.address) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready(server.model)
        metadata = client.get_model_metadata(server.model)
        assert [tensor.name for tensor in metadata.inputs] == list(inputs)
        theirs = client.infer(server.model, triton_inputs(inputs), priority=1, timeout=60_000_000)
    for name, array in ours.outputs.items():
        np.testing.assert_array_equal(theirs.as_numpy(name), array)
    exits = theirs.get_response().parameters["offramp_exits"].string_param
    assert exits == ",".join(map(str, ours.exits))


@pytest.mark.parametrize(
    ("model", "change", "status"),
    [
        ("nobody", lambda inputs: inputs, "NOT_FOUND"),
        (None, lambda inputs: {n: a[:, :0] for n, a in inputs.items()}, "INVALID_ARGUMENT"),
        (None, lambda inputs: {n: a.astype(bool) for n, a in inputs.items()}, "INVALID_ARGUMENT"),
    ],
)
def test_tritonclient_gets_tritons_statuses(
    server: Any, model: str | None, change: Any, status: str
) -> None:
    with (
        triton.InferenceServerClient(server.address) as client,
        pytest.raises(InferenceServerException) as caught,
    ):
        client.infer(model or server.model, triton_inputs(change(server.inputs(2))))
    assert caught.value.status() == f"StatusCode.{status}"
