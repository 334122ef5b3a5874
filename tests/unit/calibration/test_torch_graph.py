"""Graphs in torch answer as ONNX Runtime does, and their gradients are those of the answers."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from tests.facts import facts, tells
from tests.models import Builder, bert_like, residual_cnn
from tests.torch_graphs import (
    difference,
    in_runtime,
    in_torch,
    tensors,
    with_outputs,
    wrong_slopes,
)
from tests.zoo.families import FAMILIES
from tests.zoo.variants import Exported, Variant, export
from torch import Tensor

from offramp.calibration.data.errors import UntrainableError
from offramp.calibration.torch.torch_graph import OPERATORS, TorchGraph, check_trainable
from offramp.calibration.torch_operators.node import plain
from offramp.compiler.graphs.runtime import random_inputs

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "fashion" / "fashion_resnet56.onnx"
GOLDEN = ROOT / "tests" / "golden" / "bundle" / "source.onnx"
WORST = 1e-5
"""Relative; float32 added up in another order. The worst of the zoo is 5e-6, of deep VGGs."""
SIZES = (1, 5)
QUICK = (
    Variant("ResNet", "torchscript", "dynamic"),
    Variant("MobileNetV3", "torchscript", "dynamic"),
    Variant("Upsampling", "torchscript", "dynamic"),
    Variant("Tabular ResNet", "torchscript", "dynamic"),
    Variant("BERT", "torchscript", "dynamic", length=True),
    Variant("Llama", "torchscript", "dynamic", length=True),
    Variant("LSTM", "torchscript", 2),
    Variant("GRU", "torchscript", 2),
    Variant("Two towers", "torchscript", "dynamic"),
)
FIXED_LENGTH = {"LSTM", "GRU"}
"""Families whose length torch's newer exporter does not leave open."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors are small, and threads of a busy machine wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def slow() -> Iterator[Variant]:
    for name, family in FAMILIES.items():
        for exporter in ("torchscript", "dynamo"):
            open_length = exporter == "torchscript" or name not in FIXED_LENGTH
            length = bool(family.dynamic) and open_length
            yield Variant(name, exporter, "dynamic", length=length)
    for name, opset in itertools.product(("ResNet", "BERT", "LSTM"), (13, 26)):
        exporter = "torchscript" if opset == 13 else "dynamo"
        yield Variant(name, exporter, "dynamic", changed=f"opset {opset}")
    yield Variant("Keras CNN, channels last", "file", "dynamic")
    yield Variant("Keras CNN, transposed at each layer", "file", "dynamic")


def cases() -> list[Any]:
    later = [pytest.param(v, id=str(v), marks=pytest.mark.slow) for v in slow() if v not in QUICK]
    return [pytest.param(variant, id=str(variant)) for variant in QUICK] + later


def exported(variant: Variant, folder: Path) -> Exported:
    if (missing := variant.missing()) is not None:
        pytest.skip(f"{missing} is not installed")
    return export(variant, folder)


@pytest.mark.parametrize("variant", cases())
def test_a_model_of_the_zoo_answers_as_onnx_runtime_does(variant: Variant, tmp_path: Path) -> None:
    given = exported(variant, tmp_path)
    model = onnx.load(given.path)
    graph = TorchGraph(model)

    for inputs in given.inputs:
        for rows in (given.batch,) if given.batch else SIZES:
            feeds = {name: array[:rows] for name, array in inputs.items()}
            assert difference(in_torch(graph, feeds), in_runtime(model, feeds)) <= WORST


@pytest.mark.parametrize(
    "variant",
    [v for v in QUICK if v.family in {"ResNet", "Upsampling", "Tabular ResNet", "LSTM", "GRU"}],
    ids=str,
)
def test_gradients_of_all_weights_are_the_slopes_of_the_answers(
    variant: Variant, tmp_path: Path
) -> None:
    given = exported(variant, tmp_path)
    feeds = {name: array[: given.batch or 3] for name, array in given.inputs[0].items()}

    assert wrong_slopes(onnx.load(given.path), feeds) == {}


def ids(rows: int, tokens: int = 6) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    mask = np.arange(tokens) < rng.integers(2, tokens + 1, (rows, 1))
    return {
        "input_ids": rng.integers(0, 50, (rows, tokens)),
        "attention_mask": mask.astype(np.int64),
    }


def images(rows: int) -> dict[str, np.ndarray[Any, Any]]:
    return {"image": np.random.default_rng(0).standard_normal((rows, 3, 16, 16), np.float32)}


