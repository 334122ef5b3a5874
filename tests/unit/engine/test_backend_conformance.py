"""Requirements on every backend; any class that passes is a backend.

The model: input ``script`` float32 [n, 3, 2]; stage k answers with ``script[:, k]``. Two exits,
then the end. For ONNX Runtime the stages are real graphs, for the fake they are the script.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.cluster.remote.listening import ThreadLauncher
from tests.cuda_fakes import fake_cuda

from offramp.certify.decision import MODEL_END, NEVER
from offramp.cluster.remote.launching import LocalLauncher, WorkerRuntime
from offramp.cluster.remote.worker_backend import RemoteBackend
from offramp.engine.backends import Backend, make_backend
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.backends.several_devices import SeveralDevices
from offramp.engine.common.errors import BackendError
from offramp.engine.stages.backend_protocol import Slot, TensorBatch
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import Mode, Plan, StageSpec
from offramp.testing.backend import SCRIPT, FakeBackend


def stage_graph(index: int, *, final: bool) -> bytes:
    """``answer = tensor{index}[:, index]``, and the whole carried on as the next tensor."""
    name, following = tensor(index), tensor(index + 1)
    shape = ["batch", 3, 2]
    nodes = [helper.make_node("Gather", [name, "index"], ["answer"], axis=1)]
    outputs = [helper.make_tensor_value_info("answer", TensorProto.FLOAT, ["batch", 2])]
    if not final:
        nodes.append(helper.make_node("Identity", [name], [following]))
        outputs.append(helper.make_tensor_value_info(following, TensorProto.FLOAT, shape))
    graph = helper.make_graph(
        nodes,
        "stage",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)],
        outputs,
        [numpy_helper.from_array(np.array(index, np.int64), "index")],
    )
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=8)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def sum_graph() -> bytes:
    """``answer = cut1[:, 1] + script[:, 0]``."""
    shape = ["batch", 3, 2]
    nodes = [
        helper.make_node("Gather", ["cut1", "one"], ["a"], axis=1),
        helper.make_node("Gather", [SCRIPT, "zero"], ["b"], axis=1),
        helper.make_node("Add", ["a", "b"], ["answer"]),
    ]
    graph = helper.make_graph(
        nodes,
        "sum",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in ("cut1", SCRIPT)],
        [helper.make_tensor_value_info("answer", TensorProto.FLOAT, ["batch", 2])],
        [numpy_helper.from_array(np.array(k, np.int64), n) for k, n in ((0, "zero"), (1, "one"))],
    )
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=8)
    return bytes(model.SerializeToString())


def tensor(index: int) -> str:
    return SCRIPT if index == 0 else f"cut{index}"


def plan(thresholds: tuple[float, float], names: Callable[[int], str] = tensor) -> Plan:
    stages = []
    for index, threshold in enumerate((*thresholds, 0.0)):
        final = index == 2
        stages.append(
            StageSpec(
                index=index,
                first_segment=index,
                last_segment=index,
                exit=MODEL_END if final else index,
                load=lambda index=index, final=final: stage_graph(index, final=final),
                inputs=(names(index),),
                carried=() if final else (names(index + 1),),
                answer="answer",
                form="probabilities",
                threshold=threshold,
            )
        )
    return Plan(stages=tuple(stages), policy_version=1, mode=Mode.LEAVE)


ON_CUDA = WorkerRuntime(backend="cuda", device="cuda:0")
MAKERS: dict[str, Callable[[], Backend]] = {
    "fake": FakeBackend,
    "onnxruntime": OnnxRuntimeBackend,
    "openvino": lambda: make_backend("openvino"),
    "workers": lambda: RemoteBackend(OnnxRuntimeBackend(), launchers=[LocalLauncher()]),
    "network": lambda: RemoteBackend(
        OnnxRuntimeBackend(), launchers=[ThreadLauncher(lambda _hello: OnnxRuntimeBackend())]
    ),
    "worker on a GPU": lambda: RemoteBackend(
        OnnxRuntimeBackend(), launchers=[ThreadLauncher(lambda _hello: fake_cuda()[0], ON_CUDA)]
    ),
    "cuda": lambda: fake_cuda()[0],
    "two GPUs": lambda: SeveralDevices({f"cuda:{n}": fake_cuda(seed=n)[0] for n in range(2)}),
    "cuda without graphs": lambda: fake_cuda(graphs=False)[0],
    "cuda with padding": lambda: fake_cuda(pads=True)[0],
}
"""Closing a backend on the fake driver checks that it used memory and streams rightly."""


def lacking_gpu() -> str:
    """Return the reason why ONNX Runtime's CUDA provider is unusable here; empty if it is
    usable.
    """
    try:
        make_backend("cuda").close()
    except BackendError as error:
        return str(error)
    return ""


LACKING = lacking_gpu()
ON_GPU = pytest.param(
    "cuda provider",
    marks=[pytest.mark.gpu, pytest.mark.skipif(bool(LACKING), reason=LACKING or "it is here")],
)
"""TensorRT's engines are of bundles: tests/gpu/test_runtime.py has them."""
MAKERS["cuda provider"] = lambda: make_backend("cuda", max_rows=33)
EVERY = [*(name for name in MAKERS if name != "cuda provider"), ON_GPU]
REAL = [name for name in EVERY if name != "fake"]
"""Backends that execute graphs."""


