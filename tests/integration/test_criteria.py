"""Bundles of every criterion: what was recorded is what is served, and methods on their exits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.methods import (
    ENTROPY,
    METHODS,
    _kept_entropies,
    _patient,
    _recorded,
    _tuning_split,
    tune_methods,
)
from benchmarks.methods import main as methods_main
from tests.facts import tells
from tests.small import compile_small

from offramp.bundle import Bundle
from offramp.bundle.records import TUNE
from offramp.bundle.schema.answers import BUILT_IN
from offramp.calibration.choose.exit_records import ExitRecords
from offramp.calibration.data.dataset import Dataset, read_samples
from offramp.certify import NEVER, first_exit
from offramp.certify.decision import MODEL_END
from offramp.compiler.commands.cli import main as compile_
from offramp.compiler.common.progress import SILENT
from offramp.compiler.exits.policy_choice import record_exits
from offramp.engine.answers import criteria
from offramp.engine.backends import make_backend
from offramp.engine.common.errors import BackendError
from offramp.engine.core import Engine
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import Mode, make_plan
from offramp.server.cli import main as serve

OWN = "mean_margin"


def mean_margin(answers: Any, state: criteria.State) -> tuple[Any, criteria.State]:
    """Return the mean difference of the two largest logits over the exits so far."""
    ordered = np.sort(answers, axis=1)
    sum_ = state.get("sum", 0) + ordered[:, -1] - ordered[:, -2]
    count = state.get("count", np.zeros(len(answers))) + 1
    return 1 - np.exp(-sum_ / count), {"sum": sum_, "count": count}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Bundle]]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(criteria, "_REGISTERED", dict(criteria._REGISTERED))
        criteria.register(OWN, mean_margin, depends_on_earlier=True)
        yield {
            name: compile_small(tmp_path_factory.mktemp(name), criterion=name)[0]
            for name in (*BUILT_IN, OWN)
        }


def data_of(bundle: Bundle) -> Dataset:
    return read_samples(bundle.path.parent / "inputs.npz", bundle.manifest)


@pytest.mark.parametrize("criterion", [*BUILT_IN, OWN])
def test_what_is_recorded_is_what_decides_while_serving(bundles, criterion: str) -> None:
    bundle = bundles[criterion]
    assert bundle.manifest.answer.criterion.name == criterion
    assert Bundle.open(bundle.path).manifest == bundle.manifest
    assert bundle.policy.active
    dataset = data_of(bundle)
    records = record_exits(bundle.manifest, bundle.read, dataset, "", SILENT)
    thresholds = np.full(len(bundle.manifest.exits), NEVER)
    for active in bundle.policy.active:
        thresholds[active.exit] = active.threshold
    wanted = first_exit(records.confidence, thresholds)
    assert len(np.unique(wanted)) > 1
    engine = EngineOptions(
        mode=Mode.LEAVE, keep_state=False, defaults=ModelOptions(max_batch_size=16)
    )

    async def answered() -> tuple[Any, Any]:
        async with await Engine.open({"small": bundle.path}, engine) as open_:
            x = dataset.take(slice(None))["x"]
            found = await asyncio.gather(
                *(open_.infer("small", {"x": x[n : n + 5]}) for n in range(0, len(x), 5))
            )
        return (
            np.concatenate([result.exits for result in found]),
            np.concatenate([result.confidences for result in found]),
        )

    exits, confidences = asyncio.run(answered())
    np.testing.assert_array_equal(exits, wanted)
    early = wanted != MODEL_END
    recorded = records.confidence[wanted, np.arange(len(wanted))]
    np.testing.assert_allclose(confidences[early], recorded[early], rtol=0, atol=1e-6)


@pytest.mark.parametrize("criterion", ["patience", OWN])
def test_exits_that_others_depend_on_run_though_nobody_leaves_there(bundles, criterion) -> None:
    bundle = bundles[criterion]
    assert [a.exit for a in bundle.policy.active] == list(range(len(bundle.manifest.exits)))
    last = bundle.policy.active[-1]
    alone = replace(bundle.policy, active=(replace(last, threshold=0.3),))
    plan = make_plan(bundle, alone)
    assert plan.exits == tuple(range(last.exit + 1))
    assert [s.threshold for s in plan.stages[:-2]] == [NEVER] * last.exit


def test_a_bundle_of_an_unknown_criterion_is_not_served(bundles, monkeypatch, capsys) -> None:
    bundle = bundles[OWN]
    monkeypatch.setattr(criteria, "_REGISTERED", {})
    backend = make_backend("onnxruntime")
    with pytest.raises(BackendError, match=f"criterion '{OWN}', which is not registered"):
        Pipeline(backend, make_plan(bundle))
    assert serve([str(bundle.path), "--mode", "leave"]) == 1
    *log, line = capsys.readouterr().err.strip().splitlines()
    assert not any("Traceback" in said for said in log)
    tells(line, "--criterion-module FILE.py:NAME")


def test_commands_that_take_no_such_criterion_say_so(bundles, tmp_path, capsys) -> None:
    bundle = str(bundles["patience"].path)
    data = str(bundles["patience"].path.parent / "data.npz")
    out = str(tmp_path / "out.onnx")
    for command, message in (
        (["rehearse", bundle, "--data", data, "--dry-run"], "exits depend on each other"),
        (["export", bundle, "--data", data, "--output", out], "computed by the host"),
        ([data, "--data", data, "--criterion", "luck", "--output", out], "no criterion is called"),
    ):
        assert compile_(command) == 1
        assert message in capsys.readouterr().err


def test_methods_are_tuned_within_the_bound_and_measured(bundles, tmp_path, capsys) -> None:
    bundle = bundles["probability"]
    out = tmp_path / "out.json"
    how = ["--batch-sizes", "4", "--rounds", "2", "--json", str(out), "--data"]
    inputs = str(bundle.path.parent / "inputs.npz")
    names = ["--method", "branchynet,deebert", "--method", "pabee"]
    assert methods_main([str(bundle.path), *how, inputs, *names]) == 0
    document = json.loads(out.read_text())
    rows = {row["system"]: row for row in document["rows"]}
    assert list(rows) == ["source", "offramp", "offramp-no-exit", "branchynet", "deebert", "pabee"]
    tuned = document["environment"]["methods"]
    assert bundle.policy.promise is not None
    for name, said in tuned.items():
        assert said["disagreement_there"] <= bundle.policy.promise.max_disagreement
        assert 1 - sum(v for k, v in rows[name]["exit_shares"].items() if k == "final") > 0.5
    assert len({t for t in tuned["deebert"]["thresholds"] if t < NEVER}) == 1
    assert "the first 100 samples of the data" in tuned["branchynet"]["tuned_on"]
    assert "tuning records" in tuned["pabee"]["tuned_on"]
    assert "no certificate" in capsys.readouterr().out


def test_methods_decide_by_what_they_were_tuned_on(bundles) -> None:
    """Stages whose criterion was exchanged decide as records of that criterion do."""
    bundle = bundles["margin"]
    methods, rest = tune_methods(list(METHODS), bundle, data_of(bundle), threads=1)
    assert len(rest) == 300
    backend = make_backend("onnxruntime")
    for method in methods:
        criterion = METHODS[method.name].criterion
        records = (
            _patient(record_exits(bundle.manifest, bundle.read, rest, "", SILENT))
            if criterion.on_host
            else _recorded(bundle, rest, criterion, 1)
        )
        wanted = first_exit(records.confidence, np.array(method.thresholds))
        slot = backend.open_slot()
        found = np.empty(len(rest), np.int64)
        for departure in Pipeline(backend, method.plan).run(slot, rest.take(slice(None))):
            found[departure.rows] = method.plan.stages[departure.stage].answered_by
        np.testing.assert_array_equal(found, wanted)


def test_methods_use_the_records_where_they_have_what_is_needed(bundles) -> None:
    bundle = bundles["entropy"]
    dataset = data_of(bundle)
    (method,), rest = tune_methods(["deebert"], bundle, dataset, threads=1)
    assert rest is dataset
    assert method.tuned_on.startswith("the bundle's")
    records = ExitRecords.kept_by(bundle, TUNE)
    left = first_exit(records.confidence, np.array(method.thresholds))
    said = np.vstack([records.prediction, records.final_prediction])[left, np.arange(len(left))]
    assert method.disagreement == pytest.approx((said != records.final_prediction).mean())


def compiled_with(bundle: Bundle) -> Dataset:
    return read_samples(bundle.path.parent / "data.npz", bundle.manifest)


@pytest.mark.parametrize("criterion", ["probability", "learned", "patience"])
def test_methods_tune_on_the_samples_that_the_bundle_was_tuned_on(bundles, criterion) -> None:
    """Found again in the data that it was compiled with: its exits say there what was recorded."""
    bundle = bundles[criterion]
    dataset, own = data_of(bundle), compiled_with(bundle)
    split = _tuning_split(bundle, own, 0, 1)
    kept, found = ExitRecords.kept_by(bundle, TUNE), _recorded(bundle, split, ENTROPY, 1)
    np.testing.assert_array_equal(found.prediction, kept.prediction)
    np.testing.assert_array_equal(found.final_prediction, kept.final_prediction)
    methods, rest = tune_methods(list(METHODS), bundle, dataset, threads=1, compiled_with=own)
    assert rest is dataset, "nothing of the data is held back"
    samples = len(kept.final_prediction)
    assert {method.name: method.tuned_on for method in methods} == {
        "branchynet": f"the {samples} samples that the bundle was tuned on",
        "deebert": f"the {samples} samples that the bundle was tuned on",
        "pabee": f"the bundle's {samples} tuning records",
    }
    left = first_exit(found.confidence, np.array(methods[0].thresholds))
    said = np.vstack([found.prediction, found.final_prediction])[left, np.arange(samples)]
    assert methods[0].disagreement == pytest.approx((said != found.final_prediction).mean())


def test_data_that_the_bundle_was_not_compiled_with_does_not_tune(
    bundles, tmp_path: Path, capsys
) -> None:
    bundle = bundles["probability"]
    folder = bundle.path.parent
    out, inputs, own = tmp_path / "out.json", str(folder / "inputs.npz"), str(folder / "data.npz")
    command = [str(bundle.path), "--data", inputs, "--method", "deebert"]
    brief = ["--batch-sizes", "8", "--rounds", "1", "--json", str(out)]
    for more, message in (
        (["--method-data", inputs], "these are not the data that the bundle was compiled with"),
        (
            ["--method-data", str(folder / "data.npz"), "--method-seed", "3"],
            "another --seed than 3",
        ),
    ):
        assert methods_main([*command, *more]) == 1
        assert message in capsys.readouterr().err
    assert methods_main([*command, *brief, "--method-data", own]) == 0
    (method,) = json.loads(out.read_text())["environment"]["methods"].values()
    assert "samples that the bundle was tuned on" in method["tuned_on"]


@pytest.mark.parametrize("criterion", ["probability", "margin"])
def test_of_two_classes_the_records_hold_entropies(tmp_path: Path, criterion: str) -> None:
    """The entropies equal those that the exits' graphs compute for the same samples."""
    folder = tmp_path / criterion
    bundle, _ = compile_small(folder, criterion=criterion, classes=2)
    kept = ExitRecords.kept_by(bundle, TUNE)
    found = _kept_entropies(bundle, kept)
    assert found is not None
    split = _tuning_split(bundle, compiled_with(bundle), 0, 1)
    graphs = _recorded(bundle, split, ENTROPY, 1)
    np.testing.assert_allclose(found.records.confidence, graphs.confidence, rtol=0, atol=2e-6)
    assert found.records.confidence.std() > 0.01
    methods, rest = tune_methods(["branchynet", "deebert"], bundle, split, threads=1)
    assert rest is split
    assert {method.tuned_on for method in methods} == {
        f"the bundle's {len(kept.final_prediction)} tuning records"
    }


def test_methods_that_cannot_be_measured_say_why(bundles, tmp_path: Path, capsys) -> None:
    bundle = bundles["probability"]
    few = tmp_path / "few.npz"
    np.savez(few, **data_of(bundle).take(slice(0, 40)))
    for method, message in (
        ("deebert", "the bundle's records hold no entropies (--criterion probability), so a quar"),
        ("deebert", "give at least 200, or give the data that the bundle was compiled with as --"),
        ("deeberd", "unknown method 'deeberd'; did you mean 'deebert'?"),
    ):
        command = [str(bundle.path), "--data", str(few), "--method", method]
        assert methods_main(command) == 1
        assert message in capsys.readouterr().err
