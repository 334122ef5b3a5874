"""The asyncio face of the engine."""

from __future__ import annotations

import asyncio
import difflib
import itertools
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Answer, Bundle, ExitPolicy, TensorSpec
from offramp.engine.backends import Backend, make_backend
from offramp.engine.errors import DrainingError, InvalidInputError, UnknownModelError
from offramp.engine.plan import Mode
from offramp.engine.requests import PendingRequest
from offramp.engine.served_model import ServedModel
from offramp.engine.statistics import ModelStatistics
from offramp.engine.validation import check_tensors

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How models are executed; the same for every model of an engine."""

    mode: Mode = Mode.LEAVE
    backend: str = "auto"
    max_batch_size: int = 32
    """Most rows of a batch; larger requests are split."""
    max_queue_delay_ms: float = 0.0
    """Longest time that a sample waits for batch mates while a stream idles."""
    max_queue_samples: int = 4096
    """Most samples that wait, per model; more are refused."""
    default_timeout_ms: float | None = None
    """Deadline of requests that bring none."""
    streams: int = 1
    """Batches that run at the same time, per model."""
    threads: int | None = None
    """Intra-op threads of each stream; ``None`` shares the cores among the streams."""
    parallel_below: int | None = None
    """PAME's τ_b: a new batch starts beside running ones once each has fewer samples than this;
    ``None`` starts one on any idle stream."""

    def __post_init__(self) -> None:
        """Refuse what could never serve."""
        for name in ("max_batch_size", "max_queue_samples", "streams", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, expected at least 1")
        if not 0 <= self.max_queue_delay_ms < float("inf"):
            raise ValueError(f"max_queue_delay_ms is {self.max_queue_delay_ms}, expected ≥ 0")

    def threads_per_stream(self) -> int:
        """The threads asked for, or an equal share of the cores (at least one)."""
        return self.threads or max(1, (os.cpu_count() or 1) // self.streams)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferResult:
    """The answer to one request of n samples."""

    outputs: Mapping[str, NDArray[Any]]
    """By output name, first dimension n."""
    exits: NDArray[np.int32]
    """[n]: index of the exit that answered (``Manifest.exits``); −1 is the model's end."""
    confidences: NDArray[np.float32]
    """[n]: confidence of the answer, 0 to 1."""
    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a client may know of a served model."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    answer: Answer
    platform: str
    """For instance ``offramp_onnxruntime-cpu``."""
    max_batch_size: int
    policy: ExitPolicy
    """In force, with the promise that it was certified for."""


