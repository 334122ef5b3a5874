"""The steps from an inference request to its answer, for gRPC and HTTP."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from offramp.engine.requests.results import EngineResult, StreamResult
from offramp.proto.messages import ModelInferResponse
from offramp.proto.request_bytes import InferMessage
from offramp.server.common.catalog import Catalog, ServedName
from offramp.server.common.served import ServedEngine
from offramp.server.requests.admission import CallState, RequestAdmission
from offramp.server.requests.codec import InferCall, write_response
from offramp.server.requests.decoding import RequestDecoder
from offramp.server.requests.shared_memory import shared_bytes


class RequestAnswering:
    """Answers inference requests whose message has been received."""

    def __init__(
        self,
        engine: ServedEngine,
        admission: RequestAdmission,
        catalog: Catalog,
        decoder: RequestDecoder,
    ) -> None:
        self._engine = engine
        self._admission = admission
        self._catalog = catalog
        self._decoder = decoder

    async def answer(
        self,
        state: CallState,
        message: InferMessage,
        *,
        time_remaining_s: float | None,
        trace_parent: str | None = None,
    ) -> ModelInferResponse:
        """Decode the tensors, run the request in the engine, and return the response.

        ``trace_parent`` is the caller's W3C trace context. Cancelling withdraws the request.

        Raises:
            EngineError: The request has no answer.
        """
        request = message.head
        reading = self.read(
            state, message, time_remaining_s=time_remaining_s, trace_parent=trace_parent
        )
        del message  # so that its bytes are freed while the engine works
        served, call = await reading
        result = await self.infer(state, served, call)
        return write_response(request, result, call, served.version)

    async def read(
        self,
        state: CallState,
        message: InferMessage,
        *,
        time_remaining_s: float | None,
        trace_parent: str | None,
    ) -> tuple[ServedName, InferCall]:
        """Return the version that answers, and the engine's arguments, or raise EngineError."""
        request = message.head
        state.model = request.model_name
        state.trace = self._admission.traces.begin(trace_parent, state.began_s)
        self._admission.access.check_model(state.principal, request.model_name)
        find = partial(self._catalog.find, request.model_name, request.model_version)
        model = self._engine.model(find().engine_name)
        self._admission.hold_more(state, shared_bytes(request))
        call = await self._decoder.call(message, model, time_remaining_s=time_remaining_s)
        return find(), call  # the served version may have changed

    async def infer(self, state: CallState, served: ServedName, call: InferCall) -> EngineResult:
        """Return the engine's only answer, or raise EngineError."""
        result = await self._engine.infer(
            served.engine_name,
            call.inputs,
            deadline_s=call.deadline_s,
            priority=call.priority,
            source=state.source,
            timeline=state.trace.timeline if state.trace else None,
        )
        state.rows = len(result.exits)
        return result

    async def infer_stream(
        self, state: CallState, served: ServedName, call: InferCall
    ) -> AsyncGenerator[StreamResult, None]:
        """Yield all answers of the engine; closing the iterator withdraws the request."""
        results = self._engine.infer_stream(
            served.engine_name,
            call.inputs,
            deadline_s=call.deadline_s,
            priority=call.priority,
            source=state.source,
            timeline=state.trace.timeline if state.trace else None,
        )
        async with aclosing(results):
            async for result in results:
                before = state.rows if result.kind.partial else 0
                state.rows = before + len(result.exits)
                yield result
