"""A slot over the fake driver: what lives how long, what fails alone, what comes to the host."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tests.cuda_fakes import FakeExecutables, fake_cuda
from tests.facts import facts

from offramp.certify.decision import MODEL_END, NEVER
from offramp.engine.common.errors import BackendError
from offramp.engine.cuda.cuda_backend import CudaBackend
from offramp.engine.cuda.device_batch import Placed
from offramp.engine.cuda.driver import DeviceLostError
from offramp.engine.cuda.prepared_stages import CudaStage
from offramp.engine.cuda.slot import CudaSlot
from offramp.engine.stages.backend_protocol import TensorBatch
from offramp.engine.stages.plan import StageSpec
from offramp.testing.cuda_driver import FakeDriver

CLASSES = 4
WIDTH = 6


def graph(
    inputs: Mapping[str, tuple[int, list[int | str]]],
    nodes: list[onnx.NodeProto],
    outputs: Mapping[str, tuple[int, list[int | str]]],
) -> bytes:
    made = helper.make_graph(
        nodes,
        "stage",
        [helper.make_tensor_value_info(n, t, ["batch", *s]) for n, (t, s) in inputs.items()],
        [helper.make_tensor_value_info(n, t, ["batch", *s]) for n, (t, s) in outputs.items()],
    )
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(made, opset_imports=opset, ir_version=8)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def spec(index: int, *, final: bool = False, threshold: float = 0.5) -> StageSpec:
    """``scores`` answers; ``x`` becomes ``x + 1`` under the next number; ``note`` passes through.

    Stage inputs: ``x{index}`` [WIDTH], ``scores`` [CLASSES], and ``note``, int64 [3], which the
    last stage adds to its answer.
    """
    x, following = f"x{index}", f"x{index + 1}"
    inputs: dict[str, tuple[int, list[int | str]]] = {
        x: (TensorProto.FLOAT, [WIDTH]),
        "scores": (TensorProto.FLOAT, [CLASSES]),
    }
    nodes = [helper.make_node("Identity", ["scores"], [f"answer{index}"])]
    if final:
        inputs["note"] = (TensorProto.INT64, [3])
        nodes = [
            helper.make_node("Cast", ["note"], ["n"], to=TensorProto.FLOAT),
            helper.make_node("Concat", ["n", x], [f"answer{index}"], axis=1),
        ]
    one = helper.make_node(
        "Constant", [], ["one"], value=helper.make_tensor("one", TensorProto.FLOAT, [], [1.0])
    )
    width = WIDTH + 3 if final else CLASSES
    outputs: dict[str, tuple[int, list[int | str]]] = {
        f"answer{index}": (TensorProto.FLOAT, [width])
    }
    if not final:
        nodes += [one, helper.make_node("Add", [x, "one"], [following])]
        outputs[following] = (TensorProto.FLOAT, [WIDTH])
    else:
        del inputs["scores"]
    model = graph(inputs, nodes, outputs)
    return StageSpec(
        index=index,
        first_segment=index,
        last_segment=index,
        exit=MODEL_END if final else index,
        load=lambda: model,
        inputs=tuple(inputs),
        carried=() if final else (following, "scores", "note"),
        answer=f"answer{index}",
        form="probabilities",
        threshold=threshold,
    )


def batch_of(confidences: list[float]) -> dict[str, np.ndarray]:
    """Return distinguishable rows: x is the row number, note its negative."""
    rows = len(confidences)
    scores = np.zeros((rows, CLASSES), np.float32)
    scores[:, 1] = confidences
    return {
        "x0": np.repeat(np.arange(rows, dtype=np.float32), WIDTH).reshape(rows, WIDTH),
        "scores": scores,
        "note": -np.repeat(np.arange(rows, dtype=np.int64), 3).reshape(rows, 3),
    }


def end_of(rows: list[int], stages: int) -> np.ndarray:
    """Return the last stage's answers for rows of :func:`batch_of` after some stages."""
    numbers = np.array(rows, np.float32)[:, None]
    return np.concatenate(
        [np.repeat(-numbers, 3, axis=1), np.repeat(numbers + stages, WIDTH, axis=1)], axis=1
    )


