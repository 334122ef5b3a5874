"""Slots of a router and of a worker, in one process: what is kept changes no answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.facts import Told, facts, tells
from tests.fakes import fake_plan, script

from offramp.cluster.remote import worker_slot as slot_module
from offramp.cluster.remote.run_layouts import forms_of
from offramp.cluster.remote.served_slot import ServedSlot
from offramp.cluster.remote.slot_tensors import InlineTensors, RemoteBatch, SharedTensors, SlotLink
from offramp.cluster.remote.transport import Connection, SharedMemory
from offramp.cluster.remote.worker_messages import (
    GIVEN,
    INLINE,
    PlacedArray,
    RunStage,
    StageDone,
    TensorForm,
    aligned,
    decode,
    encode,
)
from offramp.cluster.remote.worker_slot import RemoteSlot, RemoteStage
from offramp.engine.backends.host import HostSlot, HostStage
from offramp.engine.common.errors import BackendError, WorkerLostError
from offramp.engine.stages.backend_protocol import StageResult
from offramp.testing.backend import SCRIPT

SPEC = fake_plan([0.9]).stages[0]
FLOATS = np.dtype(np.float32)
FIRST_BYTES = 4096
"""Initial size of a slot's memory."""
ANSWER = TensorForm("answer", FLOATS, (1, 2))
CONFIDENCE = TensorForm("confidence", FLOATS, (1,))


@dataclass
class FakeWorker:
    """A worker whose slot is served by a thread of this process."""

    link: SlotLink
    name: str = "worker 1"
    pid: int = 1
    lost: bool = False
    alive: bool = True
    stages: set[int] = field(default_factory=lambda: {1})

    def open_slot(self) -> SlotLink:
        return self.link

    def cpu_s(self) -> float:
        return 0.0

    def order(self, *_: object) -> None:
        raise AssertionError("nothing is ordered")

    def lose(self, reason: str) -> WorkerLostError:
        self.lost = True
        return WorkerLostError(reason)

    def end(self) -> None:
        self.lost = True


def squares(
    fetched: Sequence[str], tensors: Mapping[str, NDArray[Any]], _: None
) -> list[NDArray[Any]]:
    """Answers by script, and carries its squares on, and the script itself."""
    given = {"answer": np.array(tensors[SCRIPT][:, 0]), "squares": tensors[SCRIPT] ** 2}
    return [given[name] for name in fetched]


STAGE = HostStage(
    spec=SPEC,
    execute=squares,
    added=False,
    inputs=(SCRIPT,),
    fetched=("answer", "squares"),
    computed=("squares",),
    passed=(SCRIPT,),
)


@contextmanager
def served(*, shared: bool) -> Iterator[tuple[RemoteSlot, ServedSlot]]:
    """A slot, and who serves it."""
    ours, theirs = Connection.pair()
    memory = SharedMemory.create(FIRST_BYTES) if shared else None
    serving = ServedSlot(
        Connection(theirs),
        HostSlot(),
        memory,
        {1: STAGE},
        lambda _point: None,
        device=nullcontext(),
    )
    tensors = SharedTensors(memory, serving.use) if memory else InlineTensors()
    slot = RemoteSlot(FakeWorker(SlotLink(ours, tensors)), load=lambda *_: None)
    thread = threading.Thread(target=serving.serve)
    thread.start()
    try:
        yield slot, serving
    finally:
        slot.close()
        thread.join()


def remote_stage() -> RemoteStage:
    return RemoteStage(1, SPEC, "", b"")


def same(found: StageResult, expected: StageResult) -> None:
    """Results are equal bit by bit."""
    assert found.answer is not None
    assert expected.answer is not None
    assert found.answer.tobytes() == expected.answer.tobytes()
    assert found.confidence.tobytes() == expected.confidence.tobytes()
    ours, theirs = found.carry, expected.carry
    assert isinstance(ours, RemoteBatch)
    tensors: Mapping[str, NDArray[Any]] = theirs.tensors  # type: ignore[union-attr]
    assert list(ours.tensors) == list(tensors)
    for name, array in ours.tensors.items():
        assert array.tobytes() == tensors[name].tobytes()


@pytest.mark.parametrize("shared", [True, False])
def test_runs_that_are_alike_and_others_answer_as_in_process(shared: bool) -> None:
    rng = np.random.default_rng(0)
    stage, here = remote_stage(), HostSlot()
    with served(shared=shared) as (slot, _):
        kept = []
        for rows in [1, 3, 1, 3, 200, 3, 1, 200, 2]:  # 200 need more memory than there is
            given = {SCRIPT: rng.random((rows, 2, 4), np.float32)}
            batch, host = slot.upload(given), here.upload(given)
            for _ in range(3):  # each on what the one before carried on
                found, expected = slot.run(stage, batch), here.run(STAGE, host)
                same(found, expected)
                assert isinstance(found.carry, RemoteBatch)
                assert expected.carry is not None
                batch, host = found.carry, expected.carry  # type: ignore[assignment]
            some = np.arange(rows)[::2]
            same(
                slot.run(stage, slot.select(batch, some)),
                here.run(STAGE, here.select(host, some)),
            )
            kept.append((found, expected))
        for found, expected in kept:  # what is held is not written over
            same(found, expected)


