"""The fake driver does what CUDA does, and finds every misuse of it: each rule is broken once."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from tests.facts import tells

from offramp.engine.common.errors import BackendError
from offramp.engine.cuda.driver import (
    ALIGNMENT,
    DeviceLostError,
    DeviceMemoryError,
    Driver,
    Pinned,
    Stream,
    StreamEvent,
)
from offramp.engine.kernels.kernel_arguments import (
    ENTRY_POINTS,
    CheckKind,
    ExitCheck,
    Launch,
    Results,
    RowCopy,
    Scratch,
    gather_rows,
    stage_end,
)
from offramp.testing.cuda_driver import PENDING, FakeDriver, MisuseError
from offramp.testing.cuda_memory import FREED, UNWRITTEN

SIZE = 16


class Bench:
    """A device with two streams, an event, memory on both sides; all of it is closed at the end."""

    def __init__(self, device: FakeDriver) -> None:
        self.device = device
        driver: Driver = device  # what is tested is the interface
        self.driver = driver
        self.first, self.second = driver.stream(), driver.stream()
        self.event = driver.event()
        self.here, self.back = driver.allocate_pinned(SIZE), driver.allocate_pinned(SIZE)
        self.memory, self.other = driver.allocate(SIZE), driver.allocate(SIZE)

    def wait(self, *streams: Stream) -> None:
        """Until all of some streams is done."""
        event = self.driver.event()
        try:
            for stream in streams:
                self.driver.record(event, stream)
                self.driver.synchronize(event)
        finally:
            event.close()

    def fetch(self, address: int, stream: Stream, size_bytes: int = SIZE) -> np.ndarray:
        """Return the content of memory, in the order of a stream."""
        self.driver.copy_out(self.back.array[:size_bytes], address, stream)
        self.wait(stream)
        return self.back.array[:size_bytes].copy()

    def close(self) -> None:
        self.driver.free(self.memory)
        self.driver.free(self.other)
        for each in (self.here, self.back):
            each.free()
        for handle in (self.first, self.second, self.event):
            handle.close()


@contextmanager
def opened(device: FakeDriver) -> Iterator[Bench]:
    with device.current():
        bench = Bench(device)
        yield bench
        if not device._lost:
            bench.wait(bench.first, bench.second)
        bench.close()
    device.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    """For tests that misuse nothing."""
    with opened(FakeDriver()) as bench:
        yield bench


@pytest.fixture
def misused() -> Iterator[Bench]:
    """For tests that do: the driver has to say it again when it is closed."""
    device = FakeDriver()
    with device.current():
        yield Bench(device)
    assert device.misuses
    with pytest.raises(MisuseError) as raised:
        device.close()
    assert all(str(each) in str(raised.value) for each in device.misuses)


def numbers(start: int = 1) -> np.ndarray:
    return np.arange(start, start + SIZE, dtype=np.uint8)


# What works.


def test_bytes_go_in_and_come_back_in_the_order_of_the_stream(bench: Bench) -> None:
    driver, stream = bench.driver, bench.first
    bench.here.array[:] = numbers()
    driver.clear(bench.other, SIZE, stream)
    driver.copy_in(bench.memory, bench.here.array, stream)
    driver.copy_within(bench.other + 4, bench.memory, 8, stream)
    got = bench.fetch(bench.other, stream)
    assert got.tolist() == [0] * 4 + numbers()[:8].tolist() + [0] * 4
    assert (bench.device.bytes_in, bench.device.bytes_out) == (SIZE, SIZE)


def test_nothing_runs_before_somebody_waits(bench: Bench) -> None:
    ran: list[int] = []
    bench.device.call(bench.first, lambda: ran.append(1))
    bench.here.array[:] = numbers()
    bench.driver.copy_in(bench.memory, bench.here.array, bench.first)
    bench.driver.copy_out(bench.back.array, bench.memory, bench.first)
    assert ran == []
    assert (bench.back.array == PENDING).all()
    bench.wait(bench.first)
    assert ran == [1]
    assert bench.back.array.tolist() == numbers().tolist()


def test_what_was_not_written_is_a_pattern(bench: Bench) -> None:
    assert (bench.here.array == UNWRITTEN).all()
    assert (bench.fetch(bench.memory, bench.first) == UNWRITTEN).all()


def test_addresses_are_aligned_true_and_different(bench: Bench) -> None:
    more = [bench.driver.allocate(size) for size in (0, 1, 255, 256, 257)]
    assert all(address % ALIGNMENT == 0 for address in more)
    assert len(set(more)) == 5
    bench.driver.clear(more[4], 257, bench.first)
    bench.wait(bench.first)
    assert ctypes.string_at(more[4], 257) == bytes(257)
    for address in more:
        bench.driver.free(address)


def orders(seed: int) -> str:
    """The order in which three operations on each of two streams run."""
    device, ran = FakeDriver(seed=seed), []
    with opened(device) as bench:
        for name, stream in (("a", bench.first), ("b", bench.second)):
            for index in range(3):
                device.call(stream, lambda name=name, index=index: ran.append(f"{name}{index}"))
        bench.wait(bench.first, bench.second)
    return " ".join(ran)


def test_streams_run_in_any_order_and_each_in_its_own() -> None:
    seen = {orders(seed) for seed in range(40)}
    assert len(seen) > 5
    assert all(sorted(seq.split()) == ["a0", "a1", "a2", "b0", "b1", "b2"] for seq in seen)
    assert all([one for one in seq.split() if one[0] == "b"] == ["b0", "b1", "b2"] for seq in seen)
    assert orders(3) == orders(3)


@pytest.mark.parametrize("seed", range(8))
def test_a_stream_waits_for_what_an_event_stands_for(seed: int) -> None:
    with opened(FakeDriver(seed=seed)) as bench:
        bench.here.array[:] = numbers()
        bench.driver.copy_in(bench.memory, bench.here.array, bench.first)
        bench.driver.record(bench.event, bench.first)
        bench.driver.clear(bench.other, SIZE, bench.first)  # behind the event: not waited for
        bench.driver.wait_on(bench.second, bench.event)
        assert bench.fetch(bench.memory, bench.second).tolist() == numbers().tolist()


@pytest.mark.parametrize("seed", range(8))
def test_an_event_stands_for_what_was_before_its_last_record(seed: int) -> None:
    with opened(FakeDriver(seed=seed)) as bench:
        bench.driver.record(bench.event, bench.first)
        bench.driver.clear(bench.memory, SIZE, bench.first)
        bench.driver.record(bench.event, bench.first)
        bench.driver.synchronize(bench.event)
        assert bench.fetch(bench.memory, bench.second).tolist() == [0] * SIZE


def test_memory_is_counted() -> None:
    device = FakeDriver(memory_bytes=1000)
    with device.current():
        assert device.memory() == (1000, 1000)
        address = device.allocate(600)
        assert device.memory() == (400, 1000)
        with pytest.raises(DeviceMemoryError) as raised:
            device.allocate(500)
        assert (raised.value.size_bytes, raised.value.free_bytes) == (500, 400)
        device.free(address)
        device.free(device.allocate(500))
        with pytest.raises(DeviceMemoryError, match="pinned"):
            device.allocate_pinned(1001)
    device.close()
    assert device.calls["allocate"] == 3


def test_the_message_of_missing_memory() -> None:
    error = DeviceMemoryError(3 << 30, 512 << 20, "NVIDIA H200")
    tells(str(error), "3,072.0 MiB", "NVIDIA H200", "512.0 MiB")


# Kernels: that they compute the right thing, test_fake_kernels says.


def end(bench: Bench, scratch: int, *, scores: int, results: int) -> Launch:
    """Two rows of two classes; the first exits. Results: 3 × 16 bytes."""
    names = ("survivors", "survivor_count", "confidence")
    places = {name: results + 16 * index for index, name in enumerate(names)}
    return stage_end(
        ExitCheck(kind=CheckKind.PROBABILITIES, classes=2, threshold=0.9),
        rows=2,
        scores=scores,
        score_type="float32",
        results=Results(**places),
        scratch=Scratch(address=scratch, rows=2),
        multiprocessors=bench.driver.multiprocessors,
        tensors=[RowCopy(source=scores, target=bench.other, row_bytes=8)],
    )


@pytest.mark.parametrize("by_kernel", [None, lambda _launch: None])
def test_a_stage_end_writes_pinned_memory_too(
    by_kernel: Callable[[Launch], None] | None,
) -> None:
    with opened(FakeDriver(run_kernel=by_kernel)) as bench:
        driver, stream = bench.driver, bench.first
        kernels = driver.load(b"cubin")
        assert set(kernels) == set(ENTRY_POINTS)
        scratch, results = driver.allocate(Scratch.bytes_for(2)), driver.allocate_pinned(80)
        driver.clear(scratch, Scratch.bytes_for(2), stream)
        bench.here.array.view(np.float32)[:] = [0.05, 0.95, 0.5, 0.5]
        driver.copy_in(bench.memory, bench.here.array, stream)
        launch = end(bench, scratch, scores=bench.memory, results=results.address)
        driver.launch(kernels[launch.entry_point], launch, stream)
        written = np.r_[0:8, 16:20, 32:40]
        assert (results.array[written] == PENDING).all()
        got = bench.fetch(bench.other, stream)
        if by_kernel is None:
            assert results.array[0:4].view(np.int32).tolist() == [1]
            assert got.view(np.float32)[:2].tolist() == [0.5, 0.5]
        else:
            assert (results.array[written] == PENDING).all()
        driver.free(scratch)
        results.free()


def test_a_replaced_kernel_is_given_true_addresses() -> None:
    seen: list[Launch] = []
    with opened(FakeDriver(run_kernel=seen.append)) as bench:
        rows = bench.driver.allocate(4)
        bench.driver.clear(rows, 4, bench.first)
        launch = gather_rows(
            [RowCopy(source=bench.memory, target=bench.other, row_bytes=4)],
            rows=rows, count=1, source_rows=4, multiprocessors=1,
        )  # fmt: skip
        bench.driver.launch("gather_rows", launch, bench.first)
        bench.wait(bench.first)
        bench.driver.free(rows)
    assert seen == [launch]


def test_a_stage_end_wants_its_scratch_cleared(misused: Bench) -> None:
    driver = misused.driver
    scratch, results = driver.allocate(Scratch.bytes_for(2)), driver.allocate(80)
    launch = end(misused, scratch, scores=misused.memory, results=results)
    driver.launch(launch.entry_point, launch, misused.first)
    with pytest.raises(MisuseError, match="was not cleared"):
        misused.wait(misused.first)


def test_a_kernel_is_launched_by_its_own_name(misused: Bench) -> None:
    launch = end(misused, misused.other, scores=misused.memory, results=misused.memory)
    with pytest.raises(MisuseError, match="stage_end_float32 was launched as gather_rows"):
        misused.driver.launch("gather_rows", launch, misused.first)


def test_kernels_want_whole_warps(misused: Bench) -> None:
    launch = Launch(entry_point="gather_rows", grid=1, block=33, arguments=np.void(b""))
    with pytest.raises(MisuseError, match="1 blocks of 33 threads"):
        misused.driver.launch("gather_rows", launch, misused.first)


# What must not be done.


def test_every_call_needs_the_context(bench: Bench) -> None:
    device, failures = bench.device, []

    def elsewhere() -> None:
        for call in (
            device.memory,
            lambda: device.allocate(1),
            lambda: device.free(bench.memory),
            lambda: device.allocate_pinned(1),
            device.stream,
            device.event,
            lambda: device.clear(bench.memory, SIZE, bench.first),
            lambda: device.record(bench.event, bench.first),
            lambda: device.capture(bench.first, lambda: None),
            lambda: device.load(b""),
            bench.event.close,
            bench.first.close,
            bench.here.free,
        ):
            try:
                call()
            except MisuseError as error:
                failures.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(failures) == 13
    assert all("the context is not current on this thread" in failure for failure in failures)
    device.misuses.clear()


def test_contexts_nest() -> None:
    device = FakeDriver()
    with device.current():
        with device.current():
            pass
        device.memory()
    with pytest.raises(MisuseError, match="not current"):
        device.memory()


Step = Callable[[Bench], object]
"""Something that must raise."""


def freed(bench: Bench) -> int:
    address = bench.driver.allocate(SIZE)
    bench.driver.free(address)
    return address


def unwaited(bench: Bench) -> None:
    bench.driver.clear(bench.memory, SIZE, bench.first)


def ran_unwaited(bench: Bench) -> None:
    """Use finished work after waiting for another stream's work only."""
    bench.driver.clear(bench.memory, SIZE, bench.first)
    bench.driver.record(bench.event, bench.second)
    while not bench.device._queues.are_empty:
        bench.device._step()
    bench.driver.synchronize(bench.event)


