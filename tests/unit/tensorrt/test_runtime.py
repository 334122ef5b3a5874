"""Stages on TensorRT's engines: a fake TensorRT on the fake driver, against ONNX Runtime."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from tests.engines import engine_bundle, half_leave
from tests.facts import facts, tells
from tests.marks import slow_but
from tests.sliced import inputs_of, sliced
from tests.unit.tensorrt.bindings import TENSORRT_VERSIONS
from tests.unit.tensorrt.fake_runtime import FakeRuntime

from offramp.bundle import NEVER, Bundle
from offramp.bundle.engine_index import addressed, model_digest
from offramp.bundle.engines import (
    EngineEntry,
    EngineStore,
    EngineTarget,
    PrecisionEvidence,
    parts_digest,
)
from offramp.compiler.engines.build_options import (
    PARTS,
    BuildSettings,
    Part,
    parse_batches,
    parse_buckets,
)
from offramp.compiler.engines.building import engine_key
from offramp.compiler.engines.profiles import ModelShapes, profile_sizes, unit_profiles
from offramp.compiler.engines.units import UnitGraphs, units_of
from offramp.compiler.graphs.graph import Dataflow
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.backends.tensorrt import TensorRTFactory, TensorRTRun, TensorRTStage
from offramp.engine.common.errors import BackendError
from offramp.engine.cuda.cuda_backend import CudaBackend
from offramp.engine.cuda.executable import SlotResources
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.self_check import CheckVerdict, run_self_check
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import Mode, Plan, StageSpec, make_chained_plan, make_plan
from offramp.engine.tensorrt import tensorrt_messages
from offramp.engine.tensorrt.lookup import EnginePlace, as_computed, open_store
from offramp.testing.cuda_driver import FakeDriver

BUCKETS = {"bert": ("sequence=8,20",)}


@pytest.fixture(params=TENSORRT_VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def device() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def fake(
    version: str, device: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeRuntime]:
    made = FakeRuntime(version, device)
    monkeypatch.setitem(sys.modules, "tensorrt", made.module)
    tensorrt_messages.logger.cache_clear()
    yield made
    tensorrt_messages.logger.cache_clear()
    device.close()  # finds what was not released, and all misuse
    assert not made.contexts
    assert not made.engines


@pytest.fixture
def bundle(request: pytest.FixtureRequest, tmp_path: Path) -> Bundle:
    return engine_bundle(getattr(request, "param", "residual"), tmp_path / "b.ee")


def target(fake: FakeRuntime, **changes: Any) -> EngineTarget:
    plain = EngineTarget(
        gpu="Fake GPU",
        compute_capability=(9, 0),
        tensorrt=fake.module.__version__,
        precision="fp32",
    )
    return replace(plain, **changes)


def build(
    fake: FakeRuntime, bundle: Bundle, parts: Sequence[Part] = PARTS, **changes: Any
) -> EngineStore:
    """Build engines as ``eecompile build`` would."""
    there = target(fake, **changes)
    sizes = profile_sizes(
        bundle.manifest,
        parse_batches("1,2-8"),
        parse_buckets(BUCKETS.get(_model(bundle), ())),
    )
    graphs = UnitGraphs(bundle, "fp32", tensorrt_version="10.0")
    settings, shapes = BuildSettings(precision="fp32"), ModelShapes(bundle)
    store = EngineStore.open(bundle.path, there)
    for unit in units_of(bundle, parts):
        graph = graphs.of(unit)
        inputs = Dataflow(onnx.load_from_string(graph).graph).inputs
        profiles = [p.shapes for p in unit_profiles(inputs, sizes, shapes)]
        parts_hash = parts_digest(bundle.manifest, *unit)
        key = engine_key(there, settings, graph, profiles, parts=parts_hash)
        plan = fake.plan(graph, profiles)
        entry = EngineEntry.of(unit.name, plan, key=key, profiles=tuple(profiles), build_s=1.0)
        store.put(entry, plan)
    return store


def _model(bundle: Bundle) -> str:
    inputs = [spec.name for spec in bundle.manifest.inputs]
    return "bert" if len(inputs) > 1 else "text cnn" if inputs == ["input_ids"] else "residual"


def half_plan(bundle: Bundle, mode: Mode = Mode.LEAVE) -> Plan:
    """Half of the rows of :func:`compare` go on after the first stage."""
    return make_plan(bundle, half_leave(bundle, inputs_of(sliced(_model(bundle)), 8)), mode)


def answers(pipeline: Pipeline, slot: Any, inputs: dict[str, NDArray[Any]]) -> NDArray[Any]:
    rows = len(next(iter(inputs.values())))
    found: list[Any] = [None] * rows
    for departure in pipeline.run(slot, inputs):
        for row, answer in zip(departure.rows, departure.answer, strict=True):
            found[row] = (departure.stage, answer)
    return np.array([[stage, *answer] for stage, answer in found])


def cut(inputs: dict[str, NDArray[Any]], rows: int, length: int | None) -> dict[str, NDArray[Any]]:
    short = {
        n: a[:rows, :length] if a.ndim == 2 and length else a[:rows] for n, a in inputs.items()
    }
    return {name: np.ascontiguousarray(array) for name, array in short.items()}


def compare(device: FakeDriver, plan: Plan, *, model: str, graphs: bool = True) -> None:
    """Rows of many sizes, each three times, so that graphs are made and launched."""
    backend = CudaBackend(
        TensorRTFactory(device, graphs=graphs), device, kernels=b"", graphs=graphs
    )
    ours, theirs = Pipeline(backend, plan), Pipeline(OnnxRuntimeBackend(), plan)
    slots = [backend.open_slot(), backend.open_slot()]
    inputs = inputs_of(sliced(model), 8)
    for rows, length in ((8, None), (3, 12), (1, None), (8, None), (3, 12), (8, None), (3, 12)):
        given = cut(inputs, rows, length if model == "bert" else None)
        expected = answers(theirs, OnnxRuntimeBackend().open_slot(), given)
        for slot in slots:
            found = answers(ours, slot, given)
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    for slot in slots:
        slot.close()
    backend.close()


@pytest.mark.parametrize("bundle", ["residual", "bert", "text cnn"], indirect=True)
@pytest.mark.parametrize("mode", [Mode.LEAVE, Mode.OFF])
def test_engines_of_stages_answer_as_onnx_runtime_does(
    fake: FakeRuntime, device: FakeDriver, bundle: Bundle, mode: Mode
) -> None:
    build(fake, bundle, ["source", "stages"])
    compare(device, half_plan(bundle, mode), model=_model(bundle))
    assert device.calls["launch_graph"] > 0


@pytest.mark.parametrize("bundle", ["residual", "bert"], indirect=True)
def test_what_is_not_built_as_one_is_run_segment_by_segment(
    fake: FakeRuntime, device: FakeDriver, bundle: Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    build(fake, bundle, ["segments"])
    compare(device, half_plan(bundle), model=_model(bundle))
    tells(caplog.text, "00-01-exit1", "2 engines", "slower")


@pytest.mark.parametrize("bundle", ["residual", "bert"], indirect=True)
def test_a_whole_model_may_be_a_chain(
    fake: FakeRuntime, device: FakeDriver, bundle: Bundle
) -> None:
    build(fake, bundle, ["segments"])
    compare(device, make_plan(bundle, mode=Mode.OFF), model=_model(bundle))


@pytest.mark.parametrize("bundle", ["text cnn"], indirect=True)
def test_a_chain_that_would_hand_on_several_tensors_is_refused(
    fake: FakeRuntime, device: FakeDriver, bundle: Bundle
) -> None:
    build(fake, bundle, ["segments"])
    backend = CudaBackend(TensorRTFactory(device), device, kernels=b"")
    with pytest.raises(BackendError, match=facts("one tensor", "--parts stages")):
        Pipeline(backend, make_plan(bundle, mode=Mode.OFF))
    backend.close()


def test_exits_that_nobody_asks_are_left_aside(
    fake: FakeRuntime, device: FakeDriver, bundle: Bundle
) -> None:
    build(fake, bundle, ["segments"])
    compare(device, make_chained_plan(bundle), model="residual")


def test_without_graphs_no_context_is_made_while_serving(
    fake: FakeRuntime, device: FakeDriver, bundle: Bundle
) -> None:
    build(fake, bundle, ["stages"])
    compare(device, half_plan(bundle), model="residual", graphs=False)
    engines, profiles, slots = 2, 2, 2
    made = engines * profiles * (1 + slots)  # when it is loaded, an engine is asked for its sizes
    assert len(fake.called("create_execution_context")) == made


def test_engines_that_cannot_be_captured_are_run_all_the_same(
    fake: FakeRuntime, device: FakeDriver, bundle: Bundle
) -> None:
    fake.graph_fails = True
    build(fake, bundle, ["stages"])
    compare(device, half_plan(bundle), model="residual")
    assert device.calls["launch_graph"] == 0


def test_the_engine_is_in_memory_once_however_many_slots_and_plans_have_it(
    fake: FakeRuntime, device: FakeDriver, bundle: Bundle
) -> None:
    build(fake, bundle, ["source", "stages"])
    backend = CudaBackend(TensorRTFactory(device), device, kernels=b"", graphs=True)
    slots = [backend.open_slot() for _ in range(3)]
    inputs = inputs_of(sliced("residual"), 4)
    for mode in (Mode.LEAVE, Mode.AUDIT):
        never = [replace(s, threshold=NEVER) for s in make_plan(bundle, mode=mode).stages]
        plan = Plan(stages=tuple(never), policy_version=1, mode=mode)
        pipeline = Pipeline(backend, plan)
        for slot in slots:
            pipeline.warm_up(slot, inputs)
    assert len(fake.engines) == len(plan.stages)  # one for all slots
    for slot in slots:
        slot.close()
    backend.close()


class Bench:
    """One stage on device memory of the test's own."""

    def __init__(self, device: FakeDriver, spec: StageSpec, **settings: Any) -> None:
        self.device, self.spec = device, spec
        self.factory = TensorRTFactory(device, **settings)
        self.memory: dict[str, int] = {}

    def __enter__(self) -> Self:
        self.context = self.device.current()
        self.context.__enter__()
        self.stage: TensorRTStage = self.factory.prepare(self.spec)
        self.stream, self.event = self.device.stream(), self.device.event()
        for info in (*self.stage.inputs, *self.stage.outputs):
            self.memory[info.name] = self.device.allocate(self.stage.max_rows * info.row_bytes)
        self.scratch = self.device.allocate(self.stage.scratch_bytes)
        self.run: TensorRTRun = self.stage.open(self.resources())
        return self

    def resources(self, **changes: Any) -> SlotResources:
        plain = SlotResources(
            driver=self.device,
            stream=self.stream,
            scratch_address=self.scratch,
            scratch_bytes=self.stage.scratch_bytes,
        )
        return replace(plain, **changes)

    def shapes(self, rows: int) -> dict[str, tuple[int, ...]]:
        return {info.name: (rows, *info.sample_shape) for info in self.stage.inputs}

    def enqueue(self, rows: int, graph: int | None = None) -> None:
        for info in self.stage.inputs:
            self.device.clear(self.memory[info.name], rows * info.row_bytes, self.stream)
        self.run.enqueue(self.shapes(rows), self.memory, self.stream, graph=graph)

    def wait(self) -> None:
        self.device.record(self.event, self.stream)
        self.device.synchronize(self.event)

    def __exit__(self, *_: object) -> None:
        self.wait()
        self.run.close()
        self.stage.close()
        self.factory.close()
        for address in (*self.memory.values(), self.scratch):
            self.device.free(address)
        self.event.close()
        self.stream.close()
        self.context.__exit__(None, None, None)


