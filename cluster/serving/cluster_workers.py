"""The workers of a cluster file: their places, devices and credentials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from offramp.bundle import Bundle, Profile
from offramp.cluster.planning.cluster_file import (
    MOST_FILE_BYTES,
    ClusterFile,
    ClusterFileError,
    RouterEntry,
    parse_cluster,
)
from offramp.cluster.planning.cluster_plan import ClusterPlan
from offramp.cluster.planning.cluster_times import make_cluster
from offramp.cluster.planning.ray_entry import ONE_CPU, RayEntry
from offramp.cluster.planning.worker_entry import WorkersEntry
from offramp.cluster.ray.launcher import RayLauncher, actor_needs, reserve
from offramp.cluster.ray.ray_connection import connect, free_cpus
from offramp.cluster.remote.handshake import HandshakeError, read_token
from offramp.cluster.remote.launching import (
    ON_THE_CPU,
    LocalLauncher,
    WorkerLauncher,
    WorkerRuntime,
)
from offramp.cluster.remote.process import WorkerCommand
from offramp.cluster.remote.tcp import HostPort, TlsTrust, parse_address
from offramp.cluster.remote.tcp_launcher import MOST_RESULT_BYTES, TcpLauncher
from offramp.cluster.serving.cluster_serving import ServedCluster
from offramp.cluster.serving.planning_files import read_plan, read_planning, read_profiles
from offramp.cluster.serving.worker_devices import MOST_WORKERS, WorkerDevices
from offramp.engine.common.errors import BackendError
from offramp.engine.common.network import NetworkError, tls_reason

RAY: Final = Path("ray")
"""Value of the option ``cluster``, in place of a file, for which Ray starts all workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """One worker: its device type, and where it runs."""

    device_type: str
    """Name of the worker's device type in the cluster's ``[devices]``."""
    address: HostPort | None
    """Address on which the worker listens; ``None`` if the worker is started for the router."""
    resources: Mapping[str, float] | None = None
    """Resources that Ray reserves for the worker; ``None`` for a process on the router's own
    host."""
    runtime: WorkerRuntime = ON_THE_CPU
    """Backend and device that run the worker's stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterWorkers(WorkerDevices):
    """All workers of a cluster, with devices, plan and credentials."""

    places: tuple[WorkerPlace, ...]
    file: ClusterFile | None
    """Devices, links and goal for planning; without it, no model is split."""
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    """Profiles by the paths that the cluster file names."""
    plan: ClusterPlan | None = None
    """Plan to serve unchanged; ``None`` if plans are made while serving."""
    token: bytes = field(repr=False, default=b"")
    """Secret shared with workers on other hosts."""
    tls: TlsTrust | None = None
    """Certificates for TLS; ``None`` connects to workers on other hosts without encryption."""
    ray: RayEntry = field(default_factory=RayEntry)
    """Options for workers that Ray starts."""

    @property
    def count(self) -> int:
        """Number of streams: each worker has one stream for each batch that it holds at a time."""
        return len(self.places) * self.batches_per_worker

    @property
    def batches_per_worker(self) -> int:
        """Number of batches that a worker holds at a time (:class:`.RouterEntry`)."""
        return 1 if self.file is None else self.file.router.batches_per_worker

    @property
    def elsewhere(self) -> bool:
        """``True`` if some workers are, or may be, on other hosts."""
        return self.local < len(self.places)

    @property
    def on_gpus(self) -> bool:
        """``True`` if any worker uses a GPU."""
        return any(place.runtime.device for place in self.places)

    @property
    def local(self) -> int:
        """Number of workers that are processes on the router's host."""
        return sum(place.address is None and place.resources is None for place in self.places)

    def launchers(
        self, command: WorkerCommand, bundles: Sequence[Path] = ()
    ) -> list[WorkerLauncher]:
        """Return the launcher of each worker; ``command`` starts those on this host.

        For Ray's workers, which serve ``bundles``, this requests placements, and waits until the
        smallest allowed number of them is placed. Raise NetworkError or BackendError.
        """
        needs = actor_needs(bundles)
        actors = [
            RayLauncher(
                place.resources,
                needs,
                device_type=place.device_type,
                address=self.ray.address,
                most_result_bytes=self.most_result_bytes,
            )
            for place in self.places
            if place.resources is not None
        ]
        if actors:
            others = len(self.places) - len(actors)
            least = len(self.places) if self.ray.least is None else self.ray.least
            reserve(actors, max(0, least - others))
        started = iter(actors)
        return [
            next(started)
            if place.resources is not None
            else LocalLauncher(command, device_type=place.device_type, runtime=place.runtime)
            if place.address is None
            else TcpLauncher(
                place.address,
                self.token,
                self.tls,
                place.device_type,
                most_result_bytes=self.most_result_bytes,
                runtime=place.runtime,
            )
            for place in self.places
        ]

    @property
    def most_result_bytes(self) -> int:
        """Largest result of a run that is received over a network, in bytes."""
        mib = None if self.file is None else self.file.router.most_result_mib
        return MOST_RESULT_BYTES if mib is None else mib << 20

    def planned_for(self, bundle: Bundle, max_batch_size: int) -> ServedCluster | None:
        """Return devices and goal for a bundle's plans.

        Times of a device come from its own profile if it has one, else from the bundle's profile.
        ClusterFileError if a profile was measured with another bundle.
        """
        if self.file is None:
            return None
        own = bundle.profile()
        cluster = make_cluster(self.file, own, self.profiles, max_batch_size)
        sizes = [size for size in own.batch_sizes if size <= max_batch_size]
        goal = self.file.goal.goal(sizes or [max_batch_size])
        return ServedCluster(
            cluster=cluster,
            goal=goal,
            plan=self.plan,
            batches_per_worker=self.batches_per_worker,
        )


