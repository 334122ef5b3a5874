"""The workers of a cluster, as its file has them: where each is, and what they are shown."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from offramp.engine.planning.cluster_file import (
    MOST_FILE_BYTES,
    ClusterFileError,
    RouterEntry,
    WorkersEntry,
    parse_cluster,
)
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


def read_cluster_workers(path: Path) -> ClusterWorkers:
    """Read the workers of a cluster file, and the files that it names.

    ClusterFileError says in a line what is wrong.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MOST_FILE_BYTES + 1)
    except OSError as error:
        raise ClusterFileError(f"{path}: cannot be read: {tls_reason(error)}") from error
    cluster = parse_cluster(content, str(path))
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
        return ClusterWorkers(places=places)
    where = f"{path} [router]"
    tls = _trust(cluster.router, path.parent, where)
    for address in addresses:
        if tls is None and not (address.is_loopback or cluster.router.insecure):
            raise ClusterFileError(
                f"{where} has no tls_ca, and {address} would be reached in the clear; give the "
                "authority of workers' certificates, or insecure = true where the network itself "
                "is trusted"
            )
    return ClusterWorkers(places=places, token=_token(cluster.router, path.parent, where), tls=tls)


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
