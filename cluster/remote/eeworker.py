"""``eeworker``: runs stages for a router on another host, one router at a time, until stopped.

The command only holds the listening socket; a child process serves, and ends with its router. So no
state of one router is left for the next, and neither a crash nor a hanging stage ends the worker.
New connections wait while the child is replaced.

Rejected: a handshake in the first process, which would then pass connections to the child. TLS
connections cannot be passed to another process.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn, Self

from offramp import __version__
from offramp.bundle import Bundle, BundleError
from offramp.cluster.planning.worker_entry import GPU_BACKENDS
from offramp.cluster.remote.handshake import read_token
from offramp.cluster.remote.listening import Admission, Listener
from offramp.cluster.remote.served_slot import Reached
from offramp.cluster.remote.stage_orders import BundlesByHash
from offramp.cluster.remote.tcp import HostPort, listen_on, parse_address
from offramp.cluster.remote.worker import MakeBackend, libraries, make_local
from offramp.cluster.remote.worker_messages import Hello
from offramp.commands.combinations import Illegal
from offramp.commands.completion import complete
from offramp.commands.parser import LayeredParser
from offramp.engine.answers.criteria import CriterionError, load_criterion
from offramp.engine.common.environment import available_cores
from offramp.engine.common.errors import BackendError, EngineError
from offramp.engine.common.job_runner import environment_of_child
from offramp.engine.common.network import NetworkError, TlsIdentity, tls_reason
from offramp.engine.stages.backend_protocol import Backend

_log = logging.getLogger(__name__)

MODULE: Final = "offramp.cluster.remote.eeworker"
BACKENDS: Final = ("onnxruntime", "openvino", *GPU_BACKENDS)
EXIT_CANNOT_START: Final = 1
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 10.0
"""Longest pause between failed starts of the serving process."""
_READY: Final = b"r"

_DESCRIPTION: Final = """\
Run stages of bundles for an eeserve on another host, one server at a time. The
server names this worker in cluster.toml: eeserve m.ee --cluster cluster.toml
"""
_EXAMPLES: Final = {
    "eeworker m.ee --listen 127.0.0.1:7070 --token-file token": "",
    "eeworker m.ee --listen 10.0.0.2:7070 --token-file token \\\n"
    "    --tls-cert worker.pem --tls-key worker.key": "",
}
_PAIR: Final = "TLS needs a certificate and its key; use --tls-cert and --tls-key"
ILLEGAL: Final = (
    Illegal(option="--tls-cert", without="--tls-key", why=_PAIR),
    Illegal(option="--tls-key", without="--tls-cert", why=_PAIR),
    Illegal(option="--tls-ca", without="--tls-cert", why=_PAIR),
    Illegal(
        option="--insecure",
        other="--tls-cert",
        why="the certificate makes the connection secure; leave one of them out",
    ),
)


class _StoppedError(Exception):
    """A signal requested the end of the process."""


def main(
    argv: Sequence[str] | None = None,
    *,
    make: MakeBackend = make_local,
    reached: Reached = lambda _point: None,
    any_graph: bool = False,
    module: str = MODULE,
) -> int:
    """Run ``eeworker``, and return the exit status.

    Tests pass ``make``, ``reached`` and ``any_graph`` to the worker; ``module`` is then the calling
    module.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    complete(make_parser)
    given = make_parser().parse_args(words)
    _set_up_logging(given.log_level)
    if os.name != "posix":
        sys.stderr.write("eeworker: needs Unix, to pass sockets to processes; run it there\n")
        return EXIT_CANNOT_START
    try:
        if given.serve_fds is not None:
            _serve(given, make, reached, any_graph=any_graph)
        token = read_token(given.token_file)
        _identity(given)
        address = _check_address(given)
    except (EngineError, OSError) as error:
        what = f"{given.token_file}: {tls_reason(error)}" if isinstance(error, OSError) else error
        sys.stderr.write(f"eeworker: {what}\n")
        return EXIT_CANNOT_START
    del token  # only checks the file; the serving process reads it again
    return _supervise(address, words, module)