AT_ONCE: dict[str, tuple[Step, Step, str]] = {
    "use after free": (
        lambda b: None,
        lambda b: b.driver.clear(freed(b), SIZE, b.first),
        "which was freed",
    ),
    "free twice": (lambda b: None, lambda b: b.driver.free(freed(b)), "was freed before"),
    "free what is none": (lambda b: None, lambda b: b.driver.free(64), "was never allocated"),
    "free pinned memory as the device's": (
        lambda b: None,
        lambda b: b.driver.free(b.here.address),
        "was never allocated",
    ),
    "beyond the end": (
        lambda b: None,
        lambda b: b.driver.clear(b.memory + 1, SIZE, b.first),
        "beyond the end of device memory",
    ),
    "nowhere": (
        lambda b: None,
        lambda b: b.driver.clear(4096, 1, b.first),
        "where nothing is allocated",
    ),
    "free before it ran": (unwaited, lambda b: b.driver.free(b.memory), "before clear used it"),
    "free before the host knows": (
        ran_unwaited,
        lambda b: b.driver.free(b.memory),
        "before the host waited for clear",
    ),
    "free pinned memory in flight": (
        lambda b: b.driver.copy_in(b.memory, b.here.array, b.first),
        lambda b: b.here.free(),
        "before copy_in used it",
    ),
    "close a stream in flight": (unwaited, lambda b: b.first.close(), "before the host waited"),
    "close a stream that nobody waited for": (
        ran_unwaited,
        lambda b: b.first.close(),
        "before the host waited",
    ),
    "a closed stream": (
        lambda b: b.first.close(),
        lambda b: b.driver.clear(b.memory, 1, b.first),
        "after it was closed",
    ),
    "a closed event": (
        lambda b: b.event.close(),
        lambda b: b.driver.record(b.event, b.first),
        "after it was closed",
    ),
    "an event without a record": (
        lambda b: None,
        lambda b: b.driver.synchronize(b.event),
        "never recorded",
    ),
    "wait on an event without a record": (
        lambda b: None,
        lambda b: b.driver.wait_on(b.first, b.event),
        "never recorded",
    ),
    "copy from what is not pinned": (
        lambda b: None,
        lambda b: b.driver.copy_in(b.memory, numbers(), b.first),
        "where nothing is allocated",
    ),
    "copy out to the device": (
        lambda b: None,
        lambda b: b.driver.copy_out(b.back.array, b.here.address, b.first),
        "instead of device memory",
    ),
    "copy what is not contiguous": (
        lambda b: None,
        lambda b: b.driver.copy_in(b.memory, b.here.array[::2], b.first),
        "not of bytes",
    ),
    "copy what are not bytes": (
        lambda b: None,
        lambda b: b.driver.copy_in(b.memory, b.here.array.view(np.int32), b.first),
        "not of bytes",
    ),
    "copy onto itself": (
        lambda b: None,
        lambda b: b.driver.copy_within(b.memory + 4, b.memory, 8, b.first),
        "they overlap",
    ),
    "memory outside of work": (
        lambda b: None,
        lambda b: b.device.read(b.memory, 1),
        "outside of enqueued work",
    ),
}


