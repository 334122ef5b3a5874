"""Clients of an Offramp server: :class:`Client` and :class:`AsyncClient`.

::

    with Client("127.0.0.1:8001") as client:
        result = client.infer("model", {"image": images})
        result.outputs["logits"], result.exits, result.confidences
        for result in client.infer_stream("model", {"image": images}):
            result.kind  # "early", then "confirmation" or "correction"; or only "answer"
        for token in client.generate("text", "in 3 minutes"):
            token.text, token.exit, token.confidence
"""

from offramp.client.aio import AsyncClient
from offramp.client.connection import Tls
from offramp.client.errors import (
    AuthenticationError,
    ConnectionFailedError,
    DeadlineError,
    InvalidInputError,
    MessageTooLargeError,
    OfframpError,
    PermissionDeniedError,
    RequestError,
    ResponseError,
    ServerBusyError,
    ServerError,
    ServerUnavailableError,
    UnknownModelError,
)
from offramp.client.rest import RestClient
from offramp.client.results import (
    AnswerKind,
    GeneratedToken,
    InferResult,
    ModelMetadata,
    StreamedResult,
    TensorMetadata,
)
from offramp.client.shared_memory import SharedInputs
from offramp.client.sync import Client

__all__ = [
    "AnswerKind",
    "AsyncClient",
    "AuthenticationError",
    "Client",
    "ConnectionFailedError",
    "DeadlineError",
    "GeneratedToken",
    "InferResult",
    "InvalidInputError",
    "MessageTooLargeError",
    "ModelMetadata",
    "OfframpError",
    "PermissionDeniedError",
    "RequestError",
    "ResponseError",
    "RestClient",
    "ServerBusyError",
    "ServerError",
    "ServerUnavailableError",
    "SharedInputs",
    "StreamedResult",
    "TensorMetadata",
    "Tls",
    "UnknownModelError",
]
