"""The command line of eeserve."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.engines import engine_bundle
from tests.facts import Told, tells

from offramp.cluster.serving.cluster_options import NAME, ClusterOptions
from offramp.cluster.serving.worker_devices import LocalWorkers
from offramp.engine.common.errors import OptionsError
from offramp.engine.core import Engine
from offramp.engine.models.options import EngineOptions, ModelOptions, controller_names
from offramp.engine.scheduling.policies import POLICIES, PolicyName
from offramp.engine.stages.plan import Mode
from offramp.engine.tensorrt import probe
from offramp.server import cli
from offramp.server.arguments import make_parser, parse_arguments
from offramp.server.arguments.option_groups import MODES, POLICY_GROUPS, controller_words
from offramp.server.arguments.options import KeepaliveOptions, ServerOptions


def help_all() -> str:
    """The full help, on one line."""
    return " ".join(make_parser().format_help_all().split())


def test_one_bundle_is_enough() -> None:
    arguments = parse_arguments(["models/resnet.ee"])
    assert arguments.models == {"resnet": Path("models/resnet.ee")}
    assert arguments.engine == EngineOptions(mode=Mode.AUDIT)
    assert arguments.server == ServerOptions()
    assert (arguments.log_level, arguments.log_format) == ("info", "human")


def test_each_worker_is_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offramp.engine.models.options.available_cores", lambda: 8)
    engine = parse_arguments(["m.ee", "--workers", "4"]).engine
    assert (engine.devices, engine.streams) == (LocalWorkers(4), 4)
    assert engine.threads_per_stream() == 2
    assert parse_arguments(["m.ee", "--workers=0", "--streams=3"]).engine.streams == 3


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--workers 4 --streams 2", ("worker", "one stream", "omit streams")),
        ("--workers 2 --backend cuda", ("backend is cuda", "CPU", "give")),
        ("--workers 9999", ("workers is 9999", "at most 4096")),
        ("--workers=-1", ("--workers",)),
    ],
)
def test_workers_that_cannot_be_are_refused(
    options: str, told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["m.ee", *options.split()])
    tells(capsys.readouterr().err, *told)


def test_onnx_files_are_named_without_their_suffix() -> None:
    models = parse_arguments(["/a/net.v2.onnx", "/b/other.ee"]).models
    assert models == {"net.v2": Path("/a/net.v2.onnx"), "other": Path("/b/other.ee")}
    assert parse_arguments(["net.onnx", "--answer=scores"]).engine.of("net").answer == "scores"


def test_models_are_named_by_their_folder_or_by_hand() -> None:
    arguments = parse_arguments(["a/resnet.ee/", "b/bert", "--model", "vit=c/x=y.ee"])
    assert arguments.models == {
        "resnet": Path("a/resnet.ee"), "bert": Path("b/bert"), "vit": Path("c/x=y.ee"),
    }  # fmt: skip


def test_every_option_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offramp.engine.models.options.available_cores", lambda: 6)
    command = (
        "m.ee --host :: --grpc-port 0 --http-port 9 --mode audit --max-batch-size 8 "
        "--max-queue-delay-ms 1.5 --max-queue-samples 64 --slo-ms 250 --streams 2 --threads 3 "
        "--policy delay --forbid-forced-exits --parallel-below 5 --backend onnxruntime "
        "--max-disagreement 0.005 --confidence 0.99 --controller apparate --audit-budget 0.1 "
        "--ramp-budget 0.25 --no-state --profile-window-s 30 --no-padding --share-weights always "
        "--max-message-mib 128 --max-queue-mib 512 --max-concurrent-requests 99 --access-log "
        "--max-connections 9 --drain-delay-s 1 --shutdown-timeout-s 0 --log-level debug "
        "--log-format json"
    )
    arguments = parse_arguments(command.split())
    assert arguments.engine == EngineOptions(
        mode=Mode.AUDIT, backend="onnxruntime", streams=2, threads=3,
        parallel_below=5,
        keep_state=False, extensions={NAME: ClusterOptions(profile_window_s=30.0)},
        defaults=ModelOptions(
            scheduling=PolicyName("delay"), max_batch_size=8, max_queue_delay_ms=1.5,
            max_queue_samples=64, slo_ms=250.0, forced_exits=False,
            max_disagreement=0.005, confidence=0.99, controller="apparate", audit_budget=0.1,
            ramp_budget=0.25, padding=False, share_weights="always",
        ),
    )  # fmt: skip
    assert isinstance(arguments.engine.mode, Mode)
    assert arguments.server == ServerOptions(
        host="::",
        grpc_port=0,
        http_port=9,
        max_message_mib=128,
        max_queue_mib=512,
        max_concurrent_requests=99,
        access_log=True,
        max_connections=9,
        drain_delay_s=1.0,
        shutdown_timeout_s=0.0,
    )
    assert (arguments.log_level, arguments.log_format) == ("debug", "json")


def test_every_option_of_gpus_arrives() -> None:
    command = (
        "m.ee --backend tensorrt --device cuda:1 --precision fp16 --no-cuda-graphs "
        "--engine-build-minutes 6 --policy fixed:2"
    )
    assert parse_arguments(command.split()).engine == EngineOptions(
        mode=Mode.AUDIT, backend="tensorrt", device="cuda:1", precision="fp16", graphs=False,
        engine_build_minutes=6.0, defaults=ModelOptions(scheduling=PolicyName("fixed", 2)),
    )  # fmt: skip


def test_pings_are_set_by_the_names_of_triton() -> None:
    line = (
        "any.ee --grpc-keepalive-time-ms 1 --grpc-keepalive-timeout-ms 2 "
        "--no-grpc-keepalive-permit-without-calls --grpc-http2-max-pings-without-data 3 "
        "--grpc-http2-min-recv-ping-interval-without-data-ms 4 --grpc-http2-max-ping-strikes 5"
    )
    assert parse_arguments(line.split()).server.keepalive == KeepaliveOptions(
        grpc_keepalive_time_ms=1,
        grpc_keepalive_timeout_ms=2,
        grpc_keepalive_permit_without_calls=False,
        grpc_http2_max_pings_without_data=3,
        grpc_http2_min_recv_ping_interval_without_data_ms=4,
        grpc_http2_max_ping_strikes=5,
    )


def test_a_self_check_takes_the_options_of_serving() -> None:
    arguments = parse_arguments(["m.ee", "--self-check", "--json", "found.json", "--streams", "1"])
    assert arguments.self_check
    assert arguments.json == Path("found.json")
    assert not parse_arguments(["m.ee"]).self_check


def test_late_samples_may_set_the_limit_of_parallel_batches() -> None:
    assert parse_arguments(["m.ee", "--max-violations", "0.01"]).engine == EngineOptions(
        mode=Mode.AUDIT, max_violations=0.01
    )


@pytest.mark.parametrize("mode", Mode)
def test_every_mode_is_understood_and_described(mode: Mode) -> None:
    engine = parse_arguments(["m.ee", "--mode", mode.value]).engine
    assert engine == EngineOptions(mode=mode)
    assert isinstance(engine.mode, Mode)
    assert f" {mode.value} {MODES[mode]}" in help_all()


def test_every_controller_is_described() -> None:
    assert tuple(controller_words()) == controller_names()
    for name, text in controller_words().items():
        assert f" {name} {text}" in help_all()


def test_a_file_may_set_what_a_mode_ignores(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('[defaults]\ncontroller = "static"\n[models.m]\npath = "m"')
    engine = parse_arguments(["--config", str(file), "--mode", "off"]).engine
    assert (engine.mode, engine.defaults.controller) == (Mode.OFF, "static")


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("", ("no model", "bundle")),
        ("a/m.ee b/m.ee", ("two models", "'m'", "a/m.ee and b/m.ee", "rename one")),
        ("m.ee --model m=x", ("two models", "'m'")),
        ("--model m", ("'m'", "NAME=PATH")),
        ("--model =m", ("'=m'", "NAME=PATH")),
        ("m.ee --grpc-port 65536", ("'65536'", "from 0 to 65535")),
        ("m.ee --grpc-port x", ("--grpc-port", "'x'", "whole number")),
        ("m.ee --grpc-port 7 --http-port 7", ("--grpc-port and --http-port", "7")),
        ("m.ee --max-batch-size 0", ("'0'", "whole number from 1 on")),
        ("m.ee --max-batch-size 1.5", ("'1.5'", "whole number from 1 on")),
        ("m.ee --max-queue-delay-ms -1", ("'-1'", "number from 0 on")),
        ("m.ee --max-queue-delay-ms nan", ("'nan'", "number from 0 on")),
        ("m.ee --slo-ms 0", ("'0'", "number above 0")),
        ("m.ee --policy slackfi", ("'slackfi'", "'slackfit'", "run-through")),
        ("m.ee --policy fixed", ("'fixed'", "expected an exit")),
        ("m.ee --max-violations 1", ("'1'", "share", "above 0 and below 1")),
        ("m.ee --parallel-below 2 --max-violations 0.1", ("parallel_below, or max_violations",)),
        ("m.ee --forbid-forced-exits=False", ("argument 'False'",)),
        ("m.ee --backend onnxruntime --streams 4096", ("4096 streams × 1 threads",)),
        ("m.ee --shutdown-timeout-s inf", ("'inf'", "number from 0 on")),
        ("m.ee --max-queue-mib 63", ("--max-queue-mib 63", "--max-message-mib 64")),
        ("m.ee --max-message-mib 1025", ("--max-queue-mib 1025 or more",)),
        ("m.ee --max-connections 1099511627776", ("whole number from 1 to 2147483647",)),
        ("m.ee --max-queue-mib 2147483648", ("whole number from 1 to 2147483647",)),
        ("m.ee --max-concurrent-requests 0", ("'0'", "whole number from 1 to 2147483647")),
        ("m.ee --max-concurrent-requests 2147483648", ("whole number from 1 to 2147483647",)),
        ("m.ee --max-message-mib 2048", ("'2048'", "whole number from 1 to 2047")),
        ("m.ee --mode on", ("choose from", "leave", "audit", "release", "off")),
        ("m.ee --controller best", ("invalid choice: 'best'",)),
        ("m.ee --share-weights yes", ("--share-weights: invalid choice: 'yes'",)),
        ("m.ee --max-disagreement 1", ("'1'", "share", "above 0 and below 1")),
        ("m.ee --confidence 95", ("'95'", "share")),
        ("m.ee --ramp-budget -1", ("'-1'", "number from 0 on")),
        ("m.ee --profile-window-s 0.5", ("'0.5'", "number from 1 on")),
        ("m.ee --profile-window-s 1e6", ("profile_window_s is 1000000.0", "from 1 to 86400")),
        ("m.ee --self-check --json /", ("--json /", "folder", "name a file")),
        ("m.ee --self-check --json no/x.json", ("no/x.json", "no folder no")),
        ("m.ee --port 8", ("--port", "--grpc-port or --http-port")),
        ("m.ee --batch 8", ("--batch", "--max-batch-size")),
    ],
)
def test_what_is_wrong_is_told_at_once(
    command: str, reason: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_arguments(command.split())
    assert caught.value.code == 2
    tells(re.sub(r"[()]", "", capsys.readouterr().err), *reason)


@pytest.mark.parametrize("name", ["max_connections", "max_concurrent_requests", "max_queue_mib"])
@pytest.mark.parametrize("count", [0, 2**31, 2**40])
def test_counts_that_no_system_takes_are_refused(name: str, count: int) -> None:
    with pytest.raises(ValueError, match=f"^{name} {count} is not in 1 to 2147483647$"):
        ServerOptions(**{name: count})


def test_help_names_every_option_and_its_default() -> None:
    words = help_all()
    for option, default in {
        "--host": "127.0.0.1", "--grpc-port": "8001", "--http-port": "8000", "--mode": "audit",
        "--max-batch-size": "32", "--max-queue-delay-ms": "0, none", "--max-queue-samples": "4096",
        "--slo-ms": "none", "--streams": "1", "--policy": "run-through", "--backend": "auto",
        "--max-message-mib": "64", "--max-queue-mib": "1024", "--max-concurrent-requests": "8192",
        "--drain-delay-s": "5", "--shutdown-timeout-s": "30", "--max-connections": "1024",
        "--log-level": "info",
        "--log-format": "human", "--confidence": "0.95", "--controller": "certified",
        "--audit-budget": "0.05", "--device": "cuda:0", "--share-weights": "auto",
        "--max-disagreement": "as compiled", "--threads": "an equal share",
        "--precision": "the lowest that was built", "--workers": "0, the server runs them itself",
    }.items():  # fmt: skip
        assert re.search(rf"{option} .*?\(default: {re.escape(default)}[,)]", words), option


def test_help_says_what_every_policy_does() -> None:
    described = [name.partition(":")[0] for group in POLICY_GROUPS.values() for name in group]
    assert sorted(described) == sorted(POLICIES)
    for group in POLICY_GROUPS.values():
        for name, text in group.items():
            assert f" {name} {text}" in help_all()


def test_a_policy_that_does_not_fit_its_model_is_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    restored_logging: None,
) -> None:
    async def refuse(*_: object) -> None:
        raise OptionsError("m: policy fixed:9: exit 9 is not in use here")

    monkeypatch.setattr(Engine, "open", refuse)
    status = cli.main(["m.ee", "--policy=fixed:9", "--grpc-port=0", "--http-port=0"])
    assert status == 1
    tells(capsys.readouterr().err, "eeserve: m", "fixed:9", "exit 9")


def test_a_named_path_without_its_option_is_told_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine_bundle("residual", tmp_path / "m.ee")
    named = f"fashion={tmp_path / 'm.ee'}"
    with pytest.raises(SystemExit) as ended:
        cli.main([named])
    assert ended.value.code == 2
    assert f"is given as --model {named}" in " ".join(capsys.readouterr().err.split())


def test_a_bundle_that_is_not_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], restored_logging: None
) -> None:
    status = cli.main([str(tmp_path / "absent.ee"), "--grpc-port", "0", "--http-port", "0"])
    (line,) = capsys.readouterr().err.splitlines()
    assert status == 1
    assert line.startswith("eeserve: ")
    assert str(tmp_path / "absent.ee") in line


def test_a_server_that_cannot_have_its_backend_says_so_in_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    restored_logging: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "_LIBRARY", "libcuda-that-is-not-there.so.1")
    engine_bundle("residual", tmp_path / "m.ee")
    ports = ["--grpc-port=0", "--http-port=0"]
    assert cli.main([str(tmp_path / "m.ee"), "--backend=tensorrt", *ports]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    tells(line, "eeserve: TensorRT", "cuda:0", "NVIDIA driver")


def test_streams_are_held_against_cores_once_the_cpu_is_what_runs(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    restored_logging: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "_LIBRARY", "libcuda-that-is-not-there.so.1")
    engine_bundle("residual", tmp_path / "m.ee")
    ports = ["--grpc-port=0", "--http-port=0", "--log-level=error"]
    assert cli.main([str(tmp_path / "m.ee"), "--streams=4096", *ports]) == 1
    told = capsys.readouterr().err
    tells(told, "eeserve: 4096 streams × 1 threads")


@pytest.mark.parametrize(
    ("control", "status", "told"),
    [
        (
            "none", 2,
            ("'fashoin' in ", "did you mean 'fashion'? (expected: fashion, named)", "correct"),
        ),
        ("poll", 1, ("WARNING", "'fashoin' in ", "yet", "no effect; did you mean 'fashion'?")),
        ("explicit", 1, ("WARNING", "'fashoin' in ", "yet", "no effect; did you mean 'fashion'?")),
    ],
)  # fmt: skip
def test_a_table_of_no_model_is_refused_or_warned_of(
    tmp_path: Path,
    control: str,
    status: int,
    told: Told,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    restored_logging: None,
) -> None:
    async def refuse(*_: object) -> None:
        raise OptionsError("the models are opened")

    monkeypatch.setattr(Engine, "open", refuse)
    (tmp_path / "models" / "fashion" / "1.ee").mkdir(parents=True)
    file, more = tmp_path / "serve.toml", [f"--model-repository={tmp_path / 'models'}"]
    more += [f"--model-control={control}", "--grpc-port=0", "--http-port=0", "--model=named=m.ee"]
    right = "[models.fashion]\nslo_ms = 3\n[models.named]\nslo_ms = 3\n"
    file.write_text(f"{right}[models.fashoin]\nslo_ms = 3")
    assert cli.main([f"--config={file}", *more]) == status
    wrong = capsys.readouterr().err
    tells(wrong, *told)
    assert ("the models are opened" in wrong) == (status == 1)
    file.write_text(right)
    assert cli.main([f"--config={file}", *more]) == 1
    assert capsys.readouterr().err == "eeserve: the models are opened\n"
