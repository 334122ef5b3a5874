"""The asyncio interface of a generating model: streams of tokens, audits, statistics, drain, close.

::

    async with GeneratingModel(backend, thresholds) as model:
        async for token in model.generate(prompt, most_tokens=64, stop=[1]):
            print(token.token, token.stage, token.confidence)

All methods are called from the event loop's thread.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from offramp.engine.common.errors import (
    BackendError,
    BadInputError,
    DeadlineExceededError,
    DrainingError,
    EngineError,
    QueueFullError,
)
from offramp.engine.requests.statistics import Histogram
from offramp.generation.scheduling import (
    EndedSequence,
    NeverFitsError,
    NewSequence,
    RefillPolicy,
    SequenceEnd,
    StepPolicy,
    TextCounts,
    TextOutcome,
    TextQueueFullError,
    TextScheduler,
    TokenThresholds,
)
from offramp.generation.serving.step_loop import StepLoop, TextStageRuns, limits_of
from offramp.generation.serving.text_audits import TextAuditCounts, TextAudits
from offramp.generation.serving.text_thread import TextThread
from offramp.generation.stages.text_backend import TextBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """Options of serving a generating model."""

    batch: int = 16
    """Largest number of rows in a step."""
    queue: int = 1024
    """Largest number of sequences that wait for a slot."""
    policy: StepPolicy = field(default_factory=RefillPolicy)
    audit_share: float = 0.0
    """Share of the answers that are compared with the full model's, 0 to 1."""
    audit_seed: int | None = None
    """Seed of the random choice of audits; ``None`` for a random seed."""

    def __post_init__(self) -> None:
        """Check ``audit_share``; the other options are checked where they are used."""
        if not 0.0 <= self.audit_share <= 1.0:
            raise ValueError(f"audit_share must be from 0 to 1, got {self.audit_share}")


class Token(NamedTuple):
    """A token of an answer, with the stage at which it left."""

    token: int
    """Token id in the vocabulary."""
    stage: int
    """Stage at which the token left."""
    confidence: float
    """Confidence of the exit at which the token left, 0 to 1; 1 at the model's end."""
    end: SequenceEnd | None = None
    """Reason why the answer ends with this token, if it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextStatistics:
    """A snapshot of a generating model."""

    counts: TextCounts
    audits: TextAuditCounts
    runs: tuple[TextStageRuns, ...]
    """Sizes and times of the runs of each stage."""
    queue_s: Histogram
    """Seconds from submission to the first prefill."""
    open: int
    """Number of sequences that have not ended, including audits."""
    awaited: int
    """Number of open sequences that a caller waits for."""
    queued: int
    """Number of sequences that wait for a slot."""
    slots: int
    slots_in_use: int
    retried: int
    """Number of restarts of sequences after a failure."""
    yielded: int
    """Number of times that an audit lost its slot to a sequence that a caller waits for."""
    thresholds: int
    """Version of the thresholds of new sequences."""
    backend: dict[str, Any]
    """The backend's own counts, at most one second old while it runs."""


@dataclass(slots=True, eq=False)
class _Stream:
    """A sequence that a caller waits for."""

    prompt: NDArray[np.int64]
    most_tokens: int
    stop: frozenset[int]
    audited: bool
    arrived: asyncio.Queue[Token | EngineError] = field(default_factory=asyncio.Queue)
    """Queue of the answer's tokens; it ends with the last token or an error. The length of the
    answer bounds it."""
    tokens: list[int] = field(default_factory=list)
    """Tokens so far; collected only if the sequence is audited."""


