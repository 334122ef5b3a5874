"""Recorded features equal the model's values, batch by batch, and those of serving."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tests.facts import facts
from tests.sliced import Sliced, dataset_of, sliced
from tests.unit.calibration.test_families import pool_by_hand

from offramp.bundle import Answer
from offramp.bundle.records import CERTIFY, TUNE
from offramp.calibration.choose.exit_records import dump_records, record_answers
from offramp.calibration.data.augmentation import AugmentedSamples
from offramp.calibration.data.dataset import DataError, Dataset
from offramp.calibration.heads import features as features_module
from offramp.calibration.heads.cut_tensors import CutTensor
from offramp.calibration.heads.families import grids_of
from offramp.calibration.heads.features import FULL_TENSOR, Recording, fit_projections, record
from offramp.compiler.exits.heads import attach_poolings
from offramp.compiler.graphs.runtime import GraphRunner
from offramp.engine.answers.exit_check import confidence_of

SAMPLES = 150
"""Two batches and a part of one."""


def record_all(pieces: Sliced, folder: Path) -> tuple[Recording, Dataset, list[int]]:
    graph, outputs = attach_poolings(pieces.model, pieces.graphs, pieces.cuts)
    data = dataset_of(pieces, SAMPLES)
    steps: list[int] = []
    answer = pieces.model.answer
    recording = record(
        graph, outputs, answer, data, masks={cut.mask for cut in pieces.cuts if cut.mask},
        threads=1, directory=folder / "f", progress=steps.append,
    )  # fmt: skip
    return recording, data, steps


def cut_values(pieces: Sliced, data: Dataset) -> dict[str, np.ndarray]:
    """Answer and every cut tensor, by running the source with them as outputs."""
    exposed = onnx.ModelProto()
    exposed.CopyFrom(pieces.model.proto)
    known = {info.name: info for info in exposed.graph.value_info}
    exposed.graph.output.extend(known[cut.name] for cut in pieces.cuts)
    return GraphRunner(exposed).run(data.inputs)


@pytest.mark.parametrize("name", ["residual", "bert", "mlp"])
def test_recorded_features_are_the_cut_tensors(name: str, tmp_path: Path) -> None:
    pieces = sliced(name)
    recording, data, steps = record_all(pieces, tmp_path)
    values = cut_values(pieces, data)

    assert steps == [64, 64, 22]
    # the whole data set at once, and in batches: kernels differ in the last bits
    answers = values[pieces.model.answer.output]
    np.testing.assert_allclose(recording.answers, answers, rtol=0, atol=1e-5)
    for cut, features in zip(pieces.cuts, recording.features, strict=True):
        grids = grids_of(cut) if cut.rank == 4 else (FULL_TENSOR,)
        assert tuple(features) == grids
        for grid, found in features.items():
            wanted = (
                values[cut.name] if grid == FULL_TENSOR else pool_by_hand(values[cut.name], grid)
            )
            assert found.dtype == np.float16
            # float16 has 11 bits; 1e-5 for values near 0
            np.testing.assert_allclose(found, wanted, rtol=2**-10, atol=1e-4)


def test_masks_are_recorded_for_those_who_need_them(tmp_path: Path) -> None:
    pieces = sliced("bert")
    recording, data, _ = record_all(pieces, tmp_path)
    assert {cut.mask for cut in pieces.cuts} == {"attention_mask"}
    masks = recording.masks["attention_mask"]
    np.testing.assert_array_equal(masks, data.inputs["attention_mask"])


def test_places_without_a_fitting_head_are_not_recorded() -> None:
    pieces = sliced("residual")
    odd = CutTensor(name=pieces.cuts[1].name, dtype="float32", shape=("batch", "c", 4, 4))
    cuts = (pieces.cuts[0], odd, *pieces.cuts[2:])
    _, outputs = attach_poolings(pieces.model, pieces.graphs, cuts)
    assert [bool(o) for o in outputs] == [cut is not odd for cut in cuts]


def scaling(factor: float) -> bytes:
    """``a`` = ``cut`` = factor · x, and ``c`` its largest softmax."""
    info = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 2]) for n in ("x", "cut", "a")
    ]
    info.append(helper.make_tensor_value_info("c", TensorProto.FLOAT, ["n"]))
    weight = helper.make_tensor("w", TensorProto.FLOAT, [], [factor])
    nodes = [
        helper.make_node("Mul", ["x", "w"], ["cut"]),
        helper.make_node("Identity", ["cut"], ["a"]),
        helper.make_node("Softmax", ["cut"], ["p"], axis=-1),
        helper.make_node("ReduceMax", ["p"], ["c"], axes=[1], keepdims=0),
    ]
    graph = helper.make_graph(nodes, "g", info[:1], info[1:], initializer=[weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return model.SerializeToString()


def record_scaled(factor: float, x: np.ndarray, folder: Path) -> Recording:
    return record(
        scaling(factor),
        ({FULL_TENSOR: "cut"},),
        Answer(output="a", classes=2, form="logits"),
        Dataset(inputs={"x": x.astype(np.float32)}, labels=None, sha256="0"),
        threads=1,
        directory=folder / "f",
    )


def test_values_beyond_float16_are_clipped(tmp_path: Path) -> None:
    recording = record_scaled(1e5, np.array([[1, -1], [0.5, 0]]), tmp_path)
    features = recording.features[0][FULL_TENSOR]
    assert features.tolist() == [[65504, -65504], [49984, 0]]  # 49984: steps of 32
    assert recording.answers.tolist() == [[1e5, -1e5], [5e4, 0]]


def test_answers_that_are_no_numbers_are_told_with_their_sample(tmp_path: Path) -> None:
    x = np.ones((100, 2))
    x[70, 1] = 1e38
    with pytest.raises(DataError, match=facts("sample 70", "NaN or infinity")):
        record_scaled(1e5, x, tmp_path)


def test_wide_tokens_are_stored_as_coordinates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features_module, "TOKEN_COMPONENTS", 5)
    pieces = sliced("bert")
    graph, outputs = attach_poolings(pieces.model, pieces.graphs, pieces.cuts)
    data = dataset_of(pieces, 80)
    projections = fit_projections(graph, outputs, pieces.cuts, data, threads=1)
    assert sorted(projections) == list(range(len(pieces.cuts)))
    recording = record(
        graph, outputs, pieces.model.answer, data, projections=projections, threads=1,
        directory=tmp_path / "f",
    )  # fmt: skip
    assert recording.projections == projections
    values = cut_values(pieces, data)
    for candidate, cut in enumerate(pieces.cuts):
        stored = recording.features[candidate][FULL_TENSOR]
        plain = values[cut.name]
        assert stored.shape == (*plain.shape[:2], 5)
        wanted = (plain - projections[candidate].mean) @ projections[candidate].matrix
        np.testing.assert_allclose(stored, wanted, rtol=2**-9, atol=2e-3)
        kept = plain[data.inputs["attention_mask"] > 0]  # padding says nothing of what varies
        np.testing.assert_allclose(projections[candidate].mean, kept.mean(0), rtol=0, atol=1e-4)


def test_where_no_token_counts_components_are_those_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mask of another kind, which is added to scores: 0 where a token counts."""
    monkeypatch.setattr(features_module, "TOKEN_COMPONENTS", 5)
    pieces = sliced("bert")
    graph, outputs = attach_poolings(pieces.model, pieces.graphs, pieces.cuts)
    data = dataset_of(pieces, 20)
    none = np.zeros_like(data.inputs["attention_mask"])
    data = replace(data, inputs={**data.inputs, "attention_mask": none})
    projections = fit_projections(graph, outputs, pieces.cuts, data, threads=1)
    for candidate, cut in enumerate(pieces.cuts):
        plain = cut_values(pieces, data)[cut.name]
        wanted = plain.reshape(-1, plain.shape[2]).mean(0)
        np.testing.assert_allclose(projections[candidate].mean, wanted, rtol=0, atol=1e-4)


