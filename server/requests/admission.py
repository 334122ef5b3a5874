"""Admission, accounting and logging of every request.

gRPC keeps an answer, and some 20 KiB for its call, until flow control lets it write the answer. A
client that answers pings but reads nothing would hold both forever. We cannot drop one call or
answer, so we close the connection of such a client.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from functools import wraps
from types import MappingProxyType
from typing import Any, Final, TypeAlias, TypeVar

import grpc
import grpc.aio

from offramp.engine.common.errors import EngineError
from offramp.engine.common.line_limit import LineLimit, one_line
from offramp.server.arguments.options import MIB, ServerOptions
from offramp.server.common.errors import (
    ERROR_METADATA_KEY,
    INTERNAL_ERROR,
    REFUSALS,
    HeldBytesError,
    RequestCountError,
    refusal_of,
    shortened,
    wire_name,
)
from offramp.server.requests.message_memory import MemoryReturn
from offramp.server.requests.tracing import RequestTrace, RequestTraces
from offramp.server.security.access import AccessRules
from offramp.server.security.tokens import Principal

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("offramp.access")

_PEER_CHARS, _MODEL_CHARS = 64, 128

_OURS: Final = {grpc.StatusCode.INTERNAL}
"""Codes that are not the client's fault; logged as errors."""


MAX_WATCHES: Final = 1024
"""Largest number of open streams of health and reflection; a separate limit from inference
streams."""

MAX_WATCHES_OF_A_PEER: Final = 16
"""Largest number of such streams of one connection; a client needs one for each service or model to
watch."""

_CALL_BYTES: Final = 20 * 1024
"""Rough size of gRPC's memory for a call, part of which stays when many calls come together."""


UNREAD_S: Final = 60.0
"""Seconds that a client may take to read an answer; large answers get additional time
(:data:`SLOWEST_BYTES_PER_S`)."""

SLOWEST_BYTES_PER_S: Final = 128 * 1024

CROWDED_S: Final = 2.0
"""Value of :data:`UNREAD_S` while requests and answers use at least half of the admission limit."""

MAX_RESETS: Final = 500
"""Number of calls of a connection that may be cancelled before their message is taken, within one
window. Envoy's number (``premature_reset_total_stream_count``)."""

RESET_WINDOW_S: Final = 10.0

_LONGEST_HOLD_S: Final = 0.2

_LOOK_S: Final = 0.001


@dataclass(slots=True, eq=False)
class PendingAnswer:
    """An answer that gRPC has not written yet."""

    peer: str
    size_bytes: int
    since_s: float
    """Start on the monotonic clock."""
    streamed: bool
    """True for a message of a stream, which its client may read at any speed."""

    def overdue(self, now_s: float, *, crowded: bool) -> bool:
        """Return whether the client exceeded its time to read the answer.

        A message of a stream is never overdue, since it uses no capacity of other requests.
        """
        allowed_s = CROWDED_S if crowded else UNREAD_S
        allowed_s += self.size_bytes / SLOWEST_BYTES_PER_S
        return not self.streamed and now_s - self.since_s > allowed_s


