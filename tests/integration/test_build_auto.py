"""``--precision auto`` for engines: what is certified is timed side by side, the best is kept."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from tests import models
from tests.facts import tells, without_steps
from tests.fake_builder import FakeBuilder
from tests.integration.test_compile_tiny import images

from offramp.bundle import ActiveExit, Bundle
from offramp.bundle.engines import EngineStore, EngineTarget, list_targets
from offramp.calibration.data.dataset import read_dataset
from offramp.compiler.commands.cli import main
from offramp.compiler.engines import build, choosing
from offramp.compiler.engines.build import BuildOptions
from offramp.compiler.engines.build_options import EngineBuildOptions
from offramp.compiler.engines.builder_protocol import TimedEngine
from offramp.compiler.engines.building import Building
from offramp.compiler.engines.choosing import (
    WORTH,
    TimedPrecision,
    _possible,
    choose,
    predicted_savings,
)

COMPILE = (
    "model.onnx", "--data", "data.npz", "--candidates", "3", "--epochs", "3",
    "--max-disagreement", "0.05", "--max-overhead", "0.99",
)  # fmt: skip
AUTO = ("build", "model.ee", "--precision", "auto")


class BuildResult(NamedTuple):
    status: int
    auto: list[str]
    """Messages about the choice."""
    err: list[str]


class Place:
    """A folder with a compiled model, and a GPU that does as told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        self.speeds: dict[str, float] = {}
        self.builders: list[FakeBuilder] = []
        self.timed: list[Sequence[TimedEngine]] = []
        self._capsys = capsys
        monkeypatch.setattr(build, "make_builder", self._make)
        monkeypatch.setattr(build, "check_device", lambda device: None)
        monkeypatch.setattr(build, "load_kernels", lambda *_, **__: b"cubin")
        self.alter: Callable[[Any], Any] = lambda outputs: outputs

    def _make(self, _device: str) -> FakeBuilder:
        place = self

        class Noting(FakeBuilder):
            def time(self, plans: Sequence[TimedEngine], *, rounds: int) -> list[float]:
                place.timed.append(plans)
                return super().time(plans, rounds=rounds)

        self.builders.append(Noting(speeds=self.speeds, alter=self.alter))
        return self.builders[-1]

    def __call__(self, *arguments: str) -> BuildResult:
        self._capsys.readouterr()
        status = main(arguments)
        err = without_steps(self._capsys.readouterr().err).splitlines()
        return BuildResult(
            status, [line for line in err if line.startswith("--precision auto")], err
        )


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("compiled")
    onnx.save(models.residual_cnn(), folder / "model.onnx")
    np.savez(folder / "data.npz", **images())
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        assert main(COMPILE) == 0
    yield folder


