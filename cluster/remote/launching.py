"""Protocols of launchers, which start workers, and of running workers, for the router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from offramp.cluster.remote.process import WorkerCommand, WorkerProcess
from offramp.cluster.remote.slot_tensors import SlotLink
from offramp.cluster.remote.worker_messages import Hello, Message
from offramp.engine.answers.criteria import criterion_modules
from offramp.engine.common.errors import WorkerLostError


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRuntime:
    """Backend of a worker, and its GPU."""

    backend: str = ""
    """One of :data:`.GPU_BACKENDS`; empty for the server's backend of workers, on the CPU."""
    device: str = ""
    """Device on the worker's host, for instance ``cuda:1``; empty for the CPU."""

    def describe(self) -> str:
        """Return a suffix for the description of a worker: ``, tensorrt on cuda:1``."""
        return f", {self.backend} on {self.device}" if self.device else ""


ON_THE_CPU: Final = WorkerRuntime()


class WorkerHandle(Protocol):
    """One running worker, as the router sees it; any thread may call any method."""

    stages: set[int]
    """Numbers of the stages that the worker has loaded; the router updates them."""
    lost: bool
    """``True`` if the router has given up the worker."""

    @property
    def name(self) -> str:
        """Name of the worker in messages, for instance ``worker 4711``."""

    @property
    def pid(self) -> int:
        """Process id, on the worker's host."""

    @property
    def alive(self) -> bool:
        """``True`` if the worker can take orders, as far as is known."""

    def cpu_s(self) -> float:
        """Return the CPU seconds that the worker has used; 0 if unknown."""

    def order(self, message: Message, body: bytes = b"") -> None:
        """Send an order and wait until it is done; BackendError or WorkerLostError if it fails."""

    def open_slot(self) -> SlotLink:
        """Open a slot; errors as :meth:`order`."""

    def lose(self, reason: str) -> WorkerLostError:
        """Kill a worker that does not answer, and return the error to raise, with the ``reason``.

        An empty ``reason`` means that a connection ended; the error then has the cause, if it is
        known.
        """

    def end(self) -> None:
        """End the worker immediately; it has nothing to clean up."""


class WorkerLauncher(Protocol):
    """Starts a worker, and its successors if the worker is lost."""

    @property
    def device_type(self) -> str:
        """Name of the worker's type in a cluster's ``[devices]``; empty without a cluster."""

    @property
    def runtime(self) -> WorkerRuntime:
        """Backend and GPU requested for the worker."""

    def describe(self) -> str:
        """Describe the location of the worker, for messages and the log."""

    def start(self, hello: Hello) -> WorkerHandle:
        """Start a worker with the options of ``hello``; BackendError of one line if that fails."""

    def close(self) -> None:
        """Release resources reserved for future workers; no more are started."""


class LocalLauncher:
    """Starts workers as processes on this host."""

    def __init__(
        self,
        command: WorkerCommand | None = None,
        *,
        device_type: str = "",
        runtime: WorkerRuntime = ON_THE_CPU,
    ) -> None:
        self._command = command or WorkerCommand()
        self._device_type = device_type
        self.runtime = runtime

    @property
    def device_type(self) -> str:
        """Name of the worker's type in a cluster's ``[devices]``; empty without a cluster."""
        return self._device_type

    def describe(self) -> str:
        """Describe the location of the worker, which is this host."""
        return f"a process on this host{self.runtime.describe()}"

    def start(self, hello: Hello) -> WorkerProcess:
        """Start a process with the options of ``hello``; BackendError if that fails."""
        return WorkerProcess(hello, self._command)

    def close(self) -> None:
        """Do nothing: no resources are reserved."""


def worker_command() -> WorkerCommand:
    """Return a worker's command with this process's libraries of operators and criteria."""
    from offramp.engine.backends.custom_ops import libraries  # noqa: PLC0415 - slow to import

    words = [("--custom-ops", str(library.path.absolute())) for library in libraries()]
    words += [("--criterion-module", text) for text in criterion_modules()]
    return WorkerCommand(arguments=tuple(word for pair in words for word in pair))
