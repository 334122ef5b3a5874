"""Disagreements caused by a precision, and their effect on the promise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from tests import models
from tests.bundles import compile_tiny
from tests.engines import engine_bundle
from tests.facts import facts, tells
from tests.sliced import dataset_of, sliced

from offramp.bundle import ActiveExit, Bundle, Promise, write_bundle
from offramp.bundle.engines import Precision
from offramp.bundle.records import CERTIFY
from offramp.calibration.data.dataset import DataError, Dataset, read_dataset
from offramp.compiler.common.errors import VerificationError
from offramp.compiler.engines.engine_verification import (
    PrecisionCheck,
    PrecisionData,
    Verdict,
    measure_precision,
    part_data,
)
from offramp.compiler.engines.units import ranges_of
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend, make_session
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import Mode, make_plan

PROMISE = Promise(
    max_disagreement=0.01,
    confidence_level=0.95,
    certify_samples=1000,
    certify_errors=4,
    p_value=0.03,
    predicted_savings=0.5,
)


def check(differs: int, samples: int = 1000, **others: object) -> PrecisionCheck:
    facts = {
        "precision": "int8",
        "unseen": True,
        "source_differs": 2,
        "policy_differs_fp32": 4,
        "promise": PROMISE,
        **others,
    }
    return PrecisionCheck(samples=samples, policy_differs=differs, **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("differs", "verdict"),
    [
        (0, "kept"),
        (4, "kept"),  # P(Binomial(1000, 1 %) <= 4) = 0.029, of 5: 0.066
        (5, "open"),
        (15, "open"),  # P(… >= 15) = 0.082, of 16: 0.048
        (16, "broken"),
        (1000, "broken"),
    ],
)
def test_the_promise_is_judged_by_exact_tests(differs: int, verdict: Verdict) -> None:
    assert check(differs).verdict == verdict


def test_few_samples_say_nothing() -> None:
    assert check(0, samples=298).verdict == "open"
    assert check(0, samples=299).verdict == "kept"


def test_without_a_promise_nothing_is_judged() -> None:
    nothing = check(900, promise=None)
    assert nothing.verdict is None
    assert "promise" not in nothing.describe()
    nothing.demand()


def test_a_broken_promise_is_refused_with_numbers_and_remedy() -> None:
    said = ("int8", "1,000 samples", "0.20%", "3.00%", "0.40%", "1.00% at 95%")
    remedies = ("--precision (fp16, tf32 or fp32)", "--accept-disagreement")
    with pytest.raises(VerificationError, match=facts(*said, *remedies)):
        check(30).demand()


def test_what_is_neither_kept_nor_broken_passes_with_its_bound() -> None:
    undecided = check(10, unseen=False)
    undecided.demand()
    tells(undecided.describe(), "1.00% at 95%", "at most 1.69%", "trained the exits")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Exits with random weights: about a third leaves at each, with answers of its own."""
    active = (ActiveExit(exit=0, threshold=0.33), ActiveExit(exit=1, threshold=0.48))
    return engine_bundle("residual", tmp_path_factory.mktemp("b") / "residual.ee", active=active)


@pytest.fixture(scope="module")
def data() -> Dataset:
    return dataset_of(sliced("residual"), 200)


def served(bundle: Bundle, dataset: Dataset, mode: Mode) -> np.ndarray:
    """Return the engine's answers."""
    backend = OnnxRuntimeBackend()
    pipeline = Pipeline(backend, make_plan(bundle, mode=mode))
    classes = np.empty(len(dataset), np.intp)
    for departure in pipeline.run(backend.open_slot(), dataset.inputs):
        classes[departure.rows] = departure.answer.argmax(axis=1)
    return classes


def test_float32_is_what_is_served(bundle: Bundle, data: Dataset) -> None:
    found = measure_precision(bundle, "fp32", None, data, unseen=True)
    wanted = (served(bundle, data, Mode.LEAVE) != served(bundle, data, Mode.OFF)).sum()
    assert 20 < wanted < 180
    assert found == PrecisionCheck(
        precision="fp32",
        samples=200,
        unseen=True,
        source_differs=0,
        policy_differs=int(wanted),
        policy_differs_fp32=int(wanted),
        promise=bundle.policy.promise,
    )


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_other_precisions_differ_in_few_answers(
    bundle: Bundle, data: Dataset, precision: Precision
) -> None:
    ranges = ranges_of(bundle, data, threads=1)
    found = measure_precision(bundle, precision, ranges, data, unseen=False)
    exact = measure_precision(bundle, "fp32", None, data, unseen=False)
    assert found.policy_differs_fp32 == exact.policy_differs
    assert abs(found.policy_differs - exact.policy_differs) <= 10
    assert found.source_differs <= {"fp16": 1, "int8": 20}[precision]
    assert not found.unseen


