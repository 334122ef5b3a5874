"""Tiny models compiled end to end in seconds, and what the bundles then answer."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from tests import models
from tests.bundles import compile_tiny
from tests.part_sizes import check_part_sizes

from offramp.bundle import NEVER, ActiveExit, Bundle, ExitPolicy
from offramp.bundle.graph_weights import PAGE
from offramp.calibration.data.training_options import TrainingOptions
from offramp.certify import binomial_cdf, evaluate
from offramp.certify.decision import MODEL_END
from offramp.compiler.graphs.weights import WeightSizes
from offramp.engine.answers.exit_check import confidence_of
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend, make_session
from offramp.engine.common.errors import BadInputError
from offramp.engine.core import Engine
from offramp.engine.models.options import EngineOptions
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import Mode, Plan, make_chained_plan, make_plan

Arrays = dict[str, NDArray[Any]]

SAMPLES = 1400
TOLERANCE = 1e-5
"""Float32 sums in another order where layouts and fusions differ, relative to the largest."""


def images(samples: int = SAMPLES, *, seed: int = 0) -> Arrays:
    """Ten kinds of picture, slightly varied: the random model answers a kind mostly alike."""
    rng = np.random.default_rng(seed)
    kinds = np.random.default_rng(99).standard_normal((10, 3, 16, 16)) * 3
    kind = rng.integers(0, 10, samples)
    noise = rng.standard_normal((samples, 3, 16, 16)) * 0.3
    return {"image": (kinds[kind] + noise).astype(np.float32), "label": kind}


def sentences(samples: int = SAMPLES, *, seed: int = 0) -> Arrays:
    """Twelve sentences of 4 to 8 words, one word in them changed now and then."""
    rng = np.random.default_rng(seed)
    known = np.random.default_rng(99)
    kinds, lengths = known.integers(0, 50, (12, 8)), known.integers(4, 9, 12)
    kind = rng.integers(0, 12, samples)
    words = kinds[kind]
    changed = rng.random(samples) < 0.2
    words[changed, rng.integers(0, 4, changed.sum())] = rng.integers(0, 50, changed.sum())
    mask = np.arange(8) < lengths[kind][:, None]
    # what the mask hides makes each sample distinct, and answers nothing
    hidden = rng.integers(0, 50, (samples, 4))
    words = np.concatenate([words * mask, hidden], axis=1)
    mask = np.concatenate([mask, np.zeros_like(hidden, np.bool_)], axis=1)
    return {"input_ids": words, "attention_mask": mask.astype(np.int64)}


def vectors(samples: int = SAMPLES, *, seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    kinds = np.random.default_rng(99).standard_normal((8, 16)) * 3
    x = kinds[rng.integers(0, 8, samples)] + rng.standard_normal((samples, 16)) * 0.3
    return {"x": x.astype(np.float32)}


DATA = {"residual": images, "bert": sentences}
BUILDERS = {"residual": models.residual_cnn, "bert": models.bert_like}


@pytest.fixture(scope="module", params=list(DATA))
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Bundle, Arrays]:
    """A bundle, and inputs that it has not seen."""
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    bundle = compile_tiny(BUILDERS[name](), DATA[name](), folder, candidates=4)
    unseen = DATA[name](90, seed=1)
    unseen.pop("label", None)
    return Bundle.open(bundle.path), unseen


def with_all_exits(bundle: Bundle, threshold: float) -> Plan:
    """Return a plan with every built exit in use, whatever the measured times are."""
    active = tuple(ActiveExit(exit=e.index, threshold=threshold) for e in bundle.manifest.exits)
    return make_plan(bundle, ExitPolicy(version=2, active=active))


def run(plan: Plan, tensors: Arrays, *, size: int = 30) -> Iterator[tuple[int, int, NDArray[Any]]]:
    """Stage, row and answer of every sample, in batches."""
    pipeline = Pipeline(OnnxRuntimeBackend(threads=1), plan)
    slot = pipeline.backend.open_slot()
    rows = len(next(iter(tensors.values())))
    for start in range(0, rows, size):
        batch = {name: array[start : start + size] for name, array in tensors.items()}
        for departure in pipeline.run(slot, batch):
            for row, answer in zip(departure.rows, departure.answer, strict=True):
                yield departure.stage, start + int(row), answer


def answers(plan: Plan, tensors: Arrays) -> NDArray[Any]:
    by_row = {row: answer for _, row, answer in run(plan, tensors)}
    assert sorted(by_row) == list(range(len(by_row)))
    return np.stack([by_row[row] for row in range(len(by_row))])


def source_answers(bundle: Bundle, tensors: Arrays) -> NDArray[Any]:
    session = make_session(bundle.read("source.onnx"), 1)
    batches = [
        session.run(None, {n: a[start : start + 30] for n, a in tensors.items()})[0]
        for start in range(0, 90, 30)
    ]
    return np.concatenate(batches)


def exit_answers(bundle: Bundle, tensors: Arrays) -> list[NDArray[Any]]:
    """Each exit's own answer: its graph, alone, on what the segments before it give."""
    values: Arrays = dict(tensors)
    for segment in bundle.manifest.segments:
        session = make_session(bundle.read(segment.file), 1)
        feed = {name: values[name] for name in segment.inputs}
        (values[segment.output],) = session.run([segment.output], feed)
    found = []
    for exit_ in bundle.manifest.exits:
        session = make_session(bundle.read(exit_.file), 1)
        found += session.run([exit_.output], {name: values[name] for name in exit_.inputs})
    return found


