"""Traces: which requests are traced, and what a collector gets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from tests.facts import facts
from tests.unit.server.test_service import wait_until
from tritonclient.utils import InferenceServerException

from offramp.server.arguments.options import ServerOptions
from offramp.server.requests.admission import RequestAdmission
from offramp.server.requests.tracing import RequestTrace, RequestTraces, TraceParent
from offramp.server.tracing.otlp import OtlpTraces
from offramp.testing.engine import FakeEngine
from offramp.testing.server import FakeServer

X = np.array([[1, 2, 3, 0.95], [4, 5, 6, 0.25]], np.float32)
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PARENT, TraceParent(int(TRACE, 16), int(SPAN, 16), sampled=True)),
        (f"00-{TRACE}-{SPAN}-00", TraceParent(int(TRACE, 16), int(SPAN, 16), sampled=False)),
        (f"01-{TRACE}-{SPAN}-03-more", TraceParent(int(TRACE, 16), int(SPAN, 16), sampled=True)),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        ("", None),
        ("not a context", None),
    ],
)
def test_contexts_are_read_as_the_standard_says(text: str, expected: TraceParent | None) -> None:
    assert TraceParent.parse(text) == expected


def test_callers_decide_and_one_in_some_of_the_others_is_traced() -> None:
    traces = RequestTraces(lambda _: None, rate=3)
    assert [traces.begin(None, 0.0) is not None for _ in range(6)] == [False, False, True] * 2
    assert traces.begin(f"00-{TRACE}-{SPAN}-00", 0.0) is None
    traced = traces.begin(PARENT, 0.0)
    assert traced is not None
    assert traced.parent == TraceParent.parse(PARENT)
    traces.change({"trace_level": ["OFF"]})
    assert traces.begin(PARENT, 0.0) is None


def test_nothing_is_traced_without_a_collector() -> None:
    traces = RequestTraces()
    assert not traces.active
    assert traces.begin(PARENT, 0.0) is None


class Traced(FakeServer[FakeEngine]):
    """A server that keeps the traces of its requests."""

    def __init__(self) -> None:
        super().__init__(FakeEngine())
        self.traces: list[RequestTrace] = []
        self.admission = RequestAdmission(traces=RequestTraces(self.traces.append, rate=1))


@pytest.fixture
def traced() -> Iterator[Traced]:
    with Traced() as server:
        yield server


def infer(client: Any, module: Any, **how: Any) -> None:
    tensor = module.InferInput("x", [2, 4], "FP32")
    tensor.set_data_from_numpy(X)
    client.infer("fake", [tensor], **how)


def test_requests_of_both_ways_are_traced_with_their_stages(traced: Traced) -> None:
    with triton.InferenceServerClient(traced.address) as client:
        infer(client, triton, headers={"traceparent": PARENT})
        with pytest.raises(InferenceServerException, match="no model 'other'"):
            client.infer("other", [])
    with triton_http.InferenceServerClient(traced.url.removeprefix("http://")) as client:
        infer(client, triton_http, headers={"traceparent": PARENT})
    wait_until(lambda: len(traced.traces) == 3)  # the last ends once its answer is written
    first, failed, second = traced.traces
    assert [t.method for t in traced.traces] == ["ModelInfer", "ModelInfer", "rest/ModelInfer"]
    for each in (first, second):
        assert each.parent == TraceParent.parse(PARENT)
        assert (each.model, each.rows, each.code) == ("fake", 2, "OK")
        (stage,) = each.timeline.stages
        assert (stage.label, stage.batch, stage.samples, stage.answered) == ("exit 0", 2, 2, 1)
        assert each.began_s <= each.queued_s == stage.began_s <= stage.ended_s <= each.ended_s
    assert (failed.parent, failed.code, failed.queued_s) == (None, "NOT_FOUND", failed.ended_s)


def test_clients_change_the_rate_while_the_server_runs(traced: Traced) -> None:
    with triton.InferenceServerClient(traced.address) as client:
        changed = client.update_trace_settings(settings={"trace_rate": "2"}).settings
        assert list(changed["trace_rate"].value) == ["2"]
        assert list(changed["trace_level"].value) == ["TIMESTAMPS"]
        for _ in range(4):
            infer(client, triton)
        assert len(traced.traces) == 2
        client.update_trace_settings(settings={"trace_level": ["OFF"]})
        infer(client, triton)
        assert len(traced.traces) == 2
        client.update_trace_settings(settings={"trace_level": None, "trace_rate": None})
        infer(client, triton)
        assert len(traced.traces) == 3
        for wrong in ({"trace_rate": "0"}, {"trace_level": ["TENSORS"]}, {"trace_file": "x"}):
            with pytest.raises(InferenceServerException, match="trace setting"):
                client.update_trace_settings(settings=wrong)
        with pytest.raises(InferenceServerException, match="cannot be changed alone"):
            client.update_trace_settings(model_name="fake", settings={"trace_rate": "2"})


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the spans that it gets."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.came = threading.Event()

    def Export(self, request: Any, _context: Any) -> Any:  # noqa: N802 - the protocol's name
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        self.came.set()
        return trace_service_pb2.ExportTraceServiceResponse()


def shown(span: Any) -> dict[str, Any]:
    """Return a span's attributes."""
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


def test_a_collector_gets_spans_of_request_queue_and_stages() -> None:
    collector = Collector()
    listener = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, listener)
    port = listener.add_insecure_port("127.0.0.1:0")
    listener.start()
    exporter = OtlpTraces(f"http://127.0.0.1:{port}")
    try:
        with FakeServer(FakeEngine()) as server:
            server.admission.traces = RequestTraces(exporter, rate=10**6)  # type: ignore[misc]
            with triton.InferenceServerClient(server.address) as client:
                infer(client, triton, headers={"traceparent": PARENT})
        exporter.close()
        assert collector.came.wait(30)
    finally:
        listener.stop(None)
    by_name = {span.name: span for span in collector.spans}
    assert set(by_name) == {"ModelInfer", "queue", "stage to exit 0"}
    root, queue, stage = (by_name[n] for n in ("ModelInfer", "queue", "stage to exit 0"))
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    assert root.parent_span_id.hex() == SPAN
    assert queue.parent_span_id == stage.parent_span_id == root.span_id
    assert root.start_time_unix_nano == queue.start_time_unix_nano
    assert queue.end_time_unix_nano == stage.start_time_unix_nano
    assert stage.end_time_unix_nano <= root.end_time_unix_nano
    assert shown(root) == {
        "rpc.system": "grpc",
        "offramp.model": "fake",
        "offramp.samples": 2,
        "offramp.status": "OK",
        "offramp.audited": False,
    }
    assert shown(stage) == {"offramp.batch": 2, "offramp.samples": 2, "offramp.answered": 1}


@pytest.mark.parametrize("endpoint", ["localhost:4317", "", "ftp://x"])
def test_what_is_no_url_of_a_collector_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match=facts("URL", "collector", "http://localhost")):
        ServerOptions(trace_endpoint=endpoint)
