"""CUDA graphs: one for each stage, number of rows and place; captured once, replayed from then."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.cuda_fakes import fake_cuda
from tests.engines import engine_bundle
from tests.facts import tells
from tests.sliced import inputs_of, sliced

from offramp.bundle import Bundle
from offramp.engine.cuda.driver import Stream
from offramp.engine.cuda.prepared_stages import CudaStage
from offramp.engine.cuda.slot import CudaSlot
from offramp.engine.stages.backend_protocol import StageResult
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import make_plan
from offramp.testing.cuda_handles import FakeGraph


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundle]:
    yield engine_bundle("mlp", tmp_path_factory.mktemp("graphs") / "mlp.ee", exits_after=(0, 1))


def run_first(slot: CudaSlot, stage: CudaStage, rows: int, seed: int = 0) -> StageResult:
    return slot.run(stage, slot.upload(inputs_of(sliced("mlp"), rows, seed=seed)))


def test_a_stage_is_captured_the_second_time_and_replayed_from_the_third(bundle: Bundle) -> None:
    backend, factory, driver = fake_cuda()
    stage = backend.prepare(make_plan(bundle).stages[0])
    slot = backend.open_slot()
    counts = []
    for _ in range(5):
        run_first(slot, stage, 3)
        counts.append((driver.calls["capture"], driver.calls["launch_graph"]))
    assert counts == [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert factory.enqueued[0, 3] == 3  # twice as it is, once into the graph
    slot.close()
    backend.close()


def test_replays_answer_for_the_rows_that_are_there_now(bundle: Bundle) -> None:
    backend, _, driver = fake_cuda()
    plain, _, _ = fake_cuda(graphs=False)
    stages = [each.prepare(make_plan(bundle).stages[0]) for each in (backend, plain)]
    slots = [backend.open_slot(), plain.open_slot()]
    for seed in range(5):
        ours, theirs = (run_first(s, p, 3, seed).answer for s, p in zip(slots, stages, strict=True))
        np.testing.assert_array_equal(ours, theirs)
    assert driver.calls["launch_graph"] == 3
    for slot, each in zip(slots, (backend, plain), strict=True):
        slot.close()
        each.close()


def test_each_number_of_rows_has_a_graph_and_none_is_made_twice(bundle: Bundle) -> None:
    backend, factory, driver = fake_cuda()
    pipeline = Pipeline(backend, make_plan(bundle))
    slot = backend.open_slot()
    for _ in range(4):
        for rows in (1, 2, 5):
            pipeline.warm_up(slot, inputs_of(sliced("mlp"), rows))
    stages = len(pipeline.plan.stages)
    assert driver.calls["capture"] == 3 * stages
    assert driver.calls["launch_graph"] == 2 * 3 * stages
    assert set(factory.enqueued.values()) == {3}
    slot.close()
    backend.close()


def test_what_is_merged_finds_the_graph_of_what_goes_straight_on(bundle: Bundle) -> None:
    backend, _, driver = fake_cuda()
    stages = [backend.prepare(spec) for spec in make_plan(bundle).stages]
    slot = backend.open_slot()
    for _ in range(3):
        carry = run_first(slot, stages[0], 4).carry
        assert carry is not None
        slot.run(stages[1], slot.select(carry, np.array([0, 2])))
    launches = driver.calls["launch_graph"]
    carry = run_first(slot, stages[0], 5).carry
    assert carry is not None
    slot.run(stages[1], slot.merge([(slot.buffer(carry, np.array([1, 4])), np.arange(2))]))
    assert driver.calls["launch_graph"] == launches + 1
    slot.close()
    backend.close()


def test_each_slot_captures_its_own(bundle: Bundle) -> None:
    backend, _, driver = fake_cuda()
    stage = backend.prepare(make_plan(bundle).stages[0])
    slots = [backend.open_slot(), backend.open_slot()]
    for slot in slots:
        for _ in range(3):
            run_first(slot, stage, 2)
    assert (driver.calls["capture"], driver.calls["launch_graph"]) == (2, 2)
    for slot in slots:
        slot.close()
    backend.close()


@pytest.mark.parametrize("settings", [{"refuse_capture": True}, {"capturable": False}])
def test_a_stage_that_cannot_be_captured_runs_without(
    bundle: Bundle, settings: dict[str, bool]
) -> None:
    backend, _, driver = fake_cuda(**settings)
    stage = backend.prepare(make_plan(bundle).stages[0])
    slot = backend.open_slot()
    for rows in (2, 2, 3, 3):
        run_first(slot, stage, rows)
    assert driver.calls["capture"] == settings.get("refuse_capture", False)
    assert driver.calls["launch_graph"] == 0
    slot.close()
    backend.close()


def test_a_driver_without_graphs_is_asked_once_a_stage_and_slot(bundle: Bundle) -> None:
    backend, _, driver = fake_cuda()
    driver.graphs = False
    stage = backend.prepare(make_plan(bundle).stages[0])
    slot = backend.open_slot()
    for rows in (1, 1, 1, 2, 2, 2):
        assert run_first(slot, stage, rows).answer is not None
    assert driver.calls["capture"] == 1
    slot.close()
    backend.close()


def test_that_a_stage_runs_without_graphs_is_said_once(
    bundle: Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    backend, factory, _ = fake_cuda(refuse_capture=True)
    stage = backend.prepare(make_plan(bundle).stages[0])
    slots = [backend.open_slot(), backend.open_slot()]
    for slot in slots:
        for _ in range(2):
            run_first(slot, stage, 3)
    said = [record.getMessage() for record in caplog.records]
    [said] = said
    tells(said, "Stage 0", "CUDA graph", "3 rows", "without CUDA graphs")
    assert factory.forgotten == 2  # nothing is kept for the graphs that never came to be
    for slot in slots:
        slot.close()
    backend.close()


def test_a_stage_is_at_rest_when_it_is_captured(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT forbids to enqueue a context while it runs."""
    backend, _, driver = fake_cuda()
    stage = backend.prepare(make_plan(bundle).stages[0])
    slot = backend.open_slot()
    capture, waited = driver.capture, []

    def noting(stream: Stream, enqueue: Callable[[], None]) -> FakeGraph | None:
        waited.append(driver.calls["record"] == driver.calls["synchronize"])
        assert not slot._work.pending
        return capture(stream, enqueue)

    monkeypatch.setattr(driver, "capture", noting)
    for _ in range(3):
        run_first(slot, stage, 3)
    assert waited == [True]
    slot.close()
    backend.close()


