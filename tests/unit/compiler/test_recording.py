"""Features that do not fit on the disk together are recorded in passes, with the same exits."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import onnx
import pytest
from tests import models
from tests.bundles import compile_tiny
from tests.facts import facts, tells
from tests.sliced import Sliced, dataset_of, run_of, slice_proto, sliced, timed

from offramp.calibration.data import running
from offramp.calibration.data.dataset import DataError, DataSplit, split
from offramp.calibration.data.training_options import TrainingOptions
from offramp.calibration.heads import features
from offramp.calibration.heads.feature_plan import GIB, MOST_PASSES
from offramp.calibration.measure import profiling
from offramp.compiler.common.options import CompileOptions
from offramp.compiler.common.resources import find_scratch
from offramp.compiler.exits.exits import FoundExits, find_exits
from offramp.compiler.exits.feature_recording import FeatureRecorder
from offramp.compiler.exits.scores import MEASURED_SAMPLES
from offramp.compiler.steps.compile import compile_model
from offramp.engine.backends.onnxruntime import make_session


def options_for(folder: Path, **more: object) -> CompileOptions:
    return CompileOptions.of(
        model=folder / "m", data=folder / "d", output=folder / "o", scratch=folder,
        training=TrainingOptions(epochs=1), **more,
    )  # type: ignore[arg-type]  # fmt: skip


def parts_of(pieces: Sliced, samples: int) -> DataSplit:
    return split(dataset_of(pieces, samples), certify_at_least=10, seed=0)


def found(pieces: Sliced, parts: DataSplit, options: CompileOptions) -> FoundExits:
    return find_exits(timed(pieces, parts, options))


@pytest.mark.parametrize("name", ["mlp", "bert", "residual"])
def test_exits_of_many_passes_are_those_of_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling.TimedGraph, "time_ms", lambda _self, _tensors: 0.001)
    pieces = sliced(name)
    parts = parts_of(pieces, 120)
    one, options = found(pieces, parts, options_for(tmp_path)), options_for(tmp_path)
    whole = FeatureRecorder.of(pieces, run_of(parts, options)).plan
    assert len(whole.groups) == 1
    few = options_for(tmp_path, scratch_limit=0.5 * whole.size_bytes / GIB)
    plan = FeatureRecorder.of(pieces, run_of(parts, few)).plan
    assert len(plan.groups) > 1
    assert plan.counts == whole.counts
    assert plan.size_bytes <= 0.5 * whole.size_bytes

    many = found(pieces, parts, few)
    assert [e.candidate for e in many.exits] == [e.candidate for e in one.exits]
    assert len(many.best) == len(one.best) > 1
    for ours, theirs in zip(many.exits, one.exits, strict=True):
        assert ours.best == theirs.best
        for weight, array in theirs.weights.items():
            np.testing.assert_array_equal(ours.weights[weight], array)
    assert list(tmp_path.iterdir()) == []


def test_samples_that_are_left_out_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pieces = sliced("mlp")
    parts = parts_of(pieces, 200)
    plan = FeatureRecorder.of(pieces, run_of(parts, options_for(tmp_path))).plan
    assert plan.counts.made == plan.counts.train
    each = plan.size_bytes / plan.counts.total / len(pieces.cuts)
    alone = max(1, -(-len(pieces.cuts) // 4)) * each
    room = (plan.counts.total - 10) * alone / GIB
    recorder = FeatureRecorder.of(pieces, run_of(parts, options_for(tmp_path, scratch_limit=room)))
    assert recorder.plan.counts.made == plan.counts.made - 10
    assert recorder.made is not None
    assert len(recorder.made) == plan.counts.made - 10
    tells(caplog.text, f"{plan.counts.train:,} of {plan.counts.train:,} real")
    tells(caplog.text, f"{plan.counts.made - 10:,} of {plan.counts.made:,} generated")


def test_a_recording_leaves_no_names_on_the_disk(tmp_path: Path) -> None:
    """So no file is left even if the process is killed."""
    pieces = sliced("bert")
    recorder = FeatureRecorder.of(pieces, run_of(parts_of(pieces, 120), options_for(tmp_path)))
    train, _ = recorder.record(0, tmp_path / "0", {})
    assert all(len(array) for of_exit in train.features for array in of_exit.values())
    assert [place for place in tmp_path.rglob("*") if place.is_file()] == []


def test_the_plan_knows_the_size_of_what_is_recorded(tmp_path: Path) -> None:
    for name in ("mlp", "bert", "residual"):
        pieces = sliced(name)
        recorder = FeatureRecorder.of(pieces, run_of(parts_of(pieces, 120), options_for(tmp_path)))
        recorded = recorder.record(0, tmp_path / name, {})
        arrays = [a for part in recorded for e in part.features for a in e.values()]
        assert recorder.plan.size_bytes == sum(array.nbytes for array in arrays)


def test_missing_disk_space_is_refused_before_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = sliced("mlp")
    parts = parts_of(pieces, 120)
    needed = FeatureRecorder.of(pieces, run_of(parts, options_for(tmp_path))).plan.size_bytes

    class Usage(NamedTuple):
        free: int

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(free=needed - 1))
    with pytest.raises(DataError) as caught:
        found(pieces, parts, options_for(tmp_path))
    text = str(caught.value)
    assert f"({needed:,} bytes), but {tmp_path} has" in text
    tells(text, f"{needed - 1:,} bytes", "free the space", "--scratch")
    assert list(tmp_path.iterdir()) == []


def test_a_scratch_folder_that_is_none_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=facts("--scratch", "nowhere: No such file", "name a")):
        compile_model(options_for(tmp_path / "nowhere"))

    def full(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.mkdtemp", full)
    with pytest.raises(DataError, match=facts(f"--scratch {tmp_path}", "No space left", "name a")):
        find_scratch(tmp_path)


def test_the_source_model_runs_over_the_data_six_times_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many passes as features may take: each runs real samples, and those made of them.

    The few that the answer's scale is measured on are not counted.
    """
    rows: list[int] = []

    class Counting:
        def __init__(self, graph: bytes, threads: int) -> None:
            assert held_operators(graph) >= 0.9 * operators, "not the whole source model"
            self._session = make_session(graph, threads)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._session, name)

        def run(self, outputs: list[str], feeds: dict[str, Any]) -> list[Any]:
            rows.append(len(next(iter(feeds.values()))))
            return self._session.run(outputs, feeds)

    pieces = slice_proto(models.bert_like(), candidates=MOST_PASSES)
    operators = len(pieces.model.proto.graph.node)
    monkeypatch.setattr(running, "make_session", Counting)
    monkeypatch.setattr(features, "TOKEN_COMPONENTS", 5)  # so that components are looked for
    monkeypatch.setattr(features, "_PROJECTED_SAMPLES", 20)
    data = dataset_of(pieces, 800)
    parts = split(data, certify_at_least=10, seed=0)
    whole = FeatureRecorder.of(pieces, run_of(parts, options_for(tmp_path))).plan
    limit = whole.size_bytes / MOST_PASSES / GIB
    plan = FeatureRecorder.of(
        pieces, run_of(parts, options_for(tmp_path, scratch_limit=limit))
    ).plan
    assert (len(plan.groups), plan.counts) == (MOST_PASSES, whole.counts)
    rows.clear()
    compile_tiny(
        pieces.model.proto,
        dict(data.inputs),
        tmp_path,
        epochs=1,
        scratch=tmp_path,
        scratch_limit=limit,
        candidates=MOST_PASSES,
    )
    passes = (sum(rows) - min(len(parts.train), MEASURED_SAMPLES)) / len(data)
    assert 5 < passes <= 6


def held_operators(graph: bytes) -> int:
    return len(onnx.ModelProto.FromString(graph).graph.node)
