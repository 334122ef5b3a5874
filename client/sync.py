"""The blocking client."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from types import ModuleType
from typing import Any, ClassVar, Self

import grpc
from google.protobuf.message import Message
from numpy.typing import ArrayLike

from offramp.client.connection import ClientBase
from offramp.client.conversion import (
    build_request,
    generated_token,
    parse_metadata,
    parse_optional,
    parse_response,
    parse_streamed,
    text_inputs,
)
from offramp.client.results import GeneratedToken, InferResult, ModelMetadata, StreamedResult
from offramp.client.shared_memory import SharedInputs
from offramp.proto import messages


class Client(ClientBase):
    """Calls one server; may be shared among threads.

    Args:
        address: ``host:port`` of the server's gRPC side.
        timeout_s: How long to wait in calls that name no limit; ``None`` waits for ever.
        max_message_mib: Largest response; the server limits requests.
        tls: Encrypts the connection; ``None`` does not.
        token: Sent with every call, to a server that asks for one.
        insecure_token: Whether the token may be sent to another machine without ``tls``.
        retries: How often a call that ends with UNAVAILABLE is tried again, after a random wait
            of up to 0.1 s, 0.2 s, … and within its limit. Other errors are never tried again.

    Raises:
        ValueError: The address is not ``host:port``, a limit is not above 0, or the token would be
            sent in the clear.
    """

    _grpc: ClassVar[ModuleType] = grpc

    # The same signatures as AsyncClient's: what users read, and one awaits where the other waits.
    def infer(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        *,
        outputs: Sequence[str] | None = None,
        timeout_s: float | None = None,
        priority: int = 0,
        shared: SharedInputs | None = None,
    ) -> InferResult:
        """Ask for the answers to n samples.

        Args:
            model: Name of a served model.
            inputs: By name; first dimension n, dtype exactly the model's (lists become numpy's
                default: float64, int64).
            outputs: Names of the outputs wanted; ``None`` is all of them.
            timeout_s: Of this call, which is then its deadline on the server too; ``None`` waits
                as long as the client does, and leaves the deadline to the model's SLO.
            priority: As in Triton: 1 is served first, 0 is the default, which is level 5.
            shared: Memory of :meth:`shared_inputs` that the inputs are sent in.

        Raises:
            UnknownModelError, InvalidInputError, MessageTooLargeError, ServerBusyError,
            DeadlineError, ServerUnavailableError, ConnectionFailedError, ServerError,
            ResponseError
        """
        request = build_request(model, inputs, outputs=outputs, priority=priority, shared=shared)
        return parse_response(self._call(self._infer, request, timeout_s))

    def infer_many(
        self,
        model: str,
        requests: Iterable[Mapping[str, ArrayLike]],
        *,
        concurrency: int = 16,
        outputs: Sequence[str] | None = None,
        timeout_s: float | None = None,
        priority: int = 0,
    ) -> Generator[InferResult, None, None]:
        """Ask for many requests, of which ``concurrency`` are under way at once.

        Yields the results in the order of ``requests``, which is read as far as it is needed. An
        error is raised where its result was due. Closing the iterator, or an error, withdraws what
        is under way. Other arguments and errors are those of :meth:`infer`.
        """
        if concurrency < 1:
            raise ValueError(f"concurrency {concurrency} is below 1")
        under_way: deque[Any] = deque()
        try:
            for inputs in requests:
                request = build_request(model, inputs, outputs=outputs, priority=priority)
                under_way.append(self._infer.future(request, **self._settings.limit(timeout_s)))
                if len(under_way) >= concurrency:
                    yield self._result_of(under_way.popleft())
            while under_way:
                yield self._result_of(under_way.popleft())
        finally:
            for call in under_way:
                call.cancel()

    def _result_of(self, call: Any) -> InferResult:
        try:
            return parse_response(call.result())
        except grpc.RpcError as error:
            raise self._settings.error(error) from error

    @contextmanager
    def shared_inputs(self, size_bytes: int) -> Iterator[SharedInputs]:
        """Share memory with a server on this machine, for the inputs of one request at a time.

        Raises:
            InvalidInputError: The server cannot open it.
            PermissionDeniedError: The server takes none from this client.
        """
        region = SharedInputs(size_bytes)
        try:
            register = messages.SystemSharedMemoryRegisterRequest(
                name=region.name, key=region.key, byte_size=size_bytes
            )
            self._call(self._register, register, None)
            try:
                yield region
            finally:
                unregister = messages.SystemSharedMemoryUnregisterRequest(name=region.name)
                self._call(self._unregister, unregister, None)
        finally:
            region.close()

    def infer_stream(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        *,
        outputs: Sequence[str] | None = None,
        timeout_s: float | None = None,
        priority: int = 0,
    ) -> Generator[StreamedResult, None, None]:
        """Ask for the answers to n samples: the early ones first, the final ones when they come.

        One result of kind ``answer`` is all there is unless exits answered some sample and the
        server compares it with the unmodified model: always in release mode, now and then in
        audit mode. Then the first result is ``early``, and a ``confirmation`` or a ``correction``
        follows, which is left out should the server lose it.

        ::

            for result in client.infer_stream("model", {"image": images}):
                if result.kind is AnswerKind.CORRECTION:
                    mend(result.outputs["logits"][result.corrected])

        A model that answers in parts, as those that generate text do (:meth:`generate`), has any
        number of results: ``part``, and ``last``.

        Closing the iterator withdraws the request. Arguments and errors are those of
        :meth:`infer`; but ``timeout_s`` limits the wait for the first answer, and what follows may
        take as long again as the client waits in calls without a limit.
        """
        request = build_request(
            model,
            inputs,
            outputs=outputs,
            priority=priority,
            deadline_s=timeout_s,
            decoupled=True,
        )
        call = self._stream(
            iter((request,)),
            timeout=self._settings.stream_timeout_s(timeout_s),
            metadata=self._settings.metadata(),
        )
        # grpc can limit the whole call, but not the wait for its first message.
        late = None if timeout_s is None else _Alarm(timeout_s, call.cancel)
        try:
            for response in call:
                if late is not None:
                    late.stop()
                result = parse_streamed(response, address=self._settings.address)
                if result is not None:
                    yield result
        except grpc.RpcError as error:
            if late is not None and late.rang:
                raise self._settings.late(late.delay_s) from error
            raise self._settings.error(error) from error
        finally:
            if late is not None:
                late.stop()
            call.cancel()

    def generate(
        self,
        model: str,
        prompt: str | ArrayLike,
        *,
        max_tokens: int | None = None,
        timeout_s: float | None = None,
        priority: int = 0,
    ) -> Generator[GeneratedToken, None, None]:
        """Ask for a text after a prompt, token by token.

        ::

            for token in client.generate("text", "in 3 minutes", max_tokens=64):
                print(token.text, end="")

        Args:
            model: Name of a served model that generates text.
            prompt: A text, where the model has a tokenizer, or token ids [n].
            max_tokens: Most tokens of the answer; ``None`` leaves that to the model.
            timeout_s: Of the whole answer; ``None`` leaves the deadline to the model's SLO.
            priority: As of :meth:`infer`.

        Closing the iterator ends the generation. Errors are those of :meth:`infer`; tokens that
        came before are yielded.
        """
        inputs = text_inputs(prompt, max_tokens)
        results = self.infer_stream(model, inputs, timeout_s=timeout_s, priority=priority)
        with closing(results):
            for result in results:
                yield generated_token(result)

    def metadata(self, model: str, *, timeout_s: float | None = None) -> ModelMetadata:
        """Inputs and outputs of a model; raises as :meth:`infer`."""
        request = messages.ModelMetadataRequest(name=model)
        return parse_metadata(self._call(self._metadata, request, timeout_s))

    def optional_inputs(self, model: str, *, timeout_s: float | None = None) -> frozenset[str]:
        """Names of the inputs that requests may leave out; raises as :meth:`infer`."""
        request = messages.ModelConfigRequest(name=model)
        return parse_optional(self._call(self._config, request, timeout_s))

    def server_ready(self, *, timeout_s: float | None = None) -> bool:
        """Whether every model takes requests; raises DeadlineError or ConnectionFailedError."""
        request = messages.ServerReadyRequest()
        return bool((self._call(self._server_ready, request, timeout_s)).ready)

    def model_ready(self, model: str, *, timeout_s: float | None = None) -> bool:
        """Whether a model, if it is there, takes requests; raises as :meth:`server_ready`."""
        request = messages.ModelReadyRequest(name=model)
        return bool((self._call(self._model_ready, request, timeout_s)).ready)

    def close(self) -> None:
        """Close the connection; calls in flight are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _call(self, method: Any, request: Message, timeout_s: float | None) -> Any:
        try:
            return method(request, **self._settings.limit(timeout_s))
        except grpc.RpcError as error:
            raise self._settings.error(error) from error


class _Alarm:
    """Does something after a while, unless it is stopped before; on a thread of its own."""

    def __init__(self, delay_s: float, action: Callable[[], object]) -> None:
        self.delay_s = delay_s
        self.rang = False
        self._action = action
        self._timer = threading.Timer(delay_s, self._ring)
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        """Stop it, unless it rang or was stopped before."""
        self._timer.cancel()

    def _ring(self) -> None:
        self.rang = True
        self._action()
