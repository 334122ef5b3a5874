"""Networks drop connections, or swallow what they are given: no answer is lost, double or wrong."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from tests.cluster.remote.listening import HELLO, TOKEN, listener, listening_worker, reaching
from tests.cluster.remote.proxy import proxy
from tests.cluster.remote.workers import answers_of, in_process, random_scripts, serve
from tests.fakes import fake_plan, script
from tests.unit.engine.serving import LIMIT_S

from offramp.cluster.remote import tcp_launcher
from offramp.cluster.remote import worker as worker_module
from offramp.cluster.remote.tcp import HostPort, tune
from offramp.cluster.remote.tcp_launcher import TcpLauncher, TcpWorker
from offramp.cluster.remote.worker_backend import RemoteBackend
from offramp.cluster.remote.worker_messages import Hello
from offramp.engine.common.errors import WorkerLostError
from offramp.engine.core import Engine
from offramp.testing.backend import SCRIPT
from offramp.testing.scripted_worker import ScriptedBackend

SCRIPTS = random_scripts(40)


def test_dropped_connections_cost_no_answer(tmp_path: Path) -> None:
    expected = in_process(SCRIPTS)
    with (
        listening_worker(tmp_path) as worker,
        proxy(worker.address) as network,
        reaching([network.address]) as backend,
    ):

        async def body(engine: Engine) -> None:
            assert await answers_of(engine, SCRIPTS[:20]) == expected[:20]
            network.drop()
            assert await answers_of(engine, SCRIPTS[20:]) == expected[20:]
            statistics = engine.statistics()["fake"]
            assert (statistics.failed, statistics.retried) == ({}, 0)

        serve(backend, body, streams=1)
        assert backend.restarts >= 1  # the connection may be refused while the worker is taken


def test_a_network_that_swallows_runs_is_noticed_by_their_limit(tmp_path: Path) -> None:
    expected = in_process([script([0.1, 0.2, 0.3]), *SCRIPTS[:8]])
    with (
        listening_worker(tmp_path) as worker,
        listening_worker(tmp_path) as other,
        proxy(worker.address) as network,
        reaching([network.address, other.address], least_s=1.0) as backend,
    ):

        async def body(engine: Engine) -> None:
            scripts = [script([0.1, 0.2, 0.3]), *SCRIPTS[:8]]
            for _ in range(4):  # both workers know how long each stage takes
                assert await answers_of(engine, scripts) == expected
            network.swallow()
            assert await answers_of(engine, scripts) == expected
            statistics = engine.statistics()["fake"]
            assert (statistics.failed, statistics.retried) == ({}, 0)

        serve(backend, body, streams=2, max_batch_size=2)


def test_a_silent_network_is_noticed_while_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_launcher, "PING_LIMIT_S", 1.0)
    with listener() as address, proxy(address) as network:
        worker = TcpLauncher(network.address, TOKEN, None, ping_s=0.005).start(HELLO)
        network.swallow()
        assert worker._over.wait(LIMIT_S)
        assert not worker.alive
        with pytest.raises(WorkerLostError, match=r"was lost: no answer within 1 s"):
            worker.open_slot()
        worker.end()


def test_a_worker_lets_a_silent_router_go() -> None:
    with listener(silence_s=0.05) as address:
        worker = TcpLauncher(address, TOKEN, None, ping_s=LIMIT_S).start(HELLO)
        assert worker._socket.recv(1) == b"", "the worker closes the connection"
        assert not worker.alive
        worker.end()


def test_a_connection_that_ends_is_noticed_without_asking() -> None:
    with listener() as address, proxy(address) as network:
        worker = TcpLauncher(network.address, TOKEN, None).start(HELLO)
        assert worker.alive
        slot, _ = worker.open_slot()
        network.drop()
        assert worker._socket.recv(1) == b""
        assert not worker.alive
        with pytest.raises(WorkerLostError, match="was lost: its connection ended"):
            worker.order(tcp_launcher.Ping())
        slot.close()
        worker.end()


@pytest.mark.skipif(sys.platform != "linux", reason="not every system has all options")
def test_connections_set_nodelay_and_keepalive() -> None:
    with socket.socket() as connected:
        tune(connected)
        found = [
            connected.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_NODELAY, socket.TCP_KEEPIDLE, socket.TCP_USER_TIMEOUT)
        ]
        assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert found == [1, 10, 25_000]


def test_processor_time_is_that_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module.time, "process_time", lambda: 12.5)
    with listener() as address:
        worker = TcpLauncher(address, TOKEN, None, ping_s=LIMIT_S).start(HELLO)
        assert worker.cpu_s() == 12.5
        worker.end()
        assert worker.cpu_s() == 12.5, "what was known"


class CountedLauncher(TcpLauncher):
    """Counts its starts."""

    starts = 0

    def start(self, hello: Hello) -> TcpWorker:
        self.starts += 1
        return super().start(hello)


def test_a_worker_that_is_absent_is_waited_for_by_its_stream_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        absent = CountedLauncher(HostPort(*listening.getsockname()), TOKEN, None)
    with listener() as address:
        launchers = [TcpLauncher(address, TOKEN, None), absent]
        backend = RemoteBackend(ScriptedBackend(), launchers=launchers)
        stages = [backend.prepare(spec) for spec in fake_plan([0.9, 0.8]).stages]
        assert (len(stages), absent.starts) == (3, 1)
        backend.open_slot_of(0).close()
        with pytest.raises(WorkerLostError, match="cannot be reached"):
            backend.open_slot_of(1)
        assert (absent.starts, backend.in_service) == (2, 1)
        backend.close()


def test_many_rows_travel_whole(tmp_path: Path) -> None:
    """More than a socket's buffers hold, both ways."""
    many = script(*[[0.1, 0.2, 0.3]] * 40_000)
    with listening_worker(tmp_path) as worker, reaching([worker.address]) as backend:
        stages = [backend.prepare(spec) for spec in fake_plan([0.9]).stages]
        slot = backend.open_slot()
        carry = slot.run(stages[0], slot.upload({SCRIPT: many})).carry
        assert carry is not None
        answer = slot.run(stages[1], carry).answer
        assert answer is not None
        assert (answer == many[:, 1]).all()
        slot.close()
