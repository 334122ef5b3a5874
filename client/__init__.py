"""The client of an Offramp server, in two forms: :class:`Client` and :class:`AsyncClient`.

::

    with Client("127.0.0.1:8001") as client:
        result = client.infer("model", {"image": images})
        result.outputs["logits"], result.exits, result.confidences
"""

from offramp.client.aio import AsyncClient
from offramp.client.connection import Tls
from offramp.client.errors import (
    ConnectionFailedError,
    DeadlineError,
    InvalidInputError,
    MessageTooLargeError,
    OfframpError,
    RequestError,
    ResponseError,
    ServerBusyError,
    ServerError,
    ServerUnavailableError,
    UnknownModelError,
)
from offramp.client.results import InferResult, ModelMetadata, TensorMetadata
from offramp.client.sync import Client

__all__ = [
    "AsyncClient",
    "Client",
    "ConnectionFailedError",
    "DeadlineError",
    "InferResult",
    "InvalidInputError",
    "MessageTooLargeError",
    "ModelMetadata",
    "OfframpError",
    "RequestError",
    "ResponseError",
    "ServerBusyError",
    "ServerError",
    "ServerUnavailableError",
    "TensorMetadata",
    "Tls",
    "UnknownModelError",
]