def test_a_precision_that_ruins_the_model_is_seen(bundle: Bundle, data: Dataset) -> None:
    """Ranges far too small clip everything."""
    ranges = ranges_of(bundle, data, threads=1)
    tiny = dict.fromkeys(ranges, 1e-3)
    assert measure_precision(bundle, "int8", tiny, data, unseen=True).source_differs > 50


def test_what_overflows_in_float16_is_seen(tmp_path: Path) -> None:
    """Plain ONNX Runtime computes float16 graphs in float32, where nothing overflows."""
    bundle = engine_bundle("mlp", tmp_path / "small.ee")
    source = onnx.ModelProto.FromString(bundle.read("source.onnx"))
    gemms = [node for node in source.graph.node if node.op_type == "Gemm"]
    weights = {tensor.name: tensor for tensor in source.graph.initializer}
    for gemm, factor in zip(gemms, (3e4, 1 / 3e4), strict=False):
        tensor = weights[gemm.input[1]]
        scaled = onnx.numpy_helper.to_array(tensor) * np.float32(factor)
        tensor.CopyFrom(onnx.numpy_helper.from_array(scaled, tensor.name))
    files = {e.path: bundle.read(e.path) for e in bundle.manifest.files if e.path != "policy.json"}
    files["source.onnx"] = source.SerializeToString()
    bare = replace(bundle.manifest, files=())
    large = write_bundle(tmp_path / "large.ee", bare, bundle.policy, files)
    found = measure_precision(large, "fp16", None, dataset_of(sliced("mlp"), 200), unseen=True)
    assert found.source_differs > 50


def test_other_data_are_parted_in_disjoint_halves(bundle: Bundle, data: Dataset) -> None:
    parts = part_data(bundle, data, seed=3)
    assert parts.unseen
    assert (len(parts.ranges), len(parts.judged)) == (100, 100)
    assert sorted([*parts.ranges.rows, *parts.judged.rows]) == list(range(200))
    again, other = part_data(bundle, data, seed=3), part_data(bundle, data, seed=4)
    assert again.judged.rows.tolist() == parts.judged.rows.tolist()
    assert other.judged.rows.tolist() != parts.judged.rows.tolist()


def test_a_single_sample_cannot_do_both(bundle: Bundle, data: Dataset) -> None:
    with pytest.raises(DataError, match=facts("1 samples", "too few")):
        part_data(bundle, data.subset(np.array([0])))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Dataset]:
    folder = tmp_path_factory.mktemp("compiled")
    x = np.random.default_rng(0).standard_normal((1000, 16)).astype(np.float32)
    bundle = compile_tiny(models.mlp(), {"x": x}, folder, epochs=1, seed=7)
    return bundle, read_dataset(folder / "data.npz", bundle.manifest.inputs)


def test_the_certify_split_judges_the_data_that_a_bundle_was_made_with(
    compiled: tuple[Bundle, Dataset],
) -> None:
    bundle, data = compiled
    made_with = bundle.manifest.calibration
    parts = part_data(bundle, data, seed=7)
    assert parts.unseen
    assert len(parts.judged) == made_with.certify_samples
    assert not set(parts.ranges.rows) & set(parts.judged.rows)
    records = bundle.records()
    session = make_session(bundle.read("source.onnx"), 1)
    (answers,) = session.run([bundle.manifest.answer.output], dict(parts.judged.inputs))
    recorded = records["final_prediction"][records["split"] == CERTIFY]
    assert answers.argmax(axis=1).tolist() == recorded.tolist()


def test_a_split_of_another_seed_is_not_taken_for_it(compiled: tuple[Bundle, Dataset]) -> None:
    parts: PrecisionData = part_data(*compiled, seed=8)
    assert not parts.unseen
    assert len(parts.judged) == 500


def test_a_sample_that_the_model_fails_on_is_reported(tmp_path: Path) -> None:
    bundle = engine_bundle("bert", tmp_path / "b.ee")
    data = dataset_of(sliced("bert"), 4)
    data.inputs["input_ids"][2] = 99_999  # beyond the vocabulary
    with pytest.raises(DataError, match=facts("fails", "64 samples from 0 on")):
        measure_precision(bundle, "fp16", None, data, unseen=True)
