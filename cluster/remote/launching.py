"""How workers come to be: what starts one, and what the router then has of it."""

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
    """What a worker runs stages with, and on which GPU of its host."""

    backend: str = ""
    """One of :data:`.GPU_BACKENDS`; empty for what the server runs workers with, on the CPU."""
    device: str = ""
    """For instance ``cuda:1``; empty for the CPU."""

    def describe(self) -> str:
        """Describe it, to be put after where the worker is: ``, tensorrt on cuda:1``."""
        return f", {self.backend} on {self.device}" if self.device else ""


ON_THE_CPU: Final = WorkerRuntime()


class WorkerHandle(Protocol):
    """One worker as the router has it; any thread may call any method."""

    stages: set[int]
    """Numbers of the stages that it has loaded, kept by the router."""
    lost: bool
    """Whether it was given up."""

    @property
    def name(self) -> str:
        """What messages call it, for instance ``worker 4711``."""

    @property
    def pid(self) -> int:
        """The number of its process, on the host that it runs on."""

    @property
    def alive(self) -> bool:
        """Whether it can be asked, as far as is known."""

    def cpu_s(self) -> float:
        """Seconds of processor time that it has had; 0 where that cannot be known."""

    def order(self, message: Message, body: bytes = b"") -> None:
        """Have an order carried out; BackendError if it cannot be, WorkerLostError."""

    def open_slot(self) -> SlotLink:
        """Open a slot; errors as of :meth:`order`."""

    def lose(self, reason: str) -> WorkerLostError:
        """Give it up as it does not answer: end it, and give the error that says so.

        An empty ``reason`` is for a connection that ended: the error says why, if that is known.
        """

    def end(self) -> None:
        """Be done with it at once; it has nothing to put in order."""


class WorkerLauncher(Protocol):
    """Starts the worker of one seat, and its successors should it be lost."""

    @property
    def device_type(self) -> str:
        """The name of its device among a cluster's ``[devices]``; empty if there is no cluster."""

    @property
    def runtime(self) -> WorkerRuntime:
        """What its worker is asked to run stages with."""

    def describe(self) -> str:
        """Say where its worker is, for messages and the log."""

    def start(self, hello: Hello) -> WorkerHandle:
        """Start a worker that is what ``hello`` says; BackendError in a line if it cannot be."""

    def close(self) -> None:
        """Give back what is held for workers to come; there are no more."""


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
        """The name of its device among a cluster's ``[devices]``; empty if there is no cluster."""
        return self._device_type

    def describe(self) -> str:
        """Say where its worker is."""
        return f"a process on this host{self.runtime.describe()}"

    def start(self, hello: Hello) -> WorkerProcess:
        """Start a process that is what ``hello`` says; BackendError if it cannot be."""
        return WorkerProcess(hello, self._command)

    def close(self) -> None:
        """Hold nothing."""


def worker_command() -> WorkerCommand:
    """Give the command of a worker with this process's libraries of operators and criteria."""
    from offramp.engine.backends.custom_ops import libraries  # noqa: PLC0415 - heavy

    words = [("--custom-ops", str(library.path.absolute())) for library in libraries()]
    words += [("--criterion-module", text) for text in criterion_modules()]
    return WorkerCommand(arguments=tuple(word for pair in words for word in pair))