@pytest.fixture
def place(compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Place:
    shutil.copytree(compiled, tmp_path / "w")
    monkeypatch.chdir(tmp_path / "w")
    return Place(monkeypatch, capsys)


def precisions(path: str = "model.ee") -> set[str]:
    return {target.precision for target in list_targets(path)}


@pytest.mark.parametrize(
    ("speeds", "kept"),
    [
        ({}, "fp32"),  # nobody is faster
        ({"fp16": 1.01, "int8": 1.01}, "fp32"),  # not worth it
        ({"fp16": 3.0, "int8": 1.5}, "fp16"),
        ({"fp16": 1.5, "int8": 9.0}, "int8"),
        ({"fp16": 0.5, "int8": 0.5}, "fp32"),  # a coarse precision may well be slower
    ],
)
def test_the_precision_that_saves_most_is_kept(
    place: Place, speeds: dict[str, float], kept: str
) -> None:
    place.speeds = speeds
    said = place(*AUTO, "--data", "data.npz")
    assert said.status == 0, said.err
    assert precisions() == {kept}
    (line,) = said.auto
    assert line.startswith(f"--precision auto: {kept} is kept: predicted to save ")
    for other in {"fp32", "fp16", "int8"} - {kept}:
        assert f"{other} " in line
        assert any(text.startswith("removed ") and other in text for text in said.err)
    (target,) = list_targets("model.ee")
    evidence = EngineStore.open("model.ee", target).index.evidence
    assert (evidence is None) is (kept == "fp32")
    assert all(builder.closed for builder in place.builders)


def test_all_are_timed_in_the_same_rounds_at_the_reference_batch(place: Place) -> None:
    place("build", "model.ee", "--precision", "fp32")  # what is there is not built again
    said = place(*AUTO, "--data", "data.npz", "--batch-profiles", "1,2-8,9-32")
    assert said.status == 0
    (plans,) = place.timed
    manifest = Bundle.open("model.ee").manifest
    batch = manifest.calibration.reference_batch_size
    assert {len(next(iter(each.inputs.values()))) for each in plans} == {batch}
    stages = len(Bundle.open("model.ee").policy.active) + 1
    found = [json.loads(each.plan)["precision"] for each in plans]
    assert found == ["fp32"] * (1 + stages) + ["fp16"] * stages + ["int8"] * stages
    assert len(place.builders[1].builds) == 0


def test_a_batch_that_no_engine_takes_is_timed_as_the_next_one(place: Place) -> None:
    assert place(*AUTO, "--data", "data.npz", "--batch-profiles", "1-3,20-32").status == 0
    (plans,) = place.timed
    assert {len(next(iter(each.inputs.values()))) for each in plans} == {3}


def test_without_data_there_is_fp32_alone(place: Place) -> None:
    place.speeds = {"fp16": 9.0, "int8": 9.0}
    place("build", "model.ee", "--precision", "tf32")
    said = place(*AUTO)
    assert said.status == 0
    tells(said.auto[0], "--precision auto", "fp32 only", "fp16 and int8", "--data DATA")
    assert said.auto[1].startswith("--precision auto: fp32 is kept: ")
    assert precisions() == {"fp32"}  # tf32 would have been served


def test_other_data_certify_nothing(place: Place) -> None:
    np.savez("other.npz", **images(1000, seed=5))
    place.speeds = {"fp16": 9.0, "int8": 9.0}
    said = place(*AUTO, "--data", "other.npz")
    assert said.status == 0
    tells(said.auto[0], "other.npz", "not the data")
    assert precisions() == {"fp32"}


def test_a_bundle_that_promises_nothing_has_nothing_to_certify(place: Place) -> None:
    bundle = Bundle.open("model.ee")
    bare = replace(bundle, policy=replace(bundle.policy, promise=None))
    dataset = read_dataset(Path("data.npz"), bundle.manifest.inputs)
    options = BuildOptions(bundle=bundle.path, engines=EngineBuildOptions(), data=Path("data.npz"))
    assert _possible(bundle, dataset, options) == (("fp32", "fp16", "int8"), "")
    found, why = _possible(bare, dataset, options)
    assert found == ("fp32",)
    tells(why, "promises nothing")


def test_what_cannot_be_built_is_left_out(place: Place) -> None:
    place.speeds = {"fp16": 3.0, "int8": 9.0}
    make = build.make_builder

    def failing(device: str) -> Any:
        builder: Any = make(device)
        working = builder.run

        def run(plan: bytes, inputs: Mapping[str, Any], profile: int) -> Any:
            outputs = working(plan, inputs, profile)
            if json.loads(plan)["precision"] == "int8":
                outputs = {name: -array for name, array in outputs.items()}
            return outputs

        builder.run = run
        return builder

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(build, "make_builder", failing)
        said = place(*AUTO, "--data", "data.npz")
    assert said.status == 0
    assert said.auto[0].startswith("--precision auto: int8 is left out: ")
    assert "engines failed; the first: 0" in said.auto[0]
    assert said.auto[1].startswith("--precision auto: fp16 is kept")
    assert precisions() == {"fp16"}


def test_without_a_baseline_nothing_is_chosen(place: Place) -> None:
    place.alter = lambda outputs: {name: -array for name, array in outputs.items()}
    said = place(*AUTO, "--data", "data.npz")
    assert said.status == 1
    assert said.auto == []
    assert place.timed == []


def test_engines_of_other_gpus_stay_unless_pruned(place: Place) -> None:
    other = FakeBuilder(gpu="Other GPU")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(build, "make_builder", lambda device: other)
        place("build", "model.ee", "--precision", "fp32", "--parts", "source")
    assert place(*AUTO).status == 0
    assert {target.gpu for target in list_targets("model.ee")} == {"Fake GPU", "Other GPU"}
    assert place(*AUTO, "--prune").status == 0
    assert {target.gpu for target in list_targets("model.ee")} == {"Fake GPU"}


def timed(precision: Any, savings: float) -> TimedPrecision:
    target = EngineTarget(gpu="g", compute_capability=(9, 0), tensorrt="10", precision=precision)
    building: Any = Building(bundle=None, target=target, planned=())  # type: ignore[arg-type]
    return TimedPrecision(building=building, savings=savings)


def test_a_coarser_precision_has_to_be_worth_it() -> None:
    fp32, fp16 = timed("fp32", 0.5), timed("fp16", 0.5 + WORTH)
    assert choose([fp32, fp16]) is fp32
    assert choose([fp32, timed("fp16", 0.6), timed("int8", 0.61)]).precision == "fp16"
    assert choose([fp32, fp16, timed("int8", 0.53)]).precision == "int8"


def test_savings_are_times_weighed_with_shares(compiled: Path) -> None:
    """Computed by hand: samples leaving at an exit pay for the stages so far, of a model of 10
    s.
    """
    bundle = Bundle.open(compiled / "model.ee")
    exits = [exit_.index for exit_ in bundle.manifest.exits]
    records = bundle.records()
    judged = records["split"] == choosing.CERTIFY
    middle = np.median(records["confidence"][:, judged], axis=1).tolist()
    active = tuple(ActiveExit(exit=e, threshold=middle[e]) for e in exits)
    bundle = replace(bundle, policy=replace(bundle.policy, active=active))
    left = np.ones(judged.sum(), np.bool_)
    seconds = np.arange(1.0, len(exits) + 2)
    expected = 0.0
    for place, active in enumerate(bundle.policy.active):
        expected += seconds[place] * left.mean()
        threshold = np.float32(active.threshold)
        left &= ~(records["confidence"][active.exit][judged] >= threshold)
    expected += seconds[-1] * left.mean()
    assert len(exits) > 1
    assert 0 < left.mean() < 1
    found = predicted_savings(bundle, seconds.tolist(), 10.0)
    assert found == pytest.approx(1 - expected / 10.0, abs=1e-6)