@dataclasses.dataclass
class Bench:
    """A backend with a slot and stages 0, 1 and the last."""

    backend: CudaBackend
    factory: FakeExecutables
    driver: FakeDriver
    stages: list[CudaStage]
    slot: CudaSlot


@contextmanager
def bench_with(**settings: object) -> Iterator[Bench]:
    backend, factory, driver = fake_cuda(**{"max_rows": 8, **settings})  # type: ignore[arg-type]
    stages = [backend.prepare(s) for s in (spec(0), spec(1), spec(2, final=True, threshold=0.0))]
    slot = backend.open_slot()
    yield Bench(backend, factory, driver, stages, slot)
    slot.close()
    backend.close()  # finds every misuse and every leak


@pytest.fixture
def bench() -> Iterator[Bench]:
    with bench_with() as made:
        yield made


def carry_of(bench: Bench, confidences: list[float]) -> TensorBatch:
    """After stage 0."""
    carry = bench.slot.run(bench.stages[0], bench.slot.upload(batch_of(confidences))).carry
    assert carry is not None
    return carry


def answer_at_end(bench: Bench, batch: TensorBatch) -> np.ndarray:
    answer = bench.slot.run(bench.stages[2], renamed(bench, batch)).answer
    assert answer is not None
    return answer


def renamed(bench: Bench, batch: TensorBatch) -> TensorBatch:
    """Through stage 1, with everybody going on."""
    carry = bench.slot.run(bench.stages[1], batch).carry
    assert carry is not None
    return carry


def test_survivors_of_the_stage_end_cost_no_work(bench: Bench) -> None:
    carry = carry_of(bench, [0.9, 0.1, 0.2, 0.8, 0.3])
    before = bench.driver.calls.total()
    kept = bench.slot.select(carry, np.array([1, 2, 4]))
    assert bench.driver.calls.total() == before
    np.testing.assert_array_equal(answer_at_end(bench, kept), end_of([1, 2, 4], 2))


@pytest.mark.parametrize("rows", [[2], [0, 1], [0, 3], [1, 2, 3], [0, 1, 2, 3, 4]])
def test_other_rows_are_gathered(bench: Bench, rows: list[int]) -> None:
    carry = carry_of(bench, [0.9, 0.1, 0.2, 0.8, 0.3])
    kept = bench.slot.select(carry, np.array(rows))
    assert len(kept) == len(rows)
    np.testing.assert_array_equal(answer_at_end(bench, kept), end_of(rows, 2))


def test_what_the_stage_end_brought_is_not_taken_once_it_was_overwritten(bench: Bench) -> None:
    carry = carry_of(bench, [0.9, 0.1, 0.2, 0.8, 0.3])
    bench.slot.select(carry, np.array([0, 3]))
    kept = bench.slot.select(carry, np.array([1, 2, 4]))
    np.testing.assert_array_equal(answer_at_end(bench, kept), end_of([1, 2, 4], 2))


def test_rows_can_be_selected_of_what_was_selected(bench: Bench) -> None:
    straight = bench.slot.select(carry_of(bench, [0.9, 0.1, 0.2]), np.array([1, 2]))
    np.testing.assert_array_equal(answer_at_end(bench, straight), end_of([1, 2], 2))
    kept = bench.slot.select(carry_of(bench, [0.9, 0.1, 0.2, 0.8, 0.3]), np.array([1, 2, 4]))
    fewer = bench.slot.select(kept, np.array([0, 2]))
    np.testing.assert_array_equal(answer_at_end(bench, fewer), end_of([1, 4], 2))