def read_cluster_workers(path: Path, plan: Path | None = None) -> ClusterWorkers:
    """Read the workers of a cluster file, the files that it names, and the plan to serve.

    Raise a PlanError with a one-line reason if a file cannot be read or is invalid.
    """
    cluster = parse_cluster(read_planning(path, MOST_FILE_BYTES), str(path))
    profiles = read_profiles(cluster, path.parent)
    served = None if plan is None else read_plan(plan)
    ray = cluster.router.ray
    entries = cluster.workers or _all_devices(cluster) if ray is not None else cluster.workers
    if not entries:
        raise ClusterFileError(
            f"{path} [[workers]]: there is none, expected at least one to serve on, for instance "
            f'device = "{cluster.devices[0].name}" and address = "10.0.0.2:7070"'
        )
    places = tuple(
        place
        for number, entry in enumerate(entries, 1)
        for place in _places(entry, cluster, f"{path} [[workers]] {number}")
    )
    if ray is not None and (ray.least or 0) > len(places):
        raise ClusterFileError(
            f"{path} [router] least = {ray.least}, but there are at most {len(places)} workers; "
            "lower least, or add workers"
        )
    ray = ray or RayEntry()
    addresses = [place.address for place in places if place.address is not None]
    if not addresses:
        return ClusterWorkers(places=places, file=cluster, profiles=profiles, plan=served, ray=ray)
    where = f"{path} [router]"
    tls = _trust(cluster.router, path.parent, where)
    for address in addresses:
        if tls is None and not (address.is_loopback or cluster.router.insecure):
            raise ClusterFileError(
                f"{where} has no tls_ca, and {address} would be reached unencrypted; set the "
                "authority of workers' certificates, or insecure = true if the network itself "
                "is trusted"
            )
    token = _token(cluster.router, path.parent, where)
    return ClusterWorkers(
        places=places,
        file=cluster,
        profiles=profiles,
        plan=served,
        token=token,
        tls=tls,
        ray=ray,
    )


def ray_workers(address: str | None = None, count: int | None = None) -> ClusterWorkers:
    """Return workers that Ray places, each with one CPU and all stages.

    Args:
        address: HOST:PORT of the cluster's head; ``None`` is the cluster of this host.
        count: Largest number of workers, at least 1; ``None``: one for each CPU that is free now.

    Raises:
        BackendError: No cluster can be reached, it has no free CPU, or there are too many workers.
    """
    if count is not None and not 0 <= count <= MOST_WORKERS:
        raise BackendError(f"workers is {count}, expected at most {MOST_WORKERS}, at least 0")
    if not count:
        count = free_cpus(connect(address))
    if not count:
        raise BackendError(
            "the Ray cluster has no CPU free; end jobs (ray status), add nodes, or set "
            "the number of workers (--workers N), which then wait for CPUs"
        )
    place = WorkerPlace(device_type="cpu", address=None, resources=ONE_CPU)
    ray = RayEntry(address=address, least=1)
    return ClusterWorkers(places=(place,) * count, file=None, ray=ray)


def _all_devices(cluster: ClusterFile) -> tuple[WorkersEntry, ...]:
    """Return entries for one worker on each device of the cluster file."""
    return tuple(
        WorkersEntry(device=device.name, address=None, count=device.count)
        for device in cluster.devices
    )


def _places(entry: WorkersEntry, cluster: ClusterFile, where: str) -> list[WorkerPlace]:
    try:
        address = None if entry.address is None else parse_address(entry.address)
    except NetworkError as error:
        raise ClusterFileError(f"{where} address: {error}") from error
    resources = None
    if address is None and cluster.router.ray is not None:
        said = next(device.resources for device in cluster.devices if device.name == entry.device)
        resources = ONE_CPU if said is None else said
    if resources is not None and entry.gpus:
        raise ClusterFileError(
            f"{where} backend = {entry.backend!r}, but workers that Ray starts run on the "
            "CPU; omit backend, or set the address of a running eeworker, or omit launch"
        )
    place = WorkerPlace(device_type=entry.device, address=address, resources=resources)
    if not entry.gpus:
        return [place] * entry.count
    runtimes = [WorkerRuntime(backend=entry.backend, device=f"cuda:{n}") for n in entry.gpus]
    return [replace(place, runtime=runtime) for runtime in runtimes]


def _token(router: RouterEntry, folder: Path, where: str) -> bytes:
    if router.token_file is None:
        raise ClusterFileError(
            f"{where} has no token_file, expected the file with the secret that the workers were "
            "started with (--token-file)"
        )
    path = folder / router.token_file
    try:
        return read_token(path)
    except OSError as error:
        raise ClusterFileError(
            f"{where} token_file: {path} cannot be read: {tls_reason(error)}"
        ) from error
    except HandshakeError as error:
        raise ClusterFileError(f"{where} token_file: {error}") from error


def _trust(router: RouterEntry, folder: Path, where: str) -> TlsTrust | None:
    if router.tls_ca is None:
        return None
    trust = TlsTrust(
        ca=folder / router.tls_ca,
        certificate=None if router.tls_cert is None else folder / router.tls_cert,
        key=None if router.tls_key is None else folder / router.tls_key,
    )
    try:
        trust.context()
    except NetworkError as error:
        raise ClusterFileError(f"{where}: {error}") from error
    return trust
