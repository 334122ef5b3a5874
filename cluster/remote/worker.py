"""The process that runs stages for a router: ``python -P -m offramp.cluster.remote.worker FD``.

``FD`` is a socket that the process inherits; its first message states the backend. That connection
is for orders: to load stages, and to serve slots. Each slot has its own connection, shared memory
and thread, so that a stage can be loaded while others run.

The process ends, whatever its state, when this connection ends, and leaves no resources; so it
cannot outlive its router. Rejected: ``PR_SET_PDEATHSIG``, which ends a process with the thread that
started it; this thread may end before the router does. The router handles Ctrl-C and SIGTERM,
because draining needs workers.

The process imports no runtime before the hello message.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, TypeAlias

from offramp import __version__
from offramp.cluster.remote.served_slot import Reached, ServedSlot
from offramp.cluster.remote.stage_orders import BundlesByPath, FindBundle, make_described
from offramp.cluster.remote.transport import Connection, ConnectionLostError, Frame, SharedMemory
from offramp.cluster.remote.worker_messages import (
    Failed,
    FrameError,
    Hello,
    Message,
    OpenSlot,
    Ping,
    Prepare,
    Ready,
    Refused,
    Release,
    Shutdown,
    decode,
    encode,
)
from offramp.engine.answers.criteria import CriterionError, load_criterion
from offramp.engine.common.errors import EngineError
from offramp.engine.stages.backend_protocol import Backend, Stage
from offramp.engine.tensorrt.probe import parse_devices

_log = logging.getLogger(__name__)

MakeBackend: TypeAlias = Callable[[Hello], Backend]
"""Function that makes the worker's backend; BackendError if the backend cannot run here."""


class Worker:
    """Serves one router until its connection ends.

    ``find`` returns the bundle of a stage. Stages without a bundle run only with ``any_graph``.
    """

    def __init__(
        self,
        orders: Connection,
        make: MakeBackend,
        reached: Reached = lambda _point: None,
        *,
        find: FindBundle | None = None,
        any_graph: bool = True,
    ) -> None:
        self._orders = orders
        self._make = make
        self._reached = reached
        self._find = find or BundlesByPath()
        self._any_graph = any_graph
        self._backend: Backend | None = None
        self._stages: dict[int, Stage] = {}
        self._slots: dict[int, ServedSlot] = {}
        self._device = threading.Lock()
        """Lock that is held while a stage runs; other slots receive and send in the meantime (E3
        3.2.2)."""

    def serve(self, silence_s: float | None = None) -> None:
        """Execute the router's orders until the router is gone or orders the worker to end.

        With ``silence_s``, the connection is a network: it carries no file descriptors, and
        TransportTimeoutError is raised if the router is silent for this time.
        """
        with contextlib.suppress(ConnectionLostError):
            while True:
                frame = self._orders.receive(silence_s, fds=silence_s is None)
                try:
                    message = decode(frame.header)
                    if isinstance(message, Shutdown):
                        return
                    answer = self._execute(message, frame)
                except FrameError as error:
                    _log.error(
                        "the router sent a malformed message, its connection ends: %s", error
                    )
                    return
                self._orders.send(encode(answer))

    def begin(self, hello: Hello) -> Message:
        """Start the backend that a router requests, or return the refusal."""
        if hello.version != __version__:
            return Refused(
                reason=f"the worker has Offramp {__version__}, the server {hello.version}; "
                "install the same on both"
            )
        try:
            self._backend = self._make(hello)
        except EngineError as error:
            return Refused(reason=str(error))
        return Ready(pid=os.getpid())

    def open_slot(self, number: int, connection: Connection, memory: SharedMemory | None) -> None:
        """Open a slot that :meth:`serve_slot` serves. Raise BackendError or FrameError."""
        if number in self._slots:
            raise FrameError(f"slot {number} is open already")
        slot = self._ready_backend().open_slot()
        self._slots[number] = ServedSlot(
            connection, slot, memory, self._stages, self._reached, device=self._device
        )

    def serve_slot(self, number: int) -> None:
        """Run the ordered stages of a slot until its connection ends."""
        try:
            self._slots[number].serve()
        except Exception:  # an internal error: the worker must end rather than not answer
            _log.exception("a slot cannot continue")
            os._exit(1)
        del self._slots[number]

    def _execute(self, message: Message, frame: Frame) -> Message:
        if isinstance(message, Hello):
            return self.begin(message)
        try:
            self._carry_out(message, frame)
        except EngineError as error:
            return Failed(message=str(error))
        except Exception as error:  # runtimes raise any exception
            return Failed(message=f"a worker failed: {error!r}")
        cpu_s = time.process_time() if isinstance(message, Ping) else 0.0
        return Ready(pid=os.getpid(), cpu_s=cpu_s)

    def _carry_out(self, message: Message, frame: Frame) -> None:
        if isinstance(message, Prepare):
            self._reached("before-prepare")
            self._prepare(message, bytes(frame.body))
        elif isinstance(message, Ping):
            pass
        elif isinstance(message, Release):
            self._stages.pop(message.stage, None)
        elif isinstance(message, OpenSlot):
            self._open_slot(message, frame.fds)
        else:
            raise FrameError(f"{type(message).__name__} is not an order")

    def _prepare(self, order: Prepare, graph: bytes) -> None:
        self._stages[order.stage] = self._ready_backend().prepare(
            make_described(order.document, graph, self._find, any_graph=self._any_graph)
        )

    def _open_slot(self, order: OpenSlot, fds: Sequence[int]) -> None:
        served = self._slots.get(order.slot)
        if len(fds) != (1 if served else 2):
            raise FrameError(f"a slot came with {len(fds)} file descriptors")
        memory = SharedMemory(fds[0], order.size_bytes)
        memory.close_fd()
        if served is not None:
            served.use(memory)
            return
        connection = Connection(socket.socket(fileno=fds[1]))
        self.open_slot(order.slot, connection, memory)
        threading.Thread(
            target=self.serve_slot, args=(order.slot,), name=f"slot-{order.slot}", daemon=True
        ).start()

    def _ready_backend(self) -> Backend:
        if self._backend is None:
            raise FrameError("an order came before the hello message")
        return self._backend