def assert_close(found: NDArray[Any], wanted: NDArray[Any]) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE * abs(wanted).max())


def test_exits_were_built_and_agree_with_the_model(compiled) -> None:
    bundle, _ = compiled
    assert len(bundle.manifest.exits) == len(bundle.manifest.segments) - 1
    assert bundle.policy.active
    assert all(e.agreement > 0.8 for e in bundle.manifest.exits)  # the kinds are separable
    for exit_ in bundle.manifest.exits:
        assert exit_.head in [trial.head for trial in exit_.trials]
        best = max(exit_.trials, key=lambda trial: trial.net_savings)
        assert exit_.head == best.head
        assert best.net_savings > 0


def test_ranges_are_those_of_the_data(compiled) -> None:
    bundle, tensors = compiled
    ranges = bundle.input_ranges()
    assert {seen.name for seen in ranges.inputs} == {i.name for i in bundle.manifest.inputs}
    for seen in ranges.inputs:  # of other samples of the same kinds
        assert seen.lowest == pytest.approx(tensors[seen.name].min(), abs=2.0)
        assert seen.highest == pytest.approx(tensors[seen.name].max(), abs=2.0)


def test_off_is_the_source_bit_for_bit(compiled) -> None:
    bundle, tensors = compiled
    found = answers(make_plan(bundle, mode=Mode.OFF), tensors)
    np.testing.assert_array_equal(found, source_answers(bundle, tensors))


def test_large_weights_are_in_one_file_once(compiled) -> None:
    bundle, _ = compiled
    large: list[bytes] = []
    for file in bundle.manifest.graphs:
        stored = onnx.load_from_string(bundle.graph(file)).graph.initializer
        whole = onnx.load_from_string(bundle.read(file)).graph.initializer
        assert [t.name for t in stored] == [t.name for t in whole]
        for tensor, held in zip(stored, whole, strict=True):
            assert not held.external_data
            assert bool(tensor.external_data) == (len(held.raw_data) >= PAGE)
            large += [held.raw_data] * bool(tensor.external_data)
    sizes = WeightSizes.of(bundle)
    assert sizes.graph_bytes == sum(map(len, large))
    once = {
        content
        for content in large
        if not any(o.startswith(content) for o in large if o != content)
    }
    assert sum(map(len, once)) <= sizes.file_bytes < sum(len(c) + PAGE for c in once) + 1
    told = "Large weights" in bundle.read("report.html").decode()
    assert told == (bundle.weight_folder() is not None)
    assert told == bool(large)


def test_values_that_the_model_fails_on_are_refused_before_they_join_a_batch(compiled) -> None:
    bundle, unseen = compiled
    if "input_ids" not in unseen:
        assert bundle.manifest.value_bounds == ()
        return
    ((name, highest),) = ((b.input, b.highest) for b in bundle.manifest.value_bounds)
    assert name == "input_ids"

    async def ask() -> None:
        options = EngineOptions(backend="onnxruntime", keep_state=False)
        async with await Engine.open({"m": bundle.path}, options) as engine:
            await engine.infer("m", unseen)
            beyond = {**unseen, name: unseen[name].copy()}
            beyond[name][7, 3] = highest + 1
            told = rf"m: input 'input_ids' has {highest + 1:g} at \[7, 3\], and the model takes"
            with pytest.raises(BadInputError, match=told):
                await engine.infer("m", beyond)
            assert engine.statistics()["m"].failed == {}

    asyncio.run(ask())


def test_the_manifest_has_the_sizes_of_all_parts(compiled) -> None:
    bundle, unseen = compiled
    check_part_sizes(bundle)
    first = bundle.manifest.segments[0]
    if "attention_mask" in unseen:  # 12 tokens of 16 numbers cross, with a mask
        assert first.row_bytes == 12 * 16 * 4 + 12 * 8


def test_segments_in_a_chain_are_the_source(compiled) -> None:
    bundle, tensors = compiled
    assert_close(answers(make_chained_plan(bundle), tensors), source_answers(bundle, tensors))


def test_stages_read_what_their_graphs_declare(compiled) -> None:
    bundle, _ = compiled
    everywhere = make_plan(bundle, borders=range(len(bundle.manifest.segments)))
    assert len(everywhere.stages) == len(bundle.manifest.segments)
    plans = (make_plan(bundle), everywhere, make_chained_plan(bundle), with_all_exits(bundle, 0.9))
    for plan in plans:
        for stage in plan.stages:
            session = make_session(stage.load(), 1)
            assert {i.name for i in session.get_inputs()} == set(stage.inputs)


