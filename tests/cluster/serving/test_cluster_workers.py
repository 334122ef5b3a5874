"""The workers of a cluster: read with the files they need, and made launchers of."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.facts import Told, facts

from offramp.cluster.planning.cluster_file import ClusterFileError
from offramp.cluster.planning.cluster_plan import PlanError
from offramp.cluster.planning.ray_entry import RayEntry
from offramp.cluster.remote.launching import ON_THE_CPU, WorkerRuntime
from offramp.cluster.remote.process import WorkerCommand
from offramp.cluster.remote.tcp import HostPort
from offramp.cluster.remote.tcp_launcher import TcpLauncher
from offramp.cluster.serving.cluster_workers import (
    ClusterWorkers,
    WorkerPlace,
    read_cluster_workers,
)
from offramp.engine.models.options import EngineOptions

DEVICES = """
[devices.gpu]
count = 4
cost_per_hour = 1
speed = 1
"""
LOCAL = '[[workers]]\ndevice = "gpu"\n'
REMOTE = LOCAL + 'address = "127.0.0.1:7070"\n'
FAR = LOCAL + 'address = "10.0.0.2:7070"\n'
ROUTER = '[router]\ntoken_file = "token"\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("a-token-of-16-bytes\n")
    return tmp_path


def read(folder: Path, text: str) -> ClusterWorkers:
    (folder / "cluster.toml").write_text(DEVICES + text)
    return read_cluster_workers(folder / "cluster.toml")


def test_each_worker_has_a_launcher(folder: Path) -> None:
    workers = read(folder, LOCAL + "count = 2\n" + REMOTE + ROUTER)
    here = WorkerPlace(device_type="gpu", address=None)
    there = WorkerPlace(device_type="gpu", address=HostPort("127.0.0.1", 7070))
    assert workers.places == (here, here, there)
    assert (workers.local, workers.token, workers.tls) == (2, b"a-token-of-16-bytes", None)
    assert "a-token" not in repr(workers)
    launchers = workers.launchers(WorkerCommand())
    assert [launcher.device_type for launcher in launchers] == ["gpu"] * 3
    assert [launcher.describe() for launcher in launchers] == [
        *["a process on this host"] * 2,
        "another process at 127.0.0.1:7070, not encrypted",
    ]


ON_GPUS = LOCAL + 'count = 2\nbackend = "tensorrt"\n'


def test_workers_on_gpus_are_told_which(folder: Path) -> None:
    far = REMOTE.replace('"gpu"', '"gpu:3"') + 'backend = "cuda"\n'
    workers = read(folder, LOCAL + ON_GPUS + far + ROUTER)
    launchers = workers.launchers(WorkerCommand())
    assert [launcher.device_type for launcher in launchers] == ["gpu"] * 4
    assert [launcher.runtime for launcher in launchers] == [
        ON_THE_CPU,
        WorkerRuntime(backend="tensorrt", device="cuda:0"),
        WorkerRuntime(backend="tensorrt", device="cuda:1"),
        WorkerRuntime(backend="cuda", device="cuda:3"),
    ]
    assert [launcher.describe() for launcher in launchers] == [
        "a process on this host",
        "a process on this host, tensorrt on cuda:0",
        "a process on this host, tensorrt on cuda:1",
        "another process at 127.0.0.1:7070, not encrypted, cuda on cuda:3",
    ]


def test_workers_on_gpus_run_engines_in_fp32_alone(folder: Path) -> None:
    workers = read(folder, ON_GPUS)
    assert EngineOptions(devices=workers, precision="fp32").streams == 2
    with pytest.raises(ValueError, match=facts("precision is fp16", "GPUs")):
        EngineOptions(devices=workers, precision="fp16")
    with pytest.raises(ValueError, match=facts("'cuda:0,cuda:1'", "workers have their own GPUs")):
        EngineOptions(devices=workers, device="cuda:0,cuda:1")


def test_ray_starts_no_workers_on_gpus(folder: Path) -> None:
    with pytest.raises(ClusterFileError, match=facts("1 backend = 'tensorrt'", "Ray")):
        read(folder, ON_GPUS + '[router]\nlaunch = "ray"')


def test_what_runs_may_give_is_bound(folder: Path) -> None:
    assert read(folder, REMOTE + ROUTER).most_result_bytes == 1 << 30
    workers = read(folder, REMOTE + ROUTER + "most_result_mib = 3")
    assert workers.most_result_bytes == 3 << 20
    (launcher,) = workers.launchers(WorkerCommand())
    assert isinstance(launcher, TcpLauncher)
    assert launcher._address.most_result_bytes == 3 << 20


def test_processes_on_this_host_need_no_token(folder: Path) -> None:
    assert read(folder, LOCAL).token == b""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", ("cluster.toml [[workers]]", "at least one")),
        (REMOTE, ("[router]", "token_file", "secret")),
        (REMOTE + '[router]\ntoken_file = "no"', ("token_file", "/no", "No such file")),
        (REMOTE + '[router]\ntoken_file = "short"', ("5 bytes", "16 to")),
        (REMOTE + '[router]\ntoken_file = "two"', ("several words", "16 to")),
        (REMOTE.replace(":7070", "") + ROUTER, ("1 address", "'127.0.0.1'", "expected")),
        (FAR + ROUTER, ("tls_ca", "10.0.0.2:7070", "unencrypted", "set the")),
        (REMOTE + ROUTER + 'tls_ca = "token"', ("authorities", "/token", "expected")),
    ],
)
def test_what_is_wrong_is_said_in_a_line(folder: Path, text: str, told: Told) -> None:
    (folder / "short").write_text("short")
    (folder / "two").write_text("two words of which none is the token")
    with pytest.raises(ClusterFileError, match=facts(*told)) as caught:
        read(folder, text)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(folder / "cluster.toml"))


def test_a_network_that_is_trusted_needs_no_tls(folder: Path) -> None:
    assert read(folder, FAR + ROUTER + "insecure = true").tls is None


RAY = DEVICES + 'resources = { CPU = 2, gadget = 1 }\n[router]\nlaunch = "ray"\n'


def test_ray_starts_what_has_no_address(folder: Path) -> None:
    (folder / "cluster.toml").write_text(RAY + 'ray_address = "10.0.0.1:6379"\nleast = 3')
    workers = read_cluster_workers(folder / "cluster.toml")
    actor = WorkerPlace(device_type="gpu", address=None, resources={"CPU": 2.0, "gadget": 1.0})
    assert workers.places == (actor,) * 4, "as many as there are devices"
    assert workers.ray == RayEntry(address="10.0.0.1:6379", least=3)
    assert (workers.local, EngineOptions(devices=workers).streams) == (0, 4)


def test_ray_starts_the_workers_that_are_named(folder: Path) -> None:
    workers = read(folder, LOCAL + "count = 2\n" + REMOTE + ROUTER + 'launch = "ray"')
    assert [place.resources for place in workers.places] == [{"CPU": 1.0}, {"CPU": 1.0}, None]
    assert workers.ray == RayEntry(), "all have to be there"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (RAY + "least = 5", ("[router] least = 5", "4 workers", "lower")),
        (RAY + "least = 0", ("[router] least = 0", "whole number from 1")),
        (RAY + "ray_address = 1", ("[router] ray_address = 1", '"10.0')),
        (RAY.replace('"ray"', '"slurm"'), ("launch = 'slurm'", "process, ray")),
        (RAY.replace('launch = "ray"', ""), ('launch = "ray"', "[devices.gpu]", "resources")),
        (DEVICES + "[router]\nleast = 1", ("least", 'launch = "ray"')),
        (RAY.replace("CPU = 2", "CPU = 2.5"), ("[devices.gpu] resources", "CPU = 2.5")),
        (RAY.replace("CPU = 2", "CPU = 0"), ("resources", "CPU = 0", "above 0")),
        (RAY.replace("{ CPU = 2, gadget = 1 }", "{}"), ("resources = {}", "expected")),
        (RAY.replace("gadget =", '"" ='), ("resources", "''", "expected")),
    ],
)
def test_what_ray_cannot_be_told_is_said_in_a_line(folder: Path, text: str, told: Told) -> None:
    (folder / "cluster.toml").write_text(text)
    with pytest.raises(ClusterFileError, match=facts(*told)) as caught:
        read_cluster_workers(folder / "cluster.toml")
    assert "\n" not in str(caught.value)


def test_each_worker_is_a_stream_and_only_those_here_take_cores(folder: Path) -> None:
    workers = read(folder, LOCAL + REMOTE + ROUTER)
    options = EngineOptions(devices=workers, backend="onnxruntime")
    assert options.streams == 2
    assert options.threads_per_stream() == EngineOptions(streams=1).threads_per_stream()
    with pytest.raises(ValueError, match=facts("streams is 3", "2 workers")):
        EngineOptions(devices=workers, streams=3)


def test_a_worker_may_have_several_batches_at_a_time(folder: Path) -> None:
    workers = read(folder, LOCAL + "count = 2\n[router]\nbatches_per_worker = 2\n")
    assert (workers.count, workers.local, workers.elsewhere) == (4, 2, False)
    assert len(workers.launchers(WorkerCommand())) == 2
    options = EngineOptions(devices=workers, threads=1)
    assert options.streams == 4
    with pytest.raises(ClusterFileError, match=r"\[router\] batches_per_worker = 9, expected"):
        read(folder, LOCAL + "[router]\nbatches_per_worker = 9\n")


def test_a_plan_is_read_with_the_workers(folder: Path) -> None:
    (folder / "cluster.toml").write_text(DEVICES + LOCAL)
    (folder / "plan.json").write_text("{}")
    with pytest.raises(
        PlanError, match=facts("plan.json", "schema None", "expected 1", "plan again")
    ):
        read_cluster_workers(folder / "cluster.toml", folder / "plan.json")
    with pytest.raises(PlanError, match=facts("absent.json", "No such file")):
        read_cluster_workers(folder / "cluster.toml", folder / "absent.json")