def test_a_stage_says_what_it_takes(fake: FakeRuntime, device: FakeDriver, bundle: Bundle) -> None:
    build(fake, bundle, ["stages"])
    with Bench(device, make_plan(bundle).stages[0]) as bench:
        stage = bench.stage
        assert [(i.name, i.dtype, i.sample_shape) for i in stage.inputs] == [
            ("image", np.float32, (3, 16, 16))
        ]
        assert [(o.name, o.sample_shape) for o in stage.outputs][:2] == [
            ("exit1/answer", (5,)), ("exit1/confidence", ()),
        ]  # fmt: skip
        assert stage.outputs[2].name == stage.spec.carried[0]
        assert stage.max_rows == 8
        assert stage.scratch_bytes == 1024  # of TensorRT's 1000; one engine has nothing between
        assert stage.capturable
        assert stage.pads
        assert [stage.padding_limit(rows) for rows in (1, 2, 8)] == [1, 8, 8]  # profiles 1,2-8


@pytest.mark.parametrize("bundle", ["bert"], indirect=True)
def test_inputs_have_the_types_that_the_engine_has(
    fake: FakeRuntime, device: FakeDriver, bundle: Bundle
) -> None:
    build(fake, bundle, ["stages"])
    with Bench(device, make_plan(bundle).stages[0]) as bench:
        types = {info.name: info.dtype for info in bench.stage.inputs}
        assert types["input_ids"] == (np.int64 if fake.major >= 10 else np.int32)
        assert types["input_ids"] == bench.factory.device_dtype(np.dtype(np.int64))
    assert bench.factory.device_dtype(np.dtype(np.float64)) == np.float32
    assert bench.factory.device_dtype(np.dtype(np.uint8)) == np.uint8


