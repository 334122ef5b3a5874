"""The frontier of two compiled bundles: what is measured is what each system really answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from benchmarks.frontier.__main__ import main
from benchmarks.frontier.measurement import whole_copy
from benchmarks.frontier.policies import BOTH, EXITS, BundlePair, choose_policies
from numpy.typing import NDArray
from tests import models
from tests.bundles import compile_tiny
from tests.integration.test_cascade import by_graph, fast_copies
from tests.integration.test_compile_tiny import answers, vectors

from offramp.engine.stages.plan import make_plan

__all__ = ["fast_copies"]
ROWS = 90


class Pair(NamedTuple):
    bundles: BundlePair
    folder: Path
    unseen: dict[str, NDArray[Any]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, fast_copies: None) -> Pair:
    """Bundles of fp32 and int8 of one model, and data that they have not seen."""
    folder = tmp_path_factory.mktemp("frontier")
    how: dict[str, Any] = {"candidates": 3, "max_overhead": None}
    exits = compile_tiny(models.mlp(), vectors(), folder, name="m", own_times=True, **how)
    cascade = compile_tiny(
        models.mlp(), vectors(), folder, name="m8", precision="int8", own_times=True, **how
    )
    unseen = vectors(ROWS, seed=1)
    source = by_graph(exits.read("source.onnx"), unseen).argmax(axis=1)
    np.savez(folder / "test.npz", **unseen, label=source)
    return Pair(BundlePair.of(exits, cascade), folder, unseen)


def test_at_its_own_bound_a_bundle_gets_its_own_policy_again(made: Pair) -> None:
    """The one function that chooses is the compiler's."""
    found = {p.system: p.policy for p in choose_policies(made.bundles, (0.05,), 0.95)}
    assert found[EXITS] == made.bundles.exits.policy
    assert found[BOTH] == made.bundles.cascade.policy


def test_the_command_measures_what_each_system_answers(
    made: Pair, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made.folder)
    how = ["--data", "test.npz", "--batch-sizes", "1,6", "--rounds", "3", "--seed", "5"]
    output = ["--json", "f.json", "--html", "f.html"]
    bounds = ["--bounds", "0.05,0.0001"]
    assert main(["m8.ee", "m.ee", *how, *output, *bounds]) == 0
    said = capsys.readouterr().out
    document = json.loads(Path("f.json").read_text())
    systems = {(s["system"], s["max_disagreement"]): s for s in document["systems"]}
    assert len(systems) == 2 + 2 * 3

    for point in systems["source", None]["measured"]:
        assert point["busy"] == point["mean"] == {"value": 1.0, "half_width": 0.0}
        assert (point["disagreement"], point["accuracy"], point["samples"]) == (0.0, 1.0, ROWS)
    source = by_graph(made.bundles.exits.read("source.onnx"), made.unseen).argmax(axis=1)
    wanted = {("int8", None): by_graph(whole_copy(made.bundles.cascade)[0], made.unseen)}
    for system, policy in {
        p.system: p.policy for p in choose_policies(made.bundles, (0.05,), 0.95)
    }.items():
        assert policy is not None
        bundle = made.bundles.bundle_of(system)
        wanted[system, 0.05] = answers(make_plan(bundle, policy), made.unseen)
    for key, found in wanted.items():
        differ = float((found.argmax(axis=1) != source).mean())
        for point in systems[key]["measured"]:
            assert point["disagreement"] == pytest.approx(differ, abs=1e-12)
            assert point["accuracy"] == pytest.approx(1 - differ)
            assert point["busy"]["value"] > 0
            assert len(point["round_busy_ms"]) == 3

    for name in ("int8-certified", "exits", "both"):
        none = systems[name, 0.0001]
        assert (none["policy"], none["measured"]) == (None, [])
        assert "certify samples are too few" in none["reason"]
        assert f"{name} at 0.01%: not certified." in said
    assert {(g["max_disagreement"], g["batch_size"]) for g in document["gains"]} == {
        (0.05, 1),
        (0.05, 6),
    }
    environment = document["environment"]
    assert (environment["seed"], environment["confidence"]) == (5, 0.95)
    assert environment["bounds"] == [0.0001, 0.05]
    assert environment["bundles"] == {"fp32": "m.ee", "int8": "m8.ee"}
    assert environment["command"]
    # batch 1 was profiled, batch 6 was not
    assert set(systems["both", 0.05]["predicted_ratio"]) == {"1"}
    assert systems["int8", None]["predicted_ratio"] == {"1": pytest.approx(0.25)}
    assert "bound 0.01%: no policy of both is certified" in said
    assert "not certified" in Path("f.html").read_text()


def test_it_warns_of_calibration_data(
    made: Pair, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made.folder)
    how = ["--batch-sizes", "1", "--rounds", "1", "--samples", "4", "--bounds", "0.05"]
    command = ["m.ee", "m8.ee", "--data", "data.npz", *how]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "the data that the bundle was calibrated on" in said
    assert "calibrated on different data" not in said