def test_gradients_of_a_transformer_are_the_slopes_of_its_answers() -> None:
    assert wrong_slopes(bert_like(layers=2), ids(3)) == {}


def test_every_float_initialiser_that_is_read_is_a_parameter() -> None:
    model = bert_like()
    graph = TorchGraph(model)
    floats = {t.name for t in model.graph.initializer if t.data_type == TensorProto.FLOAT}

    assert graph.weights.keys() == floats
    answers = graph(tensors(ids(3)))["logits"]
    answers.square().sum().backward()
    trained = {name: w for name, w in graph.weights.items() if w.requires_grad}
    assert {name for name, w in graph.weights.items() if w.ndim > 0} == trained.keys()
    assert all(w.grad is not None and w.grad.any() for w in trained.values())


@pytest.mark.parametrize("path", [EXAMPLE, GOLDEN], ids=lambda path: path.stem)
def test_the_shipped_models_answer_as_in_onnx_runtime(path: Path) -> None:
    model = onnx.load(path)
    for rows in SIZES:
        feeds = random_inputs(model, rows)
        assert difference(in_torch(TorchGraph(model), feeds), in_runtime(model, feeds)) <= WORST


def test_taps_are_the_tensors_inside() -> None:
    model, names = residual_cnn(), ["block1", "stem", "probabilities", "image"]

    found = in_torch(TorchGraph(model, outputs=names), images(3))

    assert list(found) == names
    wanted = in_runtime(with_outputs(model, names[:3]), images(3))
    assert difference({n: found[n] for n in wanted}, wanted) <= 1e-6
    assert np.array_equal(found["image"], images(3)["image"])


def test_only_what_the_taps_need_is_run_and_held() -> None:
    model = residual_cnn()
    end = model.graph.node[-1]
    end.op_type, end.domain = "Squash", "our.own"

    graph = TorchGraph(model, outputs=["stem"])

    assert len(graph.weights) == 1
    assert graph(tensors(images(2)))["stem"].shape == (2, 8, 16, 16)


def chain(*kinds: str) -> onnx.ModelProto:
    b = Builder()
    x = b.input("x", ["batch", 4])
    for kind in kinds:
        x = b.node(kind, x)
    b.output(x, ["batch", 4])
    return b.build()


def test_tensors_are_freed_once_nobody_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[weakref.ref[Tensor]] = []
    alive = []

    def spy(x: Tensor) -> Tensor:
        gc.collect()
        alive.append(sum(ref() is not None for ref in seen))
        seen.append(weakref.ref(x))
        return x + 1

    monkeypatch.setitem(OPERATORS, "Relu", plain(spy))  # type: ignore[arg-type]
    graph = TorchGraph(chain(*["Relu"] * 5))
    with torch.no_grad():
        graph({"x": torch.zeros(2, 4)})

    # the first is the caller's, and the one before is gone when its only reader has run
    assert alive == [0, 1, 1, 1, 1]


def test_weights_go_back_into_the_model() -> None:
    model = bert_like()
    before = model.SerializeToString()
    graph = TorchGraph(model)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in graph.weights.values():
            weight.add_(torch.randn_like(weight), alpha=0.1)

    written = graph.write_back(model)

    assert model.SerializeToString() == before
    found = in_torch(graph, ids(3))
    assert difference(found, in_runtime(written, ids(3))) <= WORST
    assert difference(found, in_runtime(model, ids(3))) > 0.01
    types = [[(t.name, t.data_type) for t in m.graph.initializer] for m in (written, model)]
    assert types[0] == types[1]


@pytest.mark.parametrize("form", [TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE])
@pytest.mark.parametrize("raw", [True, False])
def test_weights_keep_their_type_and_their_bits(form: int, *, raw: bool) -> None:
    values = np.array([[1.5, -2.0, 0.25, 3.0]])
    tensor = helper.make_tensor("w.0", form, [1, 4], values.flatten())
    if raw and form != TensorProto.BFLOAT16:
        tensor = numpy_helper.from_array(
            values.astype(helper.tensor_dtype_to_np_dtype(form)), "w.0"
        )
    elif raw:
        words = (values.astype(np.float32).view(np.uint32) >> 16).astype("<u2")
        tensor = helper.make_tensor("w.0", form, [1, 4], words.tobytes(), raw=True)
    model = one_node("Add", ["x", "w.0"], tensor, form=form)
    graph = TorchGraph(model)
    assert graph.weights["w.0"].tolist() == values.tolist()
    with torch.no_grad():
        graph.weights["w.0"].mul_(2)

    (written,) = graph.float().write_back(model).graph.initializer

    assert written.data_type == form
    assert TorchGraph(graph.write_back(model)).weights["w.0"].tolist() == (2 * values).tolist()