@pytest.fixture(params=EVERY)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    made = MAKERS[request.param]()
    yield made
    made.close()


@pytest.fixture(params=REAL)
def real(request: pytest.FixtureRequest) -> Iterator[Backend]:
    made = MAKERS[request.param]()
    yield made
    made.close()


@pytest.fixture
def slot(backend: Backend) -> Iterator[Slot]:
    opened = backend.open_slot()
    yield opened
    opened.close()


def random_script(rows: int, seed: int = 0) -> np.ndarray:
    first = np.random.default_rng(seed).random((rows, 3, 1)).astype(np.float32)
    return np.concatenate([first, 1 - first], axis=-1)


def test_a_batch_knows_its_rows(slot: Slot) -> None:
    assert len(slot.upload({SCRIPT: random_script(5)})) == 5


@pytest.mark.parametrize("rows", [1, 2, 7, 33])
def test_stages_answer_and_carry(backend: Backend, slot: Slot, rows: int) -> None:
    stages = [backend.prepare(spec) for spec in plan((0.5, 0.5)).stages]
    script = random_script(rows)
    batch = slot.upload({SCRIPT: script})
    for index, stage in enumerate(stages):
        result = slot.run(stage, batch)
        assert result.answer is not None
        np.testing.assert_array_equal(result.answer, script[:, index])
        np.testing.assert_array_equal(result.confidence, script[:, index].max(axis=1))
        assert result.confidence.dtype == np.float32
        if index < 2:
            assert result.carry is not None
            batch = result.carry
        else:
            assert result.carry is None


def test_selected_rows_go_on_in_their_order(backend: Backend, slot: Slot) -> None:
    stages = [backend.prepare(spec) for spec in plan((0.5, 0.5)).stages]
    script = random_script(6)
    carry = slot.run(stages[0], slot.upload({SCRIPT: script})).carry
    assert carry is not None
    kept = slot.select(carry, np.array([0, 3, 5]))
    assert len(kept) == 3
    answer = slot.run(stages[1], kept).answer
    assert answer is not None
    np.testing.assert_array_equal(answer, script[[0, 3, 5], 1])


def test_all_rows_selected_is_the_same_batch(backend: Backend, slot: Slot) -> None:
    first, second = map(backend.prepare, plan((0.5, 0.5)).stages[:2])
    script = random_script(4)
    carry = slot.run(first, slot.upload({SCRIPT: script})).carry
    assert carry is not None
    np.testing.assert_array_equal(
        slot.run(second, slot.select(carry, np.arange(4))).answer, script[:, 1]
    )


