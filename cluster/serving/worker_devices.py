"""Workers as an engine's devices; each worker runs one of the engine's streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from offramp.bundle import Bundle
from offramp.cluster.remote.launching import LocalLauncher, WorkerLauncher, worker_command
from offramp.cluster.remote.process import WorkerCommand
from offramp.cluster.remote.worker_backend import RemoteBackend
from offramp.cluster.serving.cluster_serving import ServedCluster, plan_splits, segments_of
from offramp.cluster.serving.served_splits import ServedSplits
from offramp.engine.common.errors import StageNotLoadedError
from offramp.engine.models.options import MOST_THREADS, ON_CPU, EngineOptions
from offramp.engine.stages.backend_protocol import Backend

MOST_WORKERS: Final = MOST_THREADS
"""Largest number of workers of a router, which has threads for each; more is assumed to be a
mistake."""
WORKERS_ON_CPU: Final = (
    "that is for workers on the CPU; give --backend onnxruntime or openvino, and name GPUs in a "
    'cluster file ([[workers]] device = "cuda:0", backend = "tensorrt"), or run without workers '
    "(--device cuda:0,cuda:1)"
)
"""Reason why a backend is refused."""


class WorkerDevices:
    """Workers, each of which runs one stream; implements :class:`.StreamDevices`."""

    @property
    def count(self) -> int:
        """Number of streams that the workers run, on all hosts."""
        raise NotImplementedError

    @property
    def local(self) -> int:
        """Number of workers that are processes on the router's host."""
        return self.count

    @property
    def elsewhere(self) -> bool:
        """``True`` if some workers are on other hosts."""
        return False

    @property
    def on_gpus(self) -> bool:
        """``True`` if any worker uses a GPU."""
        return False

    def launchers(
        self,
        command: WorkerCommand,
        bundles: Sequence[Path] = (),  # noqa: ARG002 - only Ray's workers need them
    ) -> list[WorkerLauncher]:
        """Return the launcher of each worker; ``command`` starts those on this host."""
        return [LocalLauncher(command)] * self.count

    def planned_for(
        self,
        bundle: Bundle,  # noqa: ARG002
        max_batch_size: int,  # noqa: ARG002
    ) -> ServedCluster | None:
        """Return devices and goal of a bundle's plans; ``None`` if each worker holds all stages."""
        return None

    def check(self, options: EngineOptions) -> None:
        """Raise ValueError for options that do not fit workers."""
        if not 0 <= self.count <= MOST_WORKERS:
            raise ValueError(f"workers is {self.count}, expected at most {MOST_WORKERS}")
        if options.streams not in (1, self.count):
            raise ValueError(
                f"streams is {options.streams} and there are {self.count} workers: each worker "
                "is one stream; omit streams"
            )
        if options.backend not in ("auto", *ON_CPU):
            raise ValueError(f"backend is {options.backend}, and {WORKERS_ON_CPU}")
        if self.on_gpus and options.precision not in (None, "fp32"):
            raise ValueError(
                f"precision is {options.precision}, and workers on GPUs run engines in fp32, which "
                "the bundle's own policy is certified for; omit precision"
            )

    def open(
        self, local: Backend, bundles: Sequence[Path], options: EngineOptions, *, max_rows: int
    ) -> RemoteBackend:
        """Open the backend whose slots are the workers; BackendError if that fails."""
        try:
            launchers = self.launchers(worker_command(), bundles)
        except BaseException:
            local.close()
            raise
        return RemoteBackend(
            local,
            launchers=launchers,
            threads=options.threads_per_stream(),
            graphs=options.graphs,
            max_rows=max_rows,
        )

    def split(
        self,
        name: str,
        bundle: Bundle,
        backend: Backend,
        options: EngineOptions,
        refused: Sequence[StageNotLoadedError] = (),
    ) -> ServedSplits | None:
        """Split a model by a plan, if devices and goal are configured; OptionsError."""
        served = self.planned_for(bundle, options.of(name).max_batch_size)
        if served is None or not isinstance(backend, RemoteBackend):
            return None
        kinds = backend.device_types
        # The first refused load may be of segments that devices hold only to steal work.
        served = served.without(*(segments_of(error, kinds) for error in refused[1:]))
        splits = plan_splits(name, bundle, served, kinds, options.mode, steals=not refused)
        backend.hold(splits.holds)
        return splits


@dataclass(frozen=True, slots=True)
class LocalWorkers(WorkerDevices):
    """Worker processes on this host, each of which holds all stages."""

    count: int


@dataclass(frozen=True, slots=True, eq=False)
class OpenedWorkers(WorkerDevices):
    """Workers of a backend that the caller has opened, with devices and goal for plans."""

    count: int
    served: ServedCluster | None = None

    def planned_for(
        self,
        bundle: Bundle,  # noqa: ARG002
        max_batch_size: int,  # noqa: ARG002
    ) -> ServedCluster | None:
        """Return the configured devices and goal."""
        return self.served