class PendingAnswers:
    """All answers that gRPC has not written yet; used on the event loop's thread."""

    def __init__(self) -> None:
        self._pending: dict[PendingAnswer, None] = {}
        """Answers that gRPC has not written yet, in order of arrival."""
        self._released: asyncio.Event | None = None
        """Set once answers may go to gRPC again; ``None`` while they may."""

    async def turn(self) -> None:
        """Wait until an answer may be passed to gRPC."""
        if self._released is not None:
            await self._released.wait()

    def add(
        self, peer: str, size_bytes: int, now_s: float, *, streamed: bool = False
    ) -> PendingAnswer:
        """Record an answer that is passed to gRPC now."""
        answer = PendingAnswer(peer, size_bytes, now_s, streamed)
        self._pending[answer] = None
        return answer

    def remove(self, answer: PendingAnswer) -> None:
        """Record that an answer is written, or that its call ended in another way."""
        del self._pending[answer]

    def unread(self, now_s: float, *, crowded: bool) -> dict[str, str]:
        """Return the peers whose clients do not read, with the reason to close their connection."""
        found: dict[str, str] = {}
        for answer in self._pending:
            age_s = now_s - answer.since_s
            if age_s <= CROWDED_S:
                break
            if answer.overdue(now_s, crowded=crowded):
                reason = f"an answer of {answer.size_bytes} bytes was not read for {age_s:.0f} s"
                found.setdefault(answer.peer, reason)
        return found

    @asynccontextmanager
    async def held(self) -> AsyncIterator[frozenset[str]]:
        """Hold answers back; yield the peers for which gRPC is still writing some."""
        self._released = asyncio.Event()
        try:
            for _ in range(round(_LONGEST_HOLD_S / _LOOK_S)):
                if not self._pending:
                    break
                await asyncio.sleep(_LOOK_S)
            yield frozenset(answer.peer for answer in self._pending)
        finally:
            self._released.set()
            self._released = None


class ResetCounts:
    """Calls cancelled before their message was taken, by connection (CVE-2023-44487)."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._until_s = 0.0

    def add(self, peer: str, now_s: float) -> None:
        """Count a cancelled call."""
        if now_s >= self._until_s:
            self._counts.clear()
            self._until_s = now_s + RESET_WINDOW_S
        self._counts[peer] += 1

    def excessive(self, peer: str) -> bool:
        """Return whether a connection has just reached the limit."""
        return self._counts[peer] == MAX_RESETS

    def take_beyond(self) -> Mapping[str, str]:
        """Return the peers that reset too many calls, with the reason to close their connection.

        Each is returned once, because the peer's next connection is a new one.
        """
        reason = f"{MAX_RESETS} calls were cancelled as soon as they were opened"
        found = {peer: reason for peer, count in self._counts.items() if count >= MAX_RESETS}
        for peer in found:
            del self._counts[peer]
        return found


class CallKind(Enum):
    """Kinds of calls, each with its own limit."""

    REQUEST = "request"
    STREAM = "stream"
    """A stream of inference requests."""
    WATCH = "watch"
    """A stream of health or reflection."""


@dataclass(slots=True, kw_only=True)
class CallState:
    """A call from its arrival to its end."""

    method: str
    peer: str
    """Client address in gRPC's notation, taken at arrival: gRPC reports none after the deadline."""
    began_s: float
    """Arrival on the monotonic clock."""
    kind: CallKind = CallKind.REQUEST
    admitted: bool = False
    """True if it counts toward the limit of its kind."""
    principal: Principal | None = None
    """Principal of the call's token."""
    size_bytes: int = 0
    """Bytes held for the call, which admission counts."""
    answer: PendingAnswer | None = None
    """The answer until gRPC has written it; until then the request counts as in progress."""
    model: str = ""
    rows: int = 0
    code: grpc.StatusCode = grpc.StatusCode.OK
    trace: RequestTrace | None = None
    """Trace, ``None`` for most calls: see :mod:`.tracing`."""

    @property
    def source(self) -> str:
        """The client's host: gRPC's ``ipv4:10.0.0.7:51234`` without the port."""
        return self.peer.rpartition(":")[0]