def test_an_active_threshold_replaces_the_threshold_of_the_stage(bench: Bench) -> None:
    carry_of(bench, [0.9, 0.1, 0.2, 0.8, 0.3])  # under its own
    batch = bench.slot.upload(batch_of([0.9, 0.1, 0.2, 0.8, 0.3]))
    carry = bench.slot.run(bench.stages[0], batch, threshold=0.25).carry
    assert carry is not None
    before = bench.driver.calls.total()
    kept = bench.slot.select(carry, np.array([1, 2]))
    assert bench.driver.calls.total() == before
    np.testing.assert_array_equal(answer_at_end(bench, kept), end_of([1, 2], 2))


def test_only_answers_are_copied_to_the_host(bench: Bench) -> None:
    """Confidences and survivors are written there by the kernel: 13 bytes a row and 4."""
    batch = bench.slot.upload(batch_of([0.9, 0.1, 0.2]))
    assert bench.driver.bytes_out == 0
    bench.slot.run(bench.stages[0], batch)
    assert bench.driver.bytes_out == 3 * CLASSES * 4
    assert bench.driver.calls["copy_out"] == 1


def test_the_confidence_is_that_of_the_graph_where_it_gives_one() -> None:
    """The answer's largest probability is another number here."""
    inputs: dict[str, tuple[int, list[int | str]]] = {"x0": (TensorProto.FLOAT, [1])}
    model = graph(
        inputs,
        [
            helper.make_node(
                "Constant", [], ["axis"], value=helper.make_tensor("a", TensorProto.INT64, [1], [1])
            ),
            helper.make_node("Squeeze", ["x0", "axis"], ["sure"]),
            helper.make_node("Concat", ["x0", "x0"], ["answer"], axis=1),
            helper.make_node("Neg", ["x0"], ["x1"]),
        ],
        {
            "answer": (TensorProto.FLOAT, [2]),
            "sure": (TensorProto.FLOAT, []),
            "x1": (TensorProto.FLOAT, [1]),
        },
    )
    with bench_with() as bench:
        stage = bench.backend.prepare(
            dataclasses.replace(
                spec(0),
                load=lambda: model,
                inputs=("x0",),
                carried=("x1",),
                answer="answer",
                confidence="sure",
                form="logits",
            )
        )
        sure = np.array([[0.25], [0.75], [np.nan]], np.float32)
        result = bench.slot.run(stage, bench.slot.upload({"x0": sure}))
        np.testing.assert_array_equal(result.confidence, np.array([0.25, 0.75, 0.0], np.float32))
        assert result.carry is not None
        before = bench.driver.calls.total()
        bench.slot.select(result.carry, np.array([0, 2]))
        assert bench.driver.calls.total() == before
        del stage


def test_inputs_of_all_types_arrive_as_they_are() -> None:
    kinds = {
        "a": (np.uint8, TensorProto.UINT8),
        "b": (np.int64, TensorProto.INT64),
        "c": (np.bool_, TensorProto.BOOL),
        "d": (np.float16, TensorProto.FLOAT16),
    }
    sums = [helper.make_node("Cast", [n], [f"{n}f"], to=TensorProto.FLOAT) for n in kinds]
    model = graph(
        {n: (kind, [5]) for n, (_, kind) in kinds.items()},
        [*sums, helper.make_node("Concat", [f"{n}f" for n in kinds], ["answer"], axis=1)],
        {"answer": (TensorProto.FLOAT, [20])},
    )
    rng = np.random.default_rng(0)
    arrays = {n: rng.integers(0, 2, (3, 5)).astype(dtype) for n, (dtype, _) in kinds.items()}
    arrays["a"][:] = rng.integers(0, 256, (3, 5))
    arrays["d"] = arrays["d"][:, ::-1]  # not contiguous
    with bench_with() as bench:
        last = dataclasses.replace(
            spec(2, final=True, threshold=0.0), load=lambda: model, inputs=tuple(kinds)
        )
        stage = bench.backend.prepare(dataclasses.replace(last, answer="answer"))
        answer = bench.slot.run(stage, bench.slot.upload(arrays)).answer
        expected = np.concatenate([arrays[n].astype(np.float32) for n in kinds], axis=1)
        np.testing.assert_array_equal(answer, expected)
        del stage