def test_shapes_are_known_before_a_run_and_set_once(
    fake: FakeRuntime, device: FakeDriver, bundle: Bundle
) -> None:
    build(fake, bundle, ["stages"])
    with Bench(device, make_plan(bundle).stages[0]) as bench:
        shapes = bench.run.output_shapes(bench.shapes(5))
        assert shapes["exit1/answer"] == (5, 5)
        assert shapes["exit1/confidence"] == (5,)


def test_more_rows_than_any_profile_has_are_refused_by_name(
    fake: FakeRuntime, device: FakeDriver, bundle: Bundle
) -> None:
    build(fake, bundle, ["stages"])
    with Bench(device, make_plan(bundle).stages[0]) as bench:
        with pytest.raises(BackendError) as caught:
            bench.run.output_shapes(bench.shapes(9))
        told = str(caught.value)
        tells(told, "stage 0", "00-01-exit1", "image [9, 3, 16, 16]")
        tells(told, "image [1, 3, 16, 16] to [1, 3, 16, 16]; image [2, 3, 16, 16] to [8")
        assert "use --batch-profiles" in told
        bench.enqueue(8)


@pytest.mark.parametrize("bundle", ["bert"], indirect=True)
def test_shapes_that_are_half_refused_are_all_set_anew(
    fake: FakeRuntime, device: FakeDriver, bundle: Bundle
) -> None:
    build(fake, bundle, ["stages"])
    with Bench(device, make_plan(bundle).stages[0]) as bench:
        (link,) = bench.run._links
        context = link._contexts[-1]
        before = {name: context.shapes[name] for name in link.engine.inputs}
        first, second = link.engine.inputs
        with pytest.raises(BackendError, match=r"take \(99, 9\) as attention_mask of engine"):
            context.take_shapes({first: (4, 9), second: (99, 9)})
        context.take_shapes(before)
        assert context._live()._shapes == before