class RequestAdmission:
    """Admits requests within the limits, counts refusals, and writes the access log.

    Used on the event loop's thread. The bytes of a message are held from arrival to answer, because
    the request's arrays are views of them; the bytes of the answer are held until gRPC has written
    it.
    """

    def __init__(
        self,
        options: ServerOptions | None = None,
        memory: MemoryReturn | None = None,
        access: AccessRules | None = None,
        traces: RequestTraces | None = None,
    ) -> None:
        """Without ``access``, read the token files of the options; StartError if one is invalid."""
        self.traces: Final = traces or RequestTraces()
        self._memory = memory or MemoryReturn()
        options = options or ServerOptions()
        self.access: Final = access or AccessRules(options.security)
        """Rules of access, with the tokens."""
        self._max_requests = options.max_concurrent_requests
        self._max_bytes = options.max_queue_mib * MIB
        self._access_log = options.access_log
        if options.access_log:
            access_logger.setLevel(logging.INFO)  # independent of --log-level
        self._lines = LineLimit()
        self.requests = 0
        """Number of inference requests in progress."""
        self.admitted = 0
        """Inference requests admitted since the start."""
        self.streams = 0
        """Number of open inference streams."""
        self.last_answers: dict[str, float] = {}
        """Time of each model's last answer, in seconds since the epoch."""
        self._watches: Counter[str] = Counter()
        """Number of open health watches, by client address."""
        self.held_bytes = 0
        self.answers = PendingAnswers()
        self._resets = ResetCounts()
        self.offended = asyncio.Event()
        """Set when there is a connection to close immediately."""
        self._refused = {(r.code.name, r.reason): 0 for r in REFUSALS.values()}

    @property
    def refused(self) -> Mapping[tuple[str, str], int]:
        """Number of refusals by names of status code and reason."""
        return MappingProxyType(self._refused)

    def enter(self, method: str, peer: str, *, kind: CallKind = CallKind.REQUEST) -> CallState:
        """Record a new call; :meth:`leave` must follow."""
        return CallState(method=method, peer=peer, began_s=time.monotonic(), kind=kind)

    def check_capacity(self) -> None:
        """Refuse an inference request before its message is received, if a limit is reached.

        This reserves nothing, so that a call without a message blocks no other.

        Raises:
            RequestCountError: The limit of requests is reached.
            HeldBytesError: Held messages fill the memory limit.
        """
        self._check_count(self.requests, "requests are being answered")
        if self.held_bytes >= self._max_bytes:
            raise self._full(0)

    def hold(self, state: CallState, size_bytes: int) -> None:
        """Admit an inference request whose message has arrived.

        Raises:
            RequestCountError: The limit of requests is reached.
            HeldBytesError: The message exceeds the memory left.
        """
        self._memory.record_growth(size_bytes, self.held_bytes + size_bytes)
        self._check_count(self.requests, "requests are being answered")
        if self.held_bytes + size_bytes > self._max_bytes:
            raise self._full(size_bytes)
        self.requests += 1
        self.admitted += 1
        self.held_bytes += size_bytes
        state.admitted = True
        state.size_bytes += size_bytes

    def hold_more(self, state: CallState, size_bytes: int) -> None:
        """Hold further bytes of a request, such as its shared memory, or raise HeldBytesError."""
        if self.held_bytes + size_bytes > self._max_bytes:
            raise self._full(size_bytes)
        self.held_bytes += size_bytes
        state.size_bytes += size_bytes

    def open_stream(self, state: CallState) -> None:
        """Admit a stream; RequestCountError if the limit of its kind is reached."""
        if state.kind is CallKind.WATCH:
            peer = state.peer
            self._check_watches(self._watches[peer], MAX_WATCHES_OF_A_PEER, "this connection has")
            self._check_watches(self._watches.total(), MAX_WATCHES, "the server has")
            self._watches[peer] += 1
        else:
            self._check_count(self.streams, "streams are open")
            self.streams += 1
        state.admitted = True

    def _check_watches(self, here: int, limit: int, who: str) -> None:
        if here >= limit:
            raise RequestCountError(
                f"{who} {here} open streams of health and reflection, which is the limit; "
                "end one before you open another"
            )

    def _check_count(self, here: int, what: str) -> None:
        if here >= self._max_requests:
            raise RequestCountError(
                f"{here} {what}, which is the limit; "
                "try again later, or raise --max-concurrent-requests"
            )

    def passed(self, size_bytes: int) -> None:
        """Record a message that is not held, because messages of its method only have names."""
        self._memory.record_growth(size_bytes, self.held_bytes + size_bytes)

    async def answer(
        self, state: CallState, size_bytes: int, when_done: Callable[[Any], None]
    ) -> None:
        """Wait until an answer may be passed to gRPC, and record that it is passed.

        ``when_done`` registers a callback for the end of the call.
        """
        await self.answers.turn()
        answer = self.answers.add(state.peer, size_bytes, time.monotonic())
        self.held_bytes += size_bytes - state.size_bytes
        self._memory.record_growth(size_bytes, self.held_bytes)
        state.size_bytes, state.answer = size_bytes, answer

        def written(_: object) -> None:
            self.answers.remove(answer)
            if time.monotonic() - answer.since_s > CROWDED_S:
                self._memory.record_growth(0, self.held_bytes, left_bytes=_CALL_BYTES)
            self._release(state)

        when_done(written)

    @asynccontextmanager
    async def streaming(self, peer: str, size_bytes: int) -> AsyncIterator[None]:
        """Wait until a stream's message may be passed to gRPC; record it until it is written."""
        await self.answers.turn()
        answer = self.answers.add(peer, size_bytes, time.monotonic(), streamed=True)
        try:
            yield
        finally:
            self.answers.remove(answer)

    def leave(self, state: CallState) -> None:
        """Record the end of a call: answered, refused, or left by its client."""
        if state.answer is None:
            self._release(state)
        if state.trace is not None:
            self.traces.end(
                state.trace, method=state.method, model=state.model, rows=state.rows,
                code=state.code.name,
            )  # fmt: skip
        if state.rows:
            self.last_answers[state.model] = time.time()
        stream = state.kind is not CallKind.REQUEST
        if self._access_log and not (stream and state.code is grpc.StatusCode.OK):
            self._log_access(state)

    def _release(self, state: CallState) -> None:
        """Release the capacity of a call that gRPC is done with."""
        if state.kind is CallKind.REQUEST:
            self.requests -= state.admitted
        elif state.kind is CallKind.STREAM:
            self.streams -= state.admitted
        elif state.admitted:
            self._watches -= Counter((state.peer,))  # drops peers without watches
        self.held_bytes -= state.size_bytes
        self._memory.record_shrink(self.held_bytes)

    def reset(self, state: CallState) -> None:
        """Record a call that was cancelled before its message was taken."""
        self._memory.record_growth(0, self.held_bytes, left_bytes=_CALL_BYTES)
        if state.peer:
            self._resets.add(state.peer, time.monotonic())
            if self._resets.excessive(state.peer):
                self.offended.set()

    def offenders(self) -> Mapping[str, str]:
        """Return the peers whose connections to close now, with the reason."""
        self.offended.clear()
        crowded = 2 * self.requests > self._max_requests or 2 * self.held_bytes > self._max_bytes
        unread = self.answers.unread(time.monotonic(), crowded=crowded)
        return {**unread, **self._resets.take_beyond()}

    def log_closed(self, peer: str, reason: str) -> None:
        """Log a closed connection, at most a few lines a second."""
        if (suffix := self._lines.admit("closed")) is not None:
            logger.info("closed the connection of %s: %s%s", peer, reason, suffix)

    def refuse(self, state: CallState, error: Exception) -> tuple[grpc.StatusCode, str]:
        """Count and log a refusal or failure; return the code and message for the client."""
        if isinstance(error, EngineError):
            (code, reason), message = refusal_of(error), str(error)
        else:
            (code, reason), message = REFUSALS[EngineError], INTERNAL_ERROR
        state.code = code
        self.count_refused(code.name, reason)
        if (suffix := self._lines.admit(reason)) is not None:
            self._log_refusal(state, reason, error, suffix)
        return code, message

    def count_refused(self, code: str, reason: str) -> None:
        """Count a refusal by names of status code and reason."""
        self._refused[code, reason] += 1

    def _full(self, size_bytes: int) -> HeldBytesError:
        return HeldBytesError(
            f"the server holds {self.held_bytes / MIB:.1f} MiB of requests, and "
            f"{size_bytes / MIB:.1f} MiB more are above its limit of {self._max_bytes / MIB:.0f} "
            "MiB; try again later, or raise --max-queue-mib"
        )

    def _log_refusal(self, state: CallState, reason: str, error: Exception, suffix: str) -> None:
        if not isinstance(error, EngineError):
            logger.error("unexpected error in %s%s", state.method, suffix, exc_info=error)
        elif state.code in _OURS:
            logger.error("answered %s: %s%s", state.code.name, one_line(str(error)), suffix)
        else:
            where = one_line(state.peer, _PEER_CHARS)
            logger.info(
                "refused (%s, %s) %s: %s%s",
                state.code.name, reason, where, one_line(str(error)), suffix,
            )  # fmt: skip

    def _log_access(self, state: CallState) -> None:
        facts = {
            "peer": one_line(state.peer, _PEER_CHARS),
            "method": state.method,
            "code": state.code.name,
            "ms": round((time.monotonic() - state.began_s) * 1e3, 1),
            "rows": state.rows,
            "model": one_line(state.model, _MODEL_CHARS),  # last, because it may contain spaces
        }
        line = " ".join(f"{name}={fact}" for name, fact in facts.items())
        access_logger.info("%s", line, extra={"facts": facts})


