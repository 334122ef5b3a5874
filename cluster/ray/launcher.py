"""Starts one worker as an actor of Ray where Ray has resources, and again whenever it is lost.

Each worker has its own placement group, which reserves the worker's resources. The group is kept
while the worker is replaced, so that no other job takes the resources; Ray moves the group when its
node is gone. While resources are lacking, the group waits, and an autoscaler sees that. Whenever
the worker's stream tries to start, the launcher checks whether Ray has placed the group. Rejected:
one group for all workers, which Ray places whole or not at all, and actors that wait for resources
themselves, which cannot be distinguished from actors whose process is starting.

Ray does not restart actors (``max_restarts=0``): a restarted worker would have none of its stages.
After the worker has returned its address, Ray is not needed any more; the socket reveals a lost
worker immediately.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from offramp.cluster.ray.actor import WorkerActor
from offramp.cluster.ray.ray_connection import connect, connected_ray, describe_resources, tls_files
from offramp.cluster.remote.launching import ON_THE_CPU
from offramp.cluster.remote.process import START_LIMIT_S
from offramp.cluster.remote.tcp import TlsTrust, parse_address
from offramp.cluster.remote.tcp_launcher import MOST_RESULT_BYTES, PING_S, TcpWorker, WorkerAddress
from offramp.cluster.remote.worker_messages import Hello
from offramp.engine.answers.criteria import criterion_modules
from offramp.engine.common.errors import BackendError, WorkerLostError
from offramp.engine.common.network import NetworkError

_log = logging.getLogger(__name__)

PLACE_LIMIT_S: Final = 2.0
"""Seconds that the first check of a placement may take: Ray needs time even with free resources."""
RESERVE_LIMIT_S: Final = 60.0
"""Longest time, in seconds, that a server waits until Ray has placed its first workers."""
_REMEDY: Final = "the ports of a node must be open to the other nodes of its cluster"
_LOOK_S: Final = 0.05
"""Seconds between checks of a worker's placement and address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorNeeds:
    """Start arguments of a cluster's actors: plain strings, which Ray sends to the node."""

    bundles: tuple[str, ...]
    """Absolute paths of bundles; they must be the same on every node."""
    custom_ops: tuple[str, ...] = ()
    criterion_modules: tuple[str, ...] = ()
    actor: type[WorkerActor] = WorkerActor
    """Class of the actor; every node must have its module."""


def actor_needs(bundles: Sequence[Path]) -> ActorNeeds:
    """Return start arguments of actors for bundles, with this process's operators and criteria."""
    from offramp.engine.backends.custom_ops import libraries  # noqa: PLC0415 - slow to import

    modules = []
    for text in criterion_modules():
        file, _, name = text.rpartition(":")
        modules.append(f"{Path(file).absolute()}:{name}")
    return ActorNeeds(
        bundles=tuple(str(path.absolute()) for path in bundles),
        custom_ops=tuple(str(library.path.absolute()) for library in libraries()),
        criterion_modules=tuple(modules),
    )


def reserve(launchers: Sequence[RayLauncher], least: int) -> None:
    """Request the placement of all workers; BackendError if fewer than ``least`` are placed."""
    try:
        for launcher in launchers:
            launcher.reserve()
        placed = _await_places(launchers, least)
    except BaseException:
        for launcher in launchers:
            launcher.close()
        raise
    _log.info("Ray has placed %d of %d workers", placed, len(launchers))


def _await_places(launchers: Sequence[RayLauncher], least: int) -> int:
    over = threading.Event()
    until_s = time.monotonic() + RESERVE_LIMIT_S
    while (placed := sum(launcher.placed() for launcher in launchers)) < least:
        if time.monotonic() >= until_s:
            raise BackendError(
                f"Ray has placed {placed} of {len(launchers)} workers within "
                f"{RESERVE_LIMIT_S:g} s, expected {least} at least; add nodes, end jobs that hold "
                "resources (ray status), or request fewer workers or resources"
            )
        over.wait(_LOOK_S)
    return placed


class RayWorker(TcpWorker):
    """The router's side of a worker that is an actor of Ray."""

    def __init__(self, hello: Hello, address: WorkerAddress, actor: Any, *, ping_s: float) -> None:
        self._actor = actor
        self._ended = False
        super().__init__(hello, address, ping_s=ping_s)

    @property
    def name(self) -> str:
        """Name of the worker in messages, with its address."""
        return f"Ray worker {self._address.address}"

    def _let_go(self) -> None:
        super()._let_go()
        if not self._ended:
            self._ended = True
            kill(self._actor)


