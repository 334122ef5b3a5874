"""Padded batches: few sizes are run, and answers do not change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.cuda_fakes import fake_cuda
from tests.engines import engine_bundle
from tests.sliced import inputs_of, sliced

from offramp.bundle import Bundle
from offramp.engine.cuda.batch_sizes import padded
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import make_plan


def padded_sizes(most: int) -> tuple[int, ...]:
    return tuple(sorted({padded(rows, most) for rows in range(1, most + 1)}))


def test_sizes_hold_what_they_are_for_and_less_than_twice_as_much() -> None:
    assert padded_sizes(32) == (1, 2, 4, 8, 12, 16, 24, 32)
    for rows in range(1, 300):
        size = padded(rows, 1000)
        assert rows <= size < 2 * rows
        assert padded(size, 1000) == size


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, (1,)), (5, (1, 2, 4, 5)), (30, (1, 2, 4, 8, 12, 16, 24, 30))]
)
def test_the_most_is_the_last_size(most: int, sizes: tuple[int, ...]) -> None:
    assert padded_sizes(most) == sizes


@pytest.fixture(scope="module", params=["mlp", "residual", "bert", "text cnn"])
def bundle(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bundle]:
    path = tmp_path_factory.mktemp("padding") / f"{request.param}.ee"
    yield engine_bundle(request.param, Path(path))


def model_of(bundle: Bundle) -> str:
    return bundle.path.stem


def test_answers_are_those_without_padding(bundle: Bundle) -> None:
    """Rows that were not filled contain garbage in the fake driver, so reading one fails."""
    plain, _, _ = fake_cuda()
    padding, factory, _ = fake_cuda(pads=True)
    pipelines = [Pipeline(each, make_plan(bundle)) for each in (plain, padding)]
    slots = [plain.open_slot(), padding.open_slot()]
    rng = np.random.default_rng(0)
    for rows in [*range(20, 0, -1), *rng.integers(1, 21, 30).tolist()]:
        inputs = inputs_of(sliced(model_of(bundle)), rows, seed=rows)
        ours, theirs = (
            list(pipeline.run(slot, inputs))
            for slot, pipeline in zip(slots, pipelines, strict=True)
        )
        for a, b in zip(ours, theirs, strict=True):
            assert a.stage == b.stage
            np.testing.assert_array_equal(a.rows, b.rows)
            np.testing.assert_allclose(a.answer, b.answer, rtol=1e-4, atol=1e-6)
    sizes = {rows for _, rows in factory.enqueued}
    assert sizes <= set(padded_sizes(24))
    for stage in make_plan(bundle).stages:
        graphs = len([1 for index, _ in factory.enqueued if index == stage.index])
        assert graphs <= len(padded_sizes(24))
    for slot, each in zip(slots, (plain, padding), strict=True):
        slot.close()
        each.close()


def test_sizes_that_are_filled_up_alike_share_a_graph(bundle: Bundle) -> None:
    backend, factory, driver = fake_cuda(pads=True)
    stage = backend.prepare(make_plan(bundle).stages[0])
    slot = backend.open_slot()
    for rows in (9, 10, 12, 11, 9):
        inputs = inputs_of(sliced(model_of(bundle)), rows, seed=rows)
        result = slot.run(stage, slot.upload(inputs))
        assert result.confidence.shape == (rows,)
    assert driver.calls["capture"] == 1
    assert driver.calls["launch_graph"] == 3
    assert {rows for _, rows in factory.enqueued} == {12}
    slot.close()
    backend.close()


def test_a_batch_is_filled_up_to_what_the_stage_takes_at_most(bundle: Bundle) -> None:
    backend, factory, _ = fake_cuda(pads=True, max_rows=11)
    stage = backend.prepare(make_plan(bundle).stages[0])
    slot = backend.open_slot()
    for rows in (9, 11):
        slot.run(stage, slot.upload(inputs_of(sliced(model_of(bundle)), rows)))
    assert {rows for _, rows in factory.enqueued} == {11}
    slot.close()
    backend.close()


def test_what_is_run_before_serving_are_the_sizes_that_are_run(bundle: Bundle) -> None:
    backend, factory, _ = fake_cuda(pads=True)
    stages = [backend.prepare(spec) for spec in make_plan(bundle).stages]
    assert backend.sizes(16) == [1, 2, 4, 8, 12, 16]
    factory.padding_limit = lambda rows: 3 if rows <= 3 else 10
    assert backend.sizes(10) == [1, 2, 3, 4, 8, 10]
    factory.padding_limit = lambda _: 16
    factory.pads = False
    stages.append(backend.prepare(make_plan(bundle).stages[0]))
    assert list(backend.sizes(3)) == [1, 2, 3]
    del stages
    backend.close()


def test_a_batch_is_not_filled_up_beyond_its_profile(bundle: Bundle) -> None:
    """Profiles of engines may have gaps, and are tuned for their ends."""
    backend, factory, _ = fake_cuda(pads=True, padding_limit=lambda rows: 3 if rows <= 3 else 16)
    stage = backend.prepare(make_plan(bundle).stages[0])
    slot = backend.open_slot()
    for rows in (3, 2, 9):
        slot.run(stage, slot.upload(inputs_of(sliced(model_of(bundle)), rows)))
    assert {rows for _, rows in factory.enqueued} == {3, 2, 12}
    slot.close()
    backend.close()
