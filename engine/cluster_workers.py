"""The workers of a cluster, as its file has them: where each is, and what they are shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from offramp.bundle import Bundle, Profile
from offramp.engine.cluster_serving import ServedCluster
from offramp.engine.planning.cluster_file import (
    MOST_FILE_BYTES,
    ClusterFile,
    ClusterFileError,
    RouterEntry,
    WorkersEntry,
    parse_cluster,
)
from offramp.engine.planning.cluster_times import make_cluster
from offramp.engine.planning_files import read_limited, read_profiles
from offramp.engine.remote.handshake import HandshakeError, read_token
from offramp.engine.remote.launching import LocalLauncher, WorkerLauncher
from offramp.engine.remote.process import WorkerCommand
from offramp.engine.remote.tcp import HostPort, NetworkError, TlsTrust, parse_address, tls_reason
from offramp.engine.remote.tcp_launcher import TcpLauncher


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """One worker: what it is, and where."""

    device_type: str
    """The name of its type among the cluster's ``[devices]``."""
    address: HostPort | None
    """Where it listens; ``None`` for a process that the router starts on its own host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterWorkers:
    """All workers of a cluster."""

    places: tuple[WorkerPlace, ...]
    file: ClusterFile
    """Devices, links and goal, which plans are made on."""
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    """Those that the file names."""
    token: bytes = field(repr=False, default=b"")
    """The secret that workers on other hosts have too."""
    tls: TlsTrust | None = None
    """``None`` reaches those in the clear."""

    @property
    def local(self) -> int:
        """How many of them run on the router's host."""
        return sum(place.address is None for place in self.places)

    def launchers(self, command: WorkerCommand) -> list[WorkerLauncher]:
        """Give what starts each of them; ``command`` starts those on this host. NetworkError."""
        return [
            LocalLauncher(command, device_type=place.device_type)
            if place.address is None
            else TcpLauncher(place.address, self.token, self.tls, place.device_type)
            for place in self.places
        ]

    def planned_for(self, bundle: Bundle, max_batch_size: int) -> ServedCluster:
        """Give what a bundle's plans are made on; ClusterFileError if a profile is of another.

        A device that a profile was measured on is timed by that, others by the bundle's own.
        """
        own = bundle.profile()
        cluster = make_cluster(self.file, own, self.profiles, max_batch_size)
        sizes = [size for size in own.batch_sizes if size <= max_batch_size]
        goal = self.file.goal.goal(sizes or [max_batch_size], wrapper=False)
        return ServedCluster(cluster=cluster, goal=goal)


def read_cluster_workers(path: Path) -> ClusterWorkers:
    """Read the workers of a cluster file, and the files that it names.

    PlanError says in a line what is wrong.
    """
    cluster = parse_cluster(read_limited(path, MOST_FILE_BYTES), str(path))
    profiles = read_profiles(cluster, path.parent)
    if not cluster.workers:
        raise ClusterFileError(
            f"{path} [[workers]]: there is none, expected one at least to serve on, for instance "
            f'device = "{cluster.devices[0].name}" and address = "10.0.0.2:7070"'
        )
    places = tuple(
        place
        for number, entry in enumerate(cluster.workers, 1)
        for place in _places(entry, f"{path} [[workers]] {number}")
    )
    addresses = [place.address for place in places if place.address is not None]
    if not addresses:
        return ClusterWorkers(places=places, file=cluster, profiles=profiles)
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
    return ClusterWorkers(places=places, file=cluster, profiles=profiles, token=token, tls=tls)


def _places(entry: WorkersEntry, where: str) -> list[WorkerPlace]:
    try:
        address = None if entry.address is None else parse_address(entry.address)
    except NetworkError as error:
        raise ClusterFileError(f"{where} address: {error}") from error
    return [WorkerPlace(device_type=entry.device, address=address)] * entry.count


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
