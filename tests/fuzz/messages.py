"""A campaign against the handlers of the service, called in this process: no network, so fast."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, NoReturn

import grpc
import pytest

from offramp.engine.core import Engine
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.stages.plan import Mode
from offramp.proto import messages
from offramp.proto.descriptors import method_path
from offramp.server.grpc_endpoint import GrpcEndpoint
from offramp.server.services.protocol_services import ProtocolServices
from tests.fuzz.campaign import WrongError
from tests.fuzz.subject import ALLOWED, METHODS, MODEL, Subject, method_of, mutate


class _AbortError(Exception):
    """The call was ended with a status."""


class _Context:
    """A call's context, as far as handlers use it."""

    def __init__(self, message: bytes) -> None:
        self._message: bytes | Any = message
        self.status = "OK"
        self.written: list[bytes] = []
        self._when_done: list[Callable[[Any], None]] = []

    async def read(self) -> Any:
        message, self._message = self._message, grpc.aio.EOF
        return message

    async def messages(self, read: Callable[[bytes], Any]) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield read(message)

    async def abort(self, code: grpc.StatusCode, *_: object) -> NoReturn:
        self.status = code.name
        raise _AbortError

    async def write(self, response: bytes) -> None:
        self.written.append(response)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._when_done.append(callback)

    def end(self) -> None:
        """Notify the handlers that gRPC has written the answer."""
        for callback in self._when_done:
            callback(self)

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def time_remaining(self) -> None:
        return None

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def code(self) -> int:
        return 0

    def cancelled(self) -> bool:
        return False

    def done(self) -> bool:
        return False


class Messages:
    """Feeds the handlers that gRPC would call, over a real engine."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-")
        self._subject = Subject.write(Path(self._folder.name))
        self._loop = asyncio.new_event_loop()
        self._engine = self._loop.run_until_complete(_open(self._subject.bundle.path))
        self._methods = {method: _handler(self._engine, method) for method in METHODS}
        self._cases = 0

    def seeds(self) -> Sequence[bytes]:
        return self._subject.seeds()

    def mutate(self, case: bytes, random: Random) -> bytes:
        return mutate(case, random)

    def check(self, case: bytes) -> str:
        self._cases += 1
        if self._cases % 500 == 0:
            self._probe()
        method, message = method_of(case), case[1:]
        status, told = self._loop.run_until_complete(self._call(method, message))
        if status not in ALLOWED:
            raise WrongError(f"{method}: {status}")
        return f"{method} {status}:{told}"

    async def _call(self, method: str, message: bytes) -> tuple[str, str]:
        """The status that the client would see, and what tells such calls apart."""
        handler, context = self._methods[method], _Context(message)
        read = handler.request_deserializer or bytes
        with contextlib.suppress(_AbortError):
            if handler.response_streaming:
                await handler.stream_stream(context.messages(read), context)
            elif handler.request_streaming:
                await handler.stream_unary(context.messages(read), context)
            else:
                await handler.unary_unary(read(message), context)
        context.end()
        for response in map(messages.ModelStreamInferResponse.FromString, context.written):
            if response.error_message:
                return response.infer_response.parameters["offramp_status"].string_param, ""
        return context.status, ""

    def _probe(self) -> None:
        """A valid request has the right answer all the same."""
        rows = [self._cases % len(self._subject.truth), 0]
        result = self._loop.run_until_complete(
            self._engine.infer(MODEL, self._subject.truth.take(rows))
        )
        wrong = self._subject.truth.wrong(
            rows,
            result.exits.tolist(),
            result.outputs[self._subject.truth.output],
            result.confidences.tolist(),
        )
        if wrong is not None:
            raise WrongError(f"a valid request in between: {wrong}")

    def close(self) -> None:
        self._loop.run_until_complete(self._engine.close())
        self._loop.close()
        self._folder.cleanup()


def _handler(engine: Engine, method: str) -> Any:
    """The handler that a server of the engine registers for a method."""
    registered: list[Any] = []
    server = SimpleNamespace(
        add_generic_rpc_handlers=registered.extend,
        add_registered_method_handlers=lambda *_: None,
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(grpc.aio, "server", lambda **_: server)
        GrpcEndpoint(ProtocolServices(engine), max_message_bytes=2**20)
    details = _Details(method_path(method))
    (found,) = (h for one in registered if (h := one.service(details)) is not None)
    return found


class _Details:
    """Call details that gRPC uses to find the handler."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata = ()


async def _open(bundle: Path) -> Engine:
    options = EngineOptions(
        mode=Mode.LEAVE,
        backend="onnxruntime",
        threads=1,
        keep_state=False,
        defaults=ModelOptions(max_batch_size=8, max_queue_samples=64),
    )
    return await Engine.open({MODEL: bundle}, options)
