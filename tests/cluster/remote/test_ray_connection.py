"""Messages without Ray, without a cluster, or without free resources; Ray is not needed."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.remote.listening import GOLDEN
from tests.facts import Told, facts, tells

from offramp.cluster.ray import actor, launcher, ray_connection
from offramp.cluster.ray.actor import WorkerActor
from offramp.cluster.ray.launcher import ActorNeeds, RayLauncher, actor_needs, reserve
from offramp.cluster.ray.ray_connection import connect, describe_resources
from offramp.cluster.remote.tcp import parse_address
from offramp.cluster.remote.tcp_launcher import WorkerAddress
from offramp.cluster.remote.worker_messages import Hello
from offramp.cluster.serving.cluster_workers import ClusterWorkers
from offramp.engine.common.errors import BackendError, WorkerLostError
from offramp.server.arguments import parse_arguments

HELLO = Hello(version="0", backend="onnxruntime", threads=1)
NEEDS = ActorNeeds(bundles=())
TOKEN = "t" * 32


class FakeRay(types.ModuleType):
    """A cluster that has room for so many workers, and starts none."""

    def __init__(self, room: int, cpus: float = 0.0) -> None:
        super().__init__("ray")
        self.room = room
        self.groups: list[FakeRay] = []
        self.util: Any = self
        self.exceptions = types.SimpleNamespace(RayError=ZeroDivisionError)
        self.available_resources = lambda: {"CPU": cpus}

    def is_initialized(self) -> bool:
        return True

    def placement_group(self, bundles: list[dict[str, float]]) -> FakeRay:
        self.groups.append(FakeRay(0))
        return self.groups[-1]

    def remove_placement_group(self, group: FakeRay) -> None:
        self.groups.remove(group)

    def placement_group_table(self, group: FakeRay) -> dict[str, str]:
        placed = group in self.groups[: self.room]
        return {"state": "CREATED" if placed else "PENDING"}


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Set all waiting times to 0."""
    monkeypatch.setattr(launcher, "PLACE_LIMIT_S", 0.0)
    monkeypatch.setattr(launcher, "RESERVE_LIMIT_S", 0.0)
    yield monkeypatch


def use(monkeypatch: pytest.MonkeyPatch, ray: types.ModuleType | None) -> None:
    monkeypatch.setitem(sys.modules, "ray", ray)


def test_without_ray_a_line_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, None)
    with pytest.raises(SystemExit) as ended:
        parse_arguments([str(GOLDEN), "--cluster", "ray"])
    assert ended.value.code == 2
    tells(capsys.readouterr().err, "eeserve", "ray", "every node", "pip install 'offramp[ray]'")


class UnconnectedRay(types.ModuleType):
    """Fake package without a connection, which fails to connect as configured."""

    def __init__(self, error: Exception) -> None:
        super().__init__("ray")
        self.error = error

    def is_initialized(self) -> bool:
        return False

    def init(self, **_: object) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("address", "told"),
    [
        (None, ("this host", "no running Ray", "start Ray")),
        ("ray://head:10001", ("'ray://head:10001'", "HOST:PORT")),
        ("head", ("'head'", "HOST:PORT")),
    ],
)
def test_where_no_cluster_is_a_line_says_how_to_start_one(
    monkeypatch: pytest.MonkeyPatch, address: str | None, told: Told
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    use(monkeypatch, UnconnectedRay(ConnectionError("no running Ray\nat all")))
    with pytest.raises(BackendError) as caught:
        connect(address)
    tells(str(caught.value), *told)
    assert "\n" not in str(caught.value)


def test_a_port_without_listener_fails_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, UnconnectedRay(AssertionError("not asked")))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        host, port = listening.getsockname()
    monkeypatch.setenv("RAY_ADDRESS", f"{host}:{port}")
    with pytest.raises(BackendError, match=f"at '{host}:{port}': Connection refused; start Ray"):
        connect()


def test_a_cluster_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_connection, "CONNECT_LIMIT_S", 0.0)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    use(monkeypatch, UnconnectedRay(ConnectionError()))
    monkeypatch.setattr(ray_connection.threading.Thread, "start", lambda _thread: None)
    with pytest.raises(BackendError, match=facts("this host", "0 s", "start Ray")):
        connect()


