"""Models whose probabilities are followed by other operators, compiled, served and exported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from tests import tails
from tests.bundles import compile_tiny, equal_times

from offramp.bundle import ActiveExit, Bundle, ExitPolicy
from offramp.compiler.export.export import ExportOptions, export_bundle
from offramp.compiler.samples.staged_answers import AnsweringStages
from offramp.engine.answers.agreement import agreement_of
from offramp.engine.stages.plan import make_plan

BOUND = 0.1
RANGES = {"percent": (0.0, 100.0), "clipped logits": (-1.0, 2.0)}
"""Smallest and largest possible answer of a model; 0 and 1 by default."""
MODELS = {
    "complement": tails.ending(
        tails.LABELS["sigmoid"], [tails.STEPS["with its complement"]], columns=1
    ),
    "quantised": tails.ending(
        tails.SOFT["softmax of quantised logits"], [tails.STEPS["quantised"]], columns=3
    ),
    "labels": tails.ending(tails.LABELS["sigmoid"], [tails.STEPS["quantised"]], columns=2),
    "percent": tails.ending(
        tails.SOFT["softmax in parts"],
        [tails.STEPS["reversed"], tails.STEPS["percent"], tails.STEPS["rounded"]],
        columns=3,
    ),
    "clipped logits": tails.ending(tails.BOUNDED["clipped logits"], columns=3),
}


def vectors(samples: int, *, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    kinds = 2 * np.random.default_rng(9).standard_normal((8, tails.INPUTS))
    noise = 0.3 * rng.standard_normal((samples, tails.INPUTS))
    return (kinds[rng.integers(0, 8, samples)] + noise).astype(np.float32)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_exits_answer_on_the_scale_of_the_model(name: str, tmp_path: Path) -> None:
    with equal_times():
        bundle = compile_tiny(
            MODELS[name], {"x": vectors(1400)}, tmp_path, max_disagreement=BOUND, candidates=2
        )
    x = vectors(600, seed=1)
    own = ort.InferenceSession(bundle.read(bundle.manifest.source.file)).run(None, {"x": x})[0]
    given = AnsweringStages(make_plan(bundle)).run({"x": x})
    early = given.exit >= 0
    assert early.mean() > 0.2, "the exits are in use"
    np.testing.assert_allclose(given.answer[~early], own[~early], atol=1e-5)
    least, most = RANGES.get(name, (0.0, 1.0))
    assert least <= min(given.answer.min(), own.min())
    assert max(given.answer.max(), own.max()) <= most * (1 + 1e-6)
    check_decisions(bundle, x, own)
    check_export(bundle, tmp_path, x, given.answer)


def check_decisions(bundle: Bundle, x: np.ndarray, own: np.ndarray) -> None:
    """Check that fresh answers decide differently as often as recorded ones, at every threshold."""
    records, agreement = bundle.records(), agreement_of(bundle.manifest.answer)
    wanted = agreement.codes(agreement.reduce(own))
    if bundle.manifest.answer.task.kind == "multi-label":
        powers = 2 ** np.arange(own.shape[1])
        assert (wanted == ((own > 0.5) * powers).sum(axis=1)).all()
    else:
        assert (wanted == own.argmax(axis=1)).all()
    for threshold in np.linspace(0, 1, 11).tolist():
        exit_ = ActiveExit(exit=0, threshold=threshold)
        plan = make_plan(bundle, ExitPolicy(version=1, active=(exit_,)))
        given = AnsweringStages(plan).run({"x": x})
        found = agreement.codes(agreement.reduce(given.answer))
        leaves = records["confidence"][0] >= threshold
        recorded = (leaves & (records["prediction"][0] != records["final_prediction"])).mean()
        assert (found != wanted).mean() <= recorded + 0.05
        assert abs((given.exit >= 0).mean() - leaves.mean()) < 0.1
    policy = AnsweringStages(make_plan(bundle)).run({"x": x})
    found = agreement.codes(agreement.reduce(policy.answer))
    assert (found != wanted).mean() <= BOUND


def check_export(bundle: Bundle, folder: Path, x: np.ndarray, answers: np.ndarray) -> None:
    if bundle.manifest.answer.task.kind != "classification":
        return
    options = ExportOptions(
        bundle=bundle.path, data=folder / "data.npz", output=folder / "one.onnx", with_exits=True
    )
    exported = export_bundle(options)
    session = ort.InferenceSession(exported.path)
    found, confidence = session.run(
        [bundle.manifest.answer.output, exported.names.confidence], {"x": x}
    )
    near = np.abs(found - answers) <= 0.01 * np.ptp(answers)
    assert near.all(axis=1).mean() > 0.98
    assert ((confidence >= 0) & (confidence <= 1)).all()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("percent", {"precision": "int8"}),
        ("complement", {"train": "joint"}),
        ("percent", {"heads": "bridges"}),
        ("labels", {"heads": "bridges"}),
    ],
    ids=["int8", "joint", "bridges", "labels by bridges"],
)
def test_copies_and_bridges_end_as_the_model_does(
    name: str, options: dict[str, str], tmp_path: Path
) -> None:
    rounds = {"percent": ["reversed", "percent"], "complement": ["with its complement"]}
    activation = tails.SOFT["softmax"] if name == "percent" else tails.LABELS["sigmoid"]
    steps = [tails.STEPS[step] for step in rounds.get(name, ["complement", "halves"])]
    columns = {"percent": 3, "complement": 1, "labels": 2}[name]
    proto = tails.ending(activation, steps, columns=columns)
    with equal_times():
        bundle = compile_tiny(
            proto, {"x": vectors(1000)}, tmp_path, max_disagreement=BOUND, candidates=2, **options
        )
    x = vectors(300, seed=1)
    own = ort.InferenceSession(bundle.read(bundle.manifest.source.file)).run(None, {"x": x})[0]
    agreement = agreement_of(bundle.manifest.answer)
    for exit_ in bundle.manifest.exits:
        active = ActiveExit(exit=exit_.index, threshold=0.5)
        plan = make_plan(bundle, ExitPolicy(version=1, active=(active,)))
        given = AnsweringStages(plan).run({"x": x})
        assert (given.exit >= 0).any()
        top = {"percent": 100.0, "complement": 1.0, "labels": 0.5}[name]
        assert given.answer.min() >= -1e-6 * top
        assert given.answer.max() <= top * 1.01
        if (name, options) == ("labels", {"heads": "bridges"}):
            continue  # too few epochs for these labels, with operators after them or without
        codes = [agreement.codes(agreement.reduce(values)) for values in (given.answer, own)]
        leaves = given.exit >= 0
        assert (codes[0] == codes[1])[leaves].mean() > 0.5