@pytest.mark.parametrize(("before", "wrong", "said"), AT_ONCE.values(), ids=AT_ONCE.keys())
def test_a_misuse_raises_at_once(misused: Bench, before: Step, wrong: Step, said: str) -> None:
    before(misused)
    assert misused.device.misuses == []
    with pytest.raises(MisuseError, match=said):
        wrong(misused)


def two_writers(bench: Bench) -> None:
    bench.driver.clear(bench.memory, SIZE, bench.first)
    bench.driver.clear(bench.memory, SIZE, bench.second)


def reader_without_event(bench: Bench) -> None:
    bench.driver.clear(bench.memory, SIZE, bench.first)
    bench.driver.copy_out(bench.back.array, bench.memory, bench.second)


def writer_after_reader(bench: Bench) -> None:
    bench.driver.copy_within(bench.other, bench.memory, SIZE, bench.first)
    bench.driver.clear(bench.memory, 1, bench.second)


def event_too_early(bench: Bench) -> None:
    bench.driver.record(bench.event, bench.first)
    bench.driver.clear(bench.memory, SIZE, bench.first)
    bench.driver.wait_on(bench.second, bench.event)
    bench.driver.copy_out(bench.back.array, bench.memory, bench.second)


def source_changed(bench: Bench) -> None:
    bench.driver.copy_in(bench.memory, bench.here.array, bench.first)
    bench.here.array[3] = 0