def _supervise(address: HostPort, words: Sequence[str], module: str) -> int:
    """Run a serving process until a signal; return the exit status."""
    try:
        listening = listen_on(address)
    except OSError as error:
        sys.stderr.write(
            f"eeworker: cannot listen on {address}: {tls_reason(error)}; use another --listen\n"
        )
        return EXIT_CANNOT_START
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)
    bound = HostPort(*listening.getsockname()[:2])
    started, pause_s = 0, _FIRST_PAUSE_S
    try:
        with listening:
            while True:
                with _Serving(listening, words, module) as serving:
                    ready = serving.wait_until_ready()
                    if ready:
                        started, pause_s = started + 1, _FIRST_PAUSE_S
                        if started == 1:
                            sys.stdout.write(f"eeworker: listening on {bound}\n")
                            sys.stdout.flush()
                    status = serving.process.wait()
                if not ready and not started:
                    return EXIT_CANNOT_START
                if status or not ready:
                    _log.warning("the serving process ended with status %d; restarting it", status)
                if not ready:
                    time.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    except _StoppedError:
        return 0


def _stop(_number: int, _frame: object) -> NoReturn:
    raise _StoppedError


def serving_words(words: Sequence[str], fds: tuple[int, int]) -> list[str]:
    """Return the command line of the serving process: the descriptors, then the user's words.

    The descriptors come first: after a ``--`` in the user's words they would be read as bundles.
    """
    return ["--serve-fds", *map(str, fds), *words]


class _Serving:
    """The serving process, and a socket. The serving process ends when the socket is closed."""

    def __init__(self, listening: socket.socket, words: Sequence[str], module: str) -> None:
        self._leash, theirs = socket.socketpair()
        fds = listening.fileno(), theirs.fileno()
        with theirs:
            self.process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-P", "-m", module, *serving_words(words, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                env=environment_of_child(),
                process_group=0,
            )

    def wait_until_ready(self) -> bool:
        """Wait until the process accepts connections; ``False`` if it ended before."""
        with contextlib.suppress(ConnectionResetError):
            return self._leash.recv(1) == _READY
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._leash.close()
        self.process.kill()
        self.process.wait()


