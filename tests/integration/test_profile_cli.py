"""``eecompile profile`` on a tiny model: what is measured replaces the profile alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests import models
from tests.bundles import compile_tiny
from tests.cuda_fakes import fake_cuda
from tests.facts import Told, tells
from tests.integration.test_compile_tiny import images

from offramp.bundle import Bundle
from offramp.calibration.measure import profiling
from offramp.cluster.planning.cluster_file import parse_cluster
from offramp.cluster.planning.cluster_times import make_cluster, times_of
from offramp.cluster.serving.planning_files import read_profiles
from offramp.compiler.commands.cli import main
from offramp.compiler.steps import profile
from offramp.engine.backends import Backend
from offramp.engine.models.profile_check import predicted_savings


def fake_times(patched: pytest.MonkeyPatch, slowdown: float, border: float) -> None:
    """A machine on which graphs take 1 ms a row, and a model in stages ``border`` more a stage."""

    def time_ms(_self: object, tensors: dict[str, np.ndarray]) -> float:
        return slowdown * len(next(iter(tensors.values())))

    def staged_ms(pipeline, _slot: object, tensors: dict[str, np.ndarray], _clock) -> float:
        borders = len(pipeline.plan.stages) - 1
        return slowdown * len(next(iter(tensors.values()))) * (1 + border * borders)

    patched.setattr(profiling.TimedGraph, "time_ms", time_ms)
    patched.setattr(profiling, "_staged_ms", staged_ms)
    patched.setattr(profiling, "disturbances", lambda *_: ())


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundle]:
    folder = tmp_path_factory.mktemp("profiled")
    with pytest.MonkeyPatch.context() as patched:
        fake_times(patched, 1.0, 0.01)
        bundle = compile_tiny(
            models.residual_cnn(), images(), folder, candidates=3, epochs=3, own_times=True
        )
    assert bundle.policy.active
    yield bundle


@pytest.fixture
def bundle(compiled: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(compiled.path, "tiny.ee")
    return Bundle.open("tiny.ee")


def test_the_profile_is_this_machine_s_and_the_policy_stays(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fake_times(monkeypatch, 3.0, 0.1)
    before = bundle.profile()
    assert main(["profile", "tiny.ee"]) == 0
    out = capfd.readouterr().out
    found = Bundle.open("tiny.ee")
    after = found.profile()
    assert before.source_ms == pytest.approx((1, 2, 4, 8, 16, 32))
    assert after.source_ms == pytest.approx((3, 6, 12, 24, 48, 96))
    assert np.sum(after.segments_ms, axis=0) == pytest.approx(np.array(after.source_ms))
    exits = len(found.manifest.exits)
    # these borders cost all alike, though their tensors differ: what they add up to is right
    assert sum(row[3] for row in after.stages_ms) == pytest.approx(24 * 0.1 * exits, rel=0.02)
    assert after.spread is not None
    assert after.spread.added == (0.0,) * 6
    assert found.policy.active == bundle.policy.active
    assert found.policy.version == bundle.policy.version
    assert found.policy.promise is not None
    assert bundle.policy.promise is not None
    saved = predicted_savings(found, after, 8)
    assert found.policy.promise.predicted_savings == pytest.approx(saved)
    assert saved < bundle.policy.promise.predicted_savings
    assert f"{saved:.1%} of the model's time at batch 8" in out
    changed = {"profiles/cpu.json", "report.html", "policy.json"}
    hashes = [{f.path: f.sha256 for f in b.manifest.files} for b in (bundle, found)]
    assert hashes[0].keys() - hashes[1].keys() == {"measured.json"}  # it was measured elsewhere
    assert found.measured() is None
    assert {name for name in hashes[1] if hashes[0][name] != hashes[1][name]} == changed


def test_a_dry_run_writes_nothing_and_says_where_exits_do_not_pay(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fake_times(monkeypatch, 1.0, 5.0)
    assert main(["profile", "tiny.ee", "--dry-run"]) == 0
    out = capfd.readouterr().out
    assert "do not pay on this machine" in out
    assert "Dry run: nothing was written." in out
    assert Bundle.open("tiny.ee") == bundle


def test_another_place(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fake_times(monkeypatch, 2.0, 0.01)
    assert main(["profile", "tiny.ee", "--output", "new.ee"]) == 0
    assert Bundle.open("new.ee").profile().source_ms[0] == pytest.approx(2.0)
    assert Bundle.open("tiny.ee") == bundle
    capfd.readouterr()
    assert main(["profile", "tiny.ee", "--output", "new.ee"]) == 1
    assert "new.ee exists; choose another --output" in capfd.readouterr().err
    assert main(["profile", "nothing.ee"]) == 1
    assert "nothing.ee is not a bundle" in capfd.readouterr().err


def test_a_gpu_has_a_profile_of_its_own_for_plans(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    def make(name: str, **how: Any) -> Backend:
        asked.append((name, how))
        return fake_cuda(max_rows=how["max_rows"])[0]

    monkeypatch.setattr(profile, "make_backend", make)
    line = ["profile", "tiny.ee", "--json", "gpu.json", "--backend"]
    assert main([*line, "tensorrt", "--device", "cuda:1"]) == 0
    assert "Written: gpu.json" in capfd.readouterr().out
    ((name, how),) = asked
    assert (name, how["devices"], how["precision"]) == ("tensorrt", (1,), "fp32")
    assert Bundle.open("tiny.ee") == bundle
    cluster = parse_cluster(
        b"[devices.cuda]\ncount = 2\ncost_per_hour = 1\nprofile = 'gpu.json'\n"
        b"[devices.cpu]\ncount = 1\ncost_per_hour = 1\nspeed = 1"
    )
    found = read_profiles(cluster, Path())["gpu.json"]
    assert (found.device, found.batch_sizes) == ("fake-cuda", (1, 2, 4, 8, 16, 32))
    cuda, cpu = make_cluster(cluster, bundle.profile(), {"gpu.json": found}, 32).types
    np.testing.assert_allclose(cuda.times.segments_s, times_of(found, 32).segments_s)
    np.testing.assert_allclose(cpu.times.segments_s, times_of(bundle.profile(), 32).segments_s)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--backend cuda", ("--backend cuda", "--json", "CPU", "name a file")),
        ("--json a.json --device cuda:1", ("--device", "--backend tensorrt or cuda")),
        ("--json a.json --output b.ee", ("--json", "--output", "leave")),
        ("--json a.json --backend cuda --threads 2", ("--threads", "--backend cuda")),
        ("--json a.json --backend cuda --device gpu", ("'gpu'", "TensorRT", "cuda:")),
    ],
)
def test_what_makes_no_sense_of_a_gpu_is_refused(
    bundle: Bundle, capfd: pytest.CaptureFixture[str], words: str, told: Told
) -> None:
    try:
        status = main(["profile", str(bundle.path), *words.split()])
    except SystemExit as error:
        status = int(str(error.code))
    assert status in (1, 2)
    tells(capfd.readouterr().err, *told)
