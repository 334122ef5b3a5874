"""A backend whose slots are worker processes; engine and control use it like any other.

Each worker holds all stages; a stream's slot is in one of them. A lost worker is replaced by its
launcher when its stream opens a slot again, with the pauses between starts of
:mod:`offramp.engine.serving.stream_health`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final, TypeAlias

from offramp import __version__
from offramp.bundle import Bundle
from offramp.cluster.remote.launching import WorkerHandle, WorkerLauncher, WorkerRuntime
from offramp.cluster.remote.routing import RoutedSlot
from offramp.cluster.remote.stage_orders import describe_graph, describe_stage, manifest_hash
from offramp.cluster.remote.worker_messages import Hello, Prepare, Release
from offramp.cluster.remote.worker_slot import LEAST_LIMIT_S, RemoteSlot, RemoteStage
from offramp.engine.common.errors import BackendError, StageNotLoadedError, WorkerLostError
from offramp.engine.common.line_limit import LineLimit
from offramp.engine.cuda.batch_sizes import padded
from offramp.engine.stages.backend_protocol import Backend
from offramp.engine.stages.plan import StageSpec

_log = logging.getLogger(__name__)

Holds: TypeAlias = Callable[[int, StageSpec], bool]
"""Function that returns whether a worker, numbered from 0, holds a stage."""

BACKEND_OF: Final = {"onnxruntime-cpu": "onnxruntime", "openvino-cpu": "openvino"}
"""Backend option of a worker on the CPU, by the name of the local backend."""
_NAME_OF: Final = {"tensorrt": "tensorrt", "cuda": "onnxruntime-cuda"}
"""Name of a GPU worker's backend, by its backend option."""
_LEAST_ON_GPU_S: Final = 30.0
"""Smallest time limit of a run of a stage on a GPU, in seconds: every new batch size needs
preparation, such as the choice of convolution algorithms."""

_CLOSE_S: Final = 5.0
"""Longest wait, in seconds, of a close for a start in progress, which may wait for a network."""