def test_numbers_that_do_not_fit_the_engines_type_are_refused() -> None:
    with bench_with(narrow=True) as bench:
        inputs = batch_of([0.1, 0.1])
        inputs["note"][1, 2] = 2**31
        with pytest.raises(BackendError, match=facts("note", "-1 to 2147483648", "int32")):
            bench.slot.upload(inputs)
        kept = renamed(bench, carry_of(bench, [0.1, 0.1]))
        answer = bench.slot.run(bench.stages[2], kept).answer
        np.testing.assert_array_equal(answer, end_of([0, 1], 2))


def test_float64_goes_up_as_the_float32_that_an_engine_takes() -> None:
    array = np.array([[0.1, 1e300], [-np.inf, np.nan]])
    placed = Placed(name="x", dtype=np.dtype(np.float32), sample_shape=(2,), row_bytes=8, offset=16)
    memory = np.zeros(32, np.uint8)
    placed.fill(memory, array)
    np.testing.assert_array_equal(
        memory[16:].view(np.float32).reshape(2, 2),
        np.array([[0.1, np.inf], [-np.inf, np.nan]], np.float32),
    )
    assert not memory[:16].any()


def test_answers_in_a_type_that_the_kernels_do_not_read() -> None:
    """Confidence on the host, and survivors gathered."""
    model = graph(
        {"x0": (TensorProto.DOUBLE, [2])},
        [
            helper.make_node("Identity", ["x0"], ["answer"]),
            helper.make_node("Neg", ["x0"], ["x1"]),
        ],
        {"answer": (TensorProto.DOUBLE, [2]), "x1": (TensorProto.DOUBLE, [2])},
    )
    changed = dataclasses.replace(
        spec(0), load=lambda: model, inputs=("x0",), carried=("x1",), answer="answer"
    )
    again = dataclasses.replace(
        changed,
        load=lambda: model.replace(b"x0", b"x9").replace(b"x1", b"x0").replace(b"x9", b"x1"),
    )
    again = dataclasses.replace(again, index=1, inputs=("x1",), carried=("x0",))
    with bench_with() as bench:
        first, second = bench.backend.prepare(changed), bench.backend.prepare(again)
        values = np.array([[0.1, 0.7], [0.2, 0.3], [0.9, 0.1]])
        result = bench.slot.run(first, bench.slot.upload({"x0": values}))
        np.testing.assert_array_equal(result.answer, values)
        np.testing.assert_array_equal(result.confidence, np.array([0.7, 0.3, 0.9], np.float32))
        assert result.carry is not None
        answer = bench.slot.run(second, bench.slot.select(result.carry, np.array([0, 2]))).answer
        np.testing.assert_array_equal(answer, -values[[0, 2]])
        del first, second


# What lives how long.


def test_what_was_overwritten_is_refused(bench: Bench) -> None:
    first = bench.slot.upload(batch_of([0.1, 0.2]))
    second = bench.slot.upload(batch_of([0.3, 0.2]))  # waits: the first is still copied from there
    with pytest.raises(BackendError, match="after its buffer was written again"):
        bench.slot.run(bench.stages[0], first)
    carry = bench.slot.run(bench.stages[0], second).carry
    assert carry is not None
    kept = bench.slot.select(carry, np.array([0]))
    other = bench.slot.select(carry, np.array([1]))
    with pytest.raises(BackendError, match="after its buffer was written again"):
        bench.slot.select(kept, np.array([], np.intp))
    np.testing.assert_array_equal(answer_at_end(bench, other), end_of([1], 2))
    with pytest.raises(BackendError, match="after its buffer was written again"):
        bench.slot.buffer(carry, np.array([0]))