def test_masks_without_room_are_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        if path.name.startswith("mask"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(features_module, "_reserve", full)
    pieces, steps = sliced("bert"), list[int]()
    graph, outputs = attach_poolings(pieces.model, pieces.graphs, pieces.cuts)
    message = "No space left on device; free the space, or name a folder that has it by"
    with pytest.raises(DataError, match=message):
        record(
            graph, outputs, pieces.model.answer, dataset_of(pieces, 70), masks=["attention_mask"],
            threads=1, directory=tmp_path / "f", progress=steps.append,
        )  # fmt: skip
    assert steps == []


def test_narrow_tokens_and_maps_are_stored_as_they_are() -> None:
    for name in ("bert", "residual"):
        pieces = sliced(name)
        graph, outputs = attach_poolings(pieces.model, pieces.graphs, pieces.cuts)
        data = dataset_of(pieces, 10)
        assert fit_projections(graph, outputs, pieces.cuts, data, threads=1) == {}


def test_made_samples_come_behind_the_real_ones(tmp_path: Path) -> None:
    pieces = sliced("bert")
    data = dataset_of(pieces, 70)
    graph, outputs = attach_poolings(pieces.model, pieces.graphs, pieces.cuts)
    made = AugmentedSamples.draw(data, "splice", seed=3)
    steps: list[int] = []
    recording = record(
        graph, outputs, pieces.model.answer, data, made=made, masks=["attention_mask"], threads=1,
        directory=tmp_path / "f", progress=steps.append,
    )  # fmt: skip
    whole = cut_values(pieces, data)[pieces.model.answer.output]
    spliced = Dataset(inputs=made.take(slice(None)), labels=None, sha256="0")
    more = cut_values(pieces, spliced)[pieces.model.answer.output]
    assert sum(steps) == 140
    np.testing.assert_allclose(recording.answers, np.concatenate([whole, more]), rtol=0, atol=1e-5)
    mask = recording.masks["attention_mask"]
    np.testing.assert_array_equal(mask[:70], data.inputs["attention_mask"])
    np.testing.assert_array_equal(mask[70:], spliced.inputs["attention_mask"])
    assert all(len(store) == 140 for e in recording.features for store in e.values())


def test_a_made_sample_without_a_finite_answer_is_the_one_it_was_made_of(tmp_path: Path) -> None:
    x = np.array([[1e37, 2.0], [1e38, 1.0]], np.float32)
    data = Dataset(inputs={"x": x}, labels=None, sha256="0")
    made = AugmentedSamples(
        base=data,
        method="mixup",
        first=np.arange(2),
        partner=np.array([1, 0]),
        share=np.float32([-1.0, 0.5]),
    )  # a share of −1 stands for whatever makes a model overflow: 3 · (−1e37 + 2e38)
    recording = record(
        scaling(3.0), ({FULL_TENSOR: "cut"},), Answer(output="a", classes=2, form="logits"), data,
        made=made, threads=1, directory=tmp_path / "f",
    )  # fmt: skip
    kept = np.concatenate([x, x[:1], made.take(slice(1, 2))["x"]])
    np.testing.assert_allclose(recording.answers, 3 * kept, rtol=1e-6)
    features = recording.features[0][FULL_TENSOR]
    np.testing.assert_array_equal(features[2], features[0])


def test_made_samples_that_the_model_fails_on_are_done_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pieces = sliced("bert")
    data = dataset_of(pieces, 70)
    graph, outputs = attach_poolings(pieces.model, pieces.graphs, pieces.cuts)
    made = AugmentedSamples.draw(data, "splice", seed=3)
    alone = record(graph, outputs, pieces.model.answer, data, threads=1, directory=tmp_path / "a")
    with pytest.MonkeyPatch.context() as patched:
        wrong = {name: array + 4000 for name, array in data.inputs.items()}
        patched.setattr(
            AugmentedSamples, "take", lambda _, rows: {name: a[rows] for name, a in wrong.items()}
        )
        recording = record(
            graph, outputs, pieces.model.answer, data, made=made, masks=["attention_mask"],
            threads=1, directory=tmp_path / "f",
        )  # fmt: skip
    assert "without some of the augmented samples" in caplog.text
    np.testing.assert_array_equal(recording.answers, np.tile(alone.answers, (2, 1)))
    mask = data.inputs["attention_mask"]
    np.testing.assert_array_equal(recording.masks["attention_mask"], np.tile(mask, (2, 1)))


def test_a_model_that_fails_on_some_samples_says_on_which(tmp_path: Path) -> None:
    pieces = sliced("bert")
    data = dataset_of(pieces, 100)
    data.inputs["input_ids"][90, 3] = 4000  # beyond the vocabulary of 50
    graph, outputs = attach_poolings(pieces.model, pieces.graphs, pieces.cuts)
    with pytest.raises(DataError, match=r"fails on calibration sample 90: .*indices"):
        record(graph, outputs, pieces.model.answer, data, threads=1, directory=tmp_path / "f")


def test_records_say_what_the_outputs_say() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((SAMPLES, 2))
    data = Dataset(inputs={"x": x.astype(np.float32)}, labels=np.arange(SAMPLES), sha256="0")
    answer = Answer(output="a", classes=2, form="logits")
    steps: list[int] = []
    records = record_answers(
        scaling(-2), [("cut", "c")], answer, data, threads=1, progress=steps.append
    )

    logits = -2 * x.astype(np.float32)
    np.testing.assert_array_equal(records.prediction, [logits.argmax(axis=1)])
    np.testing.assert_array_equal(records.final_prediction, logits.argmax(axis=1))
    np.testing.assert_array_equal(records.final_confidence, confidence_of(logits, "logits"))
    # the graph's softmax and numpy's differ by a rounding
    np.testing.assert_allclose(records.confidence, [records.final_confidence], rtol=1e-6)
    assert records.agrees.all()
    assert records.agrees.shape == (1, SAMPLES)
    assert steps == [64, 64, 22]

    none = record_answers(scaling(-2), [], answer, data, threads=1)
    assert none.agrees.shape == none.confidence.shape == (0, SAMPLES)


def test_both_splits_are_dumped_in_order(tmp_path: Path) -> None:
    answer = Answer(output="a", classes=2, form="logits")
    parts = [
        record_answers(
            scaling(1),
            [("cut", "c")],
            answer,
            Dataset(inputs={"x": np.full((n, 2), n, np.float32)}, labels=np.full(n, n), sha256="0"),
            threads=1,
        )
        for n in (2, 3)
    ]
    (tmp_path / "r.npz").write_bytes(dump_records(*parts))
    with np.load(tmp_path / "r.npz", allow_pickle=False) as archive:
        arrays = dict(archive)
    assert {name: (a.dtype.name, a.shape) for name, a in arrays.items()} == {
        "confidence": ("float32", (1, 5)),
        "prediction": ("int32", (1, 5)),
        "final_prediction": ("int32", (5,)),
        "final_confidence": ("float32", (5,)),
        "split": ("uint8", (5,)),
        "label": ("int64", (5,)),
    }
    assert arrays["split"].tolist() == [TUNE, TUNE, CERTIFY, CERTIFY, CERTIFY]
    assert arrays["label"].tolist() == [2, 2, 3, 3, 3]


def test_a_sample_is_named_by_its_place_in_the_file(tmp_path: Path) -> None:
    pieces = sliced("bert")
    data = dataset_of(pieces, 100)
    data.inputs["input_ids"][90, 3] = 4000
    part = data.subset(np.arange(80, 100))
    graph, outputs = attach_poolings(pieces.model, pieces.graphs, pieces.cuts)
    with pytest.raises(DataError, match="fails on calibration sample 90: "):
        record(graph, outputs, pieces.model.answer, part, threads=1, directory=tmp_path / "f")