def run(make: MakeBackend, reached: Reached = lambda _point: None) -> NoReturn:
    """Run a worker with the command line's options until the router is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(
        level=logging.WARNING,
        format="%(levelname)s worker %(process)d: %(message)s",
    )
    given = _parser().parse_args()
    try:
        for text in given.criterion_module:
            load_criterion(text)
        connection = Connection(socket.socket(fileno=given.fd))
    except (CriterionError, OSError) as error:
        _log.error("cannot start: %s", error)
        sys.exit(1)
    # A stage that is loading or hanging must not keep a worker alive after its router.
    with libraries(given.custom_ops), connection.watched(lambda: os._exit(0)):
        Worker(connection, make, reached).serve()
        os._exit(0)  # ends all other threads


def make_local(hello: Hello) -> Backend:
    """Make the backend of a hello message; BackendError if it cannot run here."""
    from offramp.engine.backends.factory import make_backend  # noqa: PLC0415 - slow to import

    return make_backend(
        hello.backend,
        threads=hello.threads,
        devices=parse_devices(hello.device) if hello.device else (),
        # Only fp32: the active policy is the same for all workers, and other precisions have other
        # policies.
        precision="fp32" if hello.backend == "tensorrt" else None,
        graphs=hello.graphs,
        max_rows=hello.max_rows,
    )


def libraries(paths: Sequence[Path]) -> contextlib.AbstractContextManager[None]:
    """Register libraries of operators for graphs that are loaded in this context."""
    if not paths:
        return contextlib.nullcontext()
    from offramp.engine.backends.custom_ops import using_libraries  # noqa: PLC0415 - slow to import

    return using_libraries(paths)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m offramp.cluster.remote.worker")
    parser.add_argument("fd", type=int, help="file descriptor of the router's connection")
    parser.add_argument("--custom-ops", type=Path, action="append", default=[])
    parser.add_argument("--criterion-module", action="append", default=[])
    return parser


if __name__ == "__main__":
    run(make_local)