def freed_by_name(bench: Bench) -> None:
    """The memory used by host work is known only when it runs."""
    address = bench.driver.allocate(SIZE)
    bench.device.call(bench.first, lambda: bench.device.write(address, SIZE).fill(0))
    bench.driver.free(address)


def writes_what_it_reads(bench: Bench) -> None:
    def work() -> None:
        bench.device.read(bench.memory, SIZE)[0] = 1

    bench.device.call(bench.first, work)


def bad_row_number(bench: Bench) -> None:
    launch = gather_rows(
        [RowCopy(source=bench.memory, target=bench.other, row_bytes=4)],
        rows=bench.here.address, count=1, source_rows=4, multiprocessors=1,
    )  # fmt: skip
    bench.here.array.view(np.int32)[0] = 4
    bench.driver.launch("gather_rows", launch, bench.first)


WHEN_IT_RUNS: dict[str, tuple[Step, str]] = {
    "two writers": (two_writers, "nothing orders the two"),
    "a reader without an event": (reader_without_event, "nothing orders the two"),
    "a writer after a reader": (writer_after_reader, "nothing orders the two"),
    "an event that was recorded too early": (event_too_early, "nothing orders the two"),
    "a source that changes": (source_changed, "changed before it was copied"),
    "memory that host work finds freed": (freed_by_name, "which was freed"),
    "writing to what is only read": (writes_what_it_reads, "read-only"),
    "a row that is not there": (bad_row_number, "beyond the end"),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("wrong", "said"), WHEN_IT_RUNS.values(), ids=WHEN_IT_RUNS.keys())