def test_inputs_that_pass_through_are_void_with_the_area_they_lie_in(bench: Bench) -> None:
    carry = carry_of(bench, [0.1, 0.2, 0.3])
    kept = bench.slot.select(carry, np.array([0, 1]))
    bench.slot.select(kept, np.array([1]))  # into the area of the upload, where the note lies
    with pytest.raises(BackendError, match="after its buffer was written again"):
        bench.slot.select(carry, np.array([2]))


def test_batches_stay_in_their_slot_unless_buffered(bench: Bench) -> None:
    other = bench.backend.open_slot()
    carry = carry_of(bench, [0.1, 0.2])
    with pytest.raises(BackendError, match="a batch of another slot"):
        other.run(bench.stages[1], carry)
    with pytest.raises(BackendError, match="only buffered batches can be merged"):
        other.merge([(carry, np.array([0]))])
    other.close()


def test_unreferenced_buffers_are_reused(bench: Bench) -> None:
    allocated = []
    for _ in range(4):
        kept = bench.slot.buffer(carry_of(bench, [0.1, 0.2, 0.3]), np.array([0, 2]))
        merged = bench.slot.merge([(kept, np.array([1]))])
        del kept  # the gather is not done yet: the slot keeps it until then
        np.testing.assert_array_equal(answer_at_end(bench, merged), end_of([2], 2))
        allocated.append(bench.driver.calls["allocate"])
    assert len(set(allocated)) == 1


def test_buffered_memory_is_not_handed_on_while_a_merge_reads_it(bench: Bench) -> None:
    other = bench.backend.open_slot()
    kept = bench.slot.buffer(carry_of(bench, [0.1, 0.2, 0.3]), np.array([0, 2]))
    merged = other.merge([(kept, np.array([0]))])
    del kept
    again = bench.slot.buffer(carry_of(bench, [0.3, 0.2, 0.1]), np.array([1]))
    carry = other.run(bench.stages[1], merged).carry
    assert carry is not None
    np.testing.assert_array_equal(other.run(bench.stages[2], carry).answer, end_of([0], 2))
    assert len(again) == 1
    other.close()


def test_rows_of_different_tensors_are_not_merged(bench: Bench) -> None:
    first = bench.slot.buffer(carry_of(bench, [0.1, 0.2]), np.array([0]))
    carry = renamed(bench, carry_of(bench, [0.1, 0.2]))
    second = bench.slot.buffer(carry, np.array([0]))
    with pytest.raises(BackendError, match="rows of different tensors cannot be merged"):
        bench.slot.merge([(first, np.array([0])), (second, np.array([0]))])


def test_nothing_is_allocated_after_the_warm_up(bench: Bench) -> None:
    def serve() -> None:
        for rows in range(8, 0, -1):
            carry = carry_of(bench, [0.9, *[0.1] * (rows - 1)])
            if rows > 1:
                answer_at_end(bench, bench.slot.select(carry, np.arange(1, rows)))

    for _ in range(2):
        serve()
    names = ("allocate", "allocate_pinned", "stream", "event", "load", "free", "free_pinned")
    before = {name: bench.driver.calls[name] for name in names}
    serve()
    assert {name: bench.driver.calls[name] for name in names} == before
    assert bench.slot.arena.growths == 0


def test_a_stage_that_is_prepared_later_makes_the_buffers_grow_once() -> None:
    backend, _, _ = fake_cuda(max_rows=8, scratch_bytes=lambda s: 512 << (3 * s.index))
    first = backend.prepare(spec(0))
    slot = backend.open_slot()
    carry = slot.run(first, slot.upload(batch_of([0.1, 0.2, 0.3]))).carry
    assert carry is not None
    later = backend.prepare(spec(1))
    result = slot.run(later, slot.select(carry, np.array([0, 2])))
    np.testing.assert_array_equal(result.answer, batch_of([0.1, 0.3])["scores"])
    grown = slot.arena.growths
    assert grown >= 1
    for _ in range(3):
        carry = slot.run(first, slot.upload(batch_of([0.1, 0.2, 0.3]))).carry
        assert carry is not None
        slot.run(later, carry)
    assert slot.arena.growths == grown
    slot.close()
    fresh = backend.open_slot()  # has it from the beginning
    carry = fresh.run(first, fresh.upload(batch_of([0.1, 0.2, 0.3]))).carry
    assert carry is not None
    fresh.run(later, carry)
    assert fresh.arena.growths == 0
    fresh.close()
    backend.close()


