"""OpenVINO on the CPU: what the conformance tests do not ask."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.engines import engine_bundle
from tests.facts import tells
from tests.sliced import inputs_of, sliced

from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.backends.openvino import OpenVinoBackend
from offramp.engine.common.errors import BackendError
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import Mode, StageSpec, make_plan

WIDE = 1024


def product(weights: np.ndarray) -> bytes:
    """``answer = x @ weights``."""
    rows, columns = weights.shape
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["answer"])],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", rows])],
        [helper.make_tensor_value_info("answer", TensorProto.FLOAT, ["batch", columns])],
        [numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def spec_of(graph: bytes) -> StageSpec:
    return StageSpec(
        index=0,
        first_segment=0,
        last_segment=0,
        exit=-1,
        load=lambda: graph,
        inputs=("x",),
        carried=(),
        answer="answer",
        form="logits",
        threshold=0.0,
    )


def test_products_are_float32_wherever_the_cpu_has_less() -> None:
    random = np.random.default_rng(0)
    weights = random.normal(size=(WIDE, 16)).astype(np.float32)
    x = random.normal(size=(8, WIDE)).astype(np.float32)
    backend = OpenVinoBackend()
    slot = backend.open_slot()
    answer = slot.run(backend.prepare(spec_of(product(weights))), slot.upload({"x": x})).answer
    exact = x.astype(np.float64) @ weights.astype(np.float64)
    # bfloat16 has 8 bits: it would be off by a thousandth of the largest and more
    assert np.abs(answer - exact).max() <= 2e-6 * np.abs(exact).max()


@pytest.mark.parametrize("how", ["read-only", "strided", "unaligned"])
def test_inputs_may_have_any_memory_layout(how: str) -> None:
    weights = np.eye(4, dtype=np.float32)
    x = np.arange(24, dtype=np.float32).reshape(6, 4)
    if how == "strided":
        given = np.repeat(x, 2, axis=0)[::2]
    elif how == "read-only":
        given = x.copy()
        given.flags.writeable = False
    else:
        given = np.frombuffer(b"." + x.tobytes(), np.float32, offset=1).reshape(x.shape)
    backend = OpenVinoBackend()
    slot = backend.open_slot()
    stage = backend.prepare(spec_of(product(weights)))
    np.testing.assert_array_equal(slot.run(stage, slot.upload({"x": given})).answer, x)


def test_answers_of_streams_do_not_mix() -> None:
    """Requests that run at the same time have memory of their own, and give copies of it."""
    backend = OpenVinoBackend(streams=2)
    stage = backend.prepare(spec_of(product(np.eye(4, dtype=np.float32))))

    def answers(value: int) -> list[np.ndarray]:
        slot = backend.open_slot()
        x = np.full((3, 4), value, np.float32)
        return [slot.run(stage, slot.upload({"x": x + k})).answer for k in range(200)]

    with ThreadPoolExecutor(4) as pool:
        for value, found in enumerate(pool.map(answers, range(4))):
            for k, answer in enumerate(found):
                np.testing.assert_array_equal(answer, value + k)


@pytest.mark.parametrize("model", ["residual", "bert", "text cnn"])
def test_bundles_answer_as_with_onnx_runtime(model: str, tmp_path: Path) -> None:
    bundle = engine_bundle(model, tmp_path / "a.ee")
    inputs = inputs_of(sliced(model), 12)
    found = []
    for backend in (OnnxRuntimeBackend(), OpenVinoBackend()):
        pipeline = Pipeline(backend, make_plan(bundle, mode=Mode.LEAVE))
        left = {d.stage: d for d in pipeline.run(backend.open_slot(), inputs)}
        found.append(left)
        backend.close()
    ours, theirs = found
    assert ours.keys() == theirs.keys()
    for stage, expected in ours.items():
        np.testing.assert_array_equal(theirs[stage].rows, expected.rows)
        scale = np.abs(expected.answer).max()
        assert np.abs(theirs[stage].answer - expected.answer).max() <= 1e-5 * scale
        np.testing.assert_allclose(theirs[stage].confidence, expected.confidence, atol=1e-5)


def test_without_it_one_line_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "openvino":
                raise ModuleNotFoundError("No module named 'openvino'", name=name)

    for name in [n for n in sys.modules if n.partition(".")[0] == "openvino"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(BackendError) as caught:
        OpenVinoBackend()
    tells(str(caught.value), "openvino", "pip install '.[openvino]'")


def test_what_it_cannot_load_is_told_by_stage() -> None:
    with pytest.raises(BackendError, match="OpenVINO cannot load stage 0: "):
        OpenVinoBackend().prepare(spec_of(b"no graph"))


def test_it_says_what_executes() -> None:
    backend = OpenVinoBackend(threads=2)
    assert backend.runtime.startswith("OpenVINO 20")
    assert backend.runtime.endswith(", 2 threads")