def test_orders_and_replies_are_made_once() -> None:
    stage = remote_stage()
    with served(shared=True) as (slot, serving):
        given = {SCRIPT: script([0.5, 0.7])}
        for _ in range(2):  # until it is known how much room results take
            slot.run(stage, slot.upload(given))
        carries = [slot.run(stage, slot.upload(given)).carry for _ in range(20)]
        assert len({id(carry.layout) for carry in carries if isinstance(carry, RemoteBatch)}) > 1
        del carries
        known = dict(serving._orders)
        for _ in range(20):
            slot.run(stage, slot.upload(given))
        assert serving._orders == known
        assert all(len(order.replies) == 1 for order in known.values())


@contextmanager
def answered(reply: Callable[[RunStage], tuple[StageDone, bytes]]) -> Iterator[RemoteSlot]:
    """A slot on shared memory whose worker says what a test will have it say."""
    ours, theirs = Connection.pair()
    other, memory = Connection(theirs), SharedMemory.create(FIRST_BYTES)
    link = SlotLink(ours, SharedTensors(memory, lambda _: None))
    slot = RemoteSlot(FakeWorker(link), load=lambda *_: None)

    def say() -> None:
        for _ in range(2):
            order = decode(other.receive().header)
            assert isinstance(order, RunStage)
            done, body = reply(order)
            other.send(encode(done), (body,) if body else ())

    thread = threading.Thread(target=say)
    thread.start()
    try:
        yield slot
    finally:
        slot.close()
        thread.join()
        other.close()


def inline(*carried: PlacedArray) -> StageDone:
    answers = [PlacedArray(form, INLINE) for form in (ANSWER, CONFIDENCE)]
    return StageDone(answers[0], answers[1], carried)


BODY = np.arange(2, dtype=np.float32).tobytes() + bytes(56) + np.ones(1, np.float32).tobytes()


@pytest.mark.parametrize(
    ("carried", "told"),
    [
        ((TensorForm("x", FLOATS, (1, 2)), 3968), ("'x'", "3968 to 3976", "expected between")),
        ((TensorForm("x", FLOATS, (1, 2)), 64), ("'x'", "64 to 72", "expected between")),
        ((TensorForm("x", FLOATS, (1, 2)), GIVEN), ("passed on 'x'", "not an input")),
        ((TensorForm(SCRIPT, FLOATS, (1, 1, 2)), GIVEN), ("passed on 'script'", "not")),
        ((TensorForm(SCRIPT, np.dtype(np.int32), (1, 2, 2)), GIVEN), ("passed on 'script'",)),
    ],
)
def test_replies_of_what_cannot_be_lose_the_worker(
    carried: tuple[TensorForm, int], told: Told
) -> None:
    given = {SCRIPT: np.zeros((1, 2, 2), np.float32)}
    right = inline(PlacedArray(forms_of(given).forms[0], GIVEN))
    replies = iter([right, inline(PlacedArray(*carried))])
    stage = remote_stage()
    with answered(lambda _: (next(replies), BODY)) as slot:
        result = slot.run(stage, slot.upload(given))
        assert (result.answer.tolist(), result.confidence.tolist()) == ([[0, 1]], [1])  # type: ignore[union-attr]
        assert isinstance(result.carry, RemoteBatch)
        assert result.carry.tensors[SCRIPT].tobytes() == given[SCRIPT].tobytes()
        with pytest.raises(WorkerLostError, match=facts(*told)):
            slot.run(stage, slot.upload(given))


def placed(name: str, *shape: int, dtype: Any = FLOATS) -> PlacedArray:
    return PlacedArray(TensorForm(name, np.dtype(dtype), shape), INLINE)


@pytest.mark.parametrize(
    ("done", "told"),
    [
        ((None, placed("confidence", 0), ()), ("no answer", "stage 0")),
        ((placed("answer", 1, 2), placed("confidence", 6), ()), ("float32 [6]", "1")),
        (
            (placed("answer", 1, 2), placed("confidence", 1, dtype=float), ()),
            ("confidences float64",),
        ),
        ((placed("answer", 1, 2), placed("confidence", 1), None), ("it passed on the tensors []",)),
        ((placed("answer", 1, 2), placed("confidence", 1), ()), ("it passed on the tensors []",)),
        (
            (placed("answer", 2, 2), placed("confidence", 1), (placed(SCRIPT, 1, 2, 2),)),
            ("'answer' has shape [2, 2]", "1 rows"),
        ),
        (
            (placed("answer", 1, 2), placed("confidence", 1), (placed(SCRIPT, 3, 2, 2),)),
            ("'script' has shape [3, 2, 2]", "1 rows"),
        ),
    ],
)
def test_replies_that_the_stage_cannot_have_given_lose_the_worker(
    done: tuple[Any, PlacedArray, Any], told: Told
) -> None:
    said, given = StageDone(*done), {SCRIPT: np.zeros((1, 2, 2), np.float32)}
    arrays = [array for array in (said.answer, said.confidence, *(said.carried or ())) if array]
    end = 0
    for array in arrays:
        end = aligned(end) + array.form.size_bytes
    stage = remote_stage()
    with answered(lambda _: (said, bytes(end))) as slot:
        for _ in range(2):  # nothing of it is kept
            with pytest.raises(WorkerLostError, match=facts(*told)):
                slot.run(stage, slot.upload(given))
            slot._worker.lost = False


