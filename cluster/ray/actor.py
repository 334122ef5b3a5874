"""The actor that Ray runs on a node: a worker that listens for its router, and ends with it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from offramp.bundle import Bundle, BundleError
from offramp.cluster.ray.ray_connection import node_address, tls_files
from offramp.cluster.remote.listening import Admission, Listener
from offramp.cluster.remote.stage_orders import BundlesByHash
from offramp.cluster.remote.tcp import HostPort, listen_on
from offramp.cluster.remote.worker import libraries, make_local
from offramp.cluster.remote.worker_messages import Hello
from offramp.engine.answers.criteria import CriterionError, load_criterion
from offramp.engine.common.errors import EngineError
from offramp.engine.common.network import tls_reason
from offramp.engine.stages.backend_protocol import Backend

LEAVE_S: Final = 10.0
"""Seconds for Ray to end an actor whose router is gone; if the actor ended itself earlier, Ray
would report a crash."""


class WorkerActor:
    """A worker on a node of a Ray cluster; all its arguments are plain strings and numbers.

    It works like ``eeworker``: it serves one router, which must present the token, and only with
    the bundles that it was started with. Its process ends when its router is gone, and Ray then
    frees the actor's resources. A successor is another actor.
    """

    def __init__(
        self,
        token: str,
        bundles: Sequence[str],
        threads: int,
        custom_ops: Sequence[str] = (),
        criterion_modules: Sequence[str] = (),
    ) -> None:
        """Keep the arguments: paths of files on the node, and number of threads of a stage."""
        self._token = token.encode()
        self._bundles = bundles
        self._threads = threads
        self._custom_ops = [Path(path) for path in custom_ops]
        self._criterion_modules = criterion_modules
        self._entered = contextlib.ExitStack()
        """Holds the libraries of operators, which are registered when the actor starts to
        listen."""

    def listen(self) -> tuple[str, str]:
        """Start to listen; return HOST:PORT and an empty text, or an empty text and the problem."""
        logging.basicConfig(
            level=logging.WARNING, format="%(levelname)s worker %(process)d: %(message)s"
        )
        host = node_address()
        try:
            for text in self._criterion_modules:
                load_criterion(text)
            self._entered.enter_context(libraries(self._custom_ops))
            identity = tls_files()
            admission = Admission(
                token=self._token,
                context=None if identity is None else identity.context(),
                make=self._make,
                find=BundlesByHash([Bundle.open(Path(path)).held() for path in self._bundles]),
                any_graph=self.any_graph,
            )
            listening = listen_on(HostPort(host, 0))
        except (BundleError, CriterionError, EngineError, OSError) as error:
            self._entered.close()
            return "", f"on the node {host}: {_message_of(error)}"
        threading.Thread(
            target=self._serve, args=(listening, admission), name="listener", daemon=True
        ).start()
        return str(HostPort(*listening.getsockname()[:2])), ""

    any_graph = False
    """``True`` if a router may send graphs that are not in a bundle; only tests do so."""

    def make(self, hello: Hello) -> Backend:
        """Make the backend that a router requests; BackendError if it cannot run here."""
        return make_local(hello)

    def _make(self, hello: Hello) -> Backend:
        return self.make(dataclasses.replace(hello, threads=self._threads))

    def _serve(self, listening: socket.socket, admission: Admission) -> NoReturn:
        try:
            with self._entered:
                Listener(listening, admission).serve()
        finally:
            threading.Event().wait(LEAVE_S)
            os._exit(0)  # ends all other threads


def _message_of(error: Exception) -> str:
    return tls_reason(error) if isinstance(error, OSError) else str(error)
