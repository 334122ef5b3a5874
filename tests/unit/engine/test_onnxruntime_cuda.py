"""Stages on ONNX Runtime's CUDA provider: a fake of it on the fake driver, against the CPU."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper
from tests.engines import engine_bundle, half_leave
from tests.facts import facts, tells
from tests.sliced import inputs_of, sliced

from offramp.bundle import Bundle
from offramp.engine.backends import onnxruntime_cuda
from offramp.engine.backends.onnxruntime import ONE_NODE, OnnxRuntimeBackend
from offramp.engine.backends.onnxruntime_cuda import OnnxRuntimeCudaFactory
from offramp.engine.backends.sizes import BundleSizes, GraphShapes
from offramp.engine.common.errors import BackendError
from offramp.engine.cuda.cuda_backend import CudaBackend
from offramp.engine.cuda.driver import DeviceLostError
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.self_check import run_self_check
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import Mode, StageSpec, make_chained_plan, make_plan
from offramp.testing.cuda_driver import FakeDriver

RealSession = ort.InferenceSession
CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


class Cuda:
    """The provider: what was asked of it, and what it shall do."""

    def __init__(self, device: FakeDriver) -> None:
        self.device = device
        self.settings: list[dict[str, str]] = []
        self.binds: list[str] = []
        self.loads = True
        self.fails = False
        self.on_cpu: set[str] = set()
        """Inputs that the graphs want in the CPU's memory."""
        self.tells_memory = True
        """True if sessions report the wanted memory of their inputs, as from 1.23 on."""

    def session(self, model: bytes, options: Any, *, providers: Sequence[Any], **how: Any) -> Any:
        if providers == [CPU]:
            return RealSession(model, options, providers=providers)
        ((name, settings),) = providers
        assert name == CUDA
        assert how == {"enable_fallback": 0}
        self.settings.append(settings)
        if "user_compute_stream" not in settings:  # of the provider's own, to try it
            return FakeSession(self, model, 0)
        kind = FakeSession if self.tells_memory else OldFakeSession
        return kind(self, model, int(settings["user_compute_stream"]))


class OldFakeSession:
    """Fake of ``InferenceSession`` on a GPU; runs on the CPU when the stream does."""

    def __init__(self, cuda: Cuda, model: bytes, stream: int) -> None:
        self.cuda, self.stream = cuda, stream
        self.real = RealSession(model, providers=[CPU])

    def get_providers(self) -> list[str]:
        return [CUDA, CPU] if self.cuda.loads else [CPU]

    def get_inputs(self) -> Any:
        return self.real.get_inputs()

    def run(self, names: Any, inputs: dict[str, NDArray[Any]]) -> Any:
        if self.cuda.fails:
            raise RuntimeError("CUDA failure 209: no kernel image is available")
        return self.real.run(names, inputs)

    def io_binding(self) -> FakeBinding:
        return FakeBinding(self.cuda)

    def run_with_iobinding(self, iobinding: FakeBinding, run_options: Any = None) -> None:
        if self.cuda.fails:
            raise RuntimeError("CUDA failure 2: out of memory")
        entry = run_options.get_run_config_entry("disable_synchronize_execution_providers")
        assert entry == "1", "it would wait for the device"
        inputs, outputs = dict(iobinding.inputs), dict(iobinding.outputs)
        device = self.cuda.device

        def run() -> None:
            feed = {}
            for name, (dtype, shape, at) in inputs.items():
                if name in iobinding.copies:
                    feed[name] = iobinding.copies[name]
                    continue
                size = int(np.prod(shape)) * np.dtype(dtype).itemsize
                feed[name] = device.read(at, size).view(dtype).reshape(shape).copy()
            values = self.real.run(list(outputs), feed)
            for (dtype, shape, at), value in zip(outputs.values(), values, strict=True):
                assert (value.dtype, value.shape) == (dtype, shape)
                data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
                device.write(at, data.nbytes)[:] = data

        (stream,) = [s for s in device._open if getattr(s, "handle", None) == self.stream]
        device.call(stream, run)  # type: ignore[arg-type]


