"""The measurements of the runtime, rehearsed on a fake driver: no figure of it means anything."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.small_bert import MODEL
from tests.unit.tools.gpu.fake_machine import FakeMachine

from offramp.bundle import Bundle
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import make_plan
from offramp.tools.bench.common.compare import NO_EXIT, OFFRAMP, SOURCE
from offramp.tools.gpu import models, pame, serving, timing
from offramp.tools.gpu.models import MODELS, BenchModel, Recorded
from offramp.tools.gpu.staged import REPLAY


@pytest.fixture
def model() -> BenchModel:
    return MODEL


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return MODEL.bundle(tmp_path_factory.mktemp("bundles"), seed=0)


@pytest.fixture
def machine() -> FakeMachine:
    return FakeMachine()


def test_who_leaves_is_decided_by_what_is_replayed(model: BenchModel, bundle: Bundle) -> None:
    samples = model.samples(400, 0.3, seed=1)
    pipeline = Pipeline(OnnxRuntimeBackend(), make_plan(bundle))
    stage = np.full(400, -1)
    for departure in pipeline.run(pipeline.backend.open_slot(), samples.take(slice(None))):
        stage[departure.rows] = departure.stage
    leaves = samples.inputs[REPLAY] >= models.THRESHOLD
    np.testing.assert_array_equal(stage, np.where(leaves[:, 0], 0, np.where(leaves[:, 1], 1, 2)))
    assert 0.2 < (stage > 0).mean() < 0.4
    assert 0.35 < (stage[stage > 0] == 2).mean() < 0.65


def test_recorded_confidences_are_replayed(model: BenchModel, tmp_path: Path) -> None:
    path = tmp_path / "recorded.npz"
    confidence = np.array([[0.9, 0.2], [0.1, 0.8], [0.1, 0.2]], np.float32)
    np.savez(path, confidence=confidence, thresholds=np.array([0.5, 0.7], np.float32))
    replayed = model.samples(300, Recorded.read(path), seed=0).inputs[REPLAY]
    found, counts = np.unique(replayed >= models.THRESHOLD, axis=0, return_counts=True)
    assert found.tolist() == [[False, False], [False, True], [True, False]]
    assert min(counts) > 70


def test_a_record_of_too_few_exits_is_refused(model: BenchModel, tmp_path: Path) -> None:
    path = tmp_path / "recorded.npz"
    np.savez(path, confidence=np.ones((4, 1)), thresholds=np.ones(1))
    with pytest.raises(ValueError, match="the recording has 1 exits, but 2 are needed"):
        model.samples(3, Recorded.read(path), seed=0)
    np.savez(path, confidence=np.ones((4, 1)))
    with pytest.raises(ValueError, match="lacks"):
        Recorded.read(path)


def test_bundles_are_made_once(model: BenchModel, bundle: Bundle) -> None:
    again = model.bundle(bundle.path.parent, seed=0)
    assert again.manifest == bundle.manifest
    assert [segment.output for segment in bundle.manifest.segments] == [
        "layer0.out", "layer1.out", "logits",
    ]  # fmt: skip


def test_latencies_of_stages_and_of_the_source_model(
    machine: FakeMachine, model: BenchModel, bundle: Bundle
) -> None:
    settings = pame.Settings(batches=(4, 8), go_on=(0.5,), rounds=2, batches_a_round=3)
    rows = pame.latencies(machine, model, bundle, settings)
    assert [(row["system"], row["batch_size"]) for row in rows] == [
        (name, size) for size in (4, 8) for name in (SOURCE, OFFRAMP, NO_EXIT)
    ]
    assert {row["go_on_replayed"] for row in rows} == {"50%"}
    for row in rows:
        assert row["baseline"] == "the source model as one session of fake-cuda"
        expected = {"final": 1.0} if row["system"] == SOURCE else None
        if expected:
            assert row["exit_shares"] == expected
        if row["system"] == NO_EXIT:
            assert row["agreement"] == 1.0
            assert row["exit_shares"]["final"] == 1.0
        if row["system"] == OFFRAMP:
            assert 0.2 < row["exit_shares"]["exit 0"] < 0.8
        assert 0 < row["mean_ms"] <= row["p99_ms"] * 1.001


def test_the_time_of_stages_is_divided(
    machine: FakeMachine, model: BenchModel, bundle: Bundle
) -> None:
    settings = pame.Settings(batches=(4,), go_on=(0.5,), rounds=2, batches_a_round=3)
    cases = {case["case"]: case for case in pame.breakdown(machine, model, bundle, settings)}
    assert list(cases) == ["50%", pame.NOBODY_LEAVES, pame.SOURCE_MODEL]
    nobody = cases[pame.NOBODY_LEAVES]
    assert [stage["mean_rows"] for stage in nobody["stages"]] == [4, 4, 4]
    first, second, last = (stage["measured_parts_ms"] for stage in nobody["stages"])
    assert {timing.MODELS, timing.STAGE_ENDS, timing.COPIES_IN} <= first.keys()
    assert timing.COPIES_IN not in second
    assert timing.STAGE_ENDS in second
    assert timing.STAGE_ENDS in last  # the answer's confidence, which nobody leaves by
    assert timing.GATHERS not in first
    (whole,) = cases[pame.SOURCE_MODEL]["stages"]
    assert timing.MODELS in whole["measured_parts_ms"]
    assert cases["50%"]["stages"][1]["mean_rows"] < 4
    assert all(0 <= stage["stage_end_share"] < 1 for stage in nobody["stages"])
    graphs = [driver.calls["launch_graph"] for driver in machine.drivers]
    assert min(graphs) > 0


@pytest.mark.slow
def test_parallel_batches_over_their_limit(
    machine: FakeMachine, model: BenchModel, bundle: Bundle
) -> None:
    settings = serving.ParallelSettings(
        limits=(1, 4), max_batch_size=8, rounds=1, requests=12, load=serving.Load(clients=4)
    )
    rows = serving.parallel(machine, model, bundle, settings)
    streams = "stages, 2 streams"
    systems = [(serving.SOURCE_MODEL, None), (serving.ONE_STREAM, None), (streams, 1), (streams, 4)]
    assert [(row["system"], row["parallel_below"]) for row in rows] == systems * 2
    assert [row["graphs"] for row in rows] == [True] * 4 + [False] * 4
    for row in rows:
        assert row["failed"] == 0
        assert row["samples_per_s"] > 0
        assert row["mean_ms"] <= row["p99_ms"]
    assert rows[0]["slower_than_source"] <= 1 / 12 + 1e-9


def test_a_long_run_loses_nothing_and_keeps_memory_flat(
    machine: FakeMachine, model: BenchModel, bundle: Bundle
) -> None:
    settings = serving.SoakSettings(
        seconds=1.0, every_s=0.01, max_batch_size=8, load=serving.Load(clients=3, rows=(1, 12))
    )
    found = serving.soak(machine, model, bundle, settings)
    assert found["sent"] == found["answered"] > 0
    assert found["lost"] == 0
    assert found["errors"] == {}
    assert found["drained"]
    assert found["streams_restarted"] == 0
    assert found["flat"]


def test_growth_is_seen() -> None:
    falling = list(range(1000, 0, -10))
    assert serving.growth_bytes(falling) == 810 - 10
    assert serving.growth_bytes([500] * 5 + [100] * 95) == 0  # warming up
    assert serving.growth_bytes([7]) == 0


def test_the_models_are_cut_where_their_exits_are() -> None:
    assert {name: model.cuts for name, model in MODELS.items()} == {
        "resnet50": ("layer2.3.relu",),
        "resnet101": ("layer3.5.relu",),
        "bert-base": ("layer2.out", "layer5.out"),
    }