def test_as_many_workers_as_there_are_free_cpus_unless_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, FakeRay(0, cpus=3.5))
    options = parse_arguments([str(GOLDEN), "--cluster=ray"]).engine
    assert options.streams == 3
    assert isinstance(options.devices, ClusterWorkers)
    assert (options.devices.local, options.devices.ray.least) == (0, 1)
    assert {place.device_type for place in options.devices.places} == {"cpu"}
    options = parse_arguments([str(GOLDEN), "--cluster=ray", "--workers=5"]).engine
    assert options.streams == 5
    use(monkeypatch, FakeRay(0, cpus=0.5))
    with pytest.raises(SystemExit):
        parse_arguments([str(GOLDEN), "--cluster=ray"])
    tells(capsys.readouterr().err, "no CPU free", "end jobs")
    with pytest.raises(SystemExit):
        parse_arguments([str(GOLDEN), "--ray-address=h:1"])
    tells(capsys.readouterr().err, "--ray-address", "--cluster ray", "cluster file")


def test_the_configuration_file_may_say_ray(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use(monkeypatch, FakeRay(0, cpus=2.0))
    file = tmp_path / "serve.toml"
    file.write_text('[engine]\ncluster = "ray"\nworkers = 4\n')
    options = parse_arguments([str(GOLDEN), f"--config={file}"]).engine
    assert options.streams == 4


FILE_SAYS_RAY = '[engine]\ncluster = "ray"\n'


@pytest.mark.parametrize(
    ("text", "words", "workers", "address"),
    [
        (FILE_SAYS_RAY, [], 2, None),
        (FILE_SAYS_RAY, ["--workers=5"], 5, None),
        (FILE_SAYS_RAY + "workers = 4", ["--workers=5"], 5, None),
        (FILE_SAYS_RAY + "workers = 4", ["--ray-address=h:1"], 4, "h:1"),
        (FILE_SAYS_RAY + "workers = 4", ["--cluster=ray"], 4, None),
        ("[engine]\nworkers = 4", ["--cluster=ray"], 4, None),
        ('[engine]\ncluster = "no.toml"', ["--cluster=ray", "--ray-address=h:1"], 2, "h:1"),
    ],
)
def test_what_the_file_and_the_command_line_say_of_ray_goes_together(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    text: str,
    words: list[str],
    workers: int,
    address: str | None,
) -> None:
    use(monkeypatch, FakeRay(0, cpus=2.0))
    file = tmp_path / "serve.toml"
    file.write_text(text)
    options = parse_arguments([str(GOLDEN), f"--config={file}", *words]).engine
    assert options.streams == workers
    assert isinstance(options.devices, ClusterWorkers)
    assert options.devices.ray.address == address


def test_ray_is_asked_for_only_by_what_is_not_overruled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, None)
    file, cluster = tmp_path / "serve.toml", tmp_path / "cluster.toml"
    file.write_text(FILE_SAYS_RAY + "workers = 4")
    cluster.write_text(
        "[devices.cpu]\ncount = 1\ncost_per_hour = 0\nspeed = 1\n[[workers]]\ndevice = 'cpu'\n"
    )
    words = [str(GOLDEN), f"--config={file}", f"--cluster={cluster}"]
    assert parse_arguments(words).engine.streams == 1
    with pytest.raises(SystemExit):
        parse_arguments([*words, "--ray-address=h:1"])
    tells(capsys.readouterr().err, "--ray-address", "--cluster ray", "cluster file")
    file.write_text(FILE_SAYS_RAY)
    with pytest.raises(SystemExit):
        parse_arguments([str(GOLDEN), f"--config={file}"])
    tells(capsys.readouterr().err, f"eeserve: {file}", "[engine] cluster", "ray", "install")


def test_who_has_no_room_waits_and_keeps_its_place_in_the_queue(
    hurried: pytest.MonkeyPatch,
) -> None:
    ray = FakeRay(1)
    use(hurried, ray)
    one, other = (RayLauncher({"CPU": 2.0, "gadget": 1.0}, NEEDS) for _ in range(2))
    reserve([one, other], 1)
    assert (one.placed(), other.placed()) == (True, False)
    for _ in range(2):
        with pytest.raises(WorkerLostError) as caught:
            other.start(HELLO)
        tells(str(caught.value), "too few free resources", "2 CPU and 1 gadget")
    assert len(ray.groups) == 2, "it asks once"
    one.close()
    assert other.placed(), "who waits comes when another leaves"
    other.close()
    assert ray.groups == []