def test_only_the_graph_that_was_not_used_for_longest_gives_way(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offramp.engine.cuda.runs.MOST_EXECUTIONS", 3)
    backend, factory, driver = fake_cuda()
    stage = backend.prepare(make_plan(bundle).stages[0])
    slot = backend.open_slot()
    for rows in (1, 2, 3):
        for _ in range(2):
            run_first(slot, stage, rows)
    run_first(slot, stage, 1)  # so 2 is the oldest
    assert (driver.calls["launch_graph"], driver.calls["close_graph"]) == (1, 0)
    run_first(slot, stage, 4)
    assert (driver.calls["close_graph"], factory.forgotten) == (1, 1)
    for rows in (1, 3):
        run_first(slot, stage, rows)
    assert driver.calls["launch_graph"] == 3
    before = factory.enqueued[0, 2]
    run_first(slot, stage, 2)
    assert factory.enqueued[0, 2] == before + 1
    assert driver.calls["launch_graph"] == 3
    slot.close()
    backend.close()


def test_graphs_are_dropped_when_their_buffers_move(bundle: Bundle) -> None:
    """A stage of larger needs that comes later; the fake driver refuses freed memory."""
    backend, factory, driver = fake_cuda(scratch_bytes=lambda s: 1024 << s.index)
    stages = make_plan(bundle).stages
    first = backend.prepare(stages[0])
    slot = backend.open_slot()
    for _ in range(3):
        carry = run_first(slot, first, 3).carry
    later = backend.prepare(stages[1])
    assert carry is not None
    assert factory.forgotten == 0
    slot.run(later, carry)
    assert factory.forgotten == 1  # before it was closed, and opened anew
    for _ in range(3):
        run_first(slot, first, 3)
    assert driver.calls["capture"] == 2
    assert driver.calls["launch_graph"] == 2
    assert driver.calls["close_graph"] == 1
    slot.close()
    backend.close()


@pytest.mark.parametrize(
    ("limit", "launches", "most"),
    [
        ("runs.MOST_EXECUTIONS", 8, 3),
        ("slot._MOST_LAYOUTS", 5, 4),  # two layouts stay: of the first size, and of 5 to 8 rows
    ],
)
def test_inputs_of_ever_new_sizes_do_not_keep_graphs_without_end(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, limit: str, launches: int, most: int
) -> None:
    monkeypatch.setattr(f"offramp.engine.cuda.{limit}", 3)
    backend, factory, driver = fake_cuda()
    plain, _, _ = fake_cuda(graphs=False)
    stages = [each.prepare(make_plan(bundle).stages[0]) for each in (backend, plain)]
    slots = [backend.open_slot(), plain.open_slot()]
    for rows in range(1, 9):
        for _ in range(3):
            ours, theirs = (
                run_first(s, p, rows).answer for s, p in zip(slots, stages, strict=True)
            )
            np.testing.assert_array_equal(ours, theirs)
    assert driver.calls["launch_graph"] == launches
    assert driver.calls["capture"] - driver.calls["close_graph"] <= most
    assert factory.forgotten >= 2
    for slot, each in zip(slots, (backend, plain), strict=True):
        slot.close()
        each.close()