class RayLauncher:
    """Reserves resources of Ray for one worker, and starts the worker there, again after each loss.

    ``resources`` are what Ray reserves for the worker, by Ray's names (``CPU``, ``GPU``, or custom
    names).
    """

    runtime = ON_THE_CPU

    def __init__(
        self,
        resources: Mapping[str, float],
        needs: ActorNeeds,
        *,
        device_type: str = "",
        address: str | None = None,
        ping_s: float = PING_S,
        most_result_bytes: int = MOST_RESULT_BYTES,
    ) -> None:
        self._most_result_bytes = most_result_bytes
        self._resources = dict(resources)
        self._needs = needs
        self._device_type = device_type
        self._ray_address = address
        self._ping_s = ping_s
        self._lock = threading.Lock()
        """Lock that guards the worker's placement group."""
        self._group: Any = None
        self._patient_until_s = 0.0

    @property
    def device_type(self) -> str:
        """Name of the worker's device type in the cluster file; empty without a cluster file."""
        return self._device_type

    def describe(self) -> str:
        """Describe the worker's location, for messages and the log."""
        return f"an actor of Ray with {describe_resources(self._resources)}"

    def reserve(self) -> None:
        """Request the worker's placement group, without waiting; BackendError without Ray."""
        with self._lock:
            if self._group is None:
                ray = connect(self._ray_address)
                self._group = ray.util.placement_group([self._resources])
                self._patient_until_s = time.monotonic() + PLACE_LIMIT_S

    def placed(self) -> bool:
        """Return whether Ray has placed the worker's group by now."""
        with self._lock:
            if self._group is None:
                return False
            table = connect(self._ray_address).util.placement_group_table(self._group)
            return bool(table.get("state") == "CREATED")

    def start(self, hello: Hello) -> RayWorker:
        """Start an actor with the options of ``hello``.

        WorkerLostError if resources are lacking, or the node lacks a file that another node may
        have. BackendError if the actor refuses the options.
        """
        ray = connect(self._ray_address)
        try:
            self.reserve()
            self._await_place()
            actor, token = self._make_actor(ray)
            try:
                address = parse_address(self._address_of(ray, actor))
                where = WorkerAddress(
                    address=address,
                    token=token.encode(),
                    context=tls_context(),
                    remedy=_REMEDY,
                    most_result_bytes=self._most_result_bytes,
                )
                return RayWorker(hello, where, actor, ping_s=self._ping_s)
            except BaseException:
                kill(actor)
                raise
        except ray.exceptions.RayError as error:
            self.close()  # the node may be the cause: the next start requests another group
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise WorkerLostError(f"Ray cannot start a worker: {lines[0]:.300}") from error

    def close(self) -> None:
        """Release the worker's placement group and its resources."""
        with self._lock:
            group, self._group = self._group, None
        ray = connected_ray()
        if group is not None and ray is not None:
            with contextlib.suppress(Exception):  # the cluster is gone, so the group is released
                ray.util.remove_placement_group(group)

    def _await_place(self) -> None:
        """Wait briefly until a requested group is placed; WorkerLostError if it is not."""
        over = threading.Event()
        while not self.placed():
            if time.monotonic() >= self._patient_until_s:
                raise WorkerLostError(
                    "Ray has too few free resources for a worker with "
                    f"{describe_resources(self._resources)}; it starts once they are free: add "
                    "nodes, or end jobs that hold them (ray status)"
                )
            over.wait(_LOOK_S)

    def _make_actor(self, ray: Any) -> tuple[Any, str]:
        """Create an actor, which may still be starting; return it with the token for its router."""
        token, needs = secrets.token_hex(32), self._needs
        scheduling = ray.util.scheduling_strategies
        rest = {k: v for k, v in self._resources.items() if k not in ("CPU", "GPU", "memory")}
        with self._lock:
            if self._group is None:
                raise WorkerLostError("the worker's resources on Ray were released")
            remote = ray.remote(needs.actor).options(
                num_cpus=self._resources.get("CPU", 0.0),
                num_gpus=self._resources.get("GPU", 0.0),
                memory=self._resources.get("memory"),
                resources=rest,
                max_restarts=0,
                scheduling_strategy=scheduling.PlacementGroupSchedulingStrategy(self._group, 0),
            )
        actor = remote.remote(
            token,
            list(needs.bundles),
            max(1, int(self._resources.get("CPU", 1.0))),
            list(needs.custom_ops),
            list(needs.criterion_modules),
        )
        return actor, token

    def _address_of(self, ray: Any, actor: Any) -> str:
        """Return an actor's address once it listens; WorkerLostError if its group is lost."""
        asked = actor.listen.remote()
        until_s = time.monotonic() + START_LIMIT_S
        while not ray.wait([asked], timeout=1.0)[0]:
            if not self.placed():
                raise WorkerLostError("the node that a worker was to start on is gone")
            if time.monotonic() >= until_s:
                raise WorkerLostError(f"a worker did not start within {START_LIMIT_S:g} s")
        address, problem = ray.get(asked)
        if problem:
            raise WorkerLostError(
                f"a worker cannot serve {problem}; every node needs the bundles and files of this "
                "server, at the same paths"
            )
        found: str = address
        return found


def tls_context() -> ssl.SSLContext | None:
    """Return the TLS context of connections to actors, or ``None``; BackendError if unusable."""
    try:
        files = tls_files()
        if files is None or files.ca is None:
            return None
        return TlsTrust(ca=files.ca, certificate=files.certificate, key=files.key).context()
    except NetworkError as error:
        raise BackendError(f"a worker of Ray cannot be reached by TLS: {error}") from error


def kill(actor: Any) -> None:
    """Make Ray end an actor, without waiting for it; an ended actor stays ended."""
    ray = connected_ray()
    if ray is not None:
        # On a separate thread: Ray may answer slowly, or be gone together with the actor.
        threading.Thread(target=_kill, args=(ray, actor), name="end actor", daemon=True).start()


def _kill(ray: Any, actor: Any) -> None:
    with contextlib.suppress(Exception):
        ray.kill(actor)
