"""Traces of requests: which requests are traced, and what a trace records.

A caller's trace context arrives as W3C's ``traceparent``, in gRPC metadata or HTTP headers. A
request is traced if its caller traces it; of the other requests, every n-th is. An exporter takes
finished traces.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from offramp.engine.common.errors import BadInputError
from offramp.engine.requests.timeline import RequestTimeline

TRACE_PARENT: Final = "traceparent"
"""HTTP header or metadata key of the caller's context."""

_FORM: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
"""Version, trace, span, flags (W3C Trace Context, 3.2)."""
_SAMPLED: Final = 0x01


class TraceParent(NamedTuple):
    """The span of a request's caller."""

    trace_id: int
    span_id: int
    sampled: bool

    @classmethod
    def parse(cls, text: str) -> TraceParent | None:
        """Parse a ``traceparent``; return ``None`` if it is invalid, as the standard requires."""
        found = _FORM.fullmatch(text.strip())
        if found is None or text.startswith("ff"):
            return None
        trace_id, span_id, flags = (int(part, 16) for part in found.groups())
        if not trace_id or not span_id:
            return None
        return cls(trace_id, span_id, bool(flags & _SAMPLED))


@dataclass(slots=True, kw_only=True)
class RequestTrace:
    """Times and facts of one traced request, for its spans."""

    parent: TraceParent | None
    began_s: float
    """Start of the request; all times of a trace are on the monotonic clock."""
    timeline: RequestTimeline = field(default_factory=RequestTimeline)
    ended_s: float = 0.0
    method: str = ""
    model: str = ""
    rows: int = 0
    code: str = ""
    """Name of the gRPC status code."""

    @property
    def queued_s(self) -> float:
        """Start of the first batch; the end of the request if it was in no batch."""
        stages = self.timeline.stages
        return stages[0].began_s if stages else self.ended_s


Exporter = Callable[[RequestTrace], None]
"""Function that takes a finished trace; it must return immediately."""


class RequestTraces:
    """Decides which requests are traced; used on the event loop's thread."""

    def __init__(self, export: Exporter | None = None, *, rate: int = 1000) -> None:
        """Trace one request in ``rate``; none if there is no exporter."""
        self._export = export
        self._rate = self._first_rate = rate
        self._on = export is not None
        self._count = 0

    @property
    def active(self) -> bool:
        """True if any requests are traced."""
        return self._on

    def begin(self, parent: str | None, began_s: float) -> RequestTrace | None:
        """Return the trace of a new request; ``None`` if it is not traced."""
        if not self._on:
            return None
        caller = None if parent is None else TraceParent.parse(parent)
        if caller is None:
            self._count += 1
            if self._count % self._rate:
                return None
        elif not caller.sampled:
            return None
        return RequestTrace(parent=caller, began_s=began_s)

    def end(self, trace: RequestTrace, *, method: str, model: str, rows: int, code: str) -> None:
        """Export the trace of a finished request."""
        trace.ended_s = time.monotonic()
        trace.method, trace.model, trace.rows, trace.code = method, model, rows, code
        if self._export is not None:
            self._export(trace)

    def settings(self) -> dict[str, list[str]]:
        """Return the settings by Triton's names."""
        return {
            "trace_level": ["TIMESTAMPS" if self._on else "OFF"],
            "trace_rate": [str(self._rate)],
            "trace_count": ["-1"],
            "log_frequency": ["0"],
            "trace_file": [""],
            "trace_mode": ["opentelemetry"],
        }

    def change(self, wanted: dict[str, list[str]]) -> None:
        """Change settings; if one is invalid, raise BadInputError and change none.

        A setting without a value is set to its default, as in Triton.
        """
        on, rate = self._on, self._rate
        for name, values in wanted.items():
            value = values[0] if values else ""
            if name == "trace_level" and value in ("", "OFF", "TIMESTAMPS"):
                on = value == "TIMESTAMPS" or (not value and self._export is not None)
            elif name == "trace_rate" and (not value or _is_rate(value)):
                rate = int(value) if value else self._first_rate
            elif values != self.settings().get(name, []):
                raise BadInputError(
                    f"trace setting {name!r:.80} cannot be set to {value!r:.80}; trace_level is "
                    "OFF or TIMESTAMPS, trace_rate a whole number from 1 on, and the others cannot "
                    "be changed"
                )
        if on and self._export is None:
            raise BadInputError(
                "requests cannot be traced: the server was started without --trace-endpoint"
            )
        self._on, self._rate = on, rate


def _is_rate(text: str) -> bool:
    return text.isascii() and text.isdigit() and 1 <= int(text) < 2**31