def test_a_refused_run_fails_and_the_next_one_does_not(
    fake: FakeRuntime, device: FakeDriver, bundle: Bundle
) -> None:
    build(fake, bundle, ["stages"])
    with Bench(device, make_plan(bundle).stages[0]) as bench:
        fake.fails_to_run = True
        with pytest.raises(BackendError, match=facts("stage 0", "00-01-exit1", "enqueue failed")):
            bench.enqueue(2)
        fake.fails_to_run = False
        bench.enqueue(2)


def test_too_little_scratch_is_refused(
    fake: FakeRuntime, device: FakeDriver, bundle: Bundle
) -> None:
    build(fake, bundle, ["stages"])
    with (
        Bench(device, make_plan(bundle).stages[0]) as bench,
        pytest.raises(BackendError, match=facts("1024 bytes", "512")),
    ):
        bench.stage.open(bench.resources(scratch_bytes=512))


def test_a_slot_that_cannot_be_opened_leaves_nothing_behind(
    fake: FakeRuntime, device: FakeDriver, bundle: Bundle
) -> None:
    build(fake, bundle, ["segments"])
    with Bench(device, make_plan(bundle).stages[0]) as bench:
        fake.refuses_profiles = True
        with pytest.raises(BackendError, match=facts("profile 0", "00-00-exit0")):
            bench.stage.open(bench.resources())
        fake.refuses_profiles = False