def test_a_misuse_raises_when_it_runs_in_any_order(wrong: Step, said: str, seed: int) -> None:
    device = FakeDriver(seed=seed)
    with device.current():
        bench = Bench(device)
        wrong(bench)
        assert device.misuses == []
        with pytest.raises((MisuseError, ValueError), match=said):
            bench.wait(bench.first, bench.second)
    with pytest.raises(MisuseError, match=said):
        device.close()


@pytest.mark.parametrize(
    "fine",
    [
        lambda b: (
            b.driver.copy_within(b.other, b.memory, 8, b.first)
            or b.driver.copy_out(b.back.array[:8], b.memory, b.second)
        ),
        lambda b: b.driver.clear(b.memory, 8, b.first) or b.driver.clear(b.memory + 8, 8, b.second),
    ],
    ids=["two readers", "different parts"],
)
@pytest.mark.parametrize("seed", range(4))
def test_streams_may_share_what_does_not_conflict(fine: Step, seed: int) -> None:
    with opened(FakeDriver(seed=seed)) as bench:
        fine(bench)
        bench.wait(bench.first, bench.second)
        assert bench.device.misuses == []


def test_the_order_may_go_through_the_host(bench: Bench) -> None:
    bench.driver.clear(bench.memory, SIZE, bench.first)
    bench.wait(bench.first)
    assert bench.fetch(bench.memory, bench.second).tolist() == [0] * SIZE


def test_the_order_may_go_through_a_third_stream(bench: Bench) -> None:
    third = bench.driver.stream()
    bench.driver.clear(bench.memory, SIZE, bench.first)
    bench.driver.record(bench.event, bench.first)
    bench.driver.wait_on(third, bench.event)
    bench.driver.record(bench.event, third)
    bench.driver.wait_on(bench.second, bench.event)
    assert bench.fetch(bench.memory, bench.second).tolist() == [0] * SIZE
    bench.wait(third)
    third.close()


# What close finds.


def entered(bench: Bench) -> object:
    context = bench.device.current()
    context.__enter__()
    return context


LEFT: dict[str, tuple[Step, str]] = {
    "memory": (lambda b: b.driver.allocate(5), "device memory at .*, 5 bytes was not freed"),
    "pinned memory": (lambda b: b.driver.allocate_pinned(5), "pinned memory .* was not freed"),
    "a stream": (lambda b: b.driver.stream(), "FakeStream.* was not closed"),
    "an event": (lambda b: b.driver.event(), "FakeEvent.* was not closed"),
    "a graph": (lambda b: b.driver.capture(b.first, lambda: None), "FakeGraph.* was not closed"),
    "a write behind memory": (
        lambda b: ctypes.memset(b.memory + SIZE, 0, 1),
        "wrote behind device memory",
    ),
    "a write before memory": (
        lambda b: ctypes.memset(b.other - 1, 0, 1),
        "wrote before device memory",
    ),
    "a write to freed memory": (
        lambda b: ctypes.memset(freed(b), 0, 1),
        "wrote to device memory .*, which was freed",
    ),
    "a context": (entered, "left the context current"),
}


