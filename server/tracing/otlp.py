"""Traces as OpenTelemetry spans, sent to a collector by OTLP over gRPC.

A request is a span of kind server. Its children are ``queue``, from arrival to the first batch, and
one span for each stage run with samples of the request. The decision of a stage's exit is on that
stage's span: ``offramp.samples`` samples ran, and ``offramp.answered`` of them left there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from offramp import __version__
from offramp.server.common.errors import StartError
from offramp.server.requests.tracing import RequestTrace, TraceParent

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Tracer

SERVICE_NAME: Final = "offramp"
_NS: Final = 1_000_000_000


class OtlpTraces:
    """Sends traces to a collector, on OpenTelemetry's thread."""

    def __init__(self, endpoint: str) -> None:
        """``endpoint`` is for instance ``http://localhost:4317``; ``https`` encrypts.

        Raises:
            StartError: OpenTelemetry is not installed.
        """
        try:
            from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
            from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
            from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        except ImportError as error:
            raise StartError(
                f"--trace-endpoint needs OpenTelemetry ({error}): pip install 'offramp[otel]'"
            ) from error
        resource = Resource.create({"service.name": SERVICE_NAME, "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
        self._tracer: Tracer = self._provider.get_tracer("offramp.server", __version__)
        self._to_epoch_s = time.time() - time.monotonic()

    def __call__(self, trace: RequestTrace) -> None:
        """Queue a finished trace for export."""
        from opentelemetry.trace import (  # noqa: PLC0415
            SpanKind,
            Status,
            StatusCode,
            set_span_in_context,
        )

        root = self._tracer.start_span(
            trace.method,
            context=_context_of(trace.parent),
            kind=SpanKind.SERVER,
            start_time=self._ns(trace.began_s),
            attributes={
                "rpc.system": "grpc",
                "offramp.model": trace.model,
                "offramp.samples": trace.rows,
                "offramp.status": trace.code,
                "offramp.audited": trace.timeline.audited,
            },
        )
        if trace.code != "OK":
            root.set_status(Status(StatusCode.ERROR, trace.code))
        inside = set_span_in_context(root)
        self._child(inside, "queue", trace.began_s, trace.queued_s, {})
        for stage in trace.timeline.stages:
            facts = {
                "offramp.batch": stage.batch,
                "offramp.samples": stage.samples,
                "offramp.answered": stage.answered,
            }
            self._child(inside, f"stage to {stage.label}", stage.began_s, stage.ended_s, facts)
        root.end(self._ns(trace.ended_s))

    def close(self) -> None:
        """Send the remaining traces, for at most a few seconds."""
        self._provider.shutdown()

    def _child(
        self, inside: Context, name: str, began_s: float, ended_s: float, facts: Mapping[str, int]
    ) -> None:
        span = self._tracer.start_span(
            name, context=inside, start_time=self._ns(began_s), attributes=facts
        )
        span.end(self._ns(ended_s))

    def _ns(self, monotonic_s: float) -> int:
        return round((monotonic_s + self._to_epoch_s) * _NS)


def _exporter(endpoint: str) -> SpanExporter:
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )
    except ImportError as error:
        raise StartError(
            f"--trace-endpoint needs OTLP's exporter ({error}): pip install 'offramp[otel]'"
        ) from error
    return OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))


def _context_of(parent: TraceParent | None) -> Context:
    """Return the parent context of a span, which belongs to the caller's trace if there is one."""
    from opentelemetry.context import Context  # noqa: PLC0415
    from opentelemetry.trace import (  # noqa: PLC0415
        NonRecordingSpan,
        SpanContext,
        TraceFlags,
        set_span_in_context,
    )

    if parent is None:
        return Context()
    caller = SpanContext(
        trace_id=parent.trace_id,
        span_id=parent.span_id,
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )
    return set_span_in_context(NonRecordingSpan(caller), Context())
