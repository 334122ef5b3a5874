"""``python -m benchmarks.adapt`` on a tiny model: table, JSON, page, and errors that teach."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from benchmarks.adapt import contenders
from benchmarks.adapt.__main__ import main
from benchmarks.adapt.contenders import KINDS, ControllerInputs, contenders_of, make_contender
from benchmarks.adapt.scenarios import answering
from benchmarks.adapt.sequence import answering_places
from tests import models
from tests.bundles import compile_tiny
from tests.facts import Told, tells

from offramp.bundle import ActiveExit, Bundle, ExitPolicy
from offramp.calibration.data.dataset import read_dataset
from offramp.calibration.measure import profiling
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.common.extensions import extensions_for
from offramp.engine.control.controller import Controller, ControllerKind, ControlTask
from offramp.engine.control.costs import CostModel
from offramp.engine.control.static import StaticController
from offramp.engine.models import options as model_options
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import make_plan


def images(samples: int, seed: int) -> dict[str, np.ndarray]:
    """Ten kinds of picture, slightly varied."""
    rng = np.random.default_rng(seed)
    kinds = np.random.default_rng(99).standard_normal((10, 3, 16, 16)) * 3
    kind = rng.integers(0, 10, samples)
    noise = rng.standard_normal((samples, 3, 16, 16)) * 1.5
    return {"image": (kinds[kind] + noise).astype(np.float32), "label": kind}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("adapt")
    with pytest.MonkeyPatch.context() as patched:
        # Whatever is timed takes 1 ms: what is compiled does not depend on the machine.
        patched.setattr(profiling.TimedGraph, "time_ms", lambda _self, _tensors: 1.0)
        return compile_tiny(models.residual_cnn(), images(1400, 0), folder, epochs=3)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "fresh.npz"
    np.savez(path, **images(300, 5))
    return path


def adapt(bundle: Bundle, data: Path, *options: str) -> int:
    given = ["--samples", "1500", "--tuning-delay", "64", *options]
    return main([str(bundle.path), "--data", str(data), *given])


class Tags(HTMLParser):
    """Counts tags, and checks that each is closed."""

    void = ("meta",)

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        assert not any(name in ("src", "href") for name, _ in attrs), "needs something beside it"
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_all_scenarios_and_controllers(
    bundle: Bundle, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("json", "html")}
    options = [f for name, path in files.items() for f in (f"--{name}", str(path))]
    assert adapt(bundle, data, "--severity", "1", *options) == 0
    shown = capsys.readouterr().out
    document = json.loads(files["json"].read_text())
    found = {c["scenario"]: c for c in document["comparisons"]}
    assert set(found) == {"difficulty", "classes", "corruption", "abrupt"}
    for comparison in found.values():
        assert [run["controller"] for run in comparison["runs"]] == list(KINDS)
        assert len(comparison["hindsight"]) == len(comparison["segments"])
        for best in comparison["hindsight"]:
            assert best["agreement"] >= 0.95
        for run in comparison["runs"]:
            whole = run["score"]["whole"]
            assert whole["samples"] == comparison["segments"][-1]["end"]
            assert 0 < whole["agreement"] <= 1
            assert whole["compute_savings"] <= whole["latency_savings"] < 1
            names = [s["name"] for s in run["score"]["segments"]]
            assert names == [s["name"] for s in comparison["segments"]]
            assert len(run["windows"]["end"]) == len(run["windows"]["agreement"])
        assert comparison["scenario"] + ":" in shown
    assert "PREDICTED" in shown
    assert document["environment"]["seed"] == 0
    assert document["environment"]["command"]
    page = files["html"].read_text()
    parser = Tags()
    parser.feed(page)
    assert parser.open == []
    assert parser.seen.count("svg") == len(found) * len(KINDS) * 3
    for name in KINDS:
        assert f"<h3>{name} <span>" in page


def test_the_same_seed_gives_the_same_figures(bundle: Bundle, data: Path, tmp_path: Path) -> None:
    documents = []
    for name, seed in (("a", "4"), ("b", "4"), ("c", "5")):
        path = tmp_path / name
        options = ["--scenario", "classes", "--seed", seed, "--json", str(path)]
        assert adapt(bundle, data, "--controllers", "leave,apparate", *options) == 0
        runs = json.loads(path.read_text())["comparisons"][0]["runs"]
        for run in runs:
            run["score"].pop("tuning_ms")
        documents.append(runs)
    assert documents[0] == documents[1]
    assert documents[0] != documents[2]


def test_two_data_sets_are_two_domains(bundle: Bundle, data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.npz"
    np.savez(other, **images(200, 8))
    result = tmp_path / "out.json"
    options = ["--data", str(other), "--scenario", "domain", "--controllers", "leave"]
    assert adapt(bundle, data, *options, "--json", str(result)) == 0
    (comparison,) = json.loads(result.read_text())["comparisons"]
    assert [s["name"] for s in comparison["segments"]] == ["fresh", "other"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--controllers", "aparate"], ("'aparate'", "apparate")),
        (["--scenario", "nothing"], ("'nothing'", "expected some of")),
        (["--scenario", "domain"], ("--data twice",)),
        (["--rate", "0"], ("--rate is 0", "more than 0")),
        (["--json", "/nowhere/out.json"], ("/nowhere/out.json",)),
        (["--max-disagreement", "1"], ("--max-disagreement is 1", "below 1")),
    ],
)
def test_mistakes_are_explained(
    bundle: Bundle,
    data: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: Told,
) -> None:
    assert adapt(bundle, data, *options) == 1
    tells(capsys.readouterr().err, *message)


def test_the_calibration_data_is_warned_of(
    bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--scenario", "classes", "--controllers", "leave"]
    assert adapt(bundle, bundle.path.parent / "data.npz", *options) == 0
    assert "data is the data that the bundle was calibrated on" in capsys.readouterr().out


def test_help_names_every_scenario_and_controller(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help-all"])
    shown = capsys.readouterr().out
    for name in (*KINDS, "difficulty", "classes", "corruption", "abrupt", "domain"):
        assert f"\n  {name} " in shown


def test_recorded_answers_are_those_that_are_served(bundle: Bundle, data: Path) -> None:
    """The joined graph's results of a sample are the stages' answers."""
    dataset = read_dataset(data, bundle.manifest.inputs)
    population = answering(bundle, threads=1)(dataset, lambda _: None)
    # Float32 sums in another order must not decide: the threshold is in the middle of a gap.
    ordered = np.sort(population.confidence[0])[30:-30]
    widest = int(np.diff(ordered).argmax())
    assert np.diff(ordered)[widest] > 1e-4
    threshold = float(ordered[widest : widest + 2].mean())
    policy = ExitPolicy(version=1, active=(ActiveExit(exit=0, threshold=threshold),))
    backend = OnnxRuntimeBackend(threads=1)
    pipeline = Pipeline(backend, make_plan(bundle, policy))
    slot = backend.open_slot()
    try:
        departures = list(pipeline.run(slot, dataset.inputs))
    finally:
        slot.close()
    places = answering_places(population.confidence, policy)
    early, late = departures
    assert sorted(early.rows.tolist()) == np.flatnonzero(places == 0).tolist()
    assert early.answer.argmax(axis=1).tolist() == population.prediction[0, early.rows].tolist()
    assert late.answer.argmax(axis=1).tolist() == population.final[late.rows].tolist()
    np.testing.assert_allclose(early.confidence, population.confidence[0, early.rows], rtol=1e-4)


def workplace(bundle: Bundle) -> ControllerInputs:
    costs = CostModel.of(bundle.manifest, bundle.profile(), 32)
    return ControllerInputs(
        bundle=bundle,
        batch_size=32,
        costs=costs,
        max_disagreement=0.05,
        confidence_level=0.95,
        ramp_budget=0.99,
        audit_budget=0.05,
    )


@pytest.mark.parametrize("name", KINDS)
def test_controllers_are_made_afresh(bundle: Bundle, name: str) -> None:
    first, second = (make_contender(name, workplace(bundle)) for _ in range(2))
    assert first.controller is not second.controller
    assert first.controller.policy == second.controller.policy
    assert first.mode is KINDS[name].mode
    controller: Controller = first.controller
    assert controller.status().max_disagreement == 0.05


def test_controllers_are_looked_up() -> None:
    assert list(contenders_of(["all"])) == list(KINDS)
    assert list(contenders_of(["apparate", "leave"])) == ["apparate", "leave"]


def test_controllers_of_extensions_are_compared(
    bundle: Bundle, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ControlTask] = []

    def make(task: ControlTask) -> Controller:
        made.append(task)
        limits = {
            "max_disagreement": task.max_disagreement,
            "confidence_level": task.confidence_level,
        }
        return StaticController(task.policy, **limits, audit_probability=task.audit_probability)

    kind = ControllerKind(name="tracker", description="follows", make=make)
    known = extensions_for("control")
    monkeypatch.setattr(model_options, "extensions_for", lambda _host: (*known, (kind,)))
    kinds = contenders.KINDS | contenders.added_kinds()
    assert list(kinds) == [*KINDS, "tracker", "tracker-release"], "baselines are there once"
    monkeypatch.setattr(contenders, "KINDS", kinds)
    result = tmp_path / "out.json"
    given = ["--scenario", "abrupt", "--controllers", "tracker,tracker-release"]
    assert adapt(bundle, data, *given, "--max-disagreement", "0.04", "--json", str(result)) == 0
    (comparison,) = json.loads(result.read_text())["comparisons"]
    assert [run["controller"] for run in comparison["runs"]] == ["tracker", "tracker-release"]
    assert {task.max_disagreement for task in made} == {0.04}
    audited = [task.audit_probability for task in made]
    assert audited[0] < audited[-1] == 1
