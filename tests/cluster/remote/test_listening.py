"""Admission of clients by a listening worker, and the responses to all others."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

import pytest
from tests.cluster.remote.listening import GOLDEN, HELLO, TOKEN, admission, listener
from tests.facts import facts, tells
from tests.fakes import fake_plan, script
from tests.unit.engine.serving import LIMIT_S

import offramp
from offramp.bundle import Bundle
from offramp.cluster.remote import handshake, tcp_launcher
from offramp.cluster.remote.listening import MOST_UNKNOWN, Listener
from offramp.cluster.remote.stage_orders import BundlesByHash
from offramp.cluster.remote.tcp import HostPort, TlsTrust, cut
from offramp.cluster.remote.tcp_launcher import TcpLauncher, WorkerAddress
from offramp.cluster.remote.transport import Connection
from offramp.cluster.remote.worker_backend import RemoteBackend
from offramp.cluster.remote.worker_messages import Hello, Prepare, encode
from offramp.engine.common.errors import BackendError, WorkerLostError
from offramp.engine.common.network import TlsIdentity
from offramp.engine.stages.plan import make_plan
from offramp.testing.backend import SCRIPT
from offramp.testing.scripted_worker import ScriptedBackend

LOG = "offramp.cluster.remote.listening"


class Lines(logging.Handler):
    """All log lines of workers in this process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: queue.Queue[str] = queue.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.put(record.getMessage())

    def next(self) -> str:
        """Wait for a line."""
        return self._lines.get(timeout=30)

    def empty(self) -> bool:
        return self._lines.empty()


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler = Lines()
    logging.getLogger(LOG).addHandler(handler)
    yield handler
    logging.getLogger(LOG).removeHandler(handler)


@pytest.fixture(scope="session")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TlsIdentity]:
    """Makes certificates that sign themselves, of hosts."""
    folder = tmp_path_factory.mktemp("tls")

    def make(host: str) -> TlsIdentity:
        key, certificate = folder / f"{host}.key", folder / f"{host}.pem"
        if not certificate.exists():
            kind = "IP" if host[0].isdigit() else "DNS"
            line = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
            words = [*line.split(), "-days", "2", "-keyout", str(key), "-out", str(certificate)]
            words += ["-subj", f"/CN={host}", "-addext", f"subjectAltName={kind}:{host}"]
            try:
                subprocess.run(words, check=True, capture_output=True)
            except FileNotFoundError:
                pytest.skip("there is no openssl to make certificates with")
        return TlsIdentity(certificate=certificate, key=key)

    return make


def answer_of(launcher: TcpLauncher) -> list[float]:
    """Run a stage on a worker; return the answer."""
    backend = RemoteBackend(ScriptedBackend(), launchers=[launcher])
    try:
        stage = backend.prepare(fake_plan([0.9]).stages[0])
        slot = backend.open_slot()
        answer = slot.run(stage, slot.upload({SCRIPT: script([0.5, 0.7])})).answer
        slot.close()
        assert answer is not None
        found: list[float] = answer[:, 0].tolist()
        return found
    finally:
        backend.close()


def test_encrypted_connections_carry_answers(pem: Callable[[str], TlsIdentity]) -> None:
    identity = pem("127.0.0.1")
    trust = TlsTrust(ca=identity.certificate)
    with listener(identity=identity) as address:
        encrypted = answer_of(TcpLauncher(address, TOKEN, trust))
    with listener() as address:
        assert answer_of(TcpLauncher(address, TOKEN, None)) == encrypted == [0.5]


def test_a_worker_may_ask_servers_for_certificates(pem: Callable[[str], TlsIdentity]) -> None:
    worker, router = pem("127.0.0.1"), pem("router")
    asking = TlsIdentity(certificate=worker.certificate, key=worker.key, ca=router.certificate)
    with listener(identity=asking) as address:
        without = TcpLauncher(address, TOKEN, TlsTrust(ca=worker.certificate))
        with pytest.raises(BackendError, match=r"TLS .* failed: .*\(tls_cert, tls_key\)$"):
            without.start(HELLO)
        trust = TlsTrust(ca=worker.certificate, certificate=router.certificate, key=router.key)
        assert answer_of(TcpLauncher(address, TOKEN, trust)) == [0.5]


def test_another_token_is_told_on_both_sides(lines: Lines) -> None:
    told = "has another token; give both ends the same token file"
    with listener() as address:
        with pytest.raises(BackendError, match=f"^the worker at {address} {told}$"):
            TcpLauncher(address, b"another-token-of-16", None).start(HELLO)
        assert answer_of(TcpLauncher(address, TOKEN, None)) == [0.5]
    line = lines.next()
    assert lines.empty()
    assert line.startswith("127.0.0.1:")
    assert line.endswith(told)