def test_answers_belong_to_the_caller(backend: Backend, slot: Slot) -> None:
    stage = backend.prepare(plan((0.5, 0.5)).stages[0])
    first, second = random_script(3, seed=1), random_script(3, seed=2)
    result = slot.run(stage, slot.upload({SCRIPT: first}))
    slot.run(stage, slot.upload({SCRIPT: second}))
    assert result.answer is not None
    np.testing.assert_array_equal(result.answer, first[:, 0])
    np.testing.assert_array_equal(result.confidence, first[:, 0].max(axis=1))


def test_a_stage_without_answer_only_carries(backend: Backend, slot: Slot) -> None:
    spec = dataclasses.replace(plan((0.5, 0.5)).stages[0], answer=None, exit=None)
    result = slot.run(backend.prepare(spec), slot.upload({SCRIPT: random_script(4)}))
    assert result.answer is None
    assert len(result.confidence) == 0
    assert result.carry is not None
    assert len(result.carry) == 4


@pytest.mark.parametrize("thresholds", [(0.8, 0.6), (0.0, 0.0), (NEVER, NEVER), (NEVER, 0.7)])
def test_pipeline_sends_every_row_to_its_first_sure_exit(
    backend: Backend, slot: Slot, thresholds: tuple[float, float]
) -> None:
    script = random_script(64)
    pipeline = Pipeline(backend, plan(thresholds))
    sure = np.stack([script[:, k].max(axis=1) >= np.float32(t) for k, t in enumerate(thresholds)])
    expected = np.where(sure[0], 0, np.where(sure[1], 1, 2))
    found = np.full(64, -1)
    for departure in pipeline.run(slot, {SCRIPT: script}):
        assert (found[departure.rows] == -1).all(), "a row left twice"
        found[departure.rows] = departure.stage
        np.testing.assert_array_equal(departure.answer, script[departure.rows, departure.stage])
    np.testing.assert_array_equal(found, expected)


def buffered(backend: Backend, slot: Slot, script: np.ndarray, rows: list[int]) -> TensorBatch:
    """Rows of a script after stage 0, buffered by the slot."""
    carry = slot.run(
        backend.prepare(plan((0.5, 0.5)).stages[0]), slot.upload({SCRIPT: script})
    ).carry
    assert carry is not None
    return slot.buffer(carry, np.array(rows))


def answer_of(backend: Backend, slot: Slot, batch: TensorBatch) -> np.ndarray:
    """Return the answer of stage 1."""
    answer = slot.run(backend.prepare(plan((0.5, 0.5)).stages[1]), batch).answer
    assert answer is not None
    return answer


def test_buffered_rows_are_merged_in_their_order(backend: Backend, slot: Slot) -> None:
    script = random_script(6)
    kept = buffered(backend, slot, script, [1, 2, 4, 5])
    assert len(kept) == 4
    merged = slot.merge([(kept, np.array([0, 2, 3]))])
    assert len(merged) == 3
    np.testing.assert_array_equal(answer_of(backend, slot, merged), script[[1, 4, 5], 1])


@pytest.mark.parametrize("rows", [[0, 2], [0, 1, 2]])
def test_what_is_buffered_outlives_uploads_and_its_slot(backend: Backend, rows: list[int]) -> None:
    first, second = random_script(3, seed=1), random_script(3, seed=2)
    slot, other = backend.open_slot(), backend.open_slot()
    kept = buffered(backend, slot, first, rows)
    buffered(backend, slot, second, [0, 1, 2])
    slot.close()
    merged = other.merge([(kept, np.arange(len(rows)))])
    np.testing.assert_array_equal(answer_of(backend, other, merged), first[rows, 1])
    other.close()


