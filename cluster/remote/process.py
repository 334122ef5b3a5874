"""The router's side of a worker process: start, orders, and end."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Final

from offramp.cluster.remote.orders import Orders
from offramp.cluster.remote.slot_tensors import FIRST_MEMORY, SharedTensors, SlotLink
from offramp.cluster.remote.transport import Connection, SharedMemory
from offramp.cluster.remote.worker_messages import Hello, Message, OpenSlot, Refused
from offramp.engine.common.errors import BackendError, WorkerLostError
from offramp.engine.common.job_runner import environment_of_child

START_LIMIT_S: Final = 60.0
"""Time limit of a worker's start, in seconds; sufficient on a busy machine."""
ORDER_LIMIT_S: Final = 600.0
"""Time limit of an order, in seconds: a large stage may take minutes to load."""
_CPU_CLOCK: Final = 2
"""Number of the CPU clock (scheduling clock) in a Linux clock id, which names a process and a
clock."""
_END_S: Final = 5.0
"""Time limit, in seconds, of operations that usually take milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCommand:
    """Command that starts a worker process."""

    module: str = "offramp.cluster.remote.worker"
    arguments: tuple[str, ...] = ()
    """Arguments of the command line, after the file descriptor."""


class WorkerProcess:
    """One worker process; any thread may call any method.

    BackendError if the process cannot be started, or refuses the options of ``hello``.
    """

    def __init__(self, hello: Hello, command: WorkerCommand) -> None:
        connection, theirs = Connection.pair()
        self._orders = Orders(connection, self.lose)
        self._slots = itertools.count(1)
        self.stages: set[int] = set()
        """Numbers of the stages that the worker has loaded."""
        self.lost = False
        with theirs:
            try:
                self._process = _start(theirs.fileno(), command)
            except OSError as error:
                self._orders.close()
                raise BackendError(f"no worker process can be started: {error}") from error
        try:
            self._greet(hello)
        except BaseException:
            self.end()
            raise

    def _greet(self, hello: Hello) -> None:
        answer = self._orders.ask(hello, START_LIMIT_S)
        if isinstance(answer, Refused):
            raise BackendError(answer.reason)

    @property
    def name(self) -> str:
        """Name of the worker in messages, with its process id."""
        return f"worker {self.pid}"

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """``True`` if the worker can take orders, as far as is known."""
        return not self.lost and self._process.poll() is None

    def cpu_s(self) -> float:
        """Return the CPU seconds that the worker has used; 0 if the system does not report them."""
        try:
            return time.clock_gettime(((~self.pid) << 3) | _CPU_CLOCK)
        except (AttributeError, OSError):
            return 0.0

    def order(self, message: Message, body: bytes = b"") -> None:
        """Send an order and wait until it is done; BackendError or WorkerLostError if it fails."""
        self._orders.ask(message, ORDER_LIMIT_S, body)

    def open_slot(self) -> SlotLink:
        """Open a slot with shared memory; BackendError if no memory is available."""
        try:
            memory = SharedMemory.create(FIRST_MEMORY)
        except OSError as error:
            raise BackendError(f"memory cannot be shared with a worker: {error}") from error
        connection, theirs = Connection.pair()
        number = next(self._slots)
        try:
            with theirs:
                self._give_memory(number, memory, theirs.fileno())
        except BaseException:
            connection.close()
            raise
        finally:
            memory.close_fd()
        return SlotLink(connection, SharedTensors(memory, lambda m: self._give_memory(number, m)))

    def _give_memory(self, slot: int, memory: SharedMemory, *fds: int) -> None:
        """Make a slot use other memory; errors as :meth:`order`."""
        message = OpenSlot(slot=slot, size_bytes=memory.size_bytes)
        self._orders.ask(message, ORDER_LIMIT_S, fds=(memory.fd, *fds))
        memory.close_fd()

    def lose(self, reason: str) -> WorkerLostError:
        """Kill a worker that does not answer, and return the error to raise, with ``reason``."""
        self.lost = True
        with contextlib.suppress(OSError):
            self._process.kill()
        error = WorkerLostError(f"{self.name} was lost: {reason or self._fate()}")
        self._wait()
        return error

    def end(self) -> None:
        """End the worker immediately; it has nothing to clean up."""
        self.lost = True
        with contextlib.suppress(OSError):
            self._process.kill()
        self._orders.close()
        self._wait()

    def _fate(self) -> str:
        try:
            status = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return "its process closed the connection"
        if status < 0:
            with contextlib.suppress(ValueError):
                return f"its process was ended by {signal.Signals(-status).name}"
        return f"its process ended with exit status {status}"

    def _wait(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)


def _start(fd: int, command: WorkerCommand) -> subprocess.Popen[bytes]:
    if not sys.executable:
        raise OSError("the path of the Python interpreter is unknown")
    # -P: do not import modules of the working directory, unless this process may do so, too.
    line = [sys.executable, "-P", "-m", command.module, str(fd), *command.arguments]
    return subprocess.Popen(  # noqa: S603  (our own module and arguments)
        line,
        pass_fds=(fd,),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=environment_of_child(),
        # A new process group: Ctrl-C reaches the foreground group, but draining needs workers. Not
        # a new session: schedulers that share cores among sessions would give it half of the cores.
        process_group=0 if hasattr(os, "setpgid") else None,
    )
