"""Starts one worker as an actor of Ray, where Ray has room for it, and its successors.

Each worker has a placement group of its own, of one bundle: what it needs. It stays while the
worker is replaced, so that nobody takes the place meanwhile, and is placed elsewhere by Ray when
its node is gone. While there is no room it waits, and an autoscaler sees that; it is looked at
whenever the worker's stream tries to start. Rejected: one group for all workers, which Ray places
whole or not at all, and actors that wait for room themselves, which cannot be told from those whose
process starts.

Ray restarts nothing by itself (``max_restarts=0``): a worker that comes back would have none of its
stages. Once the worker has told its address, Ray is not asked any more; that it is lost shows at
the socket, at once.
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
"""How long the first look at a place may take: Ray needs a moment even where there is room."""
RESERVE_LIMIT_S: Final = 60.0
"""How long a server waits for its first workers to have their places."""
_REMEDY: Final = "the ports of a node have to be open to the others of its cluster"
_LOOK_S: Final = 0.05
"""Between looks at whether a worker has its place, and its address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorNeeds:
    """What the actors of a cluster are started with: plain strings, which Ray carries there."""

    bundles: tuple[str, ...]
    """Absolute paths, the same on every node."""
    custom_ops: tuple[str, ...] = ()
    criterion_modules: tuple[str, ...] = ()
    actor: type[WorkerActor] = WorkerActor
    """Named by its module, which every node has to have."""


def actor_needs(bundles: Sequence[Path]) -> ActorNeeds:
    """Give what actors need to serve bundles, with this process's operators and criteria."""
    from offramp.engine.backends.custom_ops import libraries  # noqa: PLC0415 - heavy

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
    """Ask Ray for the places of all workers, and wait until ``least`` have theirs; BackendError."""
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
                f"{RESERVE_LIMIT_S:g} s, expected {least} at least; add nodes, end what holds "
                "them (ray status), or ask for fewer workers or resources"
            )
        over.wait(_LOOK_S)
    return placed


class RayWorker(TcpWorker):
    """One worker that is an actor, as the router has it."""

    def __init__(self, hello: Hello, address: WorkerAddress, actor: Any, *, ping_s: float) -> None:
        self._actor = actor
        self._ended = False
        super().__init__(hello, address, ping_s=ping_s)

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"Ray worker {self._address.address}"

    def _let_go(self) -> None:
        super()._let_go()
        if not self._ended:
            self._ended = True
            kill(self._actor)


class RayLauncher:
    """Has Ray place one worker, starts it there, and its successors.

    ``resources`` is what Ray sets aside for it, by Ray's names (``CPU``, ``GPU``, or your own).
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
        """Of the group."""
        self._group: Any = None
        self._patient_until_s = 0.0

    @property
    def device_type(self) -> str:
        """The name of its device among a cluster's ``[devices]``; empty if there is no cluster."""
        return self._device_type

    def describe(self) -> str:
        """Say where its worker is."""
        return f"an actor of Ray with {describe_resources(self._resources)}"

    def reserve(self) -> None:
        """Ask Ray for the place of the worker, without waiting for it; BackendError."""
        with self._lock:
            if self._group is None:
                ray = connect(self._ray_address)
                self._group = ray.util.placement_group([self._resources])
                self._patient_until_s = time.monotonic() + PLACE_LIMIT_S

    def placed(self) -> bool:
        """Say whether Ray has a place for the worker now."""
        with self._lock:
            if self._group is None:
                return False
            table = connect(self._ray_address).util.placement_group_table(self._group)
            return bool(table.get("state") == "CREATED")

    def start(self, hello: Hello) -> RayWorker:
        """Start an actor that is what ``hello`` says.

        WorkerLostError while there is no room for it, or its node lacks what it needs: another
        node may not. BackendError if it refuses to be that.
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
            self.close()  # whatever is wrong with the place: the next start asks for another
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise WorkerLostError(f"Ray cannot start a worker: {lines[0]:.300}") from error

    def close(self) -> None:
        """Give the place back."""
        with self._lock:
            group, self._group = self._group, None
        ray = connected_ray()
        if group is not None and ray is not None:
            with contextlib.suppress(Exception):  # the cluster is gone, and the place with it
                ray.util.remove_placement_group(group)

    def _await_place(self) -> None:
        """Look whether there is room, for a moment after it was asked for; WorkerLostError."""
        over = threading.Event()
        while not self.placed():
            if time.monotonic() >= self._patient_until_s:
                raise WorkerLostError(
                    f"Ray has no room for a worker with {describe_resources(self._resources)} now; "
                    "it starts when there is: add nodes, or end what holds them (ray status)"
                )
            over.wait(_LOOK_S)

    def _make_actor(self, ray: Any) -> tuple[Any, str]:
        """Give an actor that will be, and the token that it asks its router for."""
        token, needs = secrets.token_hex(32), self._needs
        scheduling = ray.util.scheduling_strategies
        rest = {k: v for k, v in self._resources.items() if k not in ("CPU", "GPU", "memory")}
        with self._lock:
            if self._group is None:
                raise WorkerLostError("the worker's place on Ray was given back")
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
        """Wait for the actor to listen, as long as it keeps its place."""
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
    """Give what connections to actors are encrypted with; BackendError."""
    try:
        files = tls_files()
        if files is None or files.ca is None:
            return None
        return TlsTrust(ca=files.ca, certificate=files.certificate, key=files.key).context()
    except NetworkError as error:
        raise BackendError(f"a worker of Ray cannot be reached by TLS: {error}") from error


def kill(actor: Any) -> None:
    """Have Ray end an actor, without waiting for it; one that has ended is ended."""
    ray = connected_ray()
    if ray is not None:
        # Beside whoever gives it up: Ray may be slow to answer, or gone, and the actor with it.
        threading.Thread(target=_kill, args=(ray, actor), name="end actor", daemon=True).start()


def _kill(ray: Any, actor: Any) -> None:
    with contextlib.suppress(Exception):
        ray.kill(actor)
