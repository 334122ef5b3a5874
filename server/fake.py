"""An engine without models: for tests of the server and of its clients.

``python -m offramp.server.fake`` serves it, with the options of the server that it needs; its
requests answer at once, or with ``--hold`` not before the server is told to stop.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import ActiveExit, Answer, ExitPolicy, Promise, TensorSpec
from offramp.engine.core import InferResult, ModelInfo
from offramp.engine.errors import (
    DeadlineExceededError,
    DrainingError,
    InvalidInputError,
    UnknownModelError,
)
from offramp.engine.statistics import (
    BATCH_BOUNDS,
    HISTOGRAM_BOUNDS_S,
    Histogram,
    ModelStatistics,
    StageStatistics,
)
from offramp.engine.validation import check_tensors
from offramp.server.app import serve
from offramp.server.logging_setup import set_up_logging
from offramp.server.options import ServerOptions
from offramp.server.served import ServedEngine

THRESHOLD: Final = 0.9
"""A sample whose last feature reaches it is answered by exit 0."""


def fake_model(name: str = "fake") -> ModelInfo:
    """``x: float32 [batch, 4]`` in, ``logits: float32 [batch, 3]`` out, one exit."""
    promise = Promise(
        max_disagreement=0.01,
        confidence=0.95,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeCall:
    """What :meth:`FakeEngine.infer` was called with."""

    model: str
    inputs: Mapping[str, NDArray[Any]]
    deadline_s: float | None
    priority: int


@dataclass(slots=True, kw_only=True)
class FakeEngine:
    """Satisfies :class:`offramp.server.served.ServedEngine`.

    The first three features of a sample are its logits, the last one is its confidence.
    """

    served: tuple[ModelInfo, ...] = field(default_factory=lambda: (fake_model(),))
    failure: Exception | None = None
    """Raised by every request from now on."""
    hurried: bool = False
    """From now on every sample leaves at exit 0, sure enough or not."""
    unready: set[str] = field(default_factory=set)
    """Models that are out of service."""
    hold: asyncio.Event | None = None
    """Requests wait for it; draining sets it."""
    calls: list[FakeCall] = field(default_factory=list)
    answered: list[int] = field(default_factory=lambda: [0, 0])
    """Samples, by exit 0 and by the end."""
    forced: int = 0
    """Those of exit 0 that were not sure enough."""
    waiting: int = 0
    """Samples of the requests in flight."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there are none any more."""
    cancelled: int = 0
    """Samples whose caller left."""
    draining: bool = False
    closed: bool = False

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, NDArray[Any]],
        *,
        deadline_s: float | None = None,
        priority: int = 0,
    ) -> InferResult:
        """Answer as the class says, after ``hold``."""
        info = self.model(model)
        self.calls.append(
            FakeCall(model=model, inputs=inputs, deadline_s=deadline_s, priority=priority)
        )
        self._check(info, inputs)
        await self._held(len(inputs["x"]), deadline_s)
        return self._answer(inputs["x"])

    def models(self) -> tuple[ModelInfo, ...]:
        """The served models."""
        return self.served

    def model(self, name: str) -> ModelInfo:
        """One served model, or UnknownModelError."""
        for info in self.served:
            if info.name == name:
                return info
        names = ", ".join(info.name for info in self.served)
        raise UnknownModelError(f"no model {name!r} is served; served: {names}")

    def ready(self, model: str | None = None) -> bool:
        """Until it drains, and for models that are there and in service."""
        served = {info.name for info in self.served}
        asked = served if model is None else {model}
        return not self.draining and asked <= served - self.unready

    def statistics(self) -> Mapping[str, ModelStatistics]:
        """Counts of all models together, under each name."""
        return {info.name: self._statistics() for info in self.served}

    async def drain(self, timeout_s: float) -> bool:
        """Let the held requests go; ``timeout_s`` 0 holds them, and fails if there are any."""
        self.draining = True
        if self.hold is not None and timeout_s > 0:
            self.hold.set()
        if self.waiting and timeout_s > 0:
            await self.idle.wait()
        return self.waiting == 0

    async def close(self) -> None:
        """Note that it was closed."""
        self.closed = True

    def _check(self, info: ModelInfo, inputs: Mapping[str, NDArray[Any]]) -> None:
        if self.draining:
            raise DrainingError("the server is shutting down; send the request to another one")
        if self.failure is not None:
            raise self.failure
        if wrong := check_tensors(info.inputs, inputs):
            raise InvalidInputError(f"{info.name}: {wrong}")

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

    def _answer(self, x: NDArray[Any]) -> InferResult:
        confidences = x[:, 3].astype(np.float32)
        sure = confidences >= THRESHOLD
        forced = ~sure & self.hurried
        exits = np.where(sure | forced, 0, -1).astype(np.int32)
        early = int((exits == 0).sum())
        self.answered[0] += early
        self.answered[1] += len(x) - early
        self.forced += int(forced.sum())
        return InferResult(
            outputs={"logits": x[:, :3]},
            exits=exits,
            confidences=confidences,
            forced=forced,
            policy_version=7,
        )

    def _statistics(self) -> ModelStatistics:
        places = (("exit 0", THRESHOLD, self.forced), ("final", 0.0, 0))
        return ModelStatistics(
            mode="leave",
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
            queued=0,
            in_flight=self.waiting,
            queue_s=_empty(HISTOGRAM_BOUNDS_S),
            latency_s=_empty(HISTOGRAM_BOUNDS_S),
            uptime_s=1.0,
        )


def _empty(bounds: tuple[float, ...]) -> Histogram:
    return Histogram(bounds=bounds, counts=(0,) * (len(bounds) + 1), total=0.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve a :class:`FakeEngine` until a signal comes."""
    parser = argparse.ArgumentParser(prog="python -m offramp.server.fake", description=__doc__)
    parser.add_argument("--grpc-port", type=int, default=8001)
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--shutdown-timeout-s", type=float, default=30.0)
    parser.add_argument("--hold", action="store_true")
    given = parser.parse_args(argv)
    set_up_logging(level="info", log_format="human")

    async def open_engine() -> ServedEngine:
        return FakeEngine(hold=asyncio.Event() if given.hold else None)

    options = ServerOptions(
        grpc_port=given.grpc_port,
        http_port=given.http_port,
        shutdown_timeout_s=given.shutdown_timeout_s,
    )
    return serve(open_engine, options)


if __name__ == "__main__":
    sys.exit(main())