# What fails alone.


def test_more_rows_than_the_largest_profile_holds(bench: Bench) -> None:
    with pytest.raises(BackendError, match=facts("stage 0", "9 rows", "8 rows")):
        bench.slot.run(bench.stages[0], bench.slot.upload(batch_of([0.1] * 9)))
    assert len(carry_of(bench, [0.1])) == 1


def test_a_stage_that_misses_an_input_says_what_there_is(bench: Bench) -> None:
    with pytest.raises(BackendError, match=facts("x1", "note, scores, x0")):
        bench.slot.run(bench.stages[1], bench.slot.upload(batch_of([0.1])))


@pytest.mark.parametrize(
    "call", ["launch", "copy_out", "record", "call", "copy_in", "launch_graph", "synchronize"]
)
def test_a_failed_call_fails_its_batch_only(bench: Bench, call: str) -> None:
    for _ in range(2):  # so that there are graphs
        carry_of(bench, [0.9, 0.1, 0.2])
    bench.driver.fail_next(call)
    failed = []
    try:
        for stage in bench.stages[:1]:
            if call == "call":
                bench.slot.run(stage, bench.slot.upload(batch_of([0.1] * 7)))
            else:
                bench.slot.run(stage, bench.slot.upload(batch_of([0.9, 0.1, 0.2])))
    except BackendError as error:
        failed.append(str(error))
    assert failed, call
    assert f"{call} failed, as the test requests" in failed[0]
    for _ in range(2):
        kept = bench.slot.select(carry_of(bench, [0.9, 0.1, 0.2]), np.array([1, 2]))
        np.testing.assert_array_equal(answer_at_end(bench, kept), end_of([1, 2], 2))


def test_a_stage_that_cannot_be_enqueued_fails_its_batch_only(bench: Bench) -> None:
    def refuse(_: StageSpec, rows: int) -> None:
        if rows == 3:
            raise BackendError("TensorRT could not run the engine: it does not say why")

    bench.factory.on_enqueue = refuse
    with pytest.raises(BackendError, match=facts("stage 0", "3 rows", "TensorRT")):
        carry_of(bench, [0.1, 0.2, 0.3])
    assert len(carry_of(bench, [0.1, 0.2])) == 2


def test_the_kernels_scratch_is_cleared_at_first_and_after_a_failure(bench: Bench) -> None:
    for _ in range(3):
        carry_of(bench, [0.1, 0.2])
    assert bench.driver.calls["clear"] == 1
    bench.driver.fail_next("copy_out")
    with pytest.raises(BackendError, match="copy_out failed"):
        carry_of(bench, [0.1, 0.2])
    carry_of(bench, [0.1, 0.2])
    assert bench.driver.calls["clear"] == 2


def test_larger_batches_of_a_later_stage_find_larger_scratch() -> None:
    backend, factory, driver = fake_cuda(max_rows=2)
    small = backend.prepare(spec(0))
    slot = backend.open_slot()
    slot.run(small, slot.upload(batch_of([0.1, 0.2])))
    factory.max_rows = 16
    large = backend.prepare(spec(0))
    answer = slot.run(large, slot.upload(batch_of([0.1] * 16))).answer
    np.testing.assert_array_equal(answer, batch_of([0.1] * 16)["scores"])
    assert driver.calls["clear"] == 2
    slot.close()
    backend.close()


