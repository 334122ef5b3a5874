"""A backend whose slots are worker processes: engine and control see no difference.

Each of the workers holds all stages; a stream's slot is one of them. One that is lost is replaced
by its launcher when its stream opens a slot again, which is where pauses between starts come from
(:mod:`offramp.engine.serving.stream_health`).
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
"""Whether a worker, numbered from 0, holds a stage."""

BACKEND_OF: Final = {"onnxruntime-cpu": "onnxruntime", "openvino-cpu": "openvino"}
"""What a worker on the CPU is told to be, by the name of the backend that it stands for."""
_NAME_OF: Final = {"tensorrt": "tensorrt", "cuda": "onnxruntime-cuda"}
"""The name of the backend of a worker on a GPU, by what it is told to be."""
_LEAST_ON_GPU_S: Final = 30.0
"""A GPU plans convolutions, or makes contexts, for every size that it runs for the first time."""

_CLOSE_S: Final = 5.0
"""Limit of the wait for a start that is under way, which may have to give up a network first."""


class RemoteBackend:
    """Prepares stages in workers, one of each of ``launchers``: a backend.

    ``local`` is a backend of the kind that the workers have, in this process; it says what there is
    to say of it, and runs nothing. Workers on GPUs run what their launchers say instead, with
    ``graphs`` and ``max_rows`` as in :func:`.make_backend`. ``least_s`` is the least time after
    which a stage hangs. Each worker holds all stages, until :meth:`hold` says otherwise.
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
        """Stages that nobody has any more, and workers still do."""
        self._seats = [_Seat(launcher) for launcher in launchers]
        self._lock = threading.Lock()
        """Of the seats' counts."""
        self._lines = LineLimit(lines=1, window_s=60.0)
        self.restarts = 0
        """Workers that were started in place of one that was lost."""

    @property
    def name(self) -> str:
        """The names of what executes in the workers, for instance ``onnxruntime-cpu+tensorrt``."""
        runtimes = [seat.launcher.runtime for seat in self._seats]
        names = [_NAME_OF.get(runtime.backend, self._local.name) for runtime in runtimes]
        return "+".join(sorted(set(names)))

    @property
    def on_cpu(self) -> bool:
        """Whether all workers run stages on the CPU."""
        return not any(seat.launcher.runtime.device for seat in self._seats)

    @property
    def runtime(self) -> str:
        """Describe what executes: times measured with it hold for nothing else."""
        return f"{getattr(self._local, 'runtime', '')}, {len(self._seats)} workers"

    @property
    def workers(self) -> int:
        """How many workers there are to be."""
        return len(self._seats)

    @property
    def device_types(self) -> tuple[str, ...]:
        """The type of device of each, in the order of the launchers."""
        return tuple(seat.launcher.device_type for seat in self._seats)

    @property
    def there(self) -> tuple[bool, ...]:
        """Whether each of them can be asked, as far as is known."""
        found = [seat.worker for seat in self._seats]
        return tuple(worker is not None and worker.alive for worker in found)

    @property
    def alive(self) -> list[WorkerHandle]:
        """Those that are there, as far as is known."""
        found = [seat.worker for seat in self._seats]
        return [worker for worker in found if worker is not None and worker.alive]

    @property
    def in_service(self) -> int:
        """How many of them are there."""
        return sum(self.there)

    @property
    def pids(self) -> list[int]:
        """The process numbers of those, each on its host."""
        return [worker.pid for worker in self.alive]

    def cpu_clock(self) -> float:
        """Seconds of processor time of this process and its workers, where that can be known."""
        return time.process_time() + sum(worker.cpu_s() for worker in self.alive)

    def as_computed(self, bundle: Bundle) -> Bundle:
        """Give the bundle as the local backend does."""
        return self._local.as_computed(bundle)

    def sizes(self, most: int) -> Sequence[int]:
        """List sizes as the local backend does, or those that GPUs fill batches up to."""
        if all(seat.launcher.runtime.device for seat in self._seats):
            return sorted({padded(rows, most) for rows in range(1, most + 1)})
        return self._local.sizes(most)

    def missing(self, stage: RemoteStage) -> None:
        """Say that nothing has to be built: which engines a worker lacks, only its log says."""

    def hold(self, holds: Holds) -> None:
        """Change which workers hold which stages, and have them load and forget accordingly.

        What a worker that is lost should hold, it loads when it is back. A stage that none holds
        any more is released, and loaded once again by who runs it. BackendError if a stage cannot
        be loaded: the rule is in force all the same.
        """
        self._holds = holds
        failures = []
        for stage in self._known():
            if self._holders(stage.spec):
                failures += self._load_everywhere(stage)
        for number, seat in enumerate(self._seats):
            with seat.lock:
                if seat.worker is not None and seat.worker.alive:
                    self._forget(number, seat.worker)
        refused = [f for f in failures if f is not None and not isinstance(f, WorkerLostError)]
        if refused:
            raise refused[0]

    def prepare(self, spec: StageSpec) -> RemoteStage:
        """Have all workers load a stage that hold it and are there; others do when they start.

        One that somebody still has is the same again. BackendError if it cannot be loaded.
        """
        made_of = _made_of(spec)
        stage = self._same_as(made_of)
        if stage is None:
            document, graph = describe_stage(spec)
            stage = RemoteStage(next(self._numbers), spec, document, graph, made_of)
            self._stages[stage.number] = stage
            weakref.finalize(stage, self._released.append, stage.number)
        failures = self._load_everywhere(stage)
        if None not in failures:  # it is enough that one has it: the others will, or are replaced
            raise next(f for f in failures if f is not None)
        refused = [f for f in failures if f is not None and not isinstance(f, WorkerLostError)]
        if refused:
            raise refused[0]
        return stage

    def open_slot(self) -> RoutedSlot:
        """Open a slot of the worker that has fewest, of those that are there if any is.

        BackendError if it has to be started and cannot be, or cannot load the stages.
        """
        there = self.there
        with self._lock:
            number = min(
                range(len(self._seats)), key=lambda n: (not there[n], self._seats[n].open_slots)
            )
        return self.open_slot_of(number)

    def open_slot_of(self, stream: int) -> RoutedSlot:
        """Open a slot of the worker of a stream, started anew if it is lost: :meth:`open_slot`."""
        number = stream % len(self._seats)
        own = self._open_own_slot(number)
        return RoutedSlot(number, own, route=self._route, open_other=self._open_own_slot)

    def _open_own_slot(self, number: int) -> RemoteSlot:
        seat = self._seats[number]
        with self._lock:
            seat.open_slots += 1
        try:
            return RemoteSlot(
                self._worker_of(number),
                load=self._load,
                least_s=max(self._least_s, _LEAST_ON_GPU_S)
                if seat.launcher.runtime.device
                else self._least_s,
                closed=lambda: self._leave(seat),
            )
        except BaseException:
            self._leave(seat)
            raise

    def _route(self, number: int, stage: RemoteStage) -> int:
        """Choose the worker that runs a stage: the given one if it holds it, or nobody does."""
        if self._holds(number, stage.spec):
            return number
        able = self._holders(stage.spec)
        if not able:  # left behind by a change of plans
            return number
        there = [n for n in able if (worker := self._seats[n].worker) and worker.alive]
        return (there or able)[0]

    def close(self) -> None:
        """End the workers; one that is being started ends with this process."""
        for seat in self._seats:
            if seat.lock.acquire(timeout=_CLOSE_S):
                try:
                    if seat.worker is not None:
                        seat.worker.end()
                finally:
                    seat.lock.release()
            seat.launcher.close()

    def _hello_to(self, runtime: WorkerRuntime) -> Hello:
        """Say what a worker is to be."""
        if not runtime.device:
            return self._hello
        return replace(self._hello, backend=runtime.backend, device=runtime.device)

    def _leave(self, seat: _Seat) -> None:
        with self._lock:
            seat.open_slots -= 1

    def _worker_of(self, number: int) -> WorkerHandle:
        """Give the worker of a seat; starts one, with all that it holds, where there is none."""
        seat = self._seats[number]
        with seat.lock:
            if seat.worker is not None and seat.worker.alive:
                return seat.worker
            if seat.worker is not None:
                seat.worker.end()
                self.restarts += 1
            try:
                worker = seat.launcher.start(self._hello_to(seat.launcher.runtime))
            except WorkerLostError:
                seat.absent = True
                raise
            seat.absent = False
            try:
                self._load_all(number, worker)
            except BaseException:
                worker.end()
                raise
            seat.worker = worker
            _log.info("%s is ready: %s", worker.name, seat.launcher.describe())
            return worker

    def _load_all(self, number: int, worker: WorkerHandle) -> None:
        """Have a worker that starts load what it holds; what does not load fails by itself later.

        BackendError if nothing loads.
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
                _log.warning("%s goes without a stage: %s", worker.name, error)
        if failures and not loaded:
            raise failures[0]

    def _load_everywhere(self, stage: RemoteStage) -> list[BackendError | None]:
        """Have all that hold a stage, and are there, load it; gives what came of each."""
        able = self._holders(stage.spec)
        if not able:
            raise self._held_by_none(stage.spec)
        there = [n for n in able if self._seats[n].may_load] or able[:1]
        with ThreadPoolExecutor(len(there)) as pool:
            return list(pool.map(lambda n: self._try_load(n, stage), there))

    def _known(self) -> list[RemoteStage]:
        """Give the stages that somebody has, while other threads prepare more."""
        found = [reference() for reference in self._stages.valuerefs()]
        return [stage for stage in found if stage is not None]

    def _same_as(self, made_of: tuple[object, ...]) -> RemoteStage | None:
        """Find a stage of the same bundle that differs at most in its place and threshold."""
        same = (stage for stage in self._known() if made_of and stage.made_of == made_of)
        return next(same, None)

    def _holders(self, spec: StageSpec) -> list[int]:
        """Give the workers that hold a stage, there or not."""
        return [n for n in range(len(self._seats)) if self._holds(n, spec)]

    def _held_by_none(self, spec: StageSpec) -> BackendError:
        return BackendError(
            f"no worker holds segments {spec.first_segment} to {spec.last_segment}: their plan is "
            "of other stages"
        )

    def _forget(self, number: int, worker: WorkerHandle) -> None:
        """Have a worker release the stages that it holds no more."""
        for stage in self._known():
            if stage.number in worker.stages and not self._holds(number, stage.spec):
                worker.stages.discard(stage.number)
                with contextlib.suppress(BackendError):  # it is lost, and so is the stage
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
        """Have a worker load a stage that it does not have, and forget what nobody has."""
        while (gone := self._next_released()) is not None:
            for seat in self._seats:
                if seat.worker is not None and gone in seat.worker.stages and seat.worker.alive:
                    seat.worker.stages.discard(gone)
                    with contextlib.suppress(BackendError):  # it is lost, and so is the stage
                        seat.worker.order(Release(stage=gone))
        if stage.number not in worker.stages:
            try:
                worker.order(Prepare(stage=stage.number, document=stage.document), stage.graph)
            except WorkerLostError:
                raise
            except BackendError as error:
                self._send_graph(worker, stage, error)
            worker.stages.add(stage.number)

    def _send_graph(self, worker: WorkerHandle, stage: RemoteStage, error: BackendError) -> None:
        """Send the graph that this process holds of a bundle which the worker does not find.

        The bundle may have been replaced since it was opened. Raises the worker's ``error`` if it
        does not take the graph either.
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
    """Say what a stage of a bundle is made of, reads and gives; of one of no bundle nothing."""
    bundle = spec.bundle
    if bundle is None:
        return ()
    where = (bundle.path, bundle.number, manifest_hash(bundle))
    return where, spec.unit, spec.inputs, spec.carried, spec.weight_form


class _Seat:
    """The place of a worker, whichever has it."""

    def __init__(self, launcher: WorkerLauncher) -> None:
        self.launcher = launcher
        self.lock = threading.Lock()
        """Held while one is started."""
        self.worker: WorkerHandle | None = None
        self.absent = False
        """Whether the last start found nobody: a network may take long to say so."""
        self.open_slots = 0

    @property
    def may_load(self) -> bool:
        """Whether to have a stage loaded here now, and not when its stream starts a worker."""
        return not self.absent if self.worker is None else self.worker.alive
