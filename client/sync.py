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
    """Client of one server; threads may share it.

    Args:
        address: ``host:port`` of the server's gRPC port.
        timeout_s: Limit, in seconds, of calls that set none; ``None`` waits forever.
        max_message_mib: Largest response, in MiB; the server limits requests.
        tls: Certificates for encryption; ``None`` does not encrypt.
        token: Token to send with every call, for a server that requires one.
        insecure_token: Whether the token may be sent to another machine without ``tls``.
        retries: How often a call that ends with UNAVAILABLE is tried again, after a random wait
            of up to 0.1 s, 0.2 s, … within the call's limit. Other errors are never retried.

    Raises:
        ValueError: The address is not ``host:port``, a limit is not above 0, or the token would be
            sent without encryption.
    """

    _grpc: ClassVar[ModuleType] = grpc

    # The same signatures as AsyncClient's, which await where these wait.
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
        """Return the answers to n samples.

        Args:
            model: Name of a served model.
            inputs: Arrays by input name; first dimension n, dtype exactly the model's (lists become
                numpy's default: float64, int64).
            outputs: Names of the requested outputs; ``None`` requests all.
            timeout_s: Limit of this call, in seconds, and its deadline on the server. ``None``
                waits up to the client's limit, and leaves the deadline to the model's SLO.
            priority: Triton's priority: 1 is served first; 0, the default, is level 5.
            shared: Memory from :meth:`shared_inputs` for the inputs.

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
        """Send many requests; at most ``concurrency`` of them are in progress at a time.

        Yields the results in the order of ``requests``, which is read only as far as needed. An
        error is raised in place of its result. Closing the iterator, or an error, withdraws the
        requests in progress. Other arguments and errors are those of :meth:`infer`.
        """
        if concurrency < 1:
            raise ValueError(f"concurrency {concurrency} is below 1")
        in_flight: deque[Any] = deque()
        try:
            for inputs in requests:
                request = build_request(model, inputs, outputs=outputs, priority=priority)
                in_flight.append(self._infer.future(request, **self._settings.limit(timeout_s)))
                if len(in_flight) >= concurrency:
                    yield self._result_of(in_flight.popleft())
            while in_flight:
                yield self._result_of(in_flight.popleft())
        finally:
            for call in in_flight:
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
            InvalidInputError: The server cannot open the memory.
            PermissionDeniedError: The server does not accept shared memory from this client.
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
        """Yield the answers to n samples: early answers first, final ones when they arrive.

        There is one result, of kind ``answer``, unless exits answered some sample and the server
        compares it with the unmodified model: always in release mode, sometimes in audit mode. In
        that case the first result is ``early``, and a ``confirmation`` or ``correction`` follows,
        unless the server loses the final answer.

        ::

            for result in client.infer_stream("model", {"image": images}):
                if result.kind is AnswerKind.CORRECTION:
                    mend(result.outputs["logits"][result.corrected])

        A model that answers in parts, for instance one that generates text (:meth:`generate`), has
        any number of results: ``part``, and ``last``.

        Closing the iterator withdraws the request. Arguments and errors are those of :meth:`infer`,
        except that ``timeout_s`` limits the wait for the first answer; later answers get the
        client's limit in addition.
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
        """Yield the tokens of a text that continues a prompt.

        ::

            for token in client.generate("text", "in 3 minutes", max_tokens=64):
                print(token.text, end="")

        Args:
            model: Name of a served model that generates text.
            prompt: A text, if the model has a tokenizer, or token ids [n].
            max_tokens: Largest number of tokens in the answer; ``None`` uses the model's limit.
            timeout_s: Limit of the whole answer, in seconds; ``None`` leaves the deadline to the
                model's SLO.
            priority: See :meth:`infer`.

        Closing the iterator ends the generation. Errors are those of :meth:`infer`; tokens that
        arrived before an error are yielded.
        """
        inputs = text_inputs(prompt, max_tokens)
        results = self.infer_stream(model, inputs, timeout_s=timeout_s, priority=priority)
        with closing(results):
            for result in results:
                yield generated_token(result)

    def metadata(self, model: str, *, timeout_s: float | None = None) -> ModelMetadata:
        """Return inputs and outputs of a model; errors are those of :meth:`infer`."""
        request = messages.ModelMetadataRequest(name=model)
        return parse_metadata(self._call(self._metadata, request, timeout_s))

    def optional_inputs(self, model: str, *, timeout_s: float | None = None) -> frozenset[str]:
        """Return the names of inputs that requests may omit; errors are those of :meth:`infer`."""
        request = messages.ModelConfigRequest(name=model)
        return parse_optional(self._call(self._config, request, timeout_s))

    def server_ready(self, *, timeout_s: float | None = None) -> bool:
        """Return whether every model takes requests; DeadlineError or ConnectionFailedError."""
        request = messages.ServerReadyRequest()
        return bool((self._call(self._server_ready, request, timeout_s)).ready)

    def model_ready(self, model: str, *, timeout_s: float | None = None) -> bool:
        """Return whether a model is served and takes requests; errors as :meth:`server_ready`."""
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
    """Calls a function on a separate thread after a delay, unless it is stopped before."""

    def __init__(self, delay_s: float, action: Callable[[], object]) -> None:
        self.delay_s = delay_s
        self.rang = False
        self._action = action
        self._timer = threading.Timer(delay_s, self._ring)
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        """Cancel the alarm, unless it rang or was stopped before."""
        self._timer.cancel()

    def _ring(self) -> None:
        self.rang = True
        self._action()
