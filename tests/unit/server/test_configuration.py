"""The configuration file of eeserve."""

from __future__ import annotations

import os
import threading
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from tests.facts import Told, facts, tells

from offramp.cluster.serving.cluster_options import cluster_options
from offramp.cluster.serving.cluster_workers import ClusterWorkers
from offramp.cluster.serving.worker_devices import LocalWorkers
from offramp.engine.models.learning_options import LearnOptions
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.scheduling.policies import PolicyName
from offramp.engine.stages.plan import Mode
from offramp.server.arguments import Arguments, parse_arguments
from offramp.server.arguments.configuration import (
    Configuration,
    ConfigurationError,
    read_configuration,
)

SLACKFIT = PolicyName("slackfit")

FILE = """
[engine]
streams = 2
threads = 1
[defaults]
policy = "refill"
slo_ms = 100
[models.fashion]
path = "fashion.ee"
policy = "slackfit"
slo_ms = 20
max_batch_size = 16
forced_exits = false
weight = 2
[models."text/1"]
path = "/models/text.ee"
"""


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the number of cores, so that limits are equal on every machine."""
    monkeypatch.setattr("offramp.engine.models.options.available_cores", lambda: 4)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path, FILE)


def write(folder: Path, text: str) -> Path:
    file = folder / "serve.toml"
    file.write_text(text)
    return file


def options(text: str, folder: Path) -> EngineOptions:
    return read_configuration(write(folder, text)).options(engine={}, defaults={})


def arguments(file: Path, *others: str) -> Arguments:
    return parse_arguments(["--config", str(file), *others])


def test_each_model_has_its_own_settings_over_the_common_ones(file: Path) -> None:
    read = arguments(file)
    common = ModelOptions(scheduling=PolicyName("refill"), slo_ms=100)
    assert read.engine == EngineOptions(
        mode=Mode.AUDIT,
        streams=2,
        threads=1,
        defaults=common,
        models={
            "fashion": ModelOptions(
                scheduling=SLACKFIT, slo_ms=20, max_batch_size=16, forced_exits=False, weight=2
            )
        },
    )
    assert read.engine.of("text/1") == common
    assert read.models == {"fashion": file.parent / "fashion.ee", "text/1": Path("/models/text.ee")}


def test_learning_has_a_table_of_its_own(tmp_path: Path) -> None:
    settings = 'samples = 7000\nfolder = "there"\nmax_gib = 2\nkeep = true'
    file = write(tmp_path, f'[learning]\n{settings}\n[models.m]\npath = "m.onnx"\nlearn = false')
    expected = LearnOptions(samples=7000, folder=tmp_path / "there", max_gib=2.0, keep=True)
    read = arguments(file).engine
    assert (read.learning, read.of("m").learn, read.defaults.learn) == (expected, False, True)
    overruled = arguments(file, "--learn", "--learn-samples=8000", "--learn-folder=here").engine
    assert overruled.learning == replace(expected, samples=8000, folder=Path("here"))
    assert arguments(write(tmp_path, "[learning]"), "m.onnx").engine.learning == LearnOptions()
    assert arguments(write(tmp_path, ""), "m.onnx").engine.learning is None
    assert arguments(write(tmp_path, ""), "m.onnx", "--learn").engine.learning == LearnOptions()


def test_the_command_line_goes_before_engine_and_defaults_and_after_a_model(file: Path) -> None:
    read = arguments(file, "--streams=1", "--slo-ms=50", "--max-batch-size=8")
    assert (read.engine.streams, read.engine.threads) == (1, 1)
    assert read.engine.defaults == ModelOptions(
        scheduling=PolicyName("refill"), slo_ms=50, max_batch_size=8
    )
    assert read.engine.of("fashion").slo_ms == 20
    assert read.engine.of("fashion").max_batch_size == 16
    assert read.engine.of("text/1").slo_ms == 50


def test_a_default_named_on_the_command_line_goes_before_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, '[defaults]\nmax_batch_size = 8\n[models.m]\npath = "m"')
    default = ModelOptions().max_batch_size
    assert arguments(file, f"--max-batch-size={default}").engine.defaults == ModelOptions()


def test_models_of_both_are_served(file: Path) -> None:
    read = arguments(file, "other.ee", "--model", "third=x")
    assert list(read.models) == ["other", "third", "fashion", "text/1"]
    assert read.engine.of("other") == read.engine.defaults


def test_two_models_of_one_name_are_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(file, "a/fashion.ee")
    told = capsys.readouterr().err
    tells(told, "'fashion'", f"a/fashion.ee and {file.parent / 'fashion.ee'}", "rename one of them")


@pytest.mark.parametrize(
    ("text", "flag", "expected"),
    [
        ("parallel_below = 4", "--max-violations=0.1", {"max_violations": 0.1}),
        ("max_violations = 0.1", "--parallel-below=4", {"parallel_below": 4}),
        ("max_violations = 0.1", "--max-violations=0.2", {"max_violations": 0.2}),
    ],
)
def test_of_two_alternatives_the_command_lines_is_taken(
    tmp_path: Path, text: str, flag: str, expected: dict[str, Any]
) -> None:
    file = write(tmp_path, f'[engine]\n{text}\n[models.m]\npath = "m"')
    assert arguments(file, flag).engine == EngineOptions(mode=Mode.AUDIT, **expected)


def test_a_cluster_file_is_found_next_to_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(
        "[devices.cpu]\ncount = 1\ncost_per_hour = 0\nspeed = 1\n[[workers]]\ndevice = 'cpu'\n"
    )
    file = write(tmp_path, '[engine]\ncluster = "cluster.toml"\n[models.m]\npath = "m"')
    found = arguments(file).engine
    assert isinstance(found.devices, ClusterWorkers)
    assert [place.device_type for place in found.devices.places] == ["cpu"]
    assert arguments(file, "--cluster", str(tmp_path / "cluster.toml")).engine == found
    with pytest.raises(ConfigurationError, match=r"\[engine\] cluster: .*no.toml: cannot be read"):
        options('[engine]\ncluster = "no.toml"', tmp_path)


def test_an_empty_file_leaves_all_open(tmp_path: Path) -> None:
    default = EngineOptions(mode=Mode.AUDIT)
    assert options("", tmp_path) == default
    assert Configuration().options(engine={}, defaults={}) == default


VALUES = {
    "answer": ('"scores"', "scores"),
    "task": ('"regression"', "regression"),
    "scheduling": ('"fixed:2"', PolicyName("fixed", 2)), "max_batch_size": ("3", 3),
    "max_queue_delay_ms": ("2", 2.0), "max_queue_samples": ("7", 7), "slo_ms": ("1.5", 1.5),
    "forced_exits": ("false", False), "weight": ("3", 3.0), "mode": ('"off"', Mode.OFF),
    "backend": ('"onnxruntime"', "onnxruntime"), "streams": ("2", 2), "threads": ("3", 3),
    "parallel_below": ("5", 5), "max_violations": ("0.25", 0.25),
    "engine_build_minutes": ("6", 6.0),
    "uncertified_exits": ("true", True),
    "controller": ('"apparate"', "apparate"), "max_disagreement": ("0.02", 0.02),
    "confidence": ("0.99", 0.99), "audit_budget": ("0.1", 0.1), "ramp_budget": ("1", 1.0),
    "trust_inputs": ("true", True), "max_source_share": ("0.25", 0.25),
    "never_beyond_compiled": ("true", True), "padding": ("false", False),
    "keep_state": ("false", False), "device": ('"cuda:1"', "cuda:1"), "graphs": ("false", False),
    "learn": ("false", False),
    "precision": ('"fp16"', "fp16"), "share_weights": ('"always"', "always"),
}  # fmt: skip
"""For each field, a value that is not its default: in the file, and read."""


@pytest.mark.parametrize(
    ("table", "kind", "field"),
    [
        *(("defaults", ModelOptions, field.name) for field in fields(ModelOptions)),
        *(
            ("engine", EngineOptions, field.name)
            for field in fields(EngineOptions)
            if field.name not in ("defaults", "models", "devices", "extensions", "learning")
        ),
    ],
)
def test_every_option_has_a_key(
    tmp_path: Path, table: str, kind: type[EngineOptions | ModelOptions], field: str
) -> None:
    text, value = VALUES[field]
    key = "policy" if field == "scheduling" else field
    read = options(f"[{table}]\n{key} = {text}", tmp_path)
    found = getattr(read if kind is EngineOptions else read.defaults, field)
    assert (found, type(found)) == (value, type(value))
    assert found != getattr(kind(), field)


def test_extensions_have_keys_too(tmp_path: Path) -> None:
    found = options("[engine]\nworkers = 2\nprofile_window_s = 30", tmp_path)
    assert (found.devices, found.streams) == (LocalWorkers(2), 2)
    assert cluster_options(found).profile_window_s == 30.0
    for text, told in (
        ("workers = -1", ("workers is -1", "at least 0")),
        ("workers = 2\nstreams = 3", ("streams is 3", "2 workers")),
        ('workers = 2\ncluster = "c.toml"', ("workers is 2", "cluster")),
        ('workers = 2\nbackend = "tensorrt"', ("backend is tensorrt",)),
        ('ray_address = "h:1"', ("'ray_address'",)),
    ):
        with pytest.raises(ConfigurationError, match=facts("[engine]", *told)):
            options(f"[engine]\n{text}", tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[model.x]", ("'model'", "'models'", "expected: engine, learning")),
        ("models = 3", ("[models] is 3 (an integer)", "table")),
        ('[models]\nx = "x.ee"', ('[models.x] is "x.ee" (a string)', "table")),
        ('[models.""]\npath = "x"', ("[models.]", "name", "[models.res")),
        ("[models.x]\npath = 3", ("[models.x] path is 3 (an integer)", "string")),
        ('[models.x]\npath = "x"\nslo = 3', ("[models.x]", "'slo'", "'slo_ms'")),
        ('[models.x]\npath = "x"\nweight = 0', ("[models.x]", "weight is 0.0", "above 0")),
        ("[learning]\nsample = 3", ("[learning]", "'sample'", "'samples'")),
        ("[learning]\nsamples = 0", ("[learning]", "samples 0", "1 to")),
        ("[learning]\nfolder = 3", ("[learning] folder is 3 (an integer)", "string")),
        ("[engine]\nstream = 3", ("[engine]", "'stream'", "'streams'")),
        ("[engine]\nstreams = true", ("[engine] streams is true (a boolean)", "whole number")),
        ("[engine]\nstreams = 2.0", ("[engine] streams is 2.0 (a float)", "whole number")),
        ("[engine]\nstreams = 0", ("[engine]", "streams is 0", "at least 1")),
        (
            '[engine]\nbackend = "onnxruntime"\nstreams = 8',
            ("[engine]", "8 streams × 1 threads", "4 cores"),
        ),
        ("[engine]\ndevices = 8", ("[engine]", "'devices'")),
        ("[engine]\ndefaults = 8", ("[engine]", "'defaults'", "expected: mode, backend")),
        ("[engine]\nmax_violations = nan", ("[engine]", "max_violations is nan", "share")),
        ("[engine]\nparallel_below = 2\nmax_violations = 0.1", ("[engine]", "parallel_below, or")),
        ('[engine]\nmode = "on"', ("[engine] mode", "'on'", "leave, audit,")),
        ('[engine]\nbackend = "onnx"', ("'onnx'", "auto, tensorrt, cuda, openvino, onnxruntime")),
        ('[defaults]\ncontroller = "apparat"', ("'apparat'", "certified, apparate, pame, static")),
        (
            "[defaults]\nconfidence = 95",
            ("[defaults]", "confidence is 95.0", "above 0 and below 1"),
        ),
        ("[defaults]\nmax_disagreement = 0", ("max_disagreement is 0.0", "above 0 and below 1")),
        ('[models.x]\npath = "x"\naudit_budge = 0', ("'audit_budge'", "'audit_budget'")),
        ("[defaults]\nmode = 'off'", ("[defaults]", "'mode'")),
        ('[defaults]\npolicy = "slackfi"', ("[defaults] policy", "'slackfi'", "'slackfit'")),
        ("[defaults]\npolicy = ['delay']", ('[defaults] policy is ["delay"] (an array)',)),
        ('[defaults]\nforced_exits = "False"', ('"False" (a string)', "true or false")),
        ("[defaults]\nforced_exits = 0", ("forced_exits is 0 (an integer)", "true or false")),
        ("[defaults]\nslo_ms = true", ("[defaults] slo_ms is true (a boolean)", "number")),
        ('[defaults]\nslo_ms = "20"', ('[defaults] slo_ms is "20" (a string)', "number")),
        ("[defaults]\nslo_ms = 1979-05-27", ('"1979-05-27" (a date or time)', "number")),
        ("[defaults]\nslo_ms = inf", ("[defaults]", "slo_ms is inf", "above 0")),
        ("[defaults]\nslo_ms =", ("TOML", "Invalid value (at end of document)")),
    ],
)
def test_what_is_wrong_is_one_line_that_names_it(
    tmp_path: Path, text: str, reason: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigurationError, match=facts(*reason)):
        options(text, tmp_path)
    with pytest.raises(SystemExit) as caught:
        arguments(tmp_path / "serve.toml", "m.ee")
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"eeserve: {tmp_path / 'serve.toml'}: ")
    tells(line, *reason)


def test_a_table_without_a_path_is_about_a_model_of_the_repository(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, "[models.net]\nmax_batch_size = 16")
    given = arguments(file, f"--model-repository={tmp_path}")
    assert given.models == {}
    assert given.engine.of("net").max_batch_size == 16
    assert given.engine.of("other").max_batch_size != 16
    with pytest.raises(SystemExit):
        arguments(file, "m.ee")
    tells(capsys.readouterr().err, "[models.net]", "has no path", "--model-repository")


def test_the_command_line_mends_what_would_not_go_together(tmp_path: Path) -> None:
    file = write(tmp_path, '[engine]\nbackend = "onnxruntime"\nstreams = 8\n[models.m]\npath = "m"')
    assert arguments(file, "--streams=4").engine.streams == 4


def test_what_goes_wrong_only_together_names_both(tmp_path: Path) -> None:
    file = read_configuration(write(tmp_path, '[engine]\nbackend = "onnxruntime"\nstreams = 2'))
    with pytest.raises(ConfigurationError, match=r"\[engine\] with the command line: 2 streams"):
        file.options(engine={"threads": 3}, defaults={})


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("absent.toml", None, ("No such file or directory",)),
        (".", None, ("Is a directory",)),
        ("latin.toml", b"# \xe9", ("UTF-8", "TOML")),
    ],
)
def test_files_that_cannot_be_read_are_named(
    tmp_path: Path, name: str, content: bytes | None, reason: Told
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=facts(f"{file!s}:", *reason)):
        read_configuration(file)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[defaults]\nslo_ms = " + "9" * 400, ("slo_ms", "int too large to convert to float")),
        ("[defaults]\nslo_ms = 1e999", ("slo_ms is inf", "above 0")),
        ("[defaults]\nslo_ms = nan", ("slo_ms is nan", "above 0")),
        ("[defaults]\nmax_batch_size = " + "9" * 20, ("at most 65536",)),
        ("[defaults]\nslo_ms = 1979-02-30", ("is not TOML: ",)),
        (f"[defaults]\n{'x' * 1_000} = 1", ("there is no key 'xxx",)),
        (f"[defaults]\npolicy = '{'x' * 1_000}'", ("there is no policy 'xxx",)),
        (f"[defaults]\nslo_ms = '{'x' * 1_000}'", ('"xxx',)),
    ],
)
def test_long_values_are_one_short_line(
    tmp_path: Path, text: str, reason: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        arguments(write(tmp_path, text))
    assert stopped.value.code == 2
    line = capsys.readouterr().err
    tells(line, *reason)
    assert line.count("\n") == 1
    assert len(line) < 700


def test_a_pipe_may_be_the_configuration_file(tmp_path: Path) -> None:
    """The case is ``eeserve --config <(envsubst < serve.toml)``."""
    place = tmp_path / "pipe"
    os.mkfifo(place)
    text = b'[models.m]\npath = "/m.ee"\n'
    writer = threading.Thread(target=place.write_bytes, args=(text,))
    writer.start()
    assert read_configuration(place).models["m"].path == Path("/m.ee")
    writer.join()