class Engine:
    """Serves several models in one process; ``async with await Engine.open(...)``.

    All methods are called from the event loop's thread.
    """

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        options: EngineOptions,
        *,
        owned: Backend | None = None,
    ) -> None:
        """Use :meth:`open`; ``owned`` is the backend to close with the engine."""
        self._owned = owned
        self._models = dict(models)
        self._options = options
        self._numbers = itertools.count()
        self._draining = False
        for model in self._models.values():
            model.executor.start(asyncio.get_running_loop())

    @classmethod
    async def open(
        cls,
        models: Mapping[str, Path],
        options: EngineOptions | None = None,
        *,
        backend: Backend | None = None,
    ) -> Engine:
        """Load, check and warm up bundles; takes seconds, off the event loop.

        Args:
            models: Bundle folders by the name to serve them under.
            options: How to execute them.
            backend: Instead of the one named in ``options``; the caller closes it.

        Raises:
            BundleError: A bundle is absent, damaged or of another version.
            BackendError: The backend cannot run here, or cannot load a stage.
        """
        options = options or EngineOptions()
        owned = None
        if backend is None:
            backend = make_backend(options.backend, threads=options.threads_per_stream())
            owned = backend
        loaded = {}
        for name, path in models.items():
            started_s = time.monotonic()
            loaded[name] = await asyncio.to_thread(_load, name, path, backend, options)
            _log.info("%s: ready after %.1f s", name, time.monotonic() - started_s)
        return cls(loaded, options, owned=owned)

    async def __aenter__(self) -> Self:
        """Enter."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.close()

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, NDArray[Any]],
        *,
        deadline_s: float | None = None,
        priority: int = 0,
    ) -> InferResult:
        """Answer a request of n samples (first dimension of every input, n ≥ 1).

        Each sample exits on its own; the result is complete. Cancelling the awaiting task
        withdraws the request; its batch mates go on. The arrays must not change meanwhile.

        Args:
            model: Name of a served model.
            inputs: One array per input of the model, exact dtype.
            deadline_s: Absolute time on ``time.monotonic()``; ``None`` is the default timeout.
            priority: Higher is served first.

        Raises:
            UnknownModelError: No such model.
            InvalidInputError: A tensor is not what the model takes.
            QueueFullError: No room in the queue.
            DeadlineExceededError: The deadline passed before all samples were computed. Answers
                that are there are returned, though they may be late.
            DrainingError: The engine is shutting down.
            BackendError: The batch's execution failed.
        """
        served = self._served(model)
        if self._draining:
            raise DrainingError("the server is shutting down; send the request to another one")
        wrong = check_tensors(served.inputs, inputs)
        if wrong:
            raise InvalidInputError(f"{model}: {wrong}")
        request = self._request(inputs, deadline_s, priority)
        if request.count > self._options.max_queue_samples:
            raise InvalidInputError(
                f"{model}: {request.count} samples are more than the queue holds "
                f"({self._options.max_queue_samples}); send them in several requests"
            )
        served.executor.submit(request)
        try:
            await request.future
        except asyncio.CancelledError:
            served.executor.cancel(request.number)
            raise
        if request.error is not None:
            raise request.error
        assert request.answer is not None
        return InferResult(
            outputs={served.answer.output: request.answer},
            exits=request.exits,
            confidences=request.confidences,
            policy_version=served.policy.version,
        )

    def models(self) -> tuple[ModelInfo, ...]:
        """The served models."""
        return tuple(self.model(name) for name in self._models)

    def model(self, name: str) -> ModelInfo:
        """One served model.

        Raises:
            UnknownModelError: No such model.
        """
        served = self._served(name)
        return ModelInfo(
            name=name,
            inputs=served.inputs,
            outputs=served.outputs,
            answer=served.answer,
            platform=f"offramp_{served.backend_name}",
            max_batch_size=self._options.max_batch_size,
            policy=served.policy,
        )

    def ready(self, model: str | None = None) -> bool:
        """Whether the model (or every model) is loaded and takes requests."""
        asked = self._models if model is None else {model: self._models.get(model)}
        alive = all(served is not None and served.executor.in_service for served in asked.values())
        return alive and not self._draining

    def statistics(self) -> Mapping[str, ModelStatistics]:
        """A snapshot per model, safe to keep."""
        return {name: served.statistics() for name, served in self._models.items()}

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, finish those in flight; ``False`` if some did not in time."""
        self._draining = True
        deadline_s = time.monotonic() + timeout_s
        for served in self._models.values():
            served.executor.flush()
        while any(served.executor.pending for served in self._models.values()):
            if time.monotonic() >= deadline_s:
                return False
            await asyncio.sleep(0.005)
        return True

    async def close(self) -> None:
        """Stop the threads and release the backends; unfinished requests fail."""
        self._draining = True
        for served in self._models.values():
            await asyncio.to_thread(served.close)
        if self._owned is not None:
            self._owned.close()
            self._owned = None
        await asyncio.sleep(0)  # let the last results be delivered

    def _served(self, name: str) -> ServedModel:
        try:
            return self._models[name]
        except KeyError:
            close = difflib.get_close_matches(name, self._models, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            served = ", ".join(map(repr, sorted(self._models)))
            raise UnknownModelError(
                f"no model {name!r} is served here; {hint}served: {served}"
            ) from None

    def _request(
        self, inputs: Mapping[str, NDArray[Any]], deadline_s: float | None, priority: int
    ) -> PendingRequest:
        now_s = time.monotonic()
        if deadline_s is None:
            timeout_ms = self._options.default_timeout_ms
            deadline_s = float("inf") if timeout_ms is None else now_s + timeout_ms / 1e3
        return PendingRequest(
            number=next(self._numbers),
            inputs=inputs,
            count=len(next(iter(inputs.values()))),
            signature=tuple(inputs[name].shape[1:] for name in sorted(inputs)),
            submitted_s=now_s,
            deadline_s=deadline_s,
            priority=priority,
            future=asyncio.get_running_loop().create_future(),
        )


def _load(name: str, path: Path, backend: Backend, options: EngineOptions) -> ServedModel:
    bundle = Bundle.open(path)
    _log.info("%s: loading %s", name, path)
    return ServedModel.load(
        name,
        bundle,
        backend,
        mode=options.mode,
        max_batch_size=options.max_batch_size,
        max_delay_s=options.max_queue_delay_ms / 1e3,
        max_queue=options.max_queue_samples,
        streams=options.streams,
        parallel_below=options.parallel_below,
    )