def _serve(
    given: argparse.Namespace, make: MakeBackend, reached: Reached, *, any_graph: bool
) -> NoReturn:
    """Run the serving process: serve one router; end with the parent process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    listening, leash = (socket.socket(fileno=fd) for fd in given.serve_fds)
    threading.Thread(target=_end_with, args=(leash,), name="leash", daemon=True).start()
    try:
        for text in given.criterion_module:
            load_criterion(text)
        bundles = BundlesByHash([Bundle.open(path).held() for path in given.bundles])
        identity = _identity(given)
        admission = Admission(
            token=read_token(given.token_file),
            context=None if identity is None else identity.context(),
            make=_maker(given, make),
            find=bundles,
            any_graph=any_graph,
        )
        _make_once(given, admission.make)
    except (BundleError, CriterionError, EngineError) as error:
        sys.stderr.write(f"eeworker: {error}\n")
        os._exit(EXIT_CANNOT_START)
    with libraries(given.custom_ops):
        _log.info("ready with %s", bundles.described or "no bundle")
        leash.send(_READY)
        Listener(listening, admission, reached).serve()
        os._exit(0)  # ends all other threads


def _end_with(leash: socket.socket) -> None:
    with contextlib.suppress(OSError):
        leash.recv(1)
    os._exit(0)


def _maker(given: argparse.Namespace, make: MakeBackend) -> MakeBackend:
    """Return a factory of backends that follows the command line."""

    def make_as_given(hello: Hello) -> Backend:
        if given.backend is not None and hello.backend != given.backend:
            raise BackendError(
                f"this worker was started with --backend {given.backend}, and the server asks for "
                f"{hello.backend!r:.40}; use the same for both"
            )
        threads = given.threads or available_cores()
        return make(dataclasses.replace(hello, threads=threads))

    return make_as_given


def _make_once(given: argparse.Namespace, make: MakeBackend) -> None:
    """Check that a chosen CPU backend can run here; the server names GPUs later."""
    if given.backend is not None and given.backend not in GPU_BACKENDS:
        make(Hello(version=__version__, backend=given.backend, threads=1)).close()


def _identity(given: argparse.Namespace) -> TlsIdentity | None:
    """Return the TLS files, if configured; NetworkError if a file is invalid."""
    if given.tls_cert is None:
        return None
    identity = TlsIdentity(certificate=given.tls_cert, key=given.tls_key, ca=given.tls_ca)
    identity.context()
    return identity


def _check_address(given: argparse.Namespace) -> HostPort:
    """Return the address to listen on; NetworkError if other hosts could connect without TLS."""
    address = parse_address(given.listen, least_port=0)
    if not (address.is_loopback or given.tls_cert or given.insecure):
        raise NetworkError(
            f"--listen {address} is open to other hosts, and connections would not be encrypted; "
            "use --tls-cert and --tls-key, or --insecure if the network itself is trusted"
        )
    return address


def _set_up_logging(level: str) -> None:
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s %(levelname)s eeworker %(process)d: %(message)s",
    )


def make_parser() -> LayeredParser:
    """Return the parser of ``eeworker``."""
    parser = LayeredParser(
        prog="eeworker",
        usage="%(prog)s BUNDLE … --listen HOST:PORT --token-file FILE [options]",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
        illegal=ILLEGAL,
    )
    add = parser.add_argument
    add(
        "bundles", metavar="BUNDLE", nargs="+", type=Path,
        help="bundle, identical to the server's; other bundles are not served",
    )  # fmt: skip
    add(
        "--listen",
        metavar="HOST:PORT",
        required=True,
        help="address to listen on; with port 0, any free port",
    )
    add(
        "--token-file", metavar="FILE", type=Path, required=True,
        help="file with the secret that the server must also have",
    )  # fmt: skip
    add("--tls-cert", metavar="PEM", type=Path, help="certificate of this worker, for its host")
    add("--tls-key", metavar="PEM", type=Path, help="the certificate's key")
    add(
        "--tls-ca", metavar="PEM", type=Path,
        help="file of the authorities that sign servers' certificates; servers must then present "
        "one",
    )  # fmt: skip
    add(
        "--insecure", action="store_true",
        help="listen for other hosts without TLS: inputs and answers can be read and changed in "
        "transit",
    )  # fmt: skip
    add(
        "--backend", metavar="NAME", choices=BACKENDS,
        help="backend that servers must request, others are refused: onnxruntime, openvino, or "
        "tensorrt or cuda on a GPU (default: as the server requests)",
    )  # fmt: skip
    add(
        "--threads", metavar="N", type=_threads,
        help="CPU threads of a stage (default: all cores)",
    )  # fmt: skip
    add(
        "--custom-ops", metavar="LIB.so", type=Path, action="append", default=[],
        help="library with operators that ONNX Runtime does not have; may be repeated",
    )  # fmt: skip
    add(
        "--criterion-module", metavar="FILE.py:NAME", action="append", default=[],
        help="file with your own criterion that a bundle was compiled with; may be repeated",
    )  # fmt: skip
    add(
        "--log-level", metavar="LEVEL", choices=("debug", "info", "warning", "error"),
        default="info", help="debug, info, warning or error",
    )  # fmt: skip
    add("--serve-fds", type=int, nargs=2, help=argparse.SUPPRESS)
    return parser


def _threads(text: str) -> int:
    cores = available_cores()
    if not text.isdecimal() or not 1 <= int(text) <= cores:
        raise argparse.ArgumentTypeError(
            f"{text!r:.40}, expected a whole number from 1 to the {cores} cores here"
        )
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