def test_several_buffered_batches_are_fused_part_after_part(backend: Backend, slot: Slot) -> None:
    other = backend.open_slot()
    scripts = [random_script(n, seed=n) for n in (3, 5, 1)]
    a = buffered(backend, slot, scripts[0], [0, 1, 2])
    b = buffered(backend, other, scripts[1], [1, 3, 4])
    c = buffered(backend, slot, scripts[2], [0])
    merged = slot.merge([(b, np.array([0, 2])), (c, np.array([0])), (a, np.array([1]))])
    assert len(merged) == 4
    expected = [*scripts[1][[1, 4], 1], scripts[2][0, 1], scripts[0][1, 1]]
    np.testing.assert_array_equal(answer_of(backend, slot, merged), expected)
    rest = other.merge([(a, np.array([0, 2])), (b, np.array([1]))])  # twice from the same two
    expected = [*scripts[0][[0, 2], 1], scripts[1][3, 1]]
    np.testing.assert_array_equal(answer_of(backend, other, rest), expected)
    other.close()


def test_what_was_merged_goes_on_as_any_batch_does(backend: Backend, slot: Slot) -> None:
    stages = [backend.prepare(spec) for spec in plan((0.5, 0.5)).stages]
    script = random_script(4)
    merged = slot.merge([(buffered(backend, slot, script, [0, 1, 3]), np.arange(3))])
    carry = slot.run(stages[1], merged).carry
    assert carry is not None
    again = slot.buffer(slot.select(carry, np.array([1, 2])), np.array([1]))
    answer = slot.run(stages[2], slot.merge([(again, np.array([0]))])).answer
    assert answer is not None
    np.testing.assert_array_equal(answer, script[[3], 2])


def test_a_carried_input_is_buffered_with_its_rows(real: Backend) -> None:
    """Stage 1 reads the model's own input in addition to the cut tensor."""
    backend = real
    first = dataclasses.replace(plan((0.5, 0.5)).stages[0], carried=("cut1", SCRIPT))
    second = dataclasses.replace(
        plan((0.5, 0.5)).stages[1],
        inputs=("cut1", SCRIPT),
        carried=(),
        load=sum_graph,
    )
    stages = [backend.prepare(first), backend.prepare(second)]
    slot, other = backend.open_slot(), backend.open_slot()
    a, b = random_script(4, seed=1), random_script(2, seed=2)
    kept = []
    for script, rows in ((a, [0, 3]), (b, [1])):
        carry = slot.run(stages[0], slot.upload({SCRIPT: script})).carry
        assert carry is not None
        kept.append(slot.buffer(carry, np.array(rows)))
    merged = other.merge([(kept[1], np.array([0])), (kept[0], np.array([0, 1]))])
    answer = other.run(stages[1], merged).answer
    assert answer is not None
    expected = np.stack([b[1], a[0], a[3]])
    np.testing.assert_array_equal(answer, expected[:, 1] + expected[:, 0])
    slot.close()
    other.close()


def test_a_broken_stage_is_refused_with_its_number(real: Backend) -> None:
    spec = dataclasses.replace(plan((0.5, 0.5)).stages[1], load=lambda: b"not a model")
    with pytest.raises(BackendError, match=r"cannot load stage 1|stage 1 cannot be loaded"):
        real.prepare(spec)


def test_the_slot_stays_usable_after_a_failed_run(real: Backend) -> None:
    slot, stage = real.open_slot(), real.prepare(plan((0.5, 0.5)).stages[0])
    with pytest.raises(BackendError, match="stage 0 failed on 2 rows"):
        slot.run(stage, slot.upload({SCRIPT: np.zeros((2, 3, 5), np.float32)}))
    script = random_script(2)
    answer = slot.run(stage, slot.upload({SCRIPT: script})).answer
    assert answer is not None
    np.testing.assert_array_equal(answer, script[:, 0])
    slot.close()


def test_the_fake_notices_a_batch_that_outlived_its_slot() -> None:
    slot = FakeBackend().open_slot()
    old = slot.upload({SCRIPT: random_script(2)})
    slot.upload({SCRIPT: random_script(2)})
    with pytest.raises(BackendError, match="after its slot's next upload"):
        slot.select(old, np.array([0]))


def test_the_fake_merges_only_what_was_buffered() -> None:
    slot = FakeBackend().open_slot()
    batch = slot.upload({SCRIPT: random_script(2)})
    with pytest.raises(BackendError, match="only buffered batches can be merged"):
        slot.merge([(batch, np.array([0]))])