class FakeSession(OldFakeSession):
    """One that tells which memory it wants its inputs in."""

    def get_input_memory_infos(self) -> list[SimpleNamespace]:
        names = [argument.name for argument in self.real.get_inputs()]
        return [SimpleNamespace(name="Cpu" if n in self.cuda.on_cpu else "Cuda") for n in names]


class FakeBinding:
    """Fake of ``IOBinding``."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.inputs: dict[str, tuple[Any, tuple[int, ...], int]] = {}
        self.outputs: dict[str, tuple[Any, tuple[int, ...], int]] = {}
        self.copies: dict[str, NDArray[Any]] = {}
        """Made when inputs for the CPU were bound."""

    def bind_input(
        self, name: Any, device_type: Any, device_id: Any, element_type: Any, shape: Any,
        buffer_ptr: Any,
    ) -> None:  # fmt: skip
        assert (device_type, device_id) == ("cuda", 3)
        self.cuda.binds.append(name)
        self.inputs[name] = element_type, shape, buffer_ptr
        if name in self.cuda.on_cpu:
            self.copies[name] = self._copied(*self.inputs[name])

    def _copied(self, dtype: Any, shape: tuple[int, ...], at: int) -> NDArray[Any]:
        """Copy on a stream that waits for no other."""
        device, found = self.cuda.device, []
        stream, event = device.stream(), device.event()
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        device.call(stream, lambda: found.append(device.read(at, size).copy()))
        device.record(event, stream)
        device.synchronize(event)
        stream.close()
        event.close()
        return found[0].view(dtype).reshape(shape)

    def bind_output(
        self, name: Any, device_type: Any = "cpu", device_id: Any = 0, element_type: Any = None,
        shape: Any = None, buffer_ptr: Any = None,
    ) -> None:  # fmt: skip
        assert (device_type, device_id) == ("cuda", 3)
        self.cuda.binds.append(name)
        self.outputs[name] = element_type, shape, buffer_ptr


@pytest.fixture
def device() -> Iterator[FakeDriver]:
    made = FakeDriver()
    yield made
    made.close()


@pytest.fixture
def cuda(device: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda(device)
    monkeypatch.setattr(ort, "InferenceSession", made.session)
    return made


@pytest.fixture
def bundle(request: pytest.FixtureRequest, tmp_path: Path) -> Bundle:
    return engine_bundle(getattr(request, "param", "residual"), tmp_path / "b.ee")


def backend_on(device: FakeDriver, max_rows: int = 8) -> CudaBackend:
    factory = OnnxRuntimeCudaFactory(device=3, max_rows=max_rows)
    return CudaBackend(factory, device, kernels=b"", graphs=True)


def answers(pipeline: Pipeline, slot: Any, inputs: dict[str, NDArray[Any]]) -> list[list[float]]:
    found: dict[int, list[float]] = {}
    for departure in pipeline.run(slot, inputs):
        for row, answer in zip(departure.rows, departure.answer, strict=True):
            found[int(row)] = [departure.stage, *answer.tolist()]
    return [found[row] for row in sorted(found)]


@pytest.mark.parametrize("bundle", ["residual", "bert", "text cnn"], indirect=True)
@pytest.mark.parametrize("kind", ["leave", "off", "chained"])
def test_answers_are_those_of_the_cpu(
    cuda: Cuda, device: FakeDriver, bundle: Bundle, kind: str
) -> None:
    names = [spec.name for spec in bundle.manifest.inputs]
    model = "bert" if len(names) > 1 else "text cnn" if names == ["input_ids"] else "residual"
    inputs = inputs_of(sliced(model), 8)
    policy = half_leave(bundle, inputs)
    plan = {
        "leave": lambda: make_plan(bundle, policy),
        "off": lambda: make_plan(bundle, mode=Mode.OFF),
        "chained": lambda: make_chained_plan(bundle),
    }[kind]()
    backend = backend_on(device)
    ours, theirs = Pipeline(backend, plan), Pipeline(OnnxRuntimeBackend(), plan)
    slots = [backend.open_slot(), backend.open_slot()]
    for rows, length in ((8, None), (3, 12), (1, None), (3, 12)):
        given = {
            n: np.ascontiguousarray(a[:rows, :length] if model == "bert" else a[:rows])
            for n, a in inputs.items()
        }
        expected = answers(theirs, OnnxRuntimeBackend().open_slot(), given)
        for slot in slots:
            np.testing.assert_allclose(answers(ours, slot, given), expected, rtol=1e-5)
    sessions = len(cuda.settings) / 2 / len(plan.stages)
    if model == "bert":
        assert sessions == 1
    elif kind == "leave":
        assert 1 < sessions <= 4  # 1, 2, 4 and 8 rows
    else:
        assert sessions == 3  # of 8, 4 and 1 rows: convolutions are planned for one size
    assert device.calls["capture"] == 0
    for slot in slots:
        slot.close()
    backend.close()


def test_sessions_work_on_their_slots_stream_in_float32(
    cuda: Cuda, device: FakeDriver, bundle: Bundle
) -> None:
    backend = backend_on(device)
    pipeline = Pipeline(backend, make_plan(bundle, mode=Mode.OFF))
    slots = [backend.open_slot(), backend.open_slot()]
    for slot in slots:
        answers(pipeline, slot, inputs_of(sliced("residual"), 2))
        slot.close()
    backend.close()
    assert {s["device_id"] for s in cuda.settings} == {"3"}
    assert {s["use_tf32"] for s in cuda.settings} == {"0"}
    assert len({s["user_compute_stream"] for s in cuda.settings}) == 2


def test_what_is_bound_already_is_not_bound_again(
    cuda: Cuda, device: FakeDriver, bundle: Bundle
) -> None:
    backend = backend_on(device)
    pipeline = Pipeline(backend, make_plan(bundle, mode=Mode.OFF))
    slot = backend.open_slot()
    for _ in range(3):
        answers(pipeline, slot, inputs_of(sliced("residual"), 2))
    assert len(cuda.binds) == 2  # an input and an answer
    answers(pipeline, slot, inputs_of(sliced("residual"), 3))
    assert len(cuda.binds) == 4
    slot.close()
    backend.close()


@pytest.mark.parametrize("tells_memory", [True, False])
def test_inputs_that_the_cpu_reads_are_copied_anew_at_every_run(
    cuda: Cuda, device: FakeDriver, bundle: Bundle, tells_memory: bool
) -> None:
    cuda.on_cpu, cuda.tells_memory = {"image"}, tells_memory
    plan = make_plan(bundle, mode=Mode.OFF)
    backend = backend_on(device)
    ours, theirs = Pipeline(backend, plan), Pipeline(OnnxRuntimeBackend(), plan)
    slot = backend.open_slot()
    for sign in (1, -1):
        inputs = {n: np.asarray(sign * a) for n, a in inputs_of(sliced("residual"), 2).items()}
        expected = answers(theirs, OnnxRuntimeBackend().open_slot(), inputs)
        np.testing.assert_allclose(answers(ours, slot, inputs), expected, rtol=1e-5)
    assert cuda.binds.count("image") == 2
    assert len(cuda.binds) == 3  # the answer once
    slot.close()
    backend.close()


def test_a_device_that_is_lost_before_a_copy_is_told_as_lost(
    cuda: Cuda, device: FakeDriver, bundle: Bundle
) -> None:
    cuda.on_cpu = {"image"}
    backend = backend_on(device)
    pipeline = Pipeline(backend, make_plan(bundle, mode=Mode.OFF))
    slot, inputs = backend.open_slot(), inputs_of(sliced("residual"), 2)
    answers(pipeline, slot, inputs)
    device.fail_next("synchronize", error=DeviceLostError("lost"))
    with pytest.raises(DeviceLostError):
        answers(pipeline, slot, inputs)
    slot.close()
    backend.close()


def test_the_real_session_tells_memory_by_input() -> None:
    session = RealSession(ONE_NODE, providers=[CPU])
    assert onnxruntime_cuda._copied_when_bound(session) == {"x"}  # "Cpu", as all are here
    assert session.run(None, {"x": np.array([-2], np.float32)}) == [np.array([2], np.float32)]


def test_answers_that_nobody_can_read_are_refused(
    cuda: Cuda, device: FakeDriver, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = OnnxRuntimeCudaFactory.prepare

    def of_bfloat16(self: OnnxRuntimeCudaFactory, spec: Any) -> Any:
        stage = prepare(self, spec)
        stage.outputs = tuple(replace(info, dtype=np.dtype(np.uint16)) for info in stage.outputs)
        return stage

    monkeypatch.setattr(OnnxRuntimeCudaFactory, "prepare", of_bfloat16)
    backend = backend_on(device)
    with pytest.raises(BackendError, match=facts("stage 0", "bfloat16 or uint16")):
        backend.prepare(make_plan(bundle, mode=Mode.OFF).stages[0])
    backend.close()


def test_a_failed_run_is_reported_and_the_next_run_rebinds(
    cuda: Cuda, device: FakeDriver, bundle: Bundle
) -> None:
    backend = backend_on(device)
    pipeline = Pipeline(backend, make_plan(bundle, mode=Mode.OFF))
    slot, inputs = backend.open_slot(), inputs_of(sliced("residual"), 2)
    cuda.fails = True
    with pytest.raises(BackendError, match=facts("stage 0", "2 rows", "out of memory")):
        answers(pipeline, slot, inputs)
    cuda.fails = False
    before = len(cuda.binds)
    assert len(answers(pipeline, slot, inputs)) == 2
    assert len(cuda.binds) == before + 2
    slot.close()
    backend.close()


def test_a_provider_that_does_not_load_is_refused(
    cuda: Cuda, device: FakeDriver, bundle: Bundle
) -> None:
    cuda.loads = False
    backend = backend_on(device)
    pipeline = Pipeline(backend, make_plan(bundle, mode=Mode.OFF))
    slot = backend.open_slot()
    with pytest.raises(BackendError, match=facts("stage 0", "cuda:3", "CUDA provider")):
        answers(pipeline, slot, inputs_of(sliced("residual"), 2))
    slot.close()
    backend.close()


def test_without_the_provider_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: [CPU])
    with pytest.raises(BackendError, match=r"has no CUDAExecutionProvider.*install onnxruntime-g"):
        onnxruntime_cuda.require_provider()
    monkeypatch.setattr(ort, "get_available_providers", lambda: [CUDA, CPU])
    onnxruntime_cuda.require_provider()


def test_cudas_libraries_are_loaded_and_what_is_printed_of_it_is_logged(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: [CUDA, CPU])
    monkeypatch.setattr(ort, "preload_dlls", lambda: print("Failed to load libcudart.so.12"))
    onnxruntime_cuda.require_provider()
    assert [r.getMessage() for r in caplog.records] == [
        "ONNX Runtime: Failed to load libcudart.so.12"
    ]
    assert capsys.readouterr().out == ""
    monkeypatch.delattr(ort, "preload_dlls")  # as before 1.21
    onnxruntime_cuda.require_provider()


def test_the_provider_is_tried_before_it_is_chosen(cuda: Cuda) -> None:
    onnxruntime_cuda.try_provider(3)
    assert [s["device_id"] for s in cuda.settings] == ["3"]
    cuda.fails = True
    with pytest.raises(BackendError, match=facts("cuda:3", "no kernel image is available")):
        onnxruntime_cuda.try_provider(3)
    cuda.loads = False
    with pytest.raises(BackendError, match=facts("cuda:3", "CUDA provider")):
        onnxruntime_cuda.try_provider(3)


@pytest.mark.parametrize("name", ["bind_input", "bind_output"])
def test_the_fake_binds_as_the_real_one_does(name: str) -> None:
    real, fake = (inspect.signature(getattr(c, name)) for c in (ort.IOBinding, FakeBinding))
    assert list(real.parameters) == list(fake.parameters)
    assert [p.default for p in real.parameters.values()] == [
        p.default for p in fake.parameters.values()
    ]


# Sizes.


def test_sizes_of_a_bundle_are_those_of_its_calibration(tmp_path: Path) -> None:
    bundle = engine_bundle("bert", tmp_path / "b.ee")
    found = BundleSizes().of(bundle)
    length = bundle.manifest.calibration.sample_shapes["input_ids"][0]
    cut = bundle.manifest.segments[0].output
    assert found["input_ids"] == (length,)
    assert found[cut][0] == length
    assert set(found) == {
        *(tensor.name for tensor in bundle.manifest.inputs),
        *(segment.output for segment in bundle.manifest.segments),
    }


def test_shapes_follow_other_lengths(tmp_path: Path) -> None:
    bundle = engine_bundle("bert", tmp_path / "b.ee")
    stage = make_plan(bundle).stages[0]
    shapes = GraphShapes(stage.load())
    width = BundleSizes().of(bundle)[stage.carried[0]][-1]
    for length in (5, 9):
        inputs = dict.fromkeys(shapes.inputs, (4, length))
        assert shapes.of(inputs)[stage.carried[0]] == (4, length, width)


@pytest.mark.parametrize("bundle", ["residual", "bert", "text cnn"], indirect=True)
def test_the_self_check_passes(device: FakeDriver, bundle: Bundle, cuda: Cuda) -> None:
    report = run_self_check(
        {"m": bundle.path},
        EngineOptions(mode=Mode.LEAVE, defaults=ModelOptions(max_batch_size=8)),
        make=lambda _models, _options: backend_on(device),
        seconds=1.0,
    )
    assert report.passed, report.document()
    (graphs,) = [r for r in report.results if r.name == "graphs"]
    tells(graphs.reason, "no stage", "log")


def test_shapes_that_the_graph_does_not_take_are_told(bundle: Bundle) -> None:
    shapes = GraphShapes(make_plan(bundle).stages[0].load())
    with pytest.raises(BackendError, match=facts("image [2, 7, 16, 16]")):
        shapes._by_running({"image": (1, 7, 16, 16)})


def stage_of(sizes: list[int | str]) -> StageSpec:
    """A stage of no bundle."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", *sizes])
    answer = helper.make_tensor_value_info("answer", TensorProto.FLOAT, ["batch", *sizes])
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["answer"])], "g", [x], [answer])
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString()
    return StageSpec(
        index=0, first_segment=0, last_segment=0, exit=None, load=lambda: model, inputs=("x",),
        carried=(), answer="answer", form="logits", threshold=0.0,
    )  # fmt: skip


def test_sizes_of_a_stage_of_no_bundle_are_those_of_its_graph() -> None:
    stage = OnnxRuntimeCudaFactory(device=0, max_rows=4).prepare(stage_of([3]))
    assert [(i.name, i.sample_shape) for i in stage.inputs] == [("x", (3,))]
    assert [(o.name, o.sample_shape) for o in stage.outputs] == [("answer", (3,))]
    with pytest.raises(BackendError, match=facts("stage 0", "no bundle", "sizes of x")):
        OnnxRuntimeCudaFactory(device=0, max_rows=4).prepare(stage_of(["classes"]))