def test_a_graph_outlives_what_is_run_after_it(
    fake: FakeRuntime, device: FakeDriver, bundle: Bundle
) -> None:
    build(fake, bundle, ["stages"])
    with Bench(device, make_plan(bundle).stages[0]) as bench:
        bench.enqueue(3, graph=0)
        bench.wait()
        shapes, stream = bench.shapes(3), bench.stream
        graph = device.capture(
            stream, lambda: bench.run.enqueue(shapes, bench.memory, stream, graph=0)
        )
        assert graph is not None
        for rows in (2, 5, 3, 2):  # the fake raises where a captured context is changed
            bench.enqueue(rows)
        graph.launch(stream)
        bench.wait()
        graph.close()


def test_what_graphs_need_is_released_with_them(
    fake: FakeRuntime, device: FakeDriver, bundle: Bundle
) -> None:
    build(fake, bundle, ["stages"])
    with Bench(device, make_plan(bundle).stages[0]) as bench:
        for rows in (1, 2, 3, 1, 2, 3):
            bench.enqueue(rows)
        assert len(fake.contexts) == 2  # one a profile
        for rows in (1, 2, 3):
            bench.enqueue(rows, graph=rows)
        assert len(fake.contexts) == 2 + 3  # and one a graph
        bench.wait()
        bench.run.forget(2)
        assert len(fake.contexts) == 2 + 2
        bench.run.forget(2)
        bench.enqueue(3)
        for rows in (1, 3):
            bench.enqueue(rows, graph=rows)
        assert len(fake.contexts) == 2 + 2


def test_two_graphs_of_the_same_shapes_and_addresses_do_not_share_what_they_need(
    fake: FakeRuntime, device: FakeDriver, bundle: Bundle
) -> None:
    """Graphs in a chain, or with other layouts only, are freed independently."""
    build(fake, bundle, ["segments"])
    with Bench(device, make_plan(bundle).stages[0]) as bench:
        before = len(fake.contexts)
        for graph in (5, 6):
            bench.enqueue(3, graph=graph)
        assert len(fake.contexts) == before + 2 * 2  # a context an engine and graph
        bench.wait()
        bench.run.forget(5)
        shapes, stream = bench.shapes(3), bench.stream
        made = device.capture(
            stream, lambda: bench.run.enqueue(shapes, bench.memory, stream, graph=6)
        )
        assert made is not None
        made.launch(stream)
        bench.wait()
        made.close()


@pytest.mark.parametrize("reason", ["driver", "engine"])
def test_where_there_are_no_graphs_no_contexts_are_kept_for_them(
    fake: FakeRuntime, device: FakeDriver, bundle: Bundle, reason: str
) -> None:
    build(fake, bundle, ["stages"])
    device.graphs, fake.graph_fails = reason != "driver", reason == "engine"
    backend = CudaBackend(TensorRTFactory(device), device, kernels=b"", graphs=True)
    pipeline, slot = Pipeline(backend, make_plan(bundle)), backend.open_slot()
    inputs = inputs_of(sliced("residual"), 8)
    pipeline.warm_up(slot, cut(inputs, 1, None))
    before, made = len(fake.contexts), len(fake.called("create_execution_context"))
    for rows in range(1, 9):
        for _ in range(3):
            pipeline.warm_up(slot, cut(inputs, rows, None))
    assert len(fake.contexts) == before
    tries = len(pipeline.plan.stages)
    assert len(fake.called("create_execution_context")) == made + tries
    slot.close()
    backend.close()


