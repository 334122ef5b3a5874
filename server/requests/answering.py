"""The way from one inference request to its answer, however it arrived."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from offramp.engine.requests.results import EngineResult, StreamResult
from offramp.proto.messages import ModelInferResponse
from offramp.proto.request_bytes import InferMessage
from offramp.server.common.catalog import Catalog, ServedName
from offramp.server.common.served import ServedEngine
from offramp.server.requests.codec import InferCall, write_response
from offramp.server.requests.decoding import RequestDecoder
from offramp.server.requests.reception import Reception, Visit
from offramp.server.requests.shared_memory import shared_bytes


class RequestAnswering:
    """Answers requests for inference whose message was received."""

    def __init__(
        self,
        engine: ServedEngine,
        reception: Reception,
        catalog: Catalog,
        decoder: RequestDecoder,
    ) -> None:
        self._engine = engine
        self._reception = reception
        self._catalog = catalog
        self._decoder = decoder

    async def answer(
        self,
        visit: Visit,
        message: InferMessage,
        *,
        time_remaining_s: float | None,
        trace_parent: str | None = None,
    ) -> ModelInferResponse:
        """Decode the tensors, ask the engine, and return the response.

        ``trace_parent`` is the caller's context, as W3C has it. Cancelling withdraws the request.

        Raises:
            EngineError: There is no answer.
        """
        request = message.head
        reading = self.read(
            visit, message, time_remaining_s=time_remaining_s, trace_parent=trace_parent
        )
        del message  # lest its bytes stay while the engine works
        served, call = await reading
        result = await self.infer(visit, served, call)
        return write_response(request, result, call, served.version)

    async def read(
        self,
        visit: Visit,
        message: InferMessage,
        *,
        time_remaining_s: float | None,
        trace_parent: str | None,
    ) -> tuple[ServedName, InferCall]:
        """Return the version that answers, and what to call the engine with; EngineError."""
        request = message.head
        visit.model = request.model_name
        visit.trace = self._reception.traces.begin(trace_parent, visit.began_s)
        self._reception.access.check_model(visit.principal, request.model_name)
        find = partial(self._catalog.find, request.model_name, request.model_version)
        model = self._engine.model(find().engine_name)
        self._reception.hold_more(visit, shared_bytes(request))
        call = await self._decoder.call(message, model, time_remaining_s=time_remaining_s)
        return find(), call  # another version may have come in the meantime

    async def infer(self, visit: Visit, served: ServedName, call: InferCall) -> EngineResult:
        """Ask the engine for the one answer; EngineError."""
        result = await self._engine.infer(
            served.engine_name,
            call.inputs,
            deadline_s=call.deadline_s,
            priority=call.priority,
            source=visit.source,
            timeline=visit.trace.timeline if visit.trace else None,
        )
        visit.rows = len(result.exits)
        return result

    async def infer_stream(
        self, visit: Visit, served: ServedName, call: InferCall
    ) -> AsyncGenerator[StreamResult, None]:
        """Yield all answers that the engine has; closing the iterator withdraws the request."""
        results = self._engine.infer_stream(
            served.engine_name,
            call.inputs,
            deadline_s=call.deadline_s,
            priority=call.priority,
            source=visit.source,
            timeline=visit.trace.timeline if visit.trace else None,
        )
        async with aclosing(results):
            async for result in results:
                before = visit.rows if result.kind.partial else 0
                visit.rows = before + len(result.exits)
                yield result
