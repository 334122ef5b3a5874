"""Asks the server what it serves, before anything is sent."""

from __future__ import annotations

from typing import Final

from offramp.bundle import TensorSpec
from offramp.client import Client, ModelMetadata, OfframpError
from offramp.tools.bench.load.settings import LoadError

_LIMIT_S: Final = 5.0


def check_server(address: str, model: str) -> ModelMetadata:
    """Make sure that the model takes requests; gives its inputs and outputs.

    Raises:
        LoadError: Nobody answers, the model is unknown, or not ready.
        ValueError: The address is not ``host:port``.
    """
    with Client(address, timeout_s=_LIMIT_S) as client:
        try:
            metadata = client.metadata(model)
            ready = client.model_ready(model)
        except OfframpError as error:
            raise LoadError(" ".join(str(error).split())) from error
    if not ready:
        raise LoadError(f"{address}: model {model!r} is not ready; wait until eeserve says so")
    return metadata


def input_specs(metadata: ModelMetadata) -> tuple[TensorSpec, ...]:
    """What data must look like; a size that is free has a symbol of its own."""
    return tuple(
        TensorSpec(
            name=name,
            dtype=tensor.dtype.name,
            shape=tuple(
                size if size >= 0 else ("batch" if axis == 0 else f"{name}_{axis}")
                for axis, size in enumerate(tensor.shape)
            ),
        )
        for name, tensor in metadata.inputs.items()
    )