@pytest.mark.parametrize("bundle", ["bert"], indirect=True)
def test_what_is_known_of_ever_new_shapes_has_an_end(
    fake: FakeRuntime, device: FakeDriver, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offramp.engine.backends.tensorrt._MOST_SHAPES", 3)
    build(fake, bundle, ["stages"])
    with Bench(device, make_plan(bundle).stages[0]) as bench:
        (link,) = bench.run._links
        for length in range(1, 9):
            shapes = dict.fromkeys(bench.shapes(2), (2, length))
            assert bench.run.output_shapes(shapes)
            assert 1 <= len(link._known) <= 3


# What may not be loaded.


def refusal(device: FakeDriver, spec: StageSpec, **settings: Any) -> str:
    with device.current(), pytest.raises(BackendError) as caught:
        TensorRTFactory(device, **settings).prepare(spec)
    told = str(caught.value)
    assert "\n" not in told
    return told


def test_without_engines_the_command_that_builds_them_is_told(
    fake: FakeRuntime, device: FakeDriver, bundle: Bundle
) -> None:
    spec = make_plan(bundle).stages[0]
    said = refusal(device, spec)
    tells(said, str(bundle.path), "Fake GPU", f"TensorRT {fake.module.__version__}")
    tells(said, f"eecompile build {bundle.path} --device cuda:0")


@pytest.mark.parametrize(
    "changes", [{"gpu": "Other GPU"}, {"tensorrt": "10.0.0.1"}, {"compute_capability": (8, 0)}]
)
def test_engines_of_another_machine_are_not_taken(
    fake: FakeRuntime, device: FakeDriver, bundle: Bundle, changes: dict[str, Any]
) -> None:
    build(fake, bundle, **changes)
    told = refusal(device, make_plan(bundle).stages[0])
    tells(told, f"{target(fake, **changes).describe()}", "build")


def test_engines_of_another_model_are_not_taken(
    fake: FakeRuntime, device: FakeDriver, bundle: Bundle
) -> None:
    store = build(fake, bundle)
    for entry in store.index.engines:
        old = replace(entry, key={**entry.key, "parts": "0" * 64})
        store.put(old, store.read(entry))
    told = refusal(device, make_plan(bundle).stages[0])
    tells(told, "00-01-exit1", "older model", "segments")
    tells(told, "00-00-exit0", "older model", "01-01-exit1")


def test_one_engine_of_an_older_model_is_replaced_by_its_segments(
    fake: FakeRuntime, device: FakeDriver, bundle: Bundle
) -> None:
    store = build(fake, bundle)
    entry = store.entry("00-01-exit1")
    assert entry is not None
    store.put(replace(entry, key={**entry.key, "builder": "0"}), store.read(entry))
    with Bench(device, make_plan(bundle).stages[0]):
        assert len(fake.engines) == 2


def test_an_altered_file_is_not_loaded(
    fake: FakeRuntime, device: FakeDriver, bundle: Bundle
) -> None:
    store = build(fake, bundle, ["stages"])
    entry = store.entry("00-01-exit1")
    assert entry is not None
    (store.folder / entry.file).write_bytes(b"x" * entry.size_bytes)
    told = refusal(device, make_plan(bundle).stages[0])
    assert entry.file in told
    assert "eecompile build" in told


def test_an_incomplete_engine_chain_names_the_missing_unit(
    fake: FakeRuntime, device: FakeDriver, bundle: Bundle
) -> None:
    store = build(fake, bundle, ["segments"])
    store.prune([e.unit for e in store.index.engines if e.unit != "00-00-exit0"])
    told = refusal(device, make_plan(bundle).stages[0])
    assert re.search(
        r"lacks engines for Fake GPU with TensorRT [\d.]+: 00-01-exit1 is not built, nor are there "
        r"its segments one by one \(00-00-exit0 is not built\); build them here: eecompile", told
    )  # fmt: skip


def test_what_tensorrt_refuses_is_told_and_released(
    fake: FakeRuntime, device: FakeDriver, bundle: Bundle
) -> None:
    build(fake, bundle, ["segments"])
    fake.fails_to_load = True
    told = refusal(device, make_plan(bundle).stages[0])
    tells(told, "TensorRT", "00-00-exit0", "version")


@pytest.mark.parametrize(
    "bundle", slow_but(["residual"], ["residual", "bert", "text cnn"]), indirect=True
)
def test_the_self_check_passes(fake: FakeRuntime, device: FakeDriver, bundle: Bundle) -> None:
    build(fake, bundle, ["stages"])
    report = run_self_check(
        {"m": bundle.path},
        EngineOptions(mode=Mode.LEAVE, defaults=ModelOptions(max_batch_size=8)),
        make=lambda _models, _options: CudaBackend(TensorRTFactory(device), device, kernels=b""),
        seconds=1.0,
    )
    assert report.passed, report.document()
    skipped = {r.name for r in report.results if r.verdict is CheckVerdict.SKIPPED}
    assert skipped == set()


def test_of_several_precisions_the_least_is_served(
    fake: FakeRuntime, device: FakeDriver, bundle: Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    build(fake, bundle, ["stages"])
    build(fake, bundle, ["segments"], precision="fp16")
    with Bench(device, make_plan(bundle).stages[0]):
        assert len(fake.engines) == 2  # segments: those of fp16
    tells(caplog.text, "fp16, fp32", "fp16")


def test_a_bundle_that_is_served_keeps_its_precision(fake: FakeRuntime, bundle: Bundle) -> None:
    """The policy was certified for it, independent of later builds."""
    build(fake, bundle, ["stages"])
    there = target(fake)
    place = EnginePlace(
        gpu=there.gpu,
        compute_capability=there.compute_capability,
        tensorrt=there.tensorrt,
        device="cuda:0",
    )
    served = as_computed(bundle, place)
    build(fake, bundle, ["stages"], precision="fp16")
    assert open_store(served, place).index.target.precision == "fp32"
    assert open_store(bundle, place).index.target.precision == "fp16"  # who begins now


def test_a_precision_may_be_asked_for(
    fake: FakeRuntime, device: FakeDriver, bundle: Bundle
) -> None:
    build(fake, bundle, ["stages"])
    build(fake, bundle, ["segments"], precision="fp16")
    stage = make_plan(bundle).stages[0]
    with Bench(device, stage, precision="fp32"):
        assert len(fake.engines) == 1  # the stage's own
    told = refusal(device, stage, precision="int8")
    tells(told, "no engines", "Fake GPU", "TensorRT")
    assert ", int8 (it has some for" in told
    assert told.endswith("--device cuda:0 --precision int8")


def served_with_evidence(
    fake: FakeRuntime, bundle: Bundle, model: str | None = None
) -> tuple[EngineStore, PrecisionEvidence]:
    store = build(fake, bundle, ["stages"], precision="fp16")
    records = bundle.read("records.npz")
    evidence = PrecisionEvidence(
        model=model or model_digest(bundle.manifest),
        policy=replace(bundle.policy, version=7),
        records=addressed("records", records, ".npz"),
        samples=1000,
        end_differs=1,
        max_disagreement=0.01,
        confidence_level=0.95,
    )
    store.put_evidence(evidence, records)
    return store, evidence


def test_engines_bring_the_policy_that_was_certified_of_them(
    fake: FakeRuntime, device: FakeDriver, bundle: Bundle
) -> None:
    _, evidence = served_with_evidence(fake, bundle)
    backend = CudaBackend(TensorRTFactory(device), device, kernels=b"")
    found = backend.as_computed(bundle)
    assert (found.policy, found.evidence) == (evidence.policy, evidence)
    assert found.arithmetic.endswith("-fp16")
    assert found.records().keys() == bundle.records().keys()
    backend.close()


@pytest.mark.parametrize("model", ["another", None])
def test_engines_of_which_nothing_was_certified_say_so(
    fake: FakeRuntime,
    device: FakeDriver,
    bundle: Bundle,
    model: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if model:
        served_with_evidence(fake, bundle, model)
    else:
        build(fake, bundle, ["stages"], precision="fp16")
    backend = CudaBackend(TensorRTFactory(device), device, kernels=b"")
    found = backend.as_computed(bundle)
    assert (found.policy, found.evidence) == (bundle.policy, None)
    assert found.arithmetic.endswith("-fp16")
    said = any("its promise was certified in fp32" in r.getMessage() for r in caplog.records)
    assert said == (bundle.policy.promise is not None)
    backend.close()


def test_damaged_evidence_is_no_reason_to_serve_without(
    fake: FakeRuntime, device: FakeDriver, bundle: Bundle
) -> None:
    store, evidence = served_with_evidence(fake, bundle)
    (store.folder / evidence.records.path).write_bytes(b"")
    backend = CudaBackend(TensorRTFactory(device), device, kernels=b"")
    with pytest.raises(BackendError, match="records-"):
        backend.as_computed(bundle)
    backend.close()
