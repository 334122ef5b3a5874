"""A Ray cluster on this host's loopback interface alone, for tests; nothing else can reach it."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

LOOPBACK: Final = {
    # Its name is of other systems, where Ray takes the loopback interface to spare people the
    # firewall's questions; on Linux it would replace 127.0.0.1 by the host's address.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A node that is gone is missed within moments.
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "2",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
SMALL: Final = {"object_store_memory": 80 * 2**20, "include_dashboard": False}


class RayNode:
    """One node."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def kill(self) -> None:
        """End what schedules there, without a word; its workers end when they notice."""
        (raylet,) = self._node.all_processes["raylet"]
        raylet.process.kill()
        raylet.process.wait()  # its workers look whether it is there, and a zombie is


class LocalRay:
    """Nodes of Ray on this host, each with a process that schedules, and its workers."""

    def __init__(self, folder: str) -> None:
        from ray.cluster_utils import Cluster

        head = {**SMALL, "num_cpus": 2, "temp_dir": folder}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address: str = self._cluster.address
        if not self.address.startswith("127.0.0.1:"):
            self.stop()
            raise AssertionError(f"{self.address} is open to others: ray was imported before")

    @property
    def head_pid(self) -> int:
        """The number of the process that workers on the first node are children of."""
        (raylet,) = self._cluster.head_node.all_processes["raylet"]
        pid: int = raylet.process.pid
        return pid

    @contextmanager
    def node(self, **resources: float) -> Iterator[RayNode]:
        """Another node, without CPUs, that has these resources."""
        node = self._cluster.add_node(**SMALL, num_cpus=0, resources=resources)
        try:
            yield RayNode(node)
        finally:
            self._cluster.remove_node(node, allow_graceful=False)

    def stop(self) -> None:
        """End all that was started here, and nothing else."""
        import ray

        ray.shutdown()
        self._cluster.shutdown()


@contextmanager
def local_ray() -> Iterator[LocalRay]:
    """A cluster of one node with two CPUs, to which this process is connected."""
    before = {name: os.environ.get(name) for name in LOOPBACK}
    os.environ.update(LOOPBACK)
    # Clusters of tests keep their address here, and do not make the folder as others do.
    Path(tempfile.gettempdir(), "ray").mkdir(exist_ok=True)
    folder = tempfile.mkdtemp(prefix="ray")  # short: sockets in it have names of at most 107 bytes
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cluster = LocalRay(folder)
            try:
                yield cluster
            finally:
                cluster.stop()
                gc.collect()  # what Ray left open is closed while nobody is warned of it
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
