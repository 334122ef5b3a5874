"""The connection to a Ray cluster, one per process, and the cluster's resources."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

from offramp.bundle.optional_imports import optional_import
from offramp.cluster.remote.tcp import parse_address
from offramp.engine.common.errors import BackendError, EngineError
from offramp.engine.common.network import NetworkError, TlsIdentity

_log = logging.getLogger(__name__)

HOW_TO_INSTALL: Final = "install it on every node: pip install 'offramp[ray]'"
HOW_TO_START: Final = (
    "start Ray on this host (ray start --head, or ray start --address=HEAD:6379 to join a cluster)"
)
REACH_LIMIT_S: Final = 5.0
"""Time limit, in seconds, to connect to the head's port; shows whether the host is reachable."""
CONNECT_LIMIT_S: Final = 60.0
"""Time limit, in seconds, to connect to Ray."""
_connecting = threading.Lock()


def import_ray() -> Any:
    """Return the ``ray`` module, without checking its types; BackendError if not installed."""
    with optional_import("ray", install=HOW_TO_INSTALL, raises=BackendError):
        import ray  # noqa: PLC0415 - optional, and slow to import
    return ray


def connect(address: str | None = None) -> Any:
    """Connect this process to a running Ray cluster, and return the ``ray`` module.

    If the process is connected already, as in an actor of Ray Serve, that connection is used. No
    cluster is started: it would contain only this server and end with it.

    Args:
        address: HOST:PORT of the head; ``None`` uses ``RAY_ADDRESS``, or the cluster on this host.

    Raises:
        BackendError: Ray is not installed, or no cluster can be reached.
    """
    with _connecting:
        return _connect(import_ray(), address)


def _connect(ray: Any, address: str | None) -> Any:
    if ray.is_initialized():
        return ray
    if address is not None and "://" in address:
        raise BackendError(
            f"{address!r:.80} is an address of Ray's client, expected HOST:PORT of the head: the "
            f"server must run on a node of the cluster; {HOW_TO_START}"
        )
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    where = "on this host" if address == "auto" else f"at {address!r:.80}"
    try:
        if address != "auto":  # Ray itself would try for minutes
            socket.create_connection(parse_address(address), REACH_LIMIT_S).close()
        _in_thread(_init, ray, address)
    except (ConnectionError, EngineError, RuntimeError, ValueError, OSError) as error:
        raise BackendError(
            f"no Ray cluster can be reached {where}: {_first_line(error)}; {HOW_TO_START}"
        ) from error
    _log.info("connected to the Ray cluster at %s", ray.get_runtime_context().gcs_address)
    return ray


def _init(ray: Any, address: str) -> None:
    logger = logging.getLogger("ray")
    before = logger.level
    logger.setLevel(logging.ERROR)  # hides a warning that Ray does not handle SIGTERM, as intended
    try:
        ray.init(address=address, namespace="offramp", log_to_driver=False, configure_logging=False)
    finally:
        logger.setLevel(before)


def _in_thread(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function on a thread, with a time limit; on the main thread Ray would handle SIGTERM.

    TimeoutError at the limit; the thread keeps running, because Ray waits forever for a lost
    cluster.
    """
    done: Future[None] = Future()

    def call() -> None:
        try:
            function(*arguments)
            done.set_result(None)
        except BaseException as error:  # passed to the caller
            done.set_exception(error)

    threading.Thread(target=call, name="connect to Ray", daemon=True).start()
    try:
        done.result(CONNECT_LIMIT_S)
    except TimeoutError as error:
        raise TimeoutError(f"no answer within {CONNECT_LIMIT_S:g} s") from error


def free_cpus(ray: Any) -> int:
    """Return the number of whole CPUs that nothing in the cluster has requested."""
    return int(ray.available_resources().get("CPU", 0.0))


def tls_files() -> TlsIdentity | None:
    """Return the TLS files that Ray uses on this node; ``None`` if Ray does not encrypt.

    Workers and their router use the same files, because both ends must present a certificate.
    """
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    names = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
    paths = [os.environ.get(name, "") for name in names]
    if missing := [name for name, path in zip(names, paths, strict=True) if not path]:
        raise NetworkError(f"RAY_USE_TLS is set, but {missing[0]} is not; set it as well")
    certificate, key, ca = map(Path, paths)
    return TlsIdentity(certificate=certificate, key=key, ca=ca)


def connected_ray() -> Any:
    """Return the ``ray`` module if this process is connected to a cluster, else ``None``."""
    ray = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None


def node_address() -> str:
    """Return the address of this node in its cluster."""
    found: str = import_ray().util.get_node_ip_address()
    return found


def describe_resources(resources: Mapping[str, float]) -> str:
    """Describe resources in words, for instance ``1 CPU and 1 gpu``."""
    parts = [f"{amount:g} {name}" for name, amount in sorted(resources.items()) if amount]
    return " and ".join(parts) or "nothing"


def _first_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