def one_node(
    kind: str,
    inputs: list[str],
    *weights: onnx.TensorProto,
    form: int = TensorProto.FLOAT,
    opset: int = 17,
    **attributes: Any,
) -> onnx.ModelProto:
    node = helper.make_node(kind, inputs, ["y"], name="it", **attributes)
    x = helper.make_tensor_value_info("x", form, ["batch", 4])
    y = helper.make_tensor_value_info("y", form, None)
    graph = helper.make_graph([node], "one", [x], [y], initializer=weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def weight(name: str, *values: float) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, np.float32), name)


def scalar(name: str, value: float) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(value, np.float32), name)


def test_a_weight_that_is_read_twice_is_one_parameter() -> None:
    b = Builder()
    w = b.constant(np.full((4, 4), 0.5), np.float32)
    x = b.node("MatMul", b.node("MatMul", b.input("x", ["batch", 4]), w), w)
    b.output(x, ["batch", 4])
    model = b.build()
    graph = TorchGraph(model)

    assert len(list(graph.parameters())) == 1
    assert wrong_slopes(model, {"x": np.eye(4, dtype=np.float32)[:3]}) == {}
    graph({"x": torch.ones(1, 4)})[x].sum().backward()
    # of x w w, by both: rows of w add up to 2
    assert graph.weights[w].grad is not None
    assert graph.weights[w].grad.flatten().tolist() == [4.0] * 16


def test_names_of_weights_may_be_any() -> None:
    for name in ("a.b", "a%2Eb", "forward", "weights", "", "_parameters"):
        if name:
            graph = TorchGraph(one_node("Add", ["x", name], weight(name, 1, 2, 3, 4)))
            assert graph.weights[name].tolist() == [1, 2, 3, 4]
            assert graph({"x": torch.zeros(1, 4)})["y"].tolist() == [[1, 2, 3, 4]]
            (only,) = graph.state_dict()
            assert "." not in only


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        ("Pow", [weight("e", 2.0)]),
        ("Clip", [scalar("low", 0), scalar("high", 1)]),
        ("Mul", [scalar("half", 0.5)]),
    ],
)
def test_numbers_are_parameters_that_are_not_trained(
    kind: str, weights: list[onnx.TensorProto]
) -> None:
    graph = TorchGraph(one_node(kind, ["x", *(w.name for w in weights)], *weights))

    assert {name: p.requires_grad for name, p in graph.weights.items()} == {
        w.name: False for w in weights
    }


def normalised(*, behind_identity: bool) -> onnx.ModelProto:
    model = one_node(
        "BatchNormalization",
        ["x", "scale", "bias", "mean", "variance"],
        *(weight(name, 1, 2, 3, 4) for name in ("scale", "bias", "mean", "variance")),
    )
    if behind_identity:
        model.graph.node[0].input[3] = "same"
        model.graph.node.insert(0, helper.make_node("Identity", ["mean"], ["same"]))
    return model


@pytest.mark.parametrize("behind_identity", [False, True])
def test_statistics_are_not_trained_unless_asked_for(*, behind_identity: bool) -> None:
    model = normalised(behind_identity=behind_identity)
    graph = TorchGraph(model)
    x = torch.arange(8.0).reshape(2, 4)

    trained = {name for name, p in graph.weights.items() if p.requires_grad}
    assert trained == {"scale", "bias"}
    plain_answer = graph({"x": x})["y"]
    graph.requires_grad_()
    graph({"x": x})["y"].sum().backward()
    assert all(p.grad is not None and p.grad.all() for p in graph.weights.values())
    assert torch.allclose(graph({"x": x})["y"], plain_answer, rtol=1e-6)


