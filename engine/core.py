"""The asyncio interface of the engine: opens models, answers requests, drains and closes."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Self

from numpy.typing import NDArray

from offramp.engine.backends import Backend, Slot
from offramp.engine.common.errors import BadInputError, DrainingError
from offramp.engine.common.extensions import extensions_for
from offramp.engine.common.validation import check_request
from offramp.engine.learning.learning_loop import Learning
from offramp.engine.models.deployment import Deployment
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.models.served_model import ServedModel
from offramp.engine.models.whole_promise import whole_policy
from offramp.engine.onnx_files import WrappedFiles
from offramp.engine.requests.request_table import Request
from offramp.engine.requests.results import EngineResult, ModelInfo, ResultKind, StreamResult
from offramp.engine.requests.statistics import ModelStatistics
from offramp.engine.requests.timeline import RequestTimeline
from offramp.engine.scheduling import DeviceScheduler, ParallelLimit
from offramp.engine.serving.control_loop import ControlLoop
from offramp.engine.serving.engine_upgrades import EngineUpgrades
from offramp.engine.serving.executor import Executor
from offramp.engine.serving.extension import BackgroundTask
from offramp.engine.serving.observers import InputObserver, InputObservers
from offramp.engine.serving.opening import load_model, open_models
from offramp.engine.serving.versions import ModelLoading, ModelVersion, ModelVersions
from offramp.engine.stages.backend_protocol import SlotsByStream, StreamBackend
from offramp.engine.stages.plan import Mode


class Engine:
    """Serves several models in one process; ``async with await Engine.open(...)``.

    All methods are called from the event loop's thread.
    """

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        backend: Backend,
        *,
        streams: int = 1,
        parallel: ParallelLimit | None = None,
        slots: Sequence[Slot] = (),
        owned: bool = False,
        options: EngineOptions | None = None,
        load: ModelLoading | None = None,
        wrapped: WrappedFiles | None = None,
        learning: Learning | None = None,
    ) -> None:
        """Use :meth:`open` instead. If ``owned``, closing the engine closes the backend.

        ``load`` loads models that replace others.
        """
        options = options or EngineOptions()
        self._backend = backend
        self._owned = owned
        self._wrapped = wrapped
        self._learning = learning or Learning({})
        self._parallel = parallel
        self._observers = InputObservers()
        self._described: dict[str, tuple[tuple[str, int], ModelInfo]] = {}
        """Descriptions by model, each with its version and deployment number."""
        self._numbers = itertools.count()
        self._leaving = self._draining = False
        scheduler = DeviceScheduler(
            {name: model.scheduler for name, model in models.items()},
            weights={name: model.options.weight for name, model in models.items()},
        )
        self._executor = Executor(
            backend,
            models,
            scheduler,
            streams=streams,
            slots=slots,
            # A stream stays on its device, also after a restart.
            open_slot=backend.open_slot_of if isinstance(backend, SlotsByStream) else None,
        )
        upgrades = EngineUpgrades(options.build_budget)
        self._control = ControlLoop(self._executor, models, upgrades=upgrades)
        self._background: dict[str, BackgroundTask] = {}
        for extension in extensions_for("engine"):
            made = extension.background_tasks(models, self._executor, backend, options)
            self._background.update(made)
        background = (*self._background.values(), self._control)
        self._versions = ModelVersions(models, self._executor, background, load)
        self._executor.start(asyncio.get_running_loop())
        self._control.start()
        for task in self._background.values():
            task.start()

    @classmethod
    async def open(
        cls,
        models: Mapping[str, Path],
        options: EngineOptions | None = None,
        *,
        backend: Backend | None = None,
    ) -> Engine:
        """Load, check and warm up models, by served name; takes seconds, in threads.

        A model is a bundle, or an ONNX file, which is served unchanged, in mode off. A separate
        process reads the ONNX file; it needs the packages of the extra ``onnx``. ``backend``
        replaces the one named in ``options``; the caller closes it.

        Raises:
            BundleError: A bundle is absent, damaged or of another version.
            OnnxFileError: An ONNX file cannot be served unchanged.
            BackendError: The backend cannot run here, or cannot load a stage.
            OptionsError: A scheduling policy does not fit its model.
        """
        options = options or EngineOptions()
        learning = await asyncio.to_thread(Learning.prepare, models, options)
        try:
            opened = await open_models(learning.paths(models), options, backend)
        except BaseException:
            await learning.close()
            raise
        load = partial(
            load_model,
            backend=opened.backend,
            options=options,
            parallel=opened.parallel,
            wrapped=opened.wrapped,
        )
        engine = cls(
            opened.models,
            opened.backend,
            streams=options.streams,
            parallel=opened.parallel,
            slots=opened.slots,
            owned=backend is None,
            options=options,
            load=load,
            wrapped=opened.wrapped,
            learning=learning,
        )
        try:
            await learning.start(engine)
        except BaseException:
            await engine.close()
            raise
        return engine

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

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
        """Answer a request of n samples (first dimension of every input, n ≥ 1).

        Each sample exits separately; the result is complete. Cancelling the awaiting task withdraws
        the request; the rest of its batch continues. The arrays, one for each input with its exact
        dtype, must not change before the result. ``deadline_s`` is a time on the clock
        ``time.monotonic()``; with ``None``, the model's SLO sets the deadline. A higher priority is
        served first. ``source`` names the sender, whose share of the control loop's evidence is
        limited by the options. ``timeline`` records the times of the request, until it is answered.

        Raises:
            ModelNotServedError: No such model.
            BadInputError: A tensor does not fit the model.
            QueueFullError: The queue is full, or the server is overloaded.
            DeadlineExceededError: The deadline passed before all samples were computed. A request
                whose samples are all computed is answered, even if late.
            DrainingError: The engine is shutting down.
            BackendError: The batch's execution failed.
        """
        version = self._versions[model]
        request = self._submit(
            version,
            inputs,
            deadline_s=deadline_s,
            priority=priority,
            source=source,
            timeline=timeline,
        )
        await self._finished(version, request)
        return StreamResult.first(version.model.answer, request)

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
        """Answer a request early, and again when its samples have run to the end.

        In release mode a second result follows if an exit answered any of the samples. In audit
        mode it follows if any sample that an exit answered was drawn for an audit. Otherwise there
        is one result. The second result has the unmodified model's answers to the samples in
        ``final``, and is omitted if these answers are lost. Closing the iterator withdraws the
        request. Arguments and errors are those of :meth:`infer`; the deadline applies to the first
        result.
        """
        version = self._versions[model]
        followup: asyncio.Future[Request] = asyncio.get_running_loop().create_future()
        request = self._submit(
            version,
            inputs,
            deadline_s=deadline_s,
            priority=priority,
            source=source,
            timeline=timeline,
            followup=followup,
        )
        try:
            await self._finished(version, request)
            early = StreamResult.first(version.model.answer, request)
            yield early
            if early.kind is ResultKind.EARLY:
                await followup
                if request.final is not None and request.final.filled.any():
                    yield StreamResult.second(version.model.answer, request)
        finally:
            if not followup.done():
                followup.cancel()
                self._executor.cancel(version.key, request.number)

    def _submit(
        self,
        version: ModelVersion,
        inputs: Mapping[str, NDArray[Any]],
        *,
        deadline_s: float | None,
        priority: int,
        source: str,
        timeline: RequestTimeline | None,
        followup: asyncio.Future[Request] | None = None,
    ) -> Request:
        if self._draining:
            raise DrainingError("the server is shutting down; send the request to another one")
        served, model = version.model, version.name
        options, now_s = served.options, time.monotonic()
        if deadline_s is None:
            deadline_s = float("inf") if options.slo_ms is None else now_s + options.slo_ms / 1e3
        if wrong := check_request(
            served.inputs,
            inputs,
            deadline_s=deadline_s,
            priority=priority,
            max_samples=options.max_queue_samples,
            unread=served.unread,
        ):
            raise BadInputError(f"{model}: {wrong}")
        if served.unread:
            inputs = {n: array for n, array in inputs.items() if n not in served.unread}
        if wrong := served.lengths.wrong(inputs) or served.limits.wrong(inputs):
            raise BadInputError(f"{model}: {wrong}")
        count = len(next(iter(inputs.values())))
        self._executor.admit(version.key, count, deadline_s - now_s, priority)
        request = Request(
            number=next(self._numbers),
            inputs=inputs,
            count=count,
            batch_key=served.lengths.batch_key(inputs),
            unseen=served.lengths.unseen(inputs),
            submitted_s=now_s,
            deadline_s=deadline_s,
            priority=priority,
            source=source,
            timeline=timeline,
            future=asyncio.get_running_loop().create_future(),
            followup=followup,
        )
        self._executor.submit(version.key, request)
        return request

    async def _finished(self, version: ModelVersion, request: Request) -> None:
        """Wait for a request's first answer; raise its error."""
        try:
            await request.future
        except asyncio.CancelledError:
            self._executor.cancel(version.key, request.number)
            raise
        if request.error is not None:
            raise request.error
        assert request.first.values is not None
        self._observers.show(version.name, request.inputs, request.first.values)

    def observe_inputs(self, name: str, observer: InputObserver | None) -> None:
        """Call an observer with the inputs of a model's requests that are answered from now on.

        Requests that fail are not observed, so that a client cannot make an observer process inputs
        that the model cannot answer.

        ``observer`` is called on the event loop, and must return quickly; if it raises an
        exception, this is logged and the observer is not called again. The observer stays when the
        model is replaced; ``None`` removes the observer.

        Raises:
            ModelNotServedError: No such model.
        """
        self._observers.set(self._versions[name].name, observer)

    async def replace(self, name: str, path: Path, *, mode: Mode | None = None) -> None:
        """Serve another bundle under a name, without losing a request.

        The new bundle is loaded during serving, with the options set for the name, and with another
        ``mode`` if one is passed. Then it answers all new requests. Requests submitted before, and
        their audits, are finished by the old version, which is removed after that. If anything
        fails, the old version continues to serve. The new model's inputs and outputs may differ
        from the old model's; Triton allows this, too. ``path`` may be the old path, if another
        bundle is there now. Models are replaced one at a time.

        Raises:
            ModelNotServedError: No such model.
            DrainingError: The engine is shutting down.
            OptionsError: The model is split among workers, or the new one does not fit its options.
            BundleError: The bundle is absent, damaged or of another version.
            BackendError: The backend cannot load a stage of it.
        """
        await self._versions.replace(name, path, mode)

    async def load(self, name: str, path: Path, *, options: ModelOptions | None = None) -> None:
        """Serve a bundle or an ONNX file under a new name, or replace a served model.

        Works like :meth:`replace`, but ``name`` may be new, and ``options``, if passed, replace the
        earlier options. If learning is on, exits are learned for an ONNX file.

        Raises:
            DrainingError: The engine is shutting down.
            OptionsError: The model is split among workers, or the new one does not fit its options.
            BundleError: The bundle is absent, damaged or of another version.
            OnnxFileError: The ONNX file cannot be served unchanged.
            BackendError: The backend cannot load a stage of it.
        """
        async with self._learning.changed(self, name, path, options) as served:
            await self._versions.load(name, served, options)

    async def unload(self, name: str) -> None:
        """Refuse new requests under a name; those submitted before are answered.

        Raises:
            ModelNotServedError: No such model.
            DrainingError: The engine is shutting down.
            OptionsError: The model is split among workers.
        """
        await self._versions.unload(name)
        self._described.pop(name, None)
        await self._learning.forget(name)

    def models(self) -> tuple[ModelInfo, ...]:
        """Describe the served models."""
        return tuple(map(self.model, self._versions.current))

    def model(self, name: str) -> ModelInfo:
        """Describe one served model; ModelNotServedError if there is none of that name."""
        version = self._versions[name]
        deployment = self._executor.deployment(version.key)
        of = (version.key, deployment.number)
        known = self._described.get(name)
        if known is not None and known[0] == of:  # called for every request
            return known[1]
        info = self._describe(version, deployment)
        self._described[name] = of, info
        return info

    def _describe(self, version: ModelVersion, deployment: Deployment) -> ModelInfo:
        served = version.model
        return ModelInfo(
            name=version.name,
            inputs=served.inputs,
            unread=served.unread,
            outputs=served.outputs,
            answer=served.answer,
            platform=f"offramp_{self._backend.name}",
            max_batch_size=served.options.max_batch_size,
            policy=whole_policy(deployment.policy, served.evidence),
            scheduling=str(served.options.scheduling),
            variants=tuple(variant.name for variant in served.variants),
            class_losses=deployment.class_losses,
            notes=served.notes,
        )

    def ready(self, model: str | None = None) -> bool:
        """Return whether the model (or every model) is loaded and takes requests.

        ``False`` after :meth:`leave`, and while no stream of the device can run it.
        """
        current = self._versions.current
        if self._leaving or self._draining or (model is not None and model not in current):
            return False
        versions = current.values() if model is None else (current[model],)
        return all(self._executor.serves(version.key) for version in versions)

    def live(self) -> bool:
        """Return whether the engine serves a model, or may do so again without a restart."""
        return self._executor.live

    def statistics(self) -> Mapping[str, ModelStatistics]:
        """Take a snapshot of every model's counters, safe to keep."""
        return {name: self._statistics(v) for name, v in self._versions.current.items()}

    def leave(self) -> None:
        """Report not ready from now on, but answer requests until :meth:`drain`.

        Load balancers that check readiness need time to notice.
        """
        self._leaving = True

    def flush(self) -> None:
        """Run requests immediately from now on, without waiting to fill batches."""
        self._executor.flush()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, finish the others; return ``False`` if the time was too short."""
        self._draining = True
        self._versions.end()
        deadline_s = time.monotonic() + timeout_s
        self.flush()
        while self._executor.pending():
            if time.monotonic() >= deadline_s:
                return False
            await asyncio.sleep(0.005)
        return True

    async def close(self) -> None:
        """Stop the threads and release the backend; unfinished requests fail."""
        self._draining = True
        await self._learning.close()
        await self._versions.close()
        try:
            for task in reversed(self._background.values()):
                await asyncio.to_thread(task.stop)
            await asyncio.to_thread(self._control.stop)
        finally:
            await asyncio.to_thread(self._executor.stop)
        if self._owned:
            self._owned = False
            self._backend.close()
        self._versions.release()
        if self._wrapped is not None:
            await asyncio.to_thread(self._wrapped.close)
        await asyncio.sleep(0)  # let the last results be delivered

    def _statistics(self, version: ModelVersion) -> ModelStatistics:
        served, key = version.model, version.key
        snapshot = self._executor.snapshot(key)
        counts = {item.name: getattr(snapshot, item.name) for item in fields(snapshot)}
        health, parallel = self._executor.health, self._parallel
        extended = [(name, background.status(key)) for name, background in self._background.items()]
        there = self._backend.there if isinstance(self._backend, StreamBackend) else ()
        return ModelStatistics(
            version=version.number,
            earlier=self._versions.earlier(version.name),
            mode=served.mode.value,
            backend=self._backend.name,
            policy_version=self._executor.deployment(key).policy.version,
            control=None if served.control is None else self._control.status(key),
            learning=self._learning.status(version.name),
            scheduling=str(served.options.scheduling),
            streams=health.streams,
            streams_in_service=health.in_service,
            restarts=health.restarts,
            extensions={name: told for name, told in extended if told is not None},
            workers=len(there),
            workers_in_service=sum(there),
            worker_restarts=getattr(self._backend, "restarts", 0),
            parallel_below=parallel.value if parallel is not None and parallel.limits else None,
            uptime_s=time.monotonic() - served.loaded_s,
            **counts,
        )
