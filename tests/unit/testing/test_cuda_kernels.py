"""The numpy kernels of the fake driver are the kernels: on random data, by all their results.

The cases are those of the kernels' own tests; the last test runs the kernels' sources, compiled
for the CPU, on the fake driver's memory.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from tests.unit.kernels.cases import (
    GatherCase,
    StageEndCase,
    gathers,
    new_scratch,
    random_scores,
    stage_ends,
    stored,
)
from tests.unit.kernels.shim import Cpu, Guarded, build, find_compiler

from offramp.engine.kernels.kernel_arguments import (
    CheckKind,
    ExitCheck,
    Launch,
    RowCopy,
    Scratch,
    gather_rows,
)
from offramp.testing import cuda_kernels
from offramp.testing.cuda_driver import FakeDriver, MisuseError
from offramp.testing.cuda_memory import ByteRange


class Numpy:
    """The tests' device: numpy on memory that only what is declared may touch."""

    def __init__(self) -> None:
        self.placed: dict[int, np.ndarray] = {}
        self.undeclared: list[ByteRange] = []

    def place(self, memory: Guarded) -> int:
        address = memory.bytes.ctypes.data
        self.placed[address] = memory.bytes
        return address

    def fetch(self, memory: Guarded) -> None:
        """Do nothing: the memory is on the host."""

    def launch(self, launch: Launch, *, seed: int = 0, resident: int = 4) -> None:
        declared = cuda_kernels.ranges_of(launch)

        def use(used: ByteRange) -> np.ndarray:
            if not any(each.covers(used) for each in declared):
                self.undeclared.append(used)
            if not used.size_bytes:
                return np.empty(0, np.uint8)
            address = max(each for each in self.placed if each <= used.address)
            start = used.address - address
            content = self.placed[address][start : start + used.size_bytes]
            assert content.size == used.size_bytes
            return content

        cuda_kernels.run(launch, use)


@settings(max_examples=200, deadline=None)
@given(stage_ends())
def test_stage_ends(case: StageEndCase) -> None:
    device = Numpy()
    case.run(device)
    assert device.undeclared == []


@settings(max_examples=100, deadline=None)
@given(gathers())
def test_gathers(case: GatherCase) -> None:
    device = Numpy()
    case.run(device)
    assert all(not used.writes for used in device.undeclared)  # rows of sources: known when it runs


def test_no_rows() -> None:
    check = ExitCheck(kind=CheckKind.LOGITS, classes=3, threshold=0.5)
    values = np.empty((0, 3), np.float32)
    rng = np.random.default_rng(0)
    StageEndCase(check=check, values=values, score_type="float32", rng=rng, row_bytes=[8]).run(
        Numpy()
    )


def test_a_kernel_that_is_none() -> None:
    launch = Launch(entry_point="stage_end_float64", grid=1, block=32, arguments=np.void(b""))
    with pytest.raises(MisuseError, match="no kernel 'stage_end_float64'"):
        cuda_kernels.run(launch, lambda used: np.empty(0, np.uint8))


def test_rows_below_zero() -> None:
    rows = np.array([2, -1], np.int32)
    launch = gather_rows(
        [RowCopy(source=256, target=512, row_bytes=4)],
        rows=1024, count=2, source_rows=3, multiprocessors=1,
    )  # fmt: skip
    with pytest.raises(MisuseError, match=r"\[-1\] to gather are below 0"):
        cuda_kernels.run(launch, lambda used: rows.view(np.uint8))


def test_scratch_that_is_not_clear() -> None:
    rng = np.random.default_rng(0)
    scratch = new_scratch(4, rng)
    scratch.bytes[0] = 1
    check = ExitCheck(kind=CheckKind.LOGITS, classes=3, threshold=0.5)
    values = rng.random((4, 3), np.float32)
    case = StageEndCase(check=check, values=values, score_type="float32", rng=rng, scratch=scratch)
    with pytest.raises(MisuseError, match="was not cleared"):
        case.run(Numpy())


class OnDriver:
    """The tests' device: a fake driver, whose memory the case's memory is copied to and from."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self.stream, self.event = driver.stream(), driver.event()
        self.kernels = driver.load(b"")
        self.staging = driver.allocate_pinned(1 << 20)
        self.addresses: dict[int, int] = {}

    def place(self, memory: Guarded) -> int:
        size_bytes = memory.whole.size
        address = self.driver.allocate(size_bytes)
        self.addresses[id(memory)] = address
        self.staging.array[:size_bytes] = memory.whole
        self.driver.copy_in(address, self.staging.array[:size_bytes], self.stream)
        self.wait()
        return address + memory.offset

    def fetch(self, memory: Guarded) -> None:
        size_bytes = memory.whole.size
        address = self.addresses[id(memory)]
        self.driver.copy_out(self.staging.array[:size_bytes], address, self.stream)
        self.wait()
        memory.whole[:] = self.staging.array[:size_bytes]

    def launch(self, launch: Launch, *, seed: int = 0, resident: int = 4) -> None:
        self.driver.launch(self.kernels[launch.entry_point], launch, self.stream)
        self.wait()

    def wait(self) -> None:
        self.driver.record(self.event, self.stream)
        self.driver.synchronize(self.event)

    def close(self) -> None:
        for address in self.addresses.values():
            self.driver.free(address)
        self.staging.free()
        self.stream.close()
        self.event.close()


@pytest.fixture(scope="module")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> Cpu:
    if find_compiler() is None:
        pytest.skip("no C++ compiler here: CXX, g++, c++, clang++")
    return Cpu(build(tmp_path_factory.mktemp("kernels")))


def check_on(driver: FakeDriver) -> None:
    """A stage end of every kind and a gather, on the driver."""
    rng = np.random.default_rng(5)
    with driver.current():
        for kind in CheckKind:
            check = ExitCheck(kind=kind, classes=70, threshold=0.5)
            values = stored(random_scores(rng, (30, 70), kind), "float16")
            device = OnDriver(driver)
            StageEndCase(
                check=check,
                values=values,
                score_type="float16",
                rng=rng,
                row_bytes=(16, 210, 3),
            ).run(device)
            device.close()
        device = OnDriver(driver)
        GatherCase(np.array([3, 0, 3], np.int32), 5, (8, 100), rng).run(device)
        device.close()
    driver.close()


def test_on_the_driver() -> None:
    check_on(FakeDriver())


def test_the_kernels_own_sources_on_the_driver(cpu: Cpu) -> None:
    launched: list[str] = []

    def run(launch: Launch) -> None:
        launched.append(launch.entry_point)
        cpu.launch(launch)

    check_on(FakeDriver(run_kernel=run))
    assert launched == ["stage_end_float16"] * 2 + ["gather_rows"]


def test_a_stage_end_declares_what_it_uses() -> None:
    rng = np.random.default_rng(0)
    check = ExitCheck(kind=CheckKind.LOGITS, classes=3, threshold=0.5)
    values = rng.random((4, 3), np.float32)
    case = StageEndCase(check=check, values=values, score_type="float32", rng=rng, row_bytes=[6])
    launch = case.launch(Numpy())
    sizes = [(used.size_bytes, used.writes) for used in cuda_kernels.ranges_of(launch)]
    assert sizes == [
        (4 * 3 * 4, False), (16, True), (16, True), (4, True),
        (Scratch.bytes_for(4), True), (24, False), (24, True),
    ]  # fmt: skip
    half = dataclasses.replace(launch, entry_point="stage_end_bfloat16")
    assert cuda_kernels.ranges_of(half)[0].size_bytes == 4 * 3 * 2