@pytest.mark.parametrize(("leave", "said"), LEFT.values(), ids=LEFT.keys())
def test_close_finds_what_is_left(leave: Step, said: str) -> None:
    device = FakeDriver()
    with device.current():
        bench = Bench(device)
        kept = leave(bench)
        with pytest.raises(MisuseError, match=said) if "write" in said else _nothing():
            bench.close()
    with pytest.raises(MisuseError, match=said):
        device.close()
    del kept


@contextmanager
def _nothing() -> Iterator[None]:
    try:
        yield
    except MisuseError as error:  # a guard is looked at when its memory is freed, too
        assert "wrote" in str(error)


def test_close_executes_pending_operations() -> None:
    device = FakeDriver()
    with device.current():
        bench = Bench(device)
        two_writers(bench)
    with pytest.raises(MisuseError, match="nothing orders the two"):
        device.close()
    device.close()  # a second time it has nothing to say


def test_nothing_is_left_of_what_was_released(bench: Bench) -> None:
    content = bench.driver.allocate_pinned(4)
    view = content.array
    content.free()
    assert (view == FREED).all()
    content.free()  # again: nothing
    stream, event = bench.driver.stream(), bench.driver.event()
    for handle in (stream, stream, event, event):
        handle.close()


def test_a_closed_driver_has_no_context() -> None:
    device = FakeDriver()
    device.close()
    with pytest.raises(MisuseError, match="is closed"), device.current():
        pass


# Failures that tests write down.


def test_a_call_fails_when_it_is_told_to(bench: Bench) -> None:
    bench.device.fail_next("clear", after=1)
    bench.driver.clear(bench.memory, SIZE, bench.first)
    with pytest.raises(BackendError, match="clear failed"):
        bench.driver.clear(bench.memory, SIZE, bench.first)
    bench.driver.clear(bench.memory, SIZE, bench.first)
    bench.device.fail_next("allocate", error=DeviceMemoryError(7, 5))
    with pytest.raises(DeviceMemoryError):
        bench.driver.allocate(7)
    assert bench.device.misuses == []


def test_a_lost_context_fails_everything_but_release() -> None:
    device = FakeDriver()
    with opened(device) as bench:
        bench.driver.copy_out(bench.back.array, bench.memory, bench.first)
        bench.driver.record(bench.event, bench.first)
        device.lose()
        with pytest.raises(DeviceLostError, match="illegal memory access"):
            bench.driver.synchronize(bench.event)
        with pytest.raises(DeviceLostError):
            bench.driver.allocate(1)
        with pytest.raises(DeviceLostError):
            bench.driver.record(bench.event, bench.first)
        assert (bench.back.array == PENDING).all()


def test_host_work_that_fails_loses_the_context() -> None:
    with opened(FakeDriver()) as bench:

        def fail() -> None:
            raise BackendError("misaligned address")

        bench.device.call(bench.first, fail)
        with pytest.raises(DeviceLostError, match=r"misaligned address.*be restarted"):
            bench.wait(bench.first)


def test_a_fault_of_host_work_is_not_swallowed(misused: Bench) -> None:
    def fail() -> None:
        raise KeyError("a fault of the test's own executable")

    misused.device.call(misused.first, fail)
    with pytest.raises(KeyError):
        misused.wait(misused.first)


# Graphs.


def test_a_graph_runs_what_was_captured_as_often_as_it_is_launched(bench: Bench) -> None:
    driver, stream = bench.driver, bench.first

    def enqueue() -> None:
        driver.copy_in(bench.memory, bench.here.array, stream)
        driver.copy_within(bench.other, bench.memory, SIZE, stream)
        driver.copy_out(bench.back.array, bench.other, stream)

    graph = driver.capture(stream, enqueue)
    assert graph is not None
    bench.wait(stream)
    assert (bench.back.array == UNWRITTEN).all()  # nothing ran, nothing was enqueued
    for start in (1, 100):
        bench.here.array[:] = numbers(start)
        graph.launch(stream)
        assert (bench.back.array == PENDING).all()
        bench.wait(stream)
        assert bench.back.array.tolist() == numbers(start).tolist()
    graph.close()
    graph.close()
    assert (bench.device.calls["copy_in"], bench.device.calls["launch_graph"]) == (1, 2)


