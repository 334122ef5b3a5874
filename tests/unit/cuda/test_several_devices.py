"""Several GPUs as one backend, on a fake driver each."""

from __future__ import annotations

import asyncio
import threading
from typing import NamedTuple

import numpy as np
import pytest
from tests.cuda_fakes import FakeExecutables, fake_cuda
from tests.facts import facts
from tests.serving_checks import MODEL, Truth, agree
from tests.small_bert import small_bert
from tests.small_bert import truth as truth_of
from tests.unit.engine.serving import LIMIT_S, until
from tests.unit.engine.test_backend_conformance import plan, random_script

from offramp.bundle import Bundle
from offramp.engine.backends.several_devices import SeveralDevices
from offramp.engine.common.errors import BackendError, TensorsLostError, WorkerLostError
from offramp.engine.core import Engine
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.scheduling.policies import PolicyName
from offramp.engine.serving import stream_health
from offramp.engine.stages.plan import StageSpec
from offramp.testing.backend import SCRIPT
from offramp.testing.cuda_driver import FakeDriver

MOST = 8


class Gpus(NamedTuple):
    """Two GPUs: the backend of both, and what each is made of."""

    backend: SeveralDevices
    factories: tuple[FakeExecutables, ...]
    drivers: tuple[FakeDriver, ...]

    def runs(self) -> list[int]:
        """Return the number of waits for each: once per stage, plus other work."""
        return [driver.calls["synchronize"] for driver in self.drivers]


def two(*, memory_bytes: tuple[int, int] = (1 << 30, 1 << 30), graphs: bool = True) -> Gpus:
    made = [
        fake_cuda(seed=n, memory_bytes=size, max_rows=MOST, graphs=graphs, pads=graphs)
        for n, size in enumerate(memory_bytes)
    ]
    backends, factories, drivers = zip(*made, strict=True)
    named = {f"cuda:{n}": backend for n, backend in enumerate(backends)}
    return Gpus(SeveralDevices(named), factories, drivers)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return small_bert(tmp_path_factory.mktemp("bundles"))


@pytest.fixture(scope="module")
def truth(bundle: Bundle) -> Truth:
    return truth_of(bundle, samples=64, tolerance=1e-5)


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_health, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(stream_health, "LONGEST_PAUSE_S", 0.01)


def first_stage() -> StageSpec:
    return plan((0.5, 0.5)).stages[0]


def test_streams_are_dealt_out_to_devices_in_turn() -> None:
    gpus = two()
    slots = [gpus.backend.open_slot_of(stream) for stream in range(4)]
    assert [slot.device for slot in slots] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    slots.pop(0).close()
    beside = gpus.backend.open_slot()
    assert beside.device == "cuda:0"  # which has fewer
    for slot in (beside, *slots):
        slot.close()
    gpus.backend.close()


def test_memory_is_of_one_device_and_the_other_has_its_own() -> None:
    gpus = two()
    stage = gpus.backend.prepare(first_stage())
    before = [driver.calls["allocate"] for driver in gpus.drivers]
    slot = gpus.backend.open_slot_of(1)
    after = [driver.calls["allocate"] for driver in gpus.drivers]
    assert after[0] == before[0]
    assert after[1] > before[1]
    del stage
    slot.close()
    gpus.backend.close()


def test_a_device_without_memory_is_named_and_the_other_opens_slots() -> None:
    gpus = two(memory_bytes=(1 << 30, 64))
    stage = gpus.backend.prepare(first_stage())
    with pytest.raises(BackendError, match=facts("cuda:1", "memory", "Fake GPU")):
        gpus.backend.open_slot_of(1)
    slots = [gpus.backend.open_slot() for _ in range(2)]
    assert [slot.device for slot in slots] == ["cuda:0", "cuda:0"]
    script = random_script(3)
    answer = slots[1].run(stage, slots[1].upload({SCRIPT: script})).answer
    np.testing.assert_array_equal(answer, script[:, 0])
    for slot in slots:
        slot.close()
    gpus.backend.close()


def test_a_stage_that_one_device_cannot_load_is_loaded_there_when_it_is_run() -> None:
    gpus = two()
    tries = []

    def scratch_bytes(_: StageSpec) -> int:
        tries.append(1)
        if len(tries) == 1:
            raise BackendError("no memory for weights")
        return 512

    gpus.factories[1].scratch_bytes = scratch_bytes
    stage = gpus.backend.prepare(first_stage())
    slot, script = gpus.backend.open_slot_of(1), random_script(2)
    answer = slot.run(stage, slot.upload({SCRIPT: script})).answer
    np.testing.assert_array_equal(answer, script[:, 0])
    assert len(tries) == 2
    slot.close()
    gpus.factories[1].open["stages"] -= 1  # of the load that failed, which the fake had counted
    gpus.backend.close()


def test_a_stage_that_no_device_loads_is_refused() -> None:
    gpus = two()
    for factory in gpus.factories:
        factory.prepare = lambda _: _raise("no engines")  # type: ignore[assignment, method-assign]
    with pytest.raises(BackendError, match="no engines"):
        gpus.backend.prepare(first_stage())
    gpus.backend.close()