def test_memory_of_a_failed_park_is_at_rest_when_it_is_used_again(bench: Bench) -> None:
    other = bench.backend.open_slot()
    carry = other.run(bench.stages[0], other.upload(batch_of([0.1, 0.2, 0.3]))).carry
    assert carry is not None
    mine = carry_of(bench, [0.1, 0.2, 0.3])
    bench.driver.fail_next("record")
    with pytest.raises(BackendError, match=facts("2 rows", "record failed")):
        bench.slot.buffer(mine, np.array([0, 2]))
    gc.collect()  # the error's frames refer to the memory
    assert len(other.buffer(carry, np.array([0, 2]))) == 2
    other.close()


def test_a_lost_device_is_told_as_such_and_everything_is_released() -> None:
    backend, factory, driver = fake_cuda(max_rows=8)
    stage = backend.prepare(spec(0))
    slot = backend.open_slot()
    for _ in range(3):
        slot.run(stage, slot.upload(batch_of([0.1, 0.2])))
    driver.lose()
    with pytest.raises(DeviceLostError, match="the process must be restarted"):
        slot.run(stage, slot.upload(batch_of([0.1, 0.2])))
    with pytest.raises(DeviceLostError):
        slot.upload(batch_of([0.1]))
    slot.close()
    backend.close()
    assert not +factory.open


def test_buffered_memory_is_held_until_its_copies_ran(bench: Bench) -> None:
    """Though sending row numbers waits for others that are still on their way."""
    buffered = bench.slot.buffer(carry_of(bench, [0.9, 0.1, 0.2, 0.8, 0.3]), np.array([1, 2, 4]))
    bench.slot.select(carry_of(bench, [0.9, 0.1, 0.2, 0.8, 0.3]), np.array([0, 3]))
    merged = bench.slot.merge([(buffered, np.array([0, 2]))])
    del buffered
    gc.collect()
    other = bench.backend.open_slot()  # would get that memory
    carry = other.run(bench.stages[0], other.upload(batch_of([0.1] * 3))).carry
    assert carry is not None
    other.buffer(carry, np.arange(3))
    other.close()
    np.testing.assert_array_equal(answer_at_end(bench, merged), end_of([1, 4], 2))


def test_a_growth_that_failed_does_not_spoil_smaller_batches() -> None:
    backend, factory, driver = fake_cuda(max_rows=4)
    small = backend.prepare(spec(0))
    slot = backend.open_slot()
    factory.max_rows = 256
    large = backend.prepare(spec(0))
    batch = slot.upload(batch_of([0.1] * 200))
    driver.fail_next("allocate_pinned", after=1)  # the first is that of row numbers
    with pytest.raises(BackendError, match="allocate_pinned failed"):
        slot.run(large, batch)
    found = slot.run(small, slot.upload(batch_of([0.9, 0.1])))
    np.testing.assert_array_equal(found.confidence, np.array([0.9, 0.1], np.float32))
    slot.close()
    backend.close()


def test_memory_that_is_short_for_a_larger_sample_says_what_to_lower(bench: Bench) -> None:
    carry = carry_of(bench, [0.1, 0.2])
    bench.driver.memory_bytes = 0
    with pytest.raises(BackendError, match=facts("1 rows", "MiB", "free", "--")):
        bench.slot.buffer(carry, np.array([0]))
    bench.driver.memory_bytes = 1 << 30
    assert len(bench.slot.buffer(carry, np.array([0]))) == 1


@pytest.mark.parametrize("threshold", [0.0, NEVER])
def test_all_rows_leave_and_no_row_leaves(bench: Bench, threshold: float) -> None:
    batch = bench.slot.upload(batch_of([0.9, 0.1, 1.0]))
    carry = bench.slot.run(bench.stages[0], batch, threshold=threshold).carry
    assert carry is not None
    np.testing.assert_array_equal(answer_at_end(bench, carry), end_of([0, 1, 2], 2))


def test_closing_twice_is_closing_once(bench: Bench) -> None:
    other = bench.backend.open_slot()
    other.close()
    calls: Callable[[], int] = bench.driver.calls.total
    before = calls()
    other.close()
    assert calls() == before
