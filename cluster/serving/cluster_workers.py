"""The workers of a cluster, as its file has them: where each is, and what they are shown."""

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
"""What stands for a cluster file where Ray alone says what there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """One worker: what it is, and where."""

    device_type: str
    """The name of its type among the cluster's ``[devices]``."""
    address: HostPort | None
    """Where it listens; ``None`` for one that is started for the router."""
    resources: Mapping[str, float] | None = None
    """What Ray sets aside for it; ``None`` for a process on the router's own host."""
    runtime: WorkerRuntime = ON_THE_CPU
    """What it runs stages with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterWorkers(WorkerDevices):
    """All workers of a cluster."""

    places: tuple[WorkerPlace, ...]
    file: ClusterFile | None
    """Devices, links and goal, which plans are made on; without, no model is split."""
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    """Those that the file names."""
    plan: ClusterPlan | None = None
    """That is to be served as it stands."""
    token: bytes = field(repr=False, default=b"")
    """The secret that workers on other hosts have too."""
    tls: TlsTrust | None = None
    """``None`` reaches those in the clear."""
    ray: RayEntry = field(default_factory=RayEntry)
    """The cluster of the workers that Ray starts."""

    @property
    def count(self) -> int:
        """How many streams they run: one for each batch that a worker has at a time."""
        return len(self.places) * self.batches_per_worker

    @property
    def batches_per_worker(self) -> int:
        """See :class:`.RouterEntry`."""
        return 1 if self.file is None else self.file.router.batches_per_worker

    @property
    def elsewhere(self) -> bool:
        """Whether some are on other hosts, or may be."""
        return self.local < len(self.places)

    @property
    def on_gpus(self) -> bool:
        """Whether any of them is on a GPU."""
        return any(place.runtime.device for place in self.places)

    @property
    def local(self) -> int:
        """How many of them are processes on the router's host."""
        return sum(place.address is None and place.resources is None for place in self.places)

    def launchers(
        self, command: WorkerCommand, bundles: Sequence[Path] = ()
    ) -> list[WorkerLauncher]:
        """Give what starts each of them; ``command`` starts those on this host.

        Those of Ray, which serve ``bundles``, have asked for their places then, and the least
        number that is asked for has them. NetworkError, BackendError.
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
        """Most that is received of what a run gave, of workers that a network is between."""
        mib = None if self.file is None else self.file.router.most_result_mib
        return MOST_RESULT_BYTES if mib is None else mib << 20

    def planned_for(self, bundle: Bundle, max_batch_size: int) -> ServedCluster | None:
        """Give what a bundle's plans are made on; ClusterFileError if a profile is of another.

        A device that a profile was measured on is timed by that, others by the bundle's own.
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
    """Read the workers of a cluster file, the files that it names, and the plan to serve by.

    PlanError says in a line what is wrong.
    """
    cluster = parse_cluster(read_planning(path, MOST_FILE_BYTES), str(path))
    profiles = read_profiles(cluster, path.parent)
    served = None if plan is None else read_plan(plan)
    ray = cluster.router.ray
    entries = cluster.workers or _all_devices(cluster) if ray is not None else cluster.workers
    if not entries:
        raise ClusterFileError(
            f"{path} [[workers]]: there is none, expected one at least to serve on, for instance "
            f'device = "{cluster.devices[0].name}" and address = "10.0.0.2:7070"'
        )
    places = tuple(
        place
        for number, entry in enumerate(entries, 1)
        for place in _places(entry, cluster, f"{path} [[workers]] {number}")
    )
    if ray is not None and (ray.least or 0) > len(places):
        raise ClusterFileError(
            f"{path} [router] least = {ray.least}, and there are {len(places)} workers at most; "
            "lower it, or add workers"
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
                f"{where} has no tls_ca, and {address} would be reached in the clear; give the "
                "authority of workers' certificates, or insecure = true where the network itself "
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
    """Give workers that Ray starts where it likes, each with a CPU, and each with all stages.

    Args:
        address: HOST:PORT of the cluster's head; ``None`` is the cluster that this host is of.
        count: How many at most, one at least; ``None`` is one for each CPU that is free now.

    Raises:
        BackendError: No cluster is there, it has no CPU free, or there are too many workers.
    """
    if count is not None and not 0 <= count <= MOST_WORKERS:
        raise BackendError(f"workers is {count}, expected at most {MOST_WORKERS}, at least 0")
    if not count:
        count = free_cpus(connect(address))
    if not count:
        raise BackendError(
            "the Ray cluster has no CPU free; end what holds them (ray status), add nodes, or say "
            "how many workers there are to be (--workers N), which then wait for room"
        )
    place = WorkerPlace(device_type="cpu", address=None, resources=ONE_CPU)
    ray = RayEntry(address=address, least=1)
    return ClusterWorkers(places=(place,) * count, file=None, ray=ray)


def _all_devices(cluster: ClusterFile) -> tuple[WorkersEntry, ...]:
    """Give a worker of each device that there is."""
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
            f"{where} backend = {entry.backend!r}, and Ray starts that worker, on the CPU; give "
            "the address of an eeworker, or leave one of launch and backend out"
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