def test_a_reply_that_is_known_comes_with_its_body() -> None:
    bodies = iter([BODY, BODY[:-1]])
    stage, given = remote_stage(), {SCRIPT: np.zeros((1, 2, 2), np.float32)}
    done = inline(PlacedArray(forms_of(given).forms[0], GIVEN))
    with answered(lambda _: (done, next(bodies))) as slot:
        slot.run(stage, slot.upload(given))
        stage.row_bytes = 0.0  # so that the order is the same
        with pytest.raises(WorkerLostError, match=facts("67 bytes", "68")):
            slot.run(stage, slot.upload(given))


@pytest.mark.parametrize(("took_s", "known_s"), [(0.5, 0.5), (1.0, 1.0), (1.5, 0.01)])
def test_runs_longer_than_their_limit_do_not_lengthen_it(
    took_s: float, known_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, given = remote_stage(), {SCRIPT: np.zeros((1, 2, 2), np.float32)}
    stage.observe(1000, 0.01)
    assert stage.limit_s(16, 1.0) == 1.0
    done = inline(PlacedArray(forms_of(given).forms[0], GIVEN))
    times = iter([0.0, took_s])
    monkeypatch.setattr(slot_module, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    with answered(lambda _: (done, BODY)) as slot:
        slot.run(stage, slot.upload(given))
        assert (stage.longest_s, stage.largest_bytes) == (known_s, 1000)
        times = iter([0.0, 0.0])
        slot.run(stage, slot.upload(given))  # the other that the worker answers


def test_an_order_that_is_known_comes_with_its_body() -> None:
    ours, theirs = Connection.pair()
    serving = ServedSlot(
        Connection(theirs), HostSlot(), None, {1: STAGE}, lambda _point: None, device=nullcontext()
    )
    thread = threading.Thread(target=serving.serve)
    thread.start()
    given = np.ones((1, 2, 2), np.float32)
    header = encode(
        RunStage(
            1, 1, None, (0, 0), (PlacedArray(TensorForm(SCRIPT, FLOATS, given.shape), INLINE),)
        )
    )
    said = []
    for body in (given, given[:, :1], given):
        ours.send(header, [body])
        said.append(decode(ours.receive().header))
    ours.close()
    thread.join()
    assert isinstance(said[0], StageDone)
    assert said[0] == said[2]
    tells(said[1].message, "8 bytes", "16")  # type: ignore[union-attr]


def test_dtypes_that_do_not_travel_are_refused() -> None:
    with pytest.raises(BackendError, match=facts("'x'", "<U1")):
        forms_of({"x": np.array(["a"])})


def test_a_worker_takes_the_next_batch_while_it_computes_the_last() -> None:
    """Two slots, one device: what the second is given has come before the first is done."""
    device, computing, go_on = threading.Lock(), threading.Event(), threading.Event()
    at_once: list[int] = []

    def slow(fetched: Sequence[str], tensors: Mapping[str, NDArray[Any]], state: None) -> list[Any]:
        at_once.append(1)
        computing.set()
        assert go_on.wait(30)
        assert len(at_once) == 1, "two batches were computed at once"
        at_once.pop()
        return STAGE.execute(fetched, tensors, state)

    stage = replace(STAGE, execute=slow)
    arrived = threading.Semaphore(0)

    def reached(point: str) -> None:
        if point == "before-run":
            arrived.release()

    slots, threads = [], []
    for _ in range(2):
        ours, theirs = Connection.pair()
        serving = ServedSlot(
            Connection(theirs), HostSlot(), None, {1: stage}, reached, device=device
        )
        slots.append(RemoteSlot(FakeWorker(SlotLink(ours, InlineTensors())), load=lambda *_: None))
        threads.append(threading.Thread(target=serving.serve))
    found: list[StageResult] = []

    def ask(slot: RemoteSlot) -> None:
        found.append(slot.run(remote_stage(), slot.upload({SCRIPT: script([0.5, 0.6, 0.7])})))

    threads += [threading.Thread(target=ask, args=(slot,)) for slot in slots]
    for thread in threads:
        thread.start()
    assert computing.wait(30)
    assert arrived.acquire(timeout=30)
    assert arrived.acquire(timeout=30), "the second batch has come too"
    assert not found
    go_on.set()
    for thread in threads[2:]:
        thread.join(30)
    for slot in slots:
        slot.close()
    for thread in threads[:2]:
        thread.join(30)
    assert len(found) == 2