NOT_IN_CAPTURE: dict[str, Step] = {
    "allocate": lambda b: b.driver.allocate(1),
    "allocate_pinned": lambda b: b.driver.allocate_pinned(1),
    "free": lambda b: b.driver.free(b.memory),
    "free_pinned": lambda b: b.here.free(),
    "synchronize": lambda b: b.driver.synchronize(b.event),
    "record": lambda b: b.driver.record(b.event, b.first),
    "wait_on": lambda b: b.driver.wait_on(b.first, b.event),
    "load": lambda b: b.driver.load(b""),
    "stream": lambda b: b.driver.stream(),
    "event": lambda b: b.driver.event(),
    "capture": lambda b: b.driver.capture(b.first, lambda: None),
    "another stream": lambda b: b.driver.clear(b.memory, 1, b.second),
}


@pytest.mark.parametrize("wrong", NOT_IN_CAPTURE.values(), ids=NOT_IN_CAPTURE.keys())
def test_a_capture_forbids(misused: Bench, wrong: Step) -> None:
    misused.driver.record(misused.event, misused.first)
    misused.wait(misused.first)
    with pytest.raises(MisuseError, match=r"is captured"):
        misused.driver.capture(misused.first, lambda: wrong(misused) and None)
    misused.driver.allocate(1)  # the capture is over


def test_other_threads_are_not_concerned_by_a_capture(bench: Bench) -> None:
    def elsewhere() -> None:
        with bench.device.current():
            bench.driver.free(bench.driver.allocate(1))
            bench.driver.clear(bench.memory, SIZE, bench.second)
            bench.wait(bench.second)

    def enqueue() -> None:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    graph = bench.driver.capture(bench.first, enqueue)
    assert graph is not None
    graph.close()


def test_another_thread_must_leave_the_captured_stream_alone(misused: Bench) -> None:
    said = []

    def elsewhere() -> None:
        with misused.device.current():
            try:
                misused.driver.clear(misused.memory, SIZE, misused.first)
            except MisuseError as error:
                said.append(str(error))

    def enqueue() -> None:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    misused.driver.capture(misused.first, enqueue)
    assert len(said) == 1


def test_no_graph_where_there_are_none_or_something_cannot_be_captured(bench: Bench) -> None:
    def refuse() -> None:
        raise BackendError("TensorRT could not run the engine: capture is not permitted")

    assert bench.driver.capture(bench.first, refuse) is None
    bench.device.graphs = False
    assert bench.driver.capture(bench.first, lambda: None) is None
    bench.driver.clear(bench.memory, 1, bench.first)  # the stream is as before
    assert bench.device.misuses == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda b, g: (g.launch(b.first), g.close()), "before the host waited"),
        (lambda b, g: (g.close(), g.launch(b.first)), "after it was closed"),
        (lambda b, g: (b.driver.free(b.memory), g.launch(b.first)), "which was freed"),
    ],
)
def test_graphs_can_be_misused(
    misused: Bench, wrong: Callable[[Bench, object], object], said: str
) -> None:
    def enqueue() -> None:
        misused.driver.clear(misused.memory, SIZE, misused.first)

    graph = misused.driver.capture(misused.first, enqueue)
    with pytest.raises(MisuseError, match=said):
        wrong(misused, graph)


def test_a_graph_may_race_like_anything_else(misused: Bench) -> None:
    def enqueue() -> None:
        misused.driver.clear(misused.memory, SIZE, misused.first)

    graph = misused.driver.capture(misused.first, enqueue)
    assert graph is not None
    graph.launch(misused.first)
    misused.driver.clear(misused.memory, SIZE, misused.second)
    with pytest.raises(MisuseError, match="nothing orders the two"):
        misused.wait(misused.first, misused.second)


def test_protocols_are_met(bench: Bench) -> None:
    """The same check as mypy's of our packages, for the objects used in tests."""
    stream: Stream = bench.first
    event: StreamEvent = bench.event
    pinned: Pinned = bench.here
    assert isinstance(stream.handle, int)
    assert event is bench.event
    assert pinned.address == pinned.array.ctypes.data
