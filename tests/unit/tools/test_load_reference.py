from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.engines import engine_bundle

from offramp.bundle import TensorSpec
from offramp.bundle.schema.compilation import DistinctSamples
from offramp.calibration.data.dataset import DataError
from offramp.calibration.data.key import GroupKey
from offramp.client import ModelMetadata, TensorMetadata
from offramp.tools.bench.load.load_settings import LoadError
from offramp.tools.bench.load.reference import (
    LoadData,
    given_reference,
    group_key,
    input_specs,
    read_data,
)

X = TensorSpec(name="x", dtype="float32", shape=("batch", 2))


def tensor(name: str, dtype: str, *shape: int) -> TensorMetadata:
    return TensorMetadata(name=name, dtype=np.dtype(dtype), shape=shape)


def metadata(*outputs: str) -> ModelMetadata:
    inputs = (tensor("x", "float32", -1, 2), tensor("ids", "int64", -1, -1))
    return ModelMetadata(
        name="m",
        platform="p",
        inputs={t.name: t for t in inputs},
        outputs={name: tensor(name, "float32", -1, 3) for name in outputs},
    )


def data(path: Path, **arrays: object) -> Path:
    np.savez(path / "data.npz", **{"x": np.ones((4, 2), np.float32), **arrays})  # type: ignore[arg-type]
    return path / "data.npz"


def test_the_servers_metadata_say_what_data_must_look_like() -> None:
    assert input_specs(metadata("logits")) == (
        X,
        TensorSpec(name="ids", dtype="int64", shape=("batch", "ids_1")),
    )


def test_the_first_samples_are_taken_without_labels(tmp_path: Path) -> None:
    read = read_data(data(tmp_path, label=np.zeros(4, np.int64)), [X], samples=3)
    assert len(read) == 3
    assert list(read.inputs) == ["x"]
    assert read.reference is None
    nothing = given_reference(read, metadata("logits"))
    assert (nothing.answer, nothing.classes) == (None, None)


def test_classes_of_the_source_model_may_come_with_the_data(tmp_path: Path) -> None:
    read = read_data(data(tmp_path, reference=np.array([2, 0, 1, 1])), [X], samples=3)
    assert list(read.inputs) == ["x"]
    reference = given_reference(read, metadata("logits"))
    assert reference.answer == "logits"
    assert reference.classes is not None
    assert reference.classes.tolist() == [2, 0, 1]
    assert reference.on_calibration_data is None


def test_the_array_that_groups_rows_is_not_sent(tmp_path: Path) -> None:
    path = data(tmp_path, patient=np.array([7, 7, 9, 9]))
    for key in (GroupKey(key="patient"), GroupKey(key="patient", needed=False)):
        assert list(read_data(path, [X], samples=9, group=key).inputs) == ["x"]
    with pytest.raises(DataError, match="--group person: there is no such array"):
        read_data(path, [X], samples=9, group=GroupKey(key="person"))
    named = re.escape("name it: --group patient (eecompile, eecompile rehearse, eebench load)")
    with pytest.raises(DataError, match=f"there is no input 'patient'.*{named}"):
        read_data(path, [X], samples=9)


def test_the_key_of_groups_is_as_asked_or_the_bundles(tmp_path: Path) -> None:
    assert group_key(None, None) is None
    bundle = engine_bundle("residual", tmp_path / "m.ee")
    assert group_key(None, bundle) is None
    distinct = DistinctSamples(rows=4, samples=2, found=(), key="patient")
    calibration = replace(bundle.manifest.calibration, distinct=distinct)
    grouped = replace(bundle, manifest=replace(bundle.manifest, calibration=calibration))
    assert group_key(None, grouped) == GroupKey(key="patient", needed=False)
    assert group_key("person", grouped) == GroupKey(key="person")


def test_only_a_bundle_says_which_of_several_outputs_is_the_answer(tmp_path: Path) -> None:
    read = read_data(data(tmp_path, reference=np.arange(4)), [X], samples=9)
    with pytest.raises(LoadError, match=r"outputs logits, features; .* give --reference"):
        given_reference(read, metadata("logits", "features"))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"reference": np.arange(3)}, "differ in length|must be the same"),
        ({"reference": np.ones(4, np.float32)}, "'reference' is float32"),
        ({"y": np.ones(4)}, "there is no input 'y'; expected [^;]*$"),
        ({"y": np.arange(3)}, "there is no input 'y'; expected [^;]*$"),
    ],
)
def test_data_that_do_not_fit_are_refused(
    tmp_path: Path, arrays: dict[str, object], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read_data(data(tmp_path, **arrays), [X], samples=9)


def test_data_that_lack_an_input_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="input 'ids' is missing"):
        read_data(data(tmp_path), input_specs(metadata("logits")), samples=9)
    with pytest.raises(DataError, match="no such file"):
        read_data(tmp_path / "absent.npz", [X], samples=9)


def test_len_is_samples() -> None:
    assert len(LoadData(inputs={"x": np.zeros((5, 2))}, reference=None, sha256="")) == 5