class RemoteBackend:
    """Prepares stages in workers, one for each of ``launchers``: a backend.

    ``local`` is a backend of the workers' kind in this process; it provides facts, but runs
    nothing. Workers on GPUs use the backend of their launcher instead, with ``graphs`` and
    ``max_rows`` as in :func:`.make_backend`. A stage counts as hanging after ``least_s`` seconds at
    the earliest. Each worker holds all stages, until :meth:`hold` changes that.
    """

    def __init__(
        self,
        local: Backend,
        *,
        launchers: Sequence[WorkerLauncher],
        threads: int = 1,
        graphs: bool = True,
        max_rows: int = 32,
        least_s: float = LEAST_LIMIT_S,
    ) -> None:
        self._local = local
        self._hello = Hello(
            version=__version__,
            backend=BACKEND_OF.get(local.name, local.name),
            threads=threads,
            graphs=graphs,
            max_rows=max_rows,
        )
        self._least_s = least_s
        self._holds: Holds = lambda _worker, _spec: True
        self._numbers = itertools.count(1)
        self._stages: weakref.WeakValueDictionary[int, RemoteStage] = weakref.WeakValueDictionary()
        self._released: deque[int] = deque()
        """Numbers of stages that are not used any more, but are still loaded in workers."""
        self._pool = [_PoolEntry(launcher) for launcher in launchers]
        self._lock = threading.Lock()
        """Guards the entries' counts."""
        self._lines = LineLimit(lines=1, window_s=60.0)
        self.restarts = 0
        """Number of workers started to replace lost workers."""

    @property
    def name(self) -> str:
        """Names of the workers' backends, for instance ``onnxruntime-cpu+tensorrt``."""
        runtimes = [entry.launcher.runtime for entry in self._pool]
        names = [_NAME_OF.get(runtime.backend, self._local.name) for runtime in runtimes]
        return "+".join(sorted(set(names)))

    @property
    def on_cpu(self) -> bool:
        """``True`` if all workers run stages on the CPU."""
        return not any(entry.launcher.runtime.device for entry in self._pool)

    @property
    def runtime(self) -> str:
        """Description of the runtime; measured times are valid only for this runtime."""
        return f"{getattr(self._local, 'runtime', '')}, {len(self._pool)} workers"

    @property
    def workers(self) -> int:
        """Number of workers, including lost workers."""
        return len(self._pool)

    @property
    def device_types(self) -> tuple[str, ...]:
        """Device type of each worker, in the order of the launchers."""
        return tuple(entry.launcher.device_type for entry in self._pool)

    @property
    def there(self) -> tuple[bool, ...]:
        """``True`` for each worker that can take orders, as far as is known."""
        found = [entry.worker for entry in self._pool]
        return tuple(worker is not None and worker.alive for worker in found)

    @property
    def alive(self) -> list[WorkerHandle]:
        """Workers that are alive, as far as is known."""
        found = [entry.worker for entry in self._pool]
        return [worker for worker in found if worker is not None and worker.alive]

    @property
    def in_service(self) -> int:
        """Number of workers that are alive."""
        return sum(self.there)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that are alive, each on its host."""
        return [worker.pid for worker in self.alive]

    def cpu_clock(self) -> float:
        """Return the CPU seconds of this process and its workers, as far as known."""
        return time.process_time() + sum(worker.cpu_s() for worker in self.alive)

    def as_computed(self, bundle: Bundle) -> Bundle:
        """Return the bundle with the results that are valid on the local backend."""
        return self._local.as_computed(bundle)

    def sizes(self, most: int) -> Sequence[int]:
        """Return the batch sizes of the local backend, or those that GPUs pad batches to."""
        if all(entry.launcher.runtime.device for entry in self._pool):
            return sorted({padded(rows, most) for rows in range(1, most + 1)})
        return self._local.sizes(most)

    def missing(self, stage: RemoteStage) -> None:
        """Return ``None``: only a worker's own log reports missing engines."""

    def hold(self, holds: Holds) -> None:
        """Change which workers hold which stages, and make them load and release accordingly.

        A lost worker loads its stages when it is back. A stage that no worker holds is released,
        and is loaded again when it is run. BackendError if a stage cannot be loaded; the new rule
        is active even then.
        """
        self._holds = holds
        failures = []
        for stage in self._known():
            if self._holders(stage.spec):
                failures += self._load_everywhere(stage)
        for number, entry in enumerate(self._pool):
            with entry.lock:
                if entry.worker is not None and entry.worker.alive:
                    self._forget(number, entry.worker)
        refused = [f for f in failures if f is not None and not isinstance(f, WorkerLostError)]
        if refused:
            raise refused[0]

    def prepare(self, spec: StageSpec) -> RemoteStage:
        """Load a stage in all live workers that hold it; other workers load it when they start.

        An equal stage that is still in use is reused. BackendError if the stage cannot be loaded.
        """
        made_of = _made_of(spec)
        stage = self._same_as(made_of)
        if stage is None:
            document, graph = describe_stage(spec)
            stage = RemoteStage(next(self._numbers), spec, document, graph, made_of)
            self._stages[stage.number] = stage
            weakref.finalize(stage, self._released.append, stage.number)
        failures = self._load_everywhere(stage)
        if None not in failures:  # one worker is enough: the others load it later, or are replaced
            raise next(f for f in failures if f is not None)
        refused = [f for f in failures if f is not None and not isinstance(f, WorkerLostError)]
        if refused:
            raise refused[0]
        return stage

    def open_slot(self) -> RoutedSlot:
        """Open a slot on the worker with the fewest slots, preferring live workers.

        BackendError if the worker must be started and this fails, or if it cannot load the stages.
        """
        there = self.there
        with self._lock:
            number = min(
                range(len(self._pool)), key=lambda n: (not there[n], self._pool[n].open_slots)
            )
        return self.open_slot_of(number)

    def open_slot_of(self, stream: int) -> RoutedSlot:
        """Open a slot on a stream's worker; a lost worker starts again. See :meth:`open_slot`."""
        number = stream % len(self._pool)
        own = self._open_own_slot(number)
        return RoutedSlot(number, own, route=self._route, open_other=self._open_own_slot)

    def _open_own_slot(self, number: int) -> RemoteSlot:
        entry = self._pool[number]
        with self._lock:
            entry.open_slots += 1
        try:
            return RemoteSlot(
                self._worker_of(number),
                load=self._load,
                least_s=max(self._least_s, _LEAST_ON_GPU_S)
                if entry.launcher.runtime.device
                else self._least_s,
                closed=lambda: self._leave(entry),
            )
        except BaseException:
            self._leave(entry)
            raise

    def _route(self, number: int, stage: RemoteStage) -> int:
        """Return the worker that runs a stage: ``number``, unless only others hold the stage."""
        if self._holds(number, stage.spec):
            return number
        able = self._holders(stage.spec)
        if not able:  # a stage of an earlier plan
            return number
        there = [n for n in able if (worker := self._pool[n].worker) and worker.alive]
        return (there or able)[0]

    def close(self) -> None:
        """End the workers; a worker that is still starting ends with this process."""
        for entry in self._pool:
            if entry.lock.acquire(timeout=_CLOSE_S):
                try:
                    if entry.worker is not None:
                        entry.worker.end()
                finally:
                    entry.lock.release()
            entry.launcher.close()

    def _hello_to(self, runtime: WorkerRuntime) -> Hello:
        """Return the first message to a worker: its backend and options."""
        if not runtime.device:
            return self._hello
        return replace(self._hello, backend=runtime.backend, device=runtime.device)

    def _leave(self, entry: _PoolEntry) -> None:
        with self._lock:
            entry.open_slots -= 1

    def _worker_of(self, number: int) -> WorkerHandle:
        """Return an entry's worker; if there is none, start one and load its stages."""
        entry = self._pool[number]
        with entry.lock:
            if entry.worker is not None and entry.worker.alive:
                return entry.worker
            if entry.worker is not None:
                entry.worker.end()
                self.restarts += 1
            try:
                worker = entry.launcher.start(self._hello_to(entry.launcher.runtime))
            except WorkerLostError:
                entry.absent = True
                raise
            entry.absent = False
            try:
                self._load_all(number, worker)
            except BaseException:
                worker.end()
                raise
            entry.worker = worker
            _log.info("%s is ready: %s", worker.name, entry.launcher.describe())
            return worker

    def _load_all(self, number: int, worker: WorkerHandle) -> None:
        """Load the stages of a starting worker; a stage that fails is reported when it is run.

        BackendError if no stage can be loaded.
        """
        failures, loaded = list[BackendError](), False
        for stage in sorted(self._known(), key=lambda stage: stage.number):
            if not self._holds(number, stage.spec):
                continue
            try:
                self._load(worker, stage)
                loaded = True
            except WorkerLostError:
                raise
            except BackendError as error:
                failures.append(error)
                _log.warning("%s continues without a stage: %s", worker.name, error)
        if failures and not loaded:
            raise failures[0]

    def _load_everywhere(self, stage: RemoteStage) -> list[BackendError | None]:
        """Load a stage in all live workers that hold it; return the error or ``None`` of each."""
        able = self._holders(stage.spec)
        if not able:
            raise self._held_by_none(stage.spec)
        there = [n for n in able if self._pool[n].may_load] or able[:1]
        with ThreadPoolExecutor(len(there)) as pool:
            return list(pool.map(lambda n: self._try_load(n, stage), there))

    def _known(self) -> list[RemoteStage]:
        """Return the stages in use; safe while other threads prepare more."""
        found = [reference() for reference in self._stages.valuerefs()]
        return [stage for stage in found if stage is not None]

    def _same_as(self, made_of: tuple[object, ...]) -> RemoteStage | None:
        """Return a loaded stage with the same graph; its number and threshold may differ."""
        same = (stage for stage in self._known() if made_of and stage.made_of == made_of)
        return next(same, None)

    def _holders(self, spec: StageSpec) -> list[int]:
        """Return the workers that hold a stage, alive or not."""
        return [n for n in range(len(self._pool)) if self._holds(n, spec)]

    def _held_by_none(self, spec: StageSpec) -> BackendError:
        return BackendError(
            f"no worker holds segments {spec.first_segment} to {spec.last_segment}: their plan has "
            "other stages"
        )

    def _forget(self, number: int, worker: WorkerHandle) -> None:
        """Release the stages that a worker does not hold any more."""
        for stage in self._known():
            if stage.number in worker.stages and not self._holds(number, stage.spec):
                worker.stages.discard(stage.number)
                with contextlib.suppress(BackendError):  # a lost worker has no stages
                    worker.order(Release(stage=stage.number))

    def _try_load(self, number: int, stage: RemoteStage) -> BackendError | None:
        try:
            self._load(self._worker_of(number), stage)
        except WorkerLostError as error:
            return error
        except BackendError as error:
            segments = (stage.spec.first_segment, stage.spec.last_segment)
            return StageNotLoadedError(str(error), device=number, segments=segments)
        return None

    def _load(self, worker: WorkerHandle, stage: RemoteStage) -> None:
        """Load a stage in a worker that lacks it, and release unused stages."""
        while (gone := self._next_released()) is not None:
            for entry in self._pool:
                if entry.worker is not None and gone in entry.worker.stages and entry.worker.alive:
                    entry.worker.stages.discard(gone)
                    with contextlib.suppress(BackendError):  # a lost worker has no stages
                        entry.worker.order(Release(stage=gone))
        if stage.number not in worker.stages:
            try:
                worker.order(Prepare(stage=stage.number, document=stage.document), stage.graph)
            except WorkerLostError:
                raise
            except BackendError as error:
                self._send_graph(worker, stage, error)
            worker.stages.add(stage.number)

    def _send_graph(self, worker: WorkerHandle, stage: RemoteStage, error: BackendError) -> None:
        """Send a bundle's graph from this process to a worker that does not find the bundle.

        The bundle may have been replaced since it was opened. Raises the worker's ``error`` if the
        worker does not accept the graph either.
        """
        bundle = stage.spec.bundle
        if bundle is None:
            raise error
        document, graph = describe_graph(stage.spec)
        try:
            worker.order(Prepare(stage=stage.number, document=document), graph)
        except WorkerLostError:
            raise
        except BackendError:
            raise error from None
        suffix = self._lines.admit(bundle.path)
        if suffix is not None:
            _log.warning(
                "%s was replaced or removed since it was opened: %s gets the graphs of the one "
                "that is served, until the server is started again (%s)%s",
                bundle.path, worker.name, error, suffix,
            )  # fmt: skip

    def _next_released(self) -> int | None:
        try:
            return self._released.popleft()
        except IndexError:
            return None


def _made_of(spec: StageSpec) -> tuple[object, ...]:
    """Return the key of a stage of a bundle: parts, inputs and outputs; empty without a bundle."""
    bundle = spec.bundle
    if bundle is None:
        return ()
    where = (bundle.path, bundle.number, manifest_hash(bundle))
    return where, spec.unit, spec.inputs, spec.carried, spec.weight_form


class _PoolEntry:
    """State of one worker and its successors in the backend."""

    def __init__(self, launcher: WorkerLauncher) -> None:
        self.launcher = launcher
        self.lock = threading.Lock()
        """Held while a worker is started."""
        self.worker: WorkerHandle | None = None
        self.absent = False
        """``True`` if the last start did not reach the worker; over a network, another try may take
        long."""
        self.open_slots = 0

    @property
    def may_load(self) -> bool:
        """Return whether to load a stage now; if not, starting the worker loads it."""
        return not self.absent if self.worker is None else self.worker.alive
