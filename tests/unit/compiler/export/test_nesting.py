"""An exported file answers what the bundle answers, at the same exits, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto
from tests import exports, sliced
from tests.engines import engine_bundle
from tests.exports import (
    Arrays,
    exported,
    nodes_of,
    replayed_bundle,
    replayed_inputs,
    run_bundle,
    run_file,
    stock_session,
)
from tests.models import Builder
from tests.sliced import inputs_of

from offramp.bundle import ActiveExit, Bundle
from offramp.compiler.export.export import make_model
from offramp.compiler.export.nesting import Names
from offramp.engine.graphs.blocked_layout import enter_blocked
from offramp.engine.stages.plan import make_plan

MODELS = [
    "residual", "vgg", "bert", "bert with types", "towers", "text cnn", "hidden states", "mlp",
    "log probabilities", "dense", "conditional",
]  # fmt: skip
EXITS = 2


def some_sure(rows: int, *, seed: int = 0) -> NDArray[np.float32]:
    """Confidences of which half reach one half, at every exit."""
    return np.random.default_rng(seed).random((rows, EXITS), np.float32)


def first_sure(sure: NDArray[np.float32], threshold: float = 0.5) -> list[int]:
    """Return the exit of each sample."""
    return [next((i for i, c in enumerate(row) if c >= threshold), -1) for row in sure]


def later_exits(model: str) -> tuple[int, ...]:
    """Segments that get an exit: one deep, so that several segments make a stage."""
    return (0, len(sliced.sliced(model).segments) - 2)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def bundle(model: str, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("nested")
    return replayed_bundle(model, folder, exits_after=later_exits(model))


@pytest.fixture(scope="module")
def file(model: str, bundle: Bundle) -> Path:
    inputs = replayed_inputs(model, some_sure(40))
    return exported(bundle, bundle.path.parent, inputs)


@pytest.mark.parametrize("rows", [1, 2, 7, 33])
def test_every_sample_leaves_where_it_is_sure(
    model: str, bundle: Bundle, file: Path, rows: int
) -> None:
    for seed in range(4):
        sure = some_sure(rows, seed=seed)
        inputs = replayed_inputs(model, sure)
        given, wanted = run_file(file, inputs), run_bundle(bundle, inputs)
        assert given.exit.tolist() == wanted.exit.tolist() == first_sure(sure)
        np.testing.assert_array_equal(given.answer, wanted.answer)
        assert given.answer.dtype == wanted.answer.dtype
        at_exit = given.exit >= 0
        np.testing.assert_array_equal(given.confidence[at_exit], wanted.confidence[at_exit])
        # The model's own is computed by other operators here than by numpy in the engine.
        np.testing.assert_allclose(given.confidence, wanted.confidence, rtol=1e-6)


@pytest.mark.parametrize(
    ("confidences", "leaves_at"),
    [
        ((1.0, 1.0), 0),
        ((0.0, 1.0), 1),
        ((0.0, 0.0), -1),
        ((np.nan, 1.0), 1),
        ((np.nan, np.nan), -1),
        ((0.5, 0.0), 0),
        ((np.nextafter(np.float32(0.5), np.float32(0)), 0.5), 1),
    ],
)
def test_all_samples_alike(
    model: str, file: Path, confidences: tuple[float, float], leaves_at: int
) -> None:
    for rows in (1, 5):
        sure = np.tile(np.array(confidences, np.float32), (rows, 1))
        assert run_file(file, replayed_inputs(model, sure)).exit.tolist() == [leaves_at] * rows


def test_thresholds_are_defaults_that_a_caller_may_override(
    model: str, bundle: Bundle, file: Path
) -> None:
    sure = some_sure(20)
    inputs = replayed_inputs(model, sure)
    session = stock_session(file)
    assert [i.name for i in session.get_inputs()] == [i.name for i in bundle.manifest.inputs]
    optional = session.get_overridable_initializers()
    assert [(o.name, o.type, o.shape) for o in optional] == [
        (f"offramp_threshold_{index}", "tensor(float)", []) for index in range(EXITS)
    ]
    more_aggressive = run_file(file, inputs, offramp_threshold_0=0.25, offramp_threshold_1=0.25)
    assert more_aggressive.exit.tolist() == first_sure(sure, 0.25) != first_sure(sure)
    never = run_file(file, inputs, offramp_threshold_0=2.0, offramp_threshold_1=2.0)
    assert set(never.exit) == {-1}
    only_last = run_file(file, inputs, offramp_threshold_0=2.0)
    assert only_last.exit.tolist() == [1 if c >= 0.5 else -1 for c in sure[:, 1]]


def test_without_exits_it_is_a_drop_in(model: str, bundle: Bundle, file: Path) -> None:
    inputs = replayed_inputs(model, some_sure(9))
    plain = exported(bundle, file.parent, inputs, with_exits=False, name="plain.onnx")
    source = onnx.load_model_from_string(bundle.read("source.onnx"))
    dropped_in = onnx.load(plain)
    names = [f"offramp_threshold_{index}" for index in range(EXITS)]
    assert list(dropped_in.graph.input)[: -len(names)] == list(source.graph.input)
    assert [i.name for i in dropped_in.graph.input][-len(names) :] == names
    assert dropped_in.graph.output == source.graph.output
    assert dropped_in.opset_import == source.opset_import
    assert dropped_in.ir_version == source.ir_version
    session = stock_session(plain)
    (answer,) = session.run(None, {i.name: inputs[i.name] for i in session.get_inputs()})
    np.testing.assert_array_equal(answer, run_file(file, inputs).answer)


def test_it_does_not_hang_on_what_optimisers_do(model: str, file: Path) -> None:
    inputs = replayed_inputs(model, some_sure(12))
    plain = stock_session(file, optimised=False).run(None, inputs)
    full = run_file(file, inputs)
    np.testing.assert_array_equal(plain[1], full.exit)
    np.testing.assert_allclose(plain[0], full.answer, rtol=1e-4, atol=1e-5)


def test_an_empty_batch_is_answered_as_the_source_model_does(
    model: str, bundle: Bundle, file: Path
) -> None:
    if model == "hidden states":
        pytest.skip("ONNX Runtime ends the process where an LSTM gets no samples")
    inputs = replayed_inputs(model, some_sure(0))
    source = exports.ort.InferenceSession(bundle.read("source.onnx"))
    read = {i.name for i in source.get_inputs()}
    (wanted,) = source.run(None, {n: a for n, a in inputs.items() if n in read})
    given = run_file(file, inputs)
    assert given.answer.shape == wanted.shape == (0, bundle.manifest.answer.classes)
    assert given.exit.shape == given.confidence.shape == (0,)


def test_weights_belong_to_the_branch_that_reads_them(file: Path, bundle: Bundle) -> None:
    """Then ONNX Runtime folds and prepacks them; and no name is used twice, as ONNX requires."""
    model = onnx.load(file)
    plan = make_plan(bundle)
    graph = model.graph
    for stage in plan.stages:
        expected = onnx.load_model_from_string(stage.load()).graph.initializer
        kept = {tensor.raw_data for tensor in graph.initializer}
        assert {tensor.raw_data for tensor in expected} <= kept
        (following,) = [n for n in graph.node if n.name.endswith(":if")] or [None]
        if following is None:
            assert stage.final
            break
        graph = onnx.helper.get_node_attr_value(following, "then_branch")
        gathered = [n.output[0] for n in graph.node if n.op_type == "Gather" and "stay" in n.name]
        described = {info.name: info for info in graph.value_info}
        assert len(gathered) == len(stage.carried)
        assert all(described[name].type.tensor_type.shape.dim for name in gathered)
    written = [name for node in nodes_of(model.graph) for name in node.output if name]
    assert len(written) == len(set(written))


def test_it_says_what_it_is(file: Path, bundle: Bundle) -> None:
    said = {p.key: p.value for p in onnx.load(file).metadata_props}
    assert json.loads(said["offramp.promise"]) == {"max_disagreement": 0.01, "confidence": 0.99}
    assert said["offramp.source_sha256"] == bundle.manifest.source.original_sha256
    assert said["offramp.policy_version"] == "1"
    assert [e["threshold_input"] for e in json.loads(said["offramp.exits"])] == [
        "offramp_threshold_0",
        "offramp_threshold_1",
    ]
    assert (said["offramp.exit_output"], said["offramp.confidence_output"]) == (
        "exit",
        "confidence",
    )


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_single_exit_anywhere(after: int, tmp_path: Path) -> None:
    bundle = replayed_bundle("mlp", tmp_path, exits_after=(after,))
    sure = some_sure(11)[:, :1]
    inputs = replayed_inputs("mlp", sure)
    given, wanted = run_file(exported(bundle, tmp_path, inputs), inputs), run_bundle(bundle, inputs)
    assert given.exit.tolist() == first_sure(sure)
    np.testing.assert_array_equal(given.answer, wanted.answer)


def test_exits_that_the_policy_leaves_out_keep_their_numbers(tmp_path: Path) -> None:
    active = (ActiveExit(exit=1, threshold=0.5), ActiveExit(exit=2, threshold=2.0))
    bundle = engine_bundle("mlp", tmp_path / "mlp.ee", exits_after=(0, 1, 2), active=active)
    inputs = inputs_of(sliced.sliced("mlp"), 50)
    file = exported(bundle, tmp_path, inputs)
    given, wanted = run_file(file, inputs), run_bundle(bundle, inputs)
    assert given.exit.tolist() == wanted.exit.tolist()
    assert set(given.exit) == {1, -1}
    names = [o.name for o in stock_session(file).get_overridable_initializers()]
    assert names == ["offramp_threshold_1"]


def clashing() -> onnx.ModelProto:
    """A model with an input, an output and inner tensors called as what exporting adds."""
    b = Builder()
    x = b.input("exit", ["batch", 16])
    for name in ("offramp_0:rows", "offramp_1/x", "confidence"):
        x = b.node("Relu", b.linear(x, 16, 16), out=name)
    b.linear(x, 16, 3, out="offramp_threshold_0")
    b.output("offramp_threshold_0", ["batch", 3])
    return b.build()


def test_names_of_the_model_stay_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sliced.BUILDERS, "clashing", clashing)
    bundle = replayed_bundle("clashing", tmp_path, exits_after=(0, 1))
    inputs = replayed_inputs("clashing", some_sure(20))
    file = exported(bundle, tmp_path, inputs)
    session = stock_session(file)
    assert [o.name for o in session.get_outputs()] == [
        "offramp_threshold_0",
        "offramp_exit",
        "offramp_confidence",
    ]
    assert [o.name for o in session.get_overridable_initializers()] == [
        "offramp_offramp_threshold_0",
        "offramp_offramp_threshold_1",
    ]
    given, wanted = run_file(file, inputs), run_bundle(bundle, inputs)
    assert given.exit.tolist() == wanted.exit.tolist()
    np.testing.assert_array_equal(given.answer, wanted.answer)


def test_nan_of_the_model_has_confidence_zero(tmp_path: Path) -> None:
    bundle = replayed_bundle("mlp", tmp_path, exits_after=(0,))
    inputs = replayed_inputs("mlp", np.zeros((3, 1), np.float32))
    file = exported(bundle, tmp_path, inputs)
    inputs["x"][1, 4] = np.nan
    given = run_file(file, inputs)
    assert given.exit.tolist() == [-1, -1, -1]
    assert given.confidence[1] == 0
    assert (given.confidence[[0, 2]] > 0.3).all()


def test_types_of_what_is_added(tmp_path: Path) -> None:
    bundle = replayed_bundle("mlp", tmp_path, exits_after=(0,))
    plan = make_plan(bundle)
    model = make_model(bundle, plan, Names.of(bundle.manifest, plan), with_exits=True)
    types = {o.name: o.type.tensor_type for o in model.graph.output}
    assert types["exit"].elem_type == TensorProto.INT32
    assert types["confidence"].elem_type == TensorProto.FLOAT
    rows = {t.shape.dim[0].dim_param for t in types.values()}
    assert rows == {"batch"}


def test_inputs_are_only_read(model: str, file: Path) -> None:
    inputs: Arrays = replayed_inputs(model, some_sure(8))
    before = {name: array.copy() for name, array in inputs.items()}
    run_file(file, inputs)
    for name, array in before.items():
        np.testing.assert_array_equal(inputs[name], array)


def test_stages_enter_blocked_layouts_as_the_engine_makes_them(tmp_path: Path) -> None:
    bundle = replayed_bundle("residual", tmp_path, exits_after=(0, 1))
    file = exported(bundle, tmp_path, replayed_inputs("residual", some_sure(5)))
    staged = [
        len(entering_pools(onnx.load_model_from_string(enter_blocked(stage.load())).graph))
        for stage in make_plan(bundle).stages
    ]
    assert staged[0] == 0
    assert len(entering_pools(onnx.load(file).graph)) == sum(staged) > 0


def entering_pools(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Poolings that change nothing but the layout."""
    pools = [node for node in nodes_of(graph) if node.op_type == "MaxPool"]
    return [p for p in pools if onnx.helper.get_node_attr_value(p, "kernel_shape") == [1, 1]]