@pytest.mark.parametrize("threshold", [0.0, 0.6, 0.9, 1.5])
def test_who_leaves_has_the_exit_s_own_answer(compiled, threshold: float) -> None:
    bundle, tensors = compiled
    plan = with_all_exits(bundle, threshold)
    own = [*exit_answers(bundle, tensors), source_answers(bundle, tensors)]
    form = bundle.manifest.answer.form
    sure = np.stack([confidence_of(answer, form) for answer in own])
    sure[-1] = 2.0  # everything leaves at the end
    expected = (sure >= threshold).argmax(axis=0)
    doubtful = (abs(sure - threshold) < 1e-5).any(axis=0)  # rounding decides where they leave
    left = list(run(plan, tensors))
    assert len(left) == 90
    for stage, row, answer in left:
        if not doubtful[row]:
            assert stage == expected[row]
        assert_close(answer, own[stage][row])
    if threshold == 0.0:
        assert {stage for stage, _, _ in left} == {0}
    if threshold > 1:
        assert {stage for stage, _, _ in left} == {len(plan.stages) - 1}


def test_the_promise_is_what_the_records_say(compiled) -> None:
    bundle, _ = compiled
    promise, records = bundle.policy.promise, bundle.records()
    certify = records["split"] == 2
    assert promise is not None
    thresholds = np.full(len(bundle.manifest.exits), NEVER)
    for active in bundle.policy.active:
        thresholds[active.exit] = active.threshold
    agrees = records["prediction"] == records["final_prediction"]
    times = np.ones(len(thresholds) + 1)
    found = evaluate(records["confidence"][:, certify], agrees[:, certify], times, thresholds)
    assert [e.agreement for e in bundle.manifest.exits] == [
        pytest.approx(row.mean()) for row in agrees[:, certify]
    ]
    assert (promise.max_disagreement, promise.confidence_level) == (0.05, 0.95)
    assert promise.certify_samples == certify.sum() == 350
    assert promise.certify_errors == found.errors
    assert promise.p_value == binomial_cdf(found.errors, 350, 0.05) <= 0.05
    assert promise.predicted_savings > 0


def test_labels_are_reported_where_there_are_any(compiled) -> None:
    bundle, _ = compiled
    accuracy = bundle.manifest.calibration.source_accuracy
    assert (accuracy is None) == ("label" not in bundle.records())
    if accuracy is not None:
        records = bundle.records()
        certify = records["split"] == 2
        right = records["final_prediction"] == records["label"]
        assert accuracy == pytest.approx(right[certify].mean())


def test_a_problem_without_good_exits_is_served_without_exits(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Heads that learn nothing, stages that cost 2 % of the model, and 1 % to disagree on."""
    x = np.random.default_rng(0).standard_normal((1200, 16)).astype(np.float32)
    stuck = TrainingOptions(epochs=1, learning_rate=1e-9)
    with caplog.at_level(logging.WARNING):
        bundle = compile_tiny(
            models.mlp(), {"x": x}, tmp_path, max_disagreement=0.01, training=stuck, staged_ms=1.06
        )
    assert bundle.policy == ExitPolicy(version=1, active=())
    (record,) = [r for r in caplog.records if r.name == "offramp.compiler.steps.compile"]
    assert record.levelno == logging.WARNING
    assert "NO EXIT IS ACTIVE" in record.getMessage()
    assert "--max-disagreement" in record.getMessage(), "the flag that would lift the limit"
    said = record.getMessage().partition("model: ")[2]
    assert said[1:60] in (bundle.path / "report.html").read_text()
    (stage,) = make_plan(bundle).stages
    assert (stage.first_segment, stage.exit, stage.final) == (0, MODEL_END, True)
    found = answers(make_plan(bundle), {"x": x[:90]})
    np.testing.assert_array_equal(found, source_answers(bundle, {"x": x[:90]}))


def test_the_same_seed_compiles_the_same_bundle(tmp_path: Path) -> None:
    """All but what has times, and the date; on one thread, as sums on several may differ."""
    timed = {"report.html", "measured.json"}
    hashes = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        bundle = compile_tiny(models.mlp(), vectors(), tmp_path / name, epochs=2, seed=3)
        assert bundle.manifest.exits
        hashes.append({f.path: f.sha256 for f in bundle.manifest.files if f.path not in timed})
    assert hashes[0] == hashes[1]


def test_a_bundle_says_where_it_came_from(compiled) -> None:
    bundle, _ = compiled
    manifest = bundle.manifest
    assert manifest.source.original_name == "model.onnx"
    assert manifest.name == "tiny"
    assert (
        manifest.calibration.train_samples,
        manifest.calibration.tune_samples,
        manifest.calibration.certify_samples,
    ) == (840, 210, 350)
    assert sum(s.flops_share for s in manifest.segments) == pytest.approx(1)
    assert dataclasses.asdict(bundle.profile())["device"] == "cpu"