_T = TypeVar("_T")
_Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Method: TypeAlias = Callable[[CallState, Any, _Context], Awaitable[_T]]
"""A service method that takes a call and may raise EngineError."""


def answering_errors(
    admission: RequestAdmission,
    name: str,
    method: Method[_T],
    *,
    serialize: Callable[[_T], bytes] | None = None,
    kind: CallKind = CallKind.REQUEST,
) -> Callable[[Any, _Context], Awaitable[bytes | None]]:
    """Return a method in gRPC's form, in which an exception becomes the call's status.

    ``serialize`` encodes the answer to a request.
    """

    @wraps(method)
    async def answered(request: Any, context: _Context) -> bytes | None:
        state = admission.enter(name, context.peer(), kind=kind)
        if isinstance(request, bytes):
            admission.passed(len(request))
        try:
            authorization = _authorization(context) if admission.access.uses_tokens else ()
            state.principal = admission.access.admit(name, state.peer, authorization)
            if kind is not CallKind.REQUEST:
                admission.open_stream(state)
            result = await method(state, request, context)
            answer = None if serialize is None else serialize(result)
            if answer is not None:
                await admission.answer(state, len(answer), context.add_done_callback)
        except grpc.aio.AbortError:  # a status that the method has set itself
            state.code = context.code()
            raise
        except Exception as error:
            if _lost(error):
                state.code = grpc.StatusCode.UNAVAILABLE
                raise asyncio.CancelledError(str(error)) from error
            code, message = admission.refuse(state, error)
            metadata = ((ERROR_METADATA_KEY, wire_name(error)),)
        except BaseException:
            state.code = grpc.StatusCode.CANCELLED
            if not state.admitted and not _expired(context):
                admission.reset(state)
            raise
        else:
            return answer
        finally:
            admission.leave(state)
        # Outside the except block: the call keeps the exception that abort raises, which would
        # otherwise refer to the error, its traceback, and all objects that the method held.
        await admission.answers.turn()
        return await context.abort(code, shortened(message), metadata)

    return answered


def _authorization(context: _Context) -> list[str]:
    """Return the authorization headers of a call."""
    metadata = context.invocation_metadata() or ()
    return [str(value) for key, value in metadata if key == "authorization"]


def _expired(context: _Context) -> bool:
    """Return whether a call was cancelled because its deadline had passed."""
    left_s = context.time_remaining()
    return left_s is not None and left_s <= 0


def _lost(error: Exception) -> bool:
    """Return whether gRPC itself gave up a call: the server stops, or the connection is lost.

    The client gets neither answer nor status then.
    """
    return isinstance(error, grpc.aio.BaseError) and not isinstance(error, grpc.aio.UsageError)