class GeneratingModel:
    """Generates text for many concurrent callers, with one thread that runs the backend.

    The model owns the backend: :meth:`close` closes it in that thread.
    """

    def __init__(
        self,
        backend: TextBackend,
        thresholds: TokenThresholds,
        options: TextOptions | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the model; start it with ``async with`` or :meth:`open`.

        Raise ValueError if the thresholds are for another number of stages.
        """
        options = options or TextOptions()
        limits = limits_of(backend, batch=options.batch)
        self._scheduler = TextScheduler(limits, options.policy, thresholds, queue=options.queue)
        self._steps = StepLoop(backend, self._scheduler, self._publish, clock)
        self._thread = TextThread(self._steps, self._break)
        self._audits = TextAudits(options.audit_share, options.audit_seed)
        self._vocabulary = backend.vocabulary
        self._numbers = itertools.count()
        self._streams: dict[int, _Stream] = {}
        self._refusal: EngineError | None = None
        """Error that new sequences get; ``None`` while they are accepted."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle = asyncio.Event()
        """Set while no stream is open."""
        self._idle.set()

    async def open(self) -> Self:
        """Start the thread; call it once."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def generate(
        self,
        prompt: Sequence[int] | NDArray[np.int64],
        *,
        most_tokens: int,
        stop: Iterable[int] = (),
        deadline_s: float | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[Token, None]:
        """Yield the answer to a prompt, int64[tokens], token by token.

        The sequence is submitted when the first token is requested. Closing the iterator cancels
        it. A stop token is yielded and ends the answer. The deadline is absolute on
        ``time.monotonic()`` and applies to the whole answer. Sequences of higher priority start
        first.

        Raises:
            BadInputError: The prompt or ``most_tokens`` can never be served.
            QueueFullError: Too many sequences wait.
            DeadlineExceededError: The deadline passed; the tokens up to then were yielded.
            BackendError: The model failed on the sequence twice.
            DrainingError: The model accepts no new sequences, or closed before the answer's end.
        """
        if self._loop is None:
            raise RuntimeError("the model is not open: use it in `async with`, or await open()")
        if self._refusal is not None:
            raise _alike(self._refusal)
        number = next(self._numbers)
        stream = _Stream(self._as_prompt(prompt), most_tokens, frozenset(stop), self._audits.draw())
        new = NewSequence(
            number=number,
            prompt_tokens=len(stream.prompt),
            most_tokens=most_tokens,
            stop=stream.stop,
            deadline_s=float("inf") if deadline_s is None else deadline_s,
            priority=priority,
        )
        self._submit(new, stream)
        token = None
        try:
            while token is None or token.end is None:
                arrived = await stream.arrived.get()
                if isinstance(arrived, EngineError):
                    raise arrived
                token = arrived
                yield token
        finally:
            if number in self._streams:
                self._steps.cancel(number)

    @property
    def serves(self) -> bool:
        """True if the model accepts new sequences."""
        return self._loop is not None and self._refusal is None

    def swap(self, thresholds: TokenThresholds) -> None:
        """Use other thresholds for sequences that start from now on."""
        with self._steps.changed:
            self._scheduler.swap(thresholds)

    def statistics(self) -> TextStatistics:
        """Return a snapshot of all counts and times."""
        with self._steps.changed:
            scheduler = self._scheduler
            return TextStatistics(
                counts=self._steps.counter.counts(),
                audits=self._audits.counts(),
                runs=self._steps.runs(),
                queue_s=self._steps.queue_s(),
                awaited=len(self._streams),
                open=scheduler.sequences,
                queued=scheduler.queued,
                slots=scheduler.limits.slots,
                slots_in_use=scheduler.slots_in_use,
                retried=scheduler.retried,
                yielded=scheduler.yielded,
                thresholds=scheduler.thresholds.version,
                backend=self._steps.backend_statistics,
            )

    async def drain(self, timeout_s: float) -> bool:
        """Reject new sequences, and finish the open sequences except audits.

        Return ``False`` if some sequences did not end in time.
        """
        self._refuse(DrainingError("the model is draining and takes no new sequences"))
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Stop the thread and close the backend; unfinished sequences fail."""
        closed = DrainingError("the model was closed")
        self._refuse(closed)
        if self._thread.ident is not None:
            self._thread.stop()
            await asyncio.to_thread(self._thread.join)
        else:
            self._steps.close()
        self._fail_streams(closed)

    def _refuse(self, refusal: EngineError) -> None:
        """Accept no more sequences; the first reason is kept."""
        self._refusal = self._refusal or refusal

    def _as_prompt(self, prompt: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return a prompt as the backend expects it; BadInputError if it is invalid."""
        array = np.asarray(prompt)
        if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
            raise BadInputError(
                f"a prompt must be whole numbers of shape [tokens], at least one; got "
                f"{array.dtype} of shape {list(array.shape)}"
            )
        if array.min() < 0 or array.max() >= self._vocabulary:
            raise BadInputError(
                f"the prompt has tokens from {array.min()} to {array.max()}, expected 0 to "
                f"{self._vocabulary - 1}: use the model's own tokenizer"
            )
        return array.astype(np.int64)

    def _submit(self, new: NewSequence, stream: _Stream) -> None:
        """Queue a sequence, whose tokens are put into ``stream``."""
        self._streams[new.number] = stream
        self._idle.clear()
        try:
            self._steps.submit(new, stream.prompt)
        except (NeverFitsError, TextQueueFullError) as error:
            self._forget(new.number)
            kind = BadInputError if isinstance(error, NeverFitsError) else QueueFullError
            raise kind(str(error)) from error

    def _publish(self, outcome: TextOutcome, error: EngineError | None) -> None:
        """Pass an outcome to the event loop; called in any thread, in order."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._deliver, outcome, error)

    def _break(self, error: EngineError) -> None:
        """Fail all streams after an error of the loop; called in the backend's thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._refuse, error)
        self._loop.call_soon_threadsafe(self._fail_streams, error)

    def _deliver(self, outcome: TextOutcome, error: EngineError | None) -> None:
        """Pass tokens to streams and audits, and end the streams that ended."""
        ends = {ended.sequence: ended.end for ended in outcome.ended}
        for given in outcome.given:
            if given.background:
                self._audits.given(given.sequence, given.token)
            elif (stream := self._streams.get(given.sequence)) is not None:
                end = ends.get(given.sequence)
                whole = end if end is not None and end.is_whole else None
                stream.arrived.put_nowait(Token(given.token, given.stage, given.confidence, whole))
                if stream.audited:
                    stream.tokens.append(given.token)
        for ended in outcome.ended:
            if ended.background:
                self._audits.ended(ended.sequence, whole=ended.end.is_whole)
            else:
                self._end(ended, error)

    def _end(self, ended: EndedSequence, error: EngineError | None) -> None:
        """End the stream of answers to a sequence that ended."""
        stream = self._forget(ended.sequence)
        if stream is None:
            return
        if ended.end is SequenceEnd.EXPIRED:
            late = f"the deadline passed after {ended.tokens} tokens"
            stream.arrived.put_nowait(DeadlineExceededError(late))
        elif ended.end is SequenceEnd.FAILED:
            failure = BackendError(f"the model failed on this sequence twice: {error}")
            failure.__cause__ = error
            stream.arrived.put_nowait(failure)
        elif ended.end.is_whole and stream.audited:
            self._audit(stream)

    def _audit(self, stream: _Stream) -> None:
        """Submit an audit of an answer."""
        if self._refusal is not None:
            self._audits.skipped()
            return
        new = NewSequence(
            number=next(self._numbers),
            prompt_tokens=len(stream.prompt),
            most_tokens=stream.most_tokens,
            stop=stream.stop,
            background=True,
        )
        self._audits.begin(new.number, tuple(stream.tokens))
        try:
            self._steps.submit(new, stream.prompt)
        except TextQueueFullError:
            self._audits.refused(new.number)

    def _forget(self, number: int) -> _Stream | None:
        """Remove a stream from the open streams."""
        stream = self._streams.pop(number, None)
        if not self._streams:
            self._idle.set()
        return stream

    def _fail_streams(self, error: EngineError) -> None:
        """Fail all open streams of answers with an error."""
        for number in list(self._streams):
            stream = self._forget(number)
            if stream is not None:
                stream.arrived.put_nowait(_alike(error))


def _alike(error: EngineError) -> EngineError:
    """Return a copy of an error; one object raised twice would collect both tracebacks."""
    return type(error)(str(error))