def test_functions_of_a_model_are_looked_into() -> None:
    body = [
        helper.make_node("Mul", ["a", "b"], ["c"]),
        helper.make_node("Relu", ["c"], ["d"]),
    ]
    standard = helper.make_opsetid("", 17)
    function = helper.make_function("our.own", "Gate", ["a", "b"], ["d"], body, [standard])
    model = one_node("Gate", ["x", "w"], weight("w", 1, -1, 2, -2), domain="our.own")
    model.opset_import.append(helper.make_opsetid("our.own", 1))
    model.functions.append(function)
    graph = TorchGraph(model)

    assert graph({"x": torch.ones(1, 4)})["y"].tolist() == [[1, 0, 2, 0]]
    assert graph.write_back(model).functions == model.functions


Reads = Callable[[onnx.ModelProto], object]
READS = pytest.mark.parametrize("read", [TorchGraph, check_trainable])
"""Refusals are the same if only operators are checked."""


@READS
def test_operators_that_are_lacking_are_all_named_with_the_first_node(read: Reads) -> None:
    b = Builder()
    x = b.node("Relu", b.input("x", ["batch", 4]))
    x = b.node("NonMaxSuppression", x, x)
    x = b.node("QuantizeLinear", x, b.constant(0.1, np.float32))
    b.output(x, ["batch", 4])

    told = facts("NonMaxSuppression, QuantizeLinear", "'t1'", "--heads bridges", "--train joint")
    with pytest.raises(UntrainableError, match=told):
        read(b.build())


@READS
def test_operators_of_other_domains_are_named_with_them(read: Reads) -> None:
    model = one_node("Gelu", ["x"], domain="com.microsoft")

    with pytest.raises(UntrainableError, match=facts("com.microsoft.Gelu", "'it'")):
        read(model)


@READS
def test_an_old_opset_is_refused(read: Reads) -> None:
    with pytest.raises(UntrainableError, match=facts("opset 12", "opset 13 or newer")):
        read(one_node("Relu", ["x"], opset=12))


@READS
@pytest.mark.parametrize("kind", ["sparse", "of data type 13"])
def test_initialisers_that_torch_has_nothing_for_are_refused(kind: str, read: Reads) -> None:
    if kind == "sparse":
        model = one_node("Add", ["x", "w"])
        values, places = weight("w", 1.0), numpy_helper.from_array(np.array([2]), "places")
        model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [4]))
    else:
        model = one_node("Add", ["x", "w"], numpy_helper.from_array(np.ones(4, np.uint64), "w"))

    with pytest.raises(UntrainableError, match=facts(f"'w' is {kind}", "dense")):
        read(model)


def test_what_can_be_trained_is_told_without_reading_weights() -> None:
    model = residual_cnn()
    check_trainable(model)
    for tensor in model.graph.initializer:
        if tensor.dims:
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value="nowhere.bin")
    check_trainable(model)


def test_an_operator_that_fails_says_which_it_was() -> None:
    graph = TorchGraph(one_node("Add", ["x", "w"], weight("w", 1, 2, 3)))

    with pytest.raises(RuntimeError) as caught:
        graph({"x": torch.zeros(1, 4)})

    [said] = caught.value.__notes__
    tells(said, "Add 'it'", "[1, 4], [3]")


def test_onnx_runtime_loads_what_is_written_back(tmp_path: Path) -> None:
    model = onnx.load(EXAMPLE)
    path = tmp_path / "trained.onnx"

    onnx.save(TorchGraph(model).write_back(model), path)

    assert ort.InferenceSession(path).get_outputs()[0].name == model.graph.output[0].name


def test_parts_of_a_model_share_their_weights() -> None:
    """A weight that two graphs read is trained by both; others stay each graph's own."""
    parts = []
    for wanted in ("first", "second"):
        b = Builder()
        x = b.input("x", ["batch", 4])
        b.node("MatMul", x, "table", out="first")
        b.node("Mul", b.node("MatMul", x, "table", out="again"), "scale", out="second")
        b.output(wanted, ["batch", 4])
        model = b.build()
        for name, value in (("table", np.eye(4)), ("scale", np.full(4, 2.0))):
            model.graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), name))
        parts.append(model)
    first, second = (TorchGraph(part) for part in parts)
    second.share(first.weights)
    assert second.weights["table"] is first.weights["table"]
    assert set(second.weights) == {"table", "scale"}
    with torch.no_grad():
        first.weights["table"].mul_(3)
    feeds = {"x": torch.ones(1, 4)}
    assert second(feeds)["second"].tolist() == [[6.0] * 4]
    written = {
        t.name: numpy_helper.to_array(t) for t in second.write_back(parts[1]).graph.initializer
    }
    np.testing.assert_array_equal(written["table"], 3 * np.eye(4))