def _raise(why: str) -> None:
    raise BackendError(why)


def test_a_lost_device_is_no_fault_of_the_batch() -> None:
    gpus = two()
    stage = gpus.backend.prepare(first_stage())
    slot = gpus.backend.open_slot_of(0)
    batch = slot.upload({SCRIPT: random_script(2)})
    gpus.drivers[0].lose()
    with pytest.raises(WorkerLostError, match="cuda:0 was lost: the GPU failed"):
        slot.run(stage, batch)
    slot.close()
    beside = gpus.backend.open_slot()
    assert beside.device == "cuda:1"
    beside.close()
    gpus.backend.close()


def test_rows_that_waited_on_a_lost_device_are_lost_alone() -> None:
    gpus = two()
    stage = gpus.backend.prepare(first_stage())
    slot, other = (gpus.backend.open_slot_of(stream) for stream in range(2))
    kept = []
    for each in (slot, other):
        carry = each.run(stage, each.upload({SCRIPT: random_script(3)})).carry
        assert carry is not None
        kept.append(each.buffer(carry, np.array([0, 2])))
    gpus.drivers[0].lose()
    with pytest.raises(TensorsLostError, match=facts("another GPU", "lost")):
        other.merge([(kept[0], np.array([0])), (kept[1], np.array([1]))])
    assert len(other.merge([(kept[1], np.array([1]))])) == 1
    slot.close()
    other.close()
    gpus.backend.close()


def serving(*, streams: int = 2, policy: str = "run-through") -> EngineOptions:
    return EngineOptions(
        device="cuda:0,cuda:1",
        streams=streams,
        keep_state=False,
        defaults=ModelOptions(
            scheduling=PolicyName(policy), max_batch_size=MOST, controller="static"
        ),
    )


@pytest.mark.parametrize("policy", ["run-through", "refill"])
def test_the_engine_answers_as_the_cpu_on_both(bundle: Bundle, truth: Truth, policy: str) -> None:
    """With refill, rows wait at splits on one device and are merged on the other."""
    gpus = two()
    how = serving(streams=4, policy=policy)
    left = asyncio.run(agree(gpus.backend, bundle.path, truth, how, requests=60))
    assert min(left) > 20
    assert min(gpus.runs()) > 20
    gpus.backend.close()


async def answered(engine: Engine, truth: Truth, requests: int) -> None:
    """Send requests one after the other, and compare answers with the CPU's."""
    policy = engine.model(MODEL).policy
    for number in range(requests):
        rows = np.random.default_rng(number).integers(0, len(truth), 3)
        result = await engine.infer(MODEL, truth.take(rows))
        truth.check(result, rows, [policy])


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize("streams", [2, 4])
@pytest.mark.parametrize("policy", ["run-through", "refill"])
def test_a_device_that_is_lost_takes_its_streams_and_no_request(
    bundle: Bundle, truth: Truth, policy: str, streams: int
) -> None:
    gpus = two()

    async def body() -> None:
        how = serving(streams=streams, policy=policy)
        async with await Engine.open({MODEL: bundle.path}, how, backend=gpus.backend) as engine:
            seen = gpus.runs()[1]
            clients = asyncio.gather(*(answered(engine, truth, 30) for _ in range(4)))
            await until(lambda: gpus.runs()[1] > seen + 5)
            gpus.drivers[1].lose()
            await clients
            while engine.statistics()[MODEL].streams_in_service > streams // 2:
                await answered(engine, truth, 1)
            assert engine.ready()
            before = gpus.runs()[0]
            await answered(engine, truth, 5)
            assert gpus.runs()[0] > before
            assert engine.statistics()[MODEL].failed == {}

    asyncio.run(asyncio.wait_for(body(), LIMIT_S))
    gpus.backend.close()


@pytest.mark.usefixtures("short_pauses")
def test_streams_are_back_when_their_device_is(bundle: Bundle, truth: Truth) -> None:
    gpus, broken = two(graphs=False), threading.Event()

    def fail(_spec: StageSpec, _rows: int) -> None:
        if broken.is_set():
            raise BackendError("uncorrectable error")

    gpus.factories[1].on_enqueue = fail

    async def body() -> None:
        how = serving(streams=4)
        async with await Engine.open({MODEL: bundle.path}, how, backend=gpus.backend) as engine:

            def in_service() -> int:
                return engine.statistics()[MODEL].streams_in_service

            broken.set()
            clients = [answered(engine, truth, 20) for _ in range(8)]  # none of which fails
            await asyncio.gather(*clients)
            assert engine.ready()
            await until(lambda: in_service() == 2)
            broken.clear()
            await until(lambda: in_service() == 4)
            before = gpus.runs()[1]
            await asyncio.gather(*(answered(engine, truth, 5) for _ in range(8)))
            assert gpus.runs()[1] > before

    asyncio.run(asyncio.wait_for(body(), LIMIT_S))
    gpus.backend.close()
