"""The backend: what is shared by slots, and that all of it is released."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager

import numpy as np
import pytest
from tests.cuda_fakes import fake_cuda
from tests.engines import engine_bundle
from tests.facts import facts
from tests.sliced import inputs_of, sliced

from offramp.bundle import Bundle
from offramp.engine.common.errors import BackendError
from offramp.engine.cuda.device_batch import Layouts
from offramp.engine.cuda.driver import DeviceMemoryError
from offramp.engine.cuda.memory import Arena, MemoryPool, Needs, Region, RowBuffers, mib
from offramp.engine.stages.backend_protocol import Backend
from offramp.engine.stages.plan import StageSpec, make_plan
from offramp.testing.cuda_driver import FakeDriver, MisuseError


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return engine_bundle("mlp", tmp_path_factory.mktemp("backend") / "mlp.ee", exits_after=(0, 1))


def samples(rows: int) -> dict[str, np.ndarray]:
    return dict(inputs_of(sliced("mlp"), rows))


def test_it_is_a_backend_under_its_factorys_name() -> None:
    backend: Backend = fake_cuda(name="tensorrt")[0]
    assert backend.name == "tensorrt"
    backend.close()
    backend.close()


def test_slots_must_be_closed_before(bundle: Bundle) -> None:
    backend, factory, _ = fake_cuda()
    slot = backend.open_slot()
    with pytest.raises(BackendError, match="1 slots are still open"):
        backend.close()
    assert not factory.closed
    slot.close()
    backend.close()
    assert factory.closed


def test_stages_that_are_still_referred_to_are_closed_with_the_backend(bundle: Bundle) -> None:
    backend, factory, _ = fake_cuda()
    stage = backend.prepare(make_plan(bundle).stages[0])
    assert factory.open["stages"] == 1
    backend.close()
    assert not +factory.open
    assert stage.facts.spec.index == 0


def test_a_stage_that_nobody_refers_to_goes_with_its_executables(bundle: Bundle) -> None:
    backend, factory, driver = fake_cuda()
    first, second = (backend.prepare(spec) for spec in make_plan(bundle).stages[:2])
    slots = [backend.open_slot(), backend.open_slot()]
    for slot in slots:
        for _ in range(3):
            carry = slot.run(first, slot.upload(samples(2))).carry
            assert carry is not None
            slot.run(second, carry)
    assert factory.open == {"stages": 2, "executables": 4}
    del second
    gc.collect()
    assert factory.open == {"stages": 2, "executables": 4}  # no slot has looked yet
    slots[0].run(first, slots[0].upload(samples(2)))
    assert factory.open == {"stages": 2, "executables": 3}
    slots[1].run(first, slots[1].upload(samples(2)))
    assert factory.open == {"stages": 1, "executables": 2}
    assert driver.calls["close_graph"] == 2
    for slot in slots:
        slot.close()
    backend.close()


def test_a_slot_that_only_merges_lets_go_of_stages_too(bundle: Bundle) -> None:
    backend, factory, _ = fake_cuda()
    first, second = (backend.prepare(spec) for spec in make_plan(bundle).stages[:2])
    early, late = backend.open_slot(), backend.open_slot()
    rows = np.arange(2)
    for _ in range(2):
        carry = early.run(first, early.upload(samples(2))).carry
        assert carry is not None
        late.run(second, late.merge([(early.buffer(carry, rows), rows)]))
    carry = early.run(first, early.upload(samples(2))).carry
    assert carry is not None
    buffered = early.buffer(carry, rows)
    assert factory.open == {"stages": 2, "executables": 2}
    del second
    gc.collect()
    late.merge([(buffered, rows)])
    assert factory.open == {"stages": 1, "executables": 1}
    early.close()
    late.close()
    backend.close()


def test_a_slot_whose_device_is_gone_is_closed_all_the_same(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, _, driver = fake_cuda()
    slot = backend.open_slot()
    with monkeypatch.context() as broken:
        broken.setattr(driver, "current", _broken)
        with pytest.raises(BackendError, match="the context cannot be pushed"):
            slot.close()
    slot.close()
    with pytest.raises(MisuseError, match="was not"):  # what the slot had: it could not be reached
        backend.close()  # but not: 1 slots are still open


def _broken() -> AbstractContextManager[None]:
    raise BackendError("the context cannot be pushed")


def test_a_stage_that_goes_unused_is_closed_by_the_next_that_is_prepared(bundle: Bundle) -> None:
    backend, factory, _ = fake_cuda()
    stages = make_plan(bundle).stages
    backend.prepare(stages[0])
    gc.collect()
    kept = backend.prepare(stages[1])
    assert factory.open["stages"] == 1
    assert kept.facts.spec.index == 1
    backend.close()


def test_memory_that_is_short_for_a_slot_says_what_is_needed_free_and_to_lower(
    bundle: Bundle,
) -> None:
    backend, _, driver = fake_cuda(scratch_bytes=lambda _: 3 << 20)
    kept = [backend.prepare(spec) for spec in make_plan(bundle).stages]
    driver.memory_bytes = 2 << 20
    with pytest.raises(
        BackendError,
        match=(
            r"^a stream needs 3\.\d MiB of memory on Fake GPU \(inputs 2 × 0\.\d MiB, outputs "
            r"0\.\d MiB, scratch 3\.0 MiB, kernels 0\.\d MiB\), 2\.0 MiB are free; .*: "
            r"lower --streams or --max-batch-size$"
        ),
    ):
        backend.open_slot()
    driver.memory_bytes = 1 << 30
    slot = backend.open_slot()
    slot.run(kept[0], slot.upload(samples(2)))
    slot.close()
    backend.close()


def test_a_slot_allocates_no_more_than_it_reports(bundle: Bundle) -> None:
    backend, _, driver = fake_cuda()
    kept = [backend.prepare(spec) for spec in make_plan(bundle).stages]
    with driver.current():
        before, _ = driver.memory()
        slot = backend.open_slot()
        after, _ = driver.memory()
    said = slot.arena.sizes.device_bytes
    assert said - 5 * 256 < before - after <= said  # the rest is alignment
    assert kept
    slot.close()
    backend.close()


def test_memory_that_is_short_for_a_stage_is_told_with_its_number(bundle: Bundle) -> None:
    backend, factory, _ = fake_cuda()

    def refuse(_: StageSpec) -> int:
        raise DeviceMemoryError(1 << 30, 1 << 20, "Fake GPU")

    factory.scratch_bytes = refuse
    with pytest.raises(BackendError, match=facts("stage 0", "1,024.0 MiB", "--streams")):
        backend.prepare(make_plan(bundle).stages[0])
    factory.open.clear()
    backend.close()


def test_everything_is_released_though_executables_fail_to_close(bundle: Bundle) -> None:
    backend, factory, _ = fake_cuda()
    stages = [backend.prepare(spec) for spec in make_plan(bundle).stages]
    slot = backend.open_slot()
    carry = slot.run(stages[0], slot.upload(samples(2))).carry
    assert carry is not None
    slot.run(stages[1], carry)

    def refuse(spec: StageSpec) -> None:
        raise BackendError(f"stage {spec.index} does not close")

    factory.on_close = refuse
    with pytest.raises(BackendError, match="does not close"):
        slot.close()
    assert factory.open["executables"] == 0
    backend.close()  # finds no leak


@pytest.mark.parametrize(
    ("call", "after"),
    [
        *(("allocate", after) for after in range(5)),
        *(("allocate_pinned", after) for after in range(4)),
        ("stream", 0),
        ("event", 0),
    ],
)
def test_a_slot_that_cannot_be_opened_leaves_nothing(bundle: Bundle, call: str, after: int) -> None:
    backend, _, driver = fake_cuda()
    stage = backend.prepare(make_plan(bundle).stages[0])
    driver.fail_next(call, after=after)
    with pytest.raises(BackendError, match=f"{call} failed"):
        backend.open_slot()
    slot = backend.open_slot()
    slot.run(stage, slot.upload(samples(2)))
    slot.close()
    backend.close()


def test_a_leak_would_be_found(bundle: Bundle) -> None:
    """The tests above rely on it."""
    backend, _, driver = fake_cuda()
    with driver.current():
        driver.allocate(1)
    with pytest.raises(MisuseError, match="was not freed"):
        backend.close()


# The parts.


def test_needs_of_both_are_the_larger_of_each() -> None:
    first, second = Needs(input_bytes=1, rows=8), Needs(input_bytes=3, scratch_bytes=2, rows=4)
    assert first.most(second) == Needs(input_bytes=3, scratch_bytes=2, rows=8)
    assert Needs().device_bytes == 0
    assert mib(3 << 19) == "1.5 MiB"


def test_a_layout_aligns_every_tensor_for_the_rows_there_is_room_for() -> None:
    layouts = Layouts()
    row = (("a", np.dtype(np.uint8), (3,)), ("b", np.dtype(np.float32), (2, 5)))
    layout = layouts.of(row, 100)
    assert [t.offset for t in layout.tensors] == [0, 512]
    assert [t.row_bytes for t in layout.tensors] == [3, 40]
    assert layout.size_bytes == 512 + 4096
    assert layout.addresses(1000) == (1000, 1512)
    assert layouts.of(row, 100) is layout
    assert layouts.of(row, 99) is not layout


def test_a_region_that_could_not_grow_is_empty_and_can_be_tried_again() -> None:
    driver = FakeDriver(memory_bytes=1000)
    with driver.current():
        region = Region(driver)
        assert region.reserve(100)
        assert not region.reserve(100)
        version = region.version
        with pytest.raises(DeviceMemoryError):
            region.reserve(2000)
        assert (region.address, region.size_bytes) == (0, 0)
        assert region.version > version
        assert region.reserve(200)
        region.free()
        region.free()
    driver.close()


@pytest.mark.parametrize("failing", range(2))
def test_memory_by_row_that_could_not_grow_is_not_believed_to_be_there(failing: int) -> None:
    """Row numbers and the output of the stage end are such, both pinned."""
    driver = FakeDriver()
    with driver.current():
        arena = Arena(driver, lambda: None)
        arena.open(Needs(rows=4))
        driver.fail_next("allocate_pinned", after=failing)
        with pytest.raises(BackendError, match="allocate_pinned failed"):
            arena.grow_rows(256)
        assert arena.sizes.rows == 0
        arena.grow_rows(4)
        by_row = arena.by_row
        results = by_row.results
        assert 0 not in (by_row.sent_numbers.address, results.confidence, by_row.row_numbers)
        assert results.survivors - results.confidence >= 4 * 4
        assert all(len(view) for view in by_row.views(4))
        assert arena.sizes.rows == 4
        arena.free()
    driver.close()


def test_a_failed_growth_of_what_the_stage_end_writes_can_be_tried_again() -> None:
    driver = FakeDriver()
    with driver.current():
        buffers = RowBuffers(driver)
        buffers.reserve(4)
        driver.fail_next("allocate_pinned", after=1)
        with pytest.raises(BackendError, match="allocate_pinned failed"):
            buffers.reserve(256)
        assert buffers.reserve(4)
        assert [view.size for view in buffers.views(4)] == [4, 4, 1]
        buffers.free()
    driver.close()


def test_the_pool_gives_idle_memory_back_before_it_gives_up() -> None:
    driver = FakeDriver(memory_bytes=1 << 20)
    pool = MemoryPool(driver)
    with driver.current():
        small = [pool.take(1 << 17) for _ in range(8)]
        with pytest.raises(DeviceMemoryError):
            pool.take(1 << 19)
        kept = small.pop()
        small.clear()
        large = pool.take((1 << 19) - 5)
        assert large.size_bytes == 1 << 19
        allocations = driver.calls["allocate"]
        assert allocations == 11  # two of them were refused
        address = kept.address
        del kept
        assert pool.take(1 << 17).address == address
        assert driver.calls["allocate"] == allocations
        pool.close()
    driver.close()
