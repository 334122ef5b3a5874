"""Copies in the calibration data: what a bundle keeps of them, and what later commands do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tests import models
from tests.bundles import compile_tiny, equal_times
from tests.facts import Told, facts, tells

from offramp.bundle import Bundle, TensorSpec
from offramp.bundle.records import CERTIFY
from offramp.calibration.data.dataset import DataError, read_dataset, read_samples
from offramp.calibration.data.key import GroupKey
from offramp.compiler.commands.printing import print_bundle, print_check
from offramp.compiler.common.options import RehearseOptions
from offramp.compiler.engines.engine_verification import part_data
from offramp.compiler.samples.grouping import grouped
from offramp.compiler.steps.bundle_check import VerifyOptions, verify_bundle
from offramp.compiler.steps.rehearse import rehearse_bundle

DISTINCT, COPIES = 700, 3
SPEC = TensorSpec(name="x", dtype="float32", shape=("batch", 16))


def rows(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = np.repeat(rng.standard_normal((DISTINCT, 16)), COPIES, axis=0)
    return rng.permutation(x).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copies")
    with equal_times():
        compile_tiny(models.mlp(), {"x": rows()}, folder, epochs=1, seed=7)
    return folder


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Bundle:
    return Bundle.open(folder / "tiny.ee")


def test_a_bundle_says_how_many_distinct_samples_it_rests_on(bundle: Bundle, capsys) -> None:
    calibration = bundle.manifest.calibration
    assert calibration.distinct is not None
    assert (calibration.distinct.rows, calibration.distinct.samples) == (2100, DISTINCT)
    assert calibration.certify_samples == round(DISTINCT / 4)
    assert calibration.train_samples == COPIES * round(DISTINCT * 0.6)
    records = bundle.records()
    assert (records["copies"] == COPIES).all()
    assert (records["split"] == CERTIFY).sum() == calibration.certify_samples
    print_bundle(bundle, Console(width=500))
    said = capsys.readouterr().out
    assert "on 175 distinct samples (of 700; of 2,100 rows of calibration data 1,400" in said
    assert "700 (of 2,100 rows of calibration data 1,400" in bundle.read("report.html").decode()


def test_the_same_splits_are_found_again(folder: Path, bundle: Bundle) -> None:
    data = read_samples(folder / "data.npz", bundle.manifest)
    parts = part_data(bundle, data, seed=7)
    assert parts.certifies
    assert len(parts.judged) == bundle.manifest.calibration.certify_samples
    assert parts.judged.copies is not None
    assert len(parts.tune) == bundle.manifest.calibration.tune_samples
    assert not part_data(bundle, data, seed=8).certifies


def test_other_data_count_each_distinct_sample_once(tmp_path: Path, bundle: Bundle, capsys) -> None:
    np.savez(tmp_path / "other.npz", x=rows(1))
    data = read_samples(tmp_path / "other.npz", bundle.manifest)
    parts = part_data(bundle, data)
    assert len(parts.tune) == len(parts.judged) == DISTINCT // 2
    check = verify_bundle(VerifyOptions(bundle=bundle.path, data=tmp_path / "other.npz"))
    assert (check.samples, check.distinct_samples) == (2100, DISTINCT)
    print_check(check, bundle.path, Console(width=300))
    assert "2,100 samples, 700 of them distinct" in capsys.readouterr().out
    few = replace(check, distinct_samples=check.samples)
    assert few.at_most == check.at_most


def test_rehearsing_counts_them_once_too(tmp_path: Path, bundle: Bundle) -> None:
    np.savez(tmp_path / "new.npz", x=rows(2))
    done = rehearse_bundle(
        RehearseOptions(bundle=bundle.path, data=tmp_path / "new.npz", output=tmp_path / "new.ee")
    )
    calibration = Bundle.open(tmp_path / "new.ee").manifest.calibration
    assert calibration.tune_samples + calibration.certify_samples == DISTINCT
    assert calibration.distinct is not None
    assert calibration.distinct.samples == DISTINCT
    assert done.written is not None


def test_too_few_distinct_samples_are_refused(tmp_path: Path) -> None:
    x = np.repeat(np.random.default_rng(0).standard_normal((60, 16)), 50, axis=0)
    with pytest.raises(DataError, match="60 distinct calibration samples are too few"):
        compile_tiny(models.mlp(), {"x": x.astype(np.float32)}, tmp_path)


def test_an_array_of_the_data_groups_rows_and_is_no_input(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((1500, 16)).astype(np.float32)
    person = np.array([f"person {n}" for n in np.arange(1500) // 2])
    bundle = compile_tiny(models.mlp(), {"x": x, "person": person}, tmp_path, group="person",
                          epochs=1)  # fmt: skip
    distinct = bundle.manifest.calibration.distinct
    assert distinct is not None
    assert (distinct.samples, distinct.key) == (750, "person")
    again = read_samples(tmp_path / "data.npz", bundle.manifest)  # the key is known from then on
    assert part_data(bundle, again).certifies
    np.savez(tmp_path / "without.npz", x=x)
    assert read_samples(tmp_path / "without.npz", bundle.manifest).group is None


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (None, ("--group person", "no such array", "none")),
        (np.arange(30.0), ("--group person is float64 [30]", "integer or a text")),
        (np.arange(29), ("--group person is int64 [29]", "integer or a text")),
        (np.zeros((30, 2), int), ("--group person is int64 [30, 2]",)),
    ],
)
def test_arrays_that_group_nothing_are_refused(tmp_path: Path, values, problem: Told) -> None:
    arrays = {"x": np.zeros((30, 16), np.float32)}
    np.savez(tmp_path / "d.npz", **arrays, **({} if values is None else {"person": values}))
    with pytest.raises(DataError, match=facts(*problem)):
        read_dataset(tmp_path / "d.npz", [SPEC], group=GroupKey(key="person"))


def test_a_warning_names_reasons(tmp_path: Path, bundle: Bundle, caplog) -> None:
    np.savez(tmp_path / "d.npz", x=rows())
    data = read_samples(tmp_path / "d.npz", bundle.manifest)
    groups = grouped(data, tmp_path / "d.npz")
    assert len(groups) == DISTINCT
    tells(caplog.text, "2,100 rows", "700 distinct", "1,400", "duplicates")