def test_a_worker_that_has_no_token_is_not_trusted() -> None:
    """The other side accepts the token, and cannot prove that it has it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def pretend() -> None:
            connected, _ = listening.accept()
            with connected:
                connected.recv(100)
                connected.sendall(handshake.greet(bytes(32)))
                proof = connected.recv(100)
                connected.sendall(b"\1" + proof)  # reflected: the router's own

        threading.Thread(target=pretend, daemon=True).start()
        address = HostPort(*listening.getsockname())
        with pytest.raises(BackendError, match="cannot prove that it has the token"):
            TcpLauncher(address, TOKEN, None).start(HELLO)


def test_another_version_is_told_and_does_not_end_the_worker(
    monkeypatch: pytest.MonkeyPatch, lines: Lines
) -> None:
    with listener() as address:
        launcher = TcpLauncher(address, TOKEN, None)
        other = Hello(version="0.0.7", backend="scripted", threads=1)
        told = rf"the worker has Offramp {offramp.__version__}, the server 0\.0\.7; install the"
        with pytest.raises(BackendError, match=told):
            launcher.start(other)
        with monkeypatch.context() as patched:
            patched.setattr(handshake, "PROTOCOL", 2)
            ours = handshake.greet(bytes(32))
        with socket.create_connection(address) as connected:
            connected.sendall(ours)
            assert len(connected.recv(100)) == handshake.GREETING_BYTES
            assert connected.recv(100) == b""
        assert answer_of(launcher) == [0.5]
    first, second = lines.next(), lines.next()
    tells(first, "0.0.7", "install")
    tells(second, "version 2", "1", "install")


def test_one_router_is_served_and_another_is_told_so(lines: Lines) -> None:
    with listener() as address:
        launcher = TcpLauncher(address, TOKEN, None)
        worker = launcher.start(HELLO)
        told = f"worker {address}: it serves another router, 127.0.0.1:[0-9]+, until that one is"
        with pytest.raises(BackendError, match=told):
            launcher.start(HELLO)
        assert worker.alive
        worker.end()
    assert "is refused: it serves another router" in lines.next()


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, OSError, SystemExit])
def test_a_backend_that_raises_anything_ends_the_process_and_not_the_service(
    error: type[BaseException], lines: Lines
) -> None:
    def make(_hello: Hello) -> NoReturn:
        raise error("the driver broke")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = Listener(listening, admission(make=make))
        served = threading.Thread(target=serving.serve, daemon=True)
        served.start()
        address = HostPort(*listening.getsockname())
        with pytest.raises(WorkerLostError, match="was lost: its connection ended"):
            TcpLauncher(address, TOKEN, None).start(HELLO)
        served.join(30)
        assert not served.is_alive(), "a new process takes the next router"
        cut(listening)
    tells(lines.next(), "cannot be served", "process ends")


@pytest.mark.parametrize("point", ["before-hello", "before-prepare"])
def test_a_router_that_goes_while_its_order_hangs_is_noticed(point: str) -> None:
    reached, never = threading.Event(), threading.Event()

    def hang(at: str) -> None:
        if at == point:
            reached.set()
            never.wait()

    with socket.create_server(("127.0.0.1", 0)) as listening, contextlib.ExitStack() as opened:
        serving = Listener(listening, admission(), hang)
        served = threading.Thread(target=serving.serve, daemon=True)
        served.start()
        where = WorkerAddress(address=HostPort(*listening.getsockname()), token=TOKEN, context=None)
        router = opened.enter_context(where.reach()[0])
        orders = Connection(router)
        orders.send(encode(HELLO))
        if point == "before-prepare":
            orders.receive(30.0)
            orders.send(encode(Prepare(stage=1, document="{}")))
        assert reached.wait(30)
        assert served.is_alive()
        router.close()
        served.join(LIMIT_S)
        assert not served.is_alive(), "a new process takes the next router"
        cut(listening)
    never.set()


def test_a_run_that_gives_more_than_is_taken_loses_its_worker() -> None:
    with listener() as address:
        launcher = TcpLauncher(address, TOKEN, None, most_result_bytes=8)
        backend = RemoteBackend(ScriptedBackend(), launchers=[launcher])
        stage = backend.prepare(fake_plan([0.9]).stages[0])
        with contextlib.closing(backend), contextlib.closing(backend.open_slot()) as slot:
            batch = slot.upload({SCRIPT: script([0.5, 0.7])})
            told = r"stage 0: it sent a body of [0-9]+ bytes, expected at most 8$"
            with pytest.raises(WorkerLostError, match=told):
                slot.run(stage, batch)


def test_connections_are_taken_again_after_one_for_which_there_was_no_thread(
    monkeypatch: pytest.MonkeyPatch, lines: Lines
) -> None:
    start, failed = threading.Thread.start, list[str]()

    def fail_once(thread: threading.Thread) -> None:
        if thread.name.startswith("peer ") and not failed:
            failed.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_once)
    with listener() as address:
        with socket.create_connection(address, 10) as connected:
            assert connected.recv(100) == b""
        assert answer_of(TcpLauncher(address, TOKEN, None)) == [0.5]
    tells(lines.next(), f"{failed[0][5:]}", "can't start new thread")


def test_bundles_are_named_by_hash_and_graphs_do_not_travel() -> None:
    bundle = Bundle.open(GOLDEN)
    (stage, *_) = make_plan(bundle).stages
    with listener(find=BundlesByHash([bundle]), any_graph=False) as address:
        backend = RemoteBackend(ScriptedBackend(), launchers=[TcpLauncher(address, TOKEN, None)])
        backend.prepare(stage)
        with pytest.raises(BackendError, match=facts("stages of the bundles")):
            backend.prepare(fake_plan([0.9]).stages[0])
        backend.close()
    with listener(any_graph=False) as address:
        backend = RemoteBackend(ScriptedBackend(), launchers=[TcpLauncher(address, TOKEN, None)])
        told = "^this worker has no bundle 'bundle' '[0-9a-f]{12}'; copy it there and name it"
        with pytest.raises(BackendError, match=told):
            backend.prepare(stage)
        backend.close()


def test_who_speaks_tls_to_one_that_does_not_is_told(
    pem: Callable[[str], TlsIdentity], lines: Lines
) -> None:
    identity = pem("127.0.0.1")
    trust = TlsTrust(ca=identity.certificate)
    with listener() as address:
        told = r"TLS with .* failed: wrong version number; it may have been started without --tls"
        with pytest.raises(BackendError, match=told):
            TcpLauncher(address, TOKEN, trust).start(HELLO)
    assert "speaks TLS, and this end does not" in lines.next()
    plain = r"closed the connection: .*; it may expect TLS \(tls_ca\); its log says why"
    with (
        listener(identity=identity) as address,
        pytest.raises(WorkerLostError, match=plain),
    ):
        TcpLauncher(address, TOKEN, None).start(HELLO)
    tells(lines.next(), "TLS", "wrong version number", "certificates")


def test_a_certificate_of_another_is_not_trusted(pem: Callable[[str], TlsIdentity]) -> None:
    right, elsewhere = pem("127.0.0.1"), pem("elsewhere")
    with listener(identity=elsewhere) as address:
        for trusted, told in ((right, "self.signed certificate"), (elsewhere, "mismatch")):
            launcher = TcpLauncher(address, TOKEN, TlsTrust(ca=trusted.certificate))
            with pytest.raises(BackendError, match=f"is not trusted: .*{told}.*tls_ca"):
                launcher.start(HELLO)


def test_a_worker_that_cannot_be_reached_is_told_how_to_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = HostPort(*listening.getsockname())
    told = f"the worker at {address} cannot be reached: Connection refused; start it there: eewor"
    with pytest.raises(WorkerLostError, match=told):
        TcpLauncher(address, TOKEN, None).start(HELLO)


def test_a_worker_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_launcher, "GREET_LIMIT_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = HostPort(*listening.getsockname())
        with pytest.raises(WorkerLostError, match=r"did not answer within 0\.01 s"):
            TcpLauncher(address, TOKEN, None).start(HELLO)


def test_who_is_slow_to_show_a_token_is_cut_off(lines: Lines) -> None:
    with listener(admit_s=0.05) as address, socket.create_connection(address) as connected:
        connected.sendall(handshake.greet(bytes(32))[:9])  # and no more
        while connected.recv(100):
            pass
    tells(lines.next(), "token", "0.05 s")


def test_connections_that_show_no_token_leave_room_for_a_router() -> None:
    with listener() as address, contextlib.ExitStack() as opened:
        idle = [
            opened.enter_context(socket.create_connection(address)) for _ in range(MOST_UNKNOWN + 1)
        ]
        assert idle[0].recv(100) == b"", "the oldest made room"
        assert answer_of(TcpLauncher(address, TOKEN, None)) == [0.5]


def test_noise_is_refused_and_the_log_stays_short(lines: Lines) -> None:
    with listener() as address:
        for _ in range(100):
            with socket.create_connection(address) as connected:
                connected.sendall(b"GET / HTTP/1.1\r\n\r\n")
                while connected.recv(100):
                    pass
        assert answer_of(TcpLauncher(address, TOKEN, None)) == [0.5]
    first = lines.next()
    tells(first, "Offramp", "b'GET / HTTP/1.1\\r\\n'", "expected")
    assert "\n" not in first