def test_a_server_without_the_least_workers_does_not_start(hurried: pytest.MonkeyPatch) -> None:
    ray = FakeRay(1)
    use(hurried, ray)
    launchers = [RayLauncher({"CPU": 1.0}, NEEDS) for _ in range(3)]
    with pytest.raises(BackendError, match=facts("1 of 3 workers", "0 s", "expected 2")):
        reserve(launchers, 2)
    assert ray.groups == [], "what was reserved is given back"


def test_an_actor_says_what_is_not_on_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = types.ModuleType("ray")
    ray.util = types.SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")  # type: ignore[attr-defined]
    use(monkeypatch, ray)
    address, problem = WorkerActor(TOKEN, [str(tmp_path / "no.ee")], 1).listen()
    assert address == ""
    assert problem.startswith("on the node 127.0.0.1: ")
    assert "no.ee" in problem
    missing = WorkerActor(TOKEN, [str(GOLDEN)], 1, criterion_modules=["/no/file.py:mine"])
    assert "/no/file.py:mine" in missing.listen()[1]
    missing = WorkerActor(TOKEN, [str(GOLDEN)], 1, custom_ops=["/no/ops.so"])
    assert missing.listen() == (
        "",
        "on the node 127.0.0.1: --custom-ops /no/ops.so: cannot be read: No such file or directory",
    )


def test_an_actor_that_cannot_listen_leaves_its_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    @contextmanager
    def libraries(paths: Sequence[Path]) -> Iterator[None]:
        said.append(f"enters {paths[0]}")
        yield
        said.append(f"leaves {paths[0]}")

    ray = types.ModuleType("ray")
    ray.util = types.SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")  # type: ignore[attr-defined]
    use(monkeypatch, ray)
    monkeypatch.setattr(actor, "libraries", libraries)
    _, problem = WorkerActor(TOKEN, [str(tmp_path / "no.ee")], 1, custom_ops=["/a.so"]).listen()
    assert "no.ee" in problem
    assert said == ["enters /a.so", "leaves /a.so"]


def test_paths_are_absolute_as_nodes_have_folders_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "criterion_modules", lambda: ("sub/mine.py:certainty",))
    needs = actor_needs([Path("model.ee")])
    assert needs.bundles == (f"{tmp_path}/model.ee",)
    assert needs.criterion_modules == (f"{tmp_path}/sub/mine.py:certainty",)


def test_resources_are_said_in_words() -> None:
    assert describe_resources({"GPU": 0.5, "CPU": 2.0}) == "2 CPU and 0.5 GPU"
    assert describe_resources({}) == "nothing"


def protocol_of(worker: WorkerActor) -> str | None:
    """Reach an actor that listens in this process, and give what encrypts the connection."""
    address, problem = worker.listen()
    assert not problem, problem
    where = WorkerAddress(
        address=parse_address(address), token=TOKEN.encode(), context=launcher.tls_context()
    )
    connected, _session = where.reach()
    with connected:
        return connected.version() if isinstance(connected, ssl.SSLSocket) else None


def test_connections_are_encrypted_where_those_of_ray_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ray = FakeRay(1)
    monkeypatch.setattr(ray, "get_node_ip_address", lambda: "127.0.0.1", raising=False)
    use(monkeypatch, ray)
    certificate, key = tmp_path / "pem", tmp_path / "key"
    line = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    line += f" -keyout {key} -out {certificate} -subj /CN=node -addext subjectAltName=IP:127.0.0.1"
    try:
        subprocess.run(line.split(), check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no openssl to make certificates with")
    assert protocol_of(WorkerActor(TOKEN, [], 1)) is None
    monkeypatch.setenv("RAY_USE_TLS", "1")
    assert WorkerActor(TOKEN, [], 1).listen() == (
        "",
        "on the node 127.0.0.1: RAY_USE_TLS is set, but RAY_TLS_SERVER_CERT is not; set it as well",
    )
    with pytest.raises(BackendError, match="RAY_USE_TLS is set, but RAY_TLS_SERVER_CERT is not"):
        launcher.tls_context()
    monkeypatch.setenv("RAY_TLS_SERVER_CERT", str(certificate))
    monkeypatch.setenv("RAY_TLS_SERVER_KEY", str(key))
    monkeypatch.setenv("RAY_TLS_CA_CERT", str(certificate))
    assert protocol_of(WorkerActor(TOKEN, [], 1)) == "TLSv1.3"
