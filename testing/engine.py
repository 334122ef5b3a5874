"""An engine without models, for tests of the server and its clients.

``python -m offramp.testing.engine`` serves this engine, and accepts options of the server. Requests
are answered immediately, or with ``--hold`` only when the server is stopped. ``--evidence`` adds a
controller with this evidence to the status page.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import NEVER, ActiveExit, Answer, ExitPolicy, Promise, TensorSpec
from offramp.engine.common.errors import (
    BadInputError,
    DeadlineExceededError,
    DrainingError,
    ModelNotServedError,
)
from offramp.engine.common.validation import check_tensors
from offramp.engine.control.controller import ControlStatus, Evidence
from offramp.engine.models.options import ModelOptions
from offramp.engine.requests.results import EngineResult, ModelInfo, ResultKind, StreamResult
from offramp.engine.requests.statistics import (
    BATCH_BOUNDS,
    HISTOGRAM_BOUNDS_S,
    Histogram,
    ModelStatistics,
    StageStatistics,
)
from offramp.engine.requests.timeline import RequestTimeline, StageTime
from offramp.engine.stages.plan import Mode
from offramp.server.app import serve
from offramp.server.arguments.logging_setup import set_up_logging
from offramp.server.arguments.options import MAX_CONNECTIONS, ServerOptions
from offramp.server.common.served import ServedEngine

THRESHOLD: Final = 0.9
"""Threshold: exit 0 answers a sample whose confidence (last feature) is at least this."""


def fake_model(name: str = "fake") -> ModelInfo:
    """Return a model: ``x: float32 [batch, 4]``, ``logits: float32 [batch, 3]``, one exit."""
    promise = Promise(
        max_disagreement=0.01,
        confidence_level=0.95,
        certify_samples=5000,
        certify_errors=12,
        p_value=1e-9,
        predicted_savings=0.4,
    )
    return ModelInfo(
        name=name,
        inputs=(TensorSpec(name="x", dtype="float32", shape=("batch", 4)),),
        outputs=(TensorSpec(name="logits", dtype="float32", shape=("batch", 3)),),
        answer=Answer(output="logits", classes=3, form="logits"),
        platform="offramp_fake",
        max_batch_size=32,
        policy=ExitPolicy(
            version=7, active=(ActiveExit(exit=0, threshold=THRESHOLD),), promise=promise
        ),
        scheduling="run-through",
    )


def fake_control(evidence: Evidence) -> ControlStatus:
    """Return a plausible status of a controller with the given evidence."""
    known = ControlStatus(
        controller="certified",
        max_disagreement=0.01,
        confidence_level=0.95,
        evidence=evidence,
        disagreement=0.0024,
        disagreement_upper_bound=0.0083,
        audit_probability=0.05,
        observed=12400,
        audited=412,
        disagreed=1,
        alarms=0,
        tunings=3,
        adjustments=2,
        state="steady",
    )
    match evidence:
        case Evidence.CERTIFIED:
            return known
        case Evidence.CALIBRATED:
            return replace(
                known, disagreement=None, disagreement_upper_bound=1.0, observed=310, audited=14,
                disagreed=0, tunings=0, adjustments=0, audit_probability=0.2, state="starting",
            )  # fmt: skip
        case Evidence.CONSERVATIVE:
            return replace(
                known, disagreement=0.0, disagreement_upper_bound=0.0, disagreed=37, alarms=1,
                audit_probability=1.0, state="recovering: 312 samples so far, at least 480 needed",
            )  # fmt: skip
        case Evidence.SUSPICIOUS:
            return replace(
                known, disagreement=0.0146, disagreement_upper_bound=1.0, disagreed=6,
                audit_probability=1.0,
                state="suspicious: 6 of 212 audited samples disagreed; auditing more",
            )  # fmt: skip
        case Evidence.NONE:
            return replace(
                known, controller="apparate", disagreement=0.0146, disagreement_upper_bound=1.0,
                disagreed=6,
            )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeCall:
    """Arguments of one call to :meth:`FakeEngine.infer` or :meth:`FakeEngine.infer_stream`."""

    model: str
    inputs: Mapping[str, NDArray[Any]]
    deadline_s: float | None
    priority: int
    source: str


@dataclass(slots=True, kw_only=True)
class FakeEngine:
    """Fake of :class:`offramp.server.common.served.ServedEngine`.

    The first three features of a sample are its logits, the last feature is its confidence. If a
    sample runs on after exit 0 answered it, the model's end returns the same answer by default.
    """

    served: tuple[ModelInfo, ...] = field(default_factory=lambda: (fake_model(),))
    mode: Mode = Mode.LEAVE
    """Mode of serving; in audit mode, the first, third, … sample of a request runs on."""
    control: ControlStatus | None = None
    """Controller status in the statistics."""
    mistaken: bool = False
    """If true, the model's end reverses the logits of samples that run on."""
    lost: bool = False
    """If true, the final answers of samples that run on are lost."""
    failure: Exception | None = None
    """Error that every request raises, if set."""
    hurried: bool = False
    """If true, every sample leaves at exit 0, even below the threshold."""
    unready: set[str] = field(default_factory=set)
    """Models that are out of service."""
    given_up: bool = False
    """True if models out of service will never return to service."""
    loads: list[tuple[str, Path, ModelOptions | None]] = field(default_factory=list)
    """Arguments of :meth:`load`, in order."""
    load_failure: Exception | None = None
    """Error that every load raises, if set."""
    hold: asyncio.Event | None = None
    """Event for which requests wait; draining sets the event."""
    hold_final: asyncio.Event | None = None
    """Event for which samples wait that run on; draining sets the event."""
    calls: list[FakeCall] = field(default_factory=list)
    answered: list[int] = field(default_factory=lambda: [0, 0])
    """Number of samples answered by exit 0, and by the model's end."""
    forced: int = 0
    """Number of samples that exit 0 answered below its threshold."""
    waiting: int = 0
    """Number of samples of the requests in flight."""
    auditing: int = 0
    """Number of answered samples that run on."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when no request is in flight any more."""
    cancelled: int = 0
    """Number of samples whose caller cancelled."""
    leaving: bool = False
    draining: bool = False
    closed: bool = False

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, NDArray[Any]],
        *,
        deadline_s: float | None = None,
        priority: int = 0,
        source: str = "",
        timeline: RequestTimeline | None = None,
    ) -> EngineResult:
        """Answer as the class describes, after ``hold``."""
        call = FakeCall(
            model=model, inputs=inputs, deadline_s=deadline_s, priority=priority, source=source
        )
        return await self._first_answer(call, timeline)

    async def infer_stream(
        self,
        model: str,
        inputs: Mapping[str, NDArray[Any]],
        *,
        deadline_s: float | None = None,
        priority: int = 0,
        source: str = "",
        timeline: RequestTimeline | None = None,
    ) -> AsyncGenerator[StreamResult, None]:
        """Answer as the class describes, after ``hold``, and again after ``hold_final``."""
        call = FakeCall(
            model=model, inputs=inputs, deadline_s=deadline_s, priority=priority, source=source
        )
        first = await self._first_answer(call, timeline)
        followed = self._followed(first.exits)
        if not followed.any():
            yield _streamed(first, ResultKind.ANSWER)
            return
        with self._running_on(int(followed.sum())):
            yield _streamed(first, ResultKind.EARLY)
            if self.hold_final is not None:
                await self.hold_final.wait()
        if not self.lost:
            yield _final(first, followed, mistaken=self.mistaken)

    def models(self) -> tuple[ModelInfo, ...]:
        """Return the descriptions of the models that the fake was made with."""
        return self.served

    def model(self, name: str) -> ModelInfo:
        """Return one served model; ModelNotServedError if it is not served."""
        for info in self.served:
            if info.name == name:
                return info
        names = ", ".join(info.name for info in self.served)
        raise ModelNotServedError(f"no model {name!r} is served; served: {names}")

    def ready(self, model: str | None = None) -> bool:
        """Return whether the model is served, in service, and the engine has not left."""
        served = {info.name for info in self.served}
        asked = served if model is None else {model}
        return not (self.leaving or self.draining) and asked <= served - self.unready

    def live(self) -> bool:
        """Return whether some model may return to service."""
        return not self.given_up

    def statistics(self) -> Mapping[str, ModelStatistics]:
        """Return, for each model's name, the counts of all models together."""
        return {info.name: self._statistics() for info in self.served}

    async def load(self, name: str, path: Path, *, options: ModelOptions | None = None) -> None:
        """Serve the fake model under a name, or raise ``load_failure``."""
        self.loads.append((name, path, options))
        if self.load_failure is not None:
            raise self.load_failure
        others = tuple(info for info in self.served if info.name != name)
        self.served = (*others, fake_model(name))

    async def unload(self, name: str) -> None:
        """Stop serving a name, or raise ModelNotServedError."""
        gone = self.model(name)
        self.served = tuple(info for info in self.served if info is not gone)

    def leave(self) -> None:
        """Report not ready from now on."""
        self.leaving = True

    def flush(self) -> None:
        """Let the held requests continue."""
        for held in (self.hold, self.hold_final):
            if held is not None:
                held.set()

    async def drain(self, timeout_s: float) -> bool:
        """Let held requests continue and finish; with ``timeout_s`` 0 they stay held."""
        self.draining = True
        if timeout_s > 0:
            self.flush()
        if self.waiting and timeout_s > 0:
            await self.idle.wait()
        return self.waiting == 0

    async def close(self) -> None:
        """Record that the engine was closed."""
        self.closed = True

    async def _first_answer(self, call: FakeCall, timeline: RequestTimeline | None) -> EngineResult:
        info = self.model(call.model)
        self.calls.append(call)
        self._check(info, call.inputs)
        x = call.inputs["x"]
        began_s = time.monotonic()
        await self._held(len(x), call.deadline_s)
        result = self._answer(x)
        if timeline is not None:
            times = (began_s, time.monotonic())
            early = int((result.exits == 0).sum())
            timeline.stages.append(StageTime("exit 0", *times, len(x), len(x), early))
        return result

    def _followed(self, exits: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return [n]: whether each sample runs on after it was answered."""
        if not self.mode.observed:
            return np.zeros(len(exits), np.bool_)
        step = 2 if self.mode is Mode.AUDIT else 1
        drawn = np.arange(len(exits)) % step == 0
        return np.asarray((exits >= 0) & drawn)

    @contextmanager
    def _running_on(self, samples: int) -> Iterator[None]:
        self.auditing += samples
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += samples
            raise
        finally:
            self.auditing -= samples

    def _check(self, info: ModelInfo, inputs: Mapping[str, NDArray[Any]]) -> None:
        if self.draining:
            raise DrainingError("the server is shutting down; send the request to another one")
        if self.failure is not None:
            raise self.failure
        if wrong := check_tensors(info.inputs, inputs, unread=info.unread):
            raise BadInputError(f"{info.name}: {wrong}")

    async def _held(self, samples: int, deadline_s: float | None) -> None:
        if self.hold is None:
            return
        left_s = None if deadline_s is None else deadline_s - time.monotonic()
        self.waiting += samples
        self.idle.clear()
        try:
            await asyncio.wait_for(self.hold.wait(), left_s)
        except TimeoutError:
            raise DeadlineExceededError("the deadline passed before there was an answer") from None
        except asyncio.CancelledError:
            self.cancelled += samples
            raise
        finally:
            self.waiting -= samples
            if not self.waiting:
                self.idle.set()

    def _answer(self, x: NDArray[Any]) -> EngineResult:
        confidences = x[:, 3].astype(np.float32)
        sure = confidences >= THRESHOLD
        forced = ~sure & self.hurried
        exits = np.where(sure | forced, 0, -1).astype(np.int32)
        early = int((exits == 0).sum())
        self.answered[0] += early
        self.answered[1] += len(x) - early
        self.forced += int(forced.sum())
        return EngineResult(
            outputs={"logits": x[:, :3]},
            exits=exits,
            confidences=confidences,
            forced=forced,
            policy_version=7,
            variants=np.zeros(len(x), np.int16),
        )

    def _statistics(self) -> ModelStatistics:
        conservative = self.control is not None and self.control.evidence is Evidence.CONSERVATIVE
        threshold = NEVER if conservative else THRESHOLD
        places = (("exit 0", threshold, self.forced), ("final", 0.0, 0))
        return ModelStatistics(
            mode=self.mode.value,
            backend="fake",
            policy_version=7,
            scheduling="run-through",
            streams=1,
            streams_in_service=0 if self.unready else 1,
            restarts=0,
            parallel_below=None,
            stages=tuple(
                StageStatistics(
                    label=label,
                    threshold=threshold,
                    answered=answered,
                    forced=forced,
                    batch_size=_empty(BATCH_BOUNDS),
                    run_s=_empty(HISTOGRAM_BOUNDS_S),
                )
                for (label, threshold, forced), answered in zip(places, self.answered, strict=True)
            ),
            requests=len(self.calls),
            samples=sum(self.answered) + self.waiting + self.cancelled,
            answered=sum(self.answered),
            failed={"cancelled": self.cancelled},
            retried=0,
            resumed=0,
            queued=0,
            in_flight=self.waiting,
            auditing=self.auditing,
            queue_s=_empty(HISTOGRAM_BOUNDS_S),
            latency_s=_empty(HISTOGRAM_BOUNDS_S),
            uptime_s=1.0,
            control=self.control,
        )


def _streamed(result: EngineResult, kind: ResultKind) -> StreamResult:
    """Return a streamed result without corrections."""
    known = {item.name: getattr(result, item.name) for item in fields(EngineResult)}
    corrected = np.zeros(len(result.exits), np.bool_)
    return StreamResult(**known, kind=kind, final=result.exits < 0, corrected=corrected)


def _final(first: EngineResult, followed: NDArray[np.bool_], *, mistaken: bool) -> StreamResult:
    logits = first.outputs["logits"].copy()
    if mistaken:
        logits[followed] = logits[followed, ::-1]
    corrected = logits.argmax(axis=1) != first.outputs["logits"].argmax(axis=1)
    kind = ResultKind.CORRECTION if corrected.any() else ResultKind.CONFIRMATION
    exits = np.where(followed, np.int32(-1), first.exits)
    known = _streamed(replace(first, outputs={"logits": logits}, exits=exits), kind)
    return replace(known, corrected=corrected)


def _empty(bounds: tuple[float, ...]) -> Histogram:
    return Histogram(bounds=bounds, counts=(0,) * (len(bounds) + 1), total=0.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve a :class:`FakeEngine` until a stop signal."""
    parser = argparse.ArgumentParser(prog="python -m offramp.testing.engine", description=__doc__)
    parser.add_argument("--grpc-port", type=int, default=8001)
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--max-connections", type=int, default=MAX_CONNECTIONS)
    parser.add_argument("--drain-delay-s", type=float, default=0.0)
    parser.add_argument("--shutdown-timeout-s", type=float, default=30.0)
    parser.add_argument("--hold", action="store_true")
    parser.add_argument("--mode", type=Mode, choices=tuple(Mode), default=Mode.LEAVE)
    parser.add_argument("--evidence", type=Evidence, choices=tuple(Evidence))
    given = parser.parse_args(argv)
    set_up_logging(level="info", log_format="human")

    async def open_engine() -> ServedEngine:
        return FakeEngine(
            hold=asyncio.Event() if given.hold else None,
            mode=given.mode,
            control=fake_control(given.evidence) if given.evidence else None,
        )

    options = ServerOptions(
        grpc_port=given.grpc_port,
        http_port=given.http_port,
        max_connections=given.max_connections,
        drain_delay_s=given.drain_delay_s,
        shutdown_timeout_s=given.shutdown_timeout_s,
    )
    return serve(open_engine, options)


if __name__ == "__main__":
    sys.exit(main())
