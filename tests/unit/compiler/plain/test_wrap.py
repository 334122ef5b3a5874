"""Models as they are: what becomes a bundle without exits, and answers as the file does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper
from tests import models
from tests.facts import Told, facts, tells
from tests.models import Builder

from offramp.bundle import Bundle, BundleExistsError
from offramp.compiler.common.errors import ModelError, VerificationError
from offramp.compiler.plain import wrap as wrapping
from offramp.compiler.plain.wrap import WrapOptions, wrap_model
from offramp.engine.answers.differences import Difference
from offramp.engine.core import Engine
from offramp.engine.models.options import EngineOptions
from offramp.engine.stages.plan import Mode

Model = Callable[[], onnx.ModelProto]


class Case(NamedTuple):
    """A model, how it may be batched, and which task is found."""

    model: Model
    kind: str = "classification"
    alone: str = ""
    """A part of the reason why samples run alone; empty where they share batches."""
    rows: int = 3
    """Largest number of rows that the file takes."""


def one_output(
    kind: str, dims: list[int | str], elem: int = TensorProto.FLOAT, **attributes: Any
) -> Model:
    """Return a builder of one operator after a linear layer, x [batch, 8] to [.., 8]."""

    def build() -> onnx.ModelProto:
        b = Builder()
        x = b.linear(b.input("x", ["batch", 8]), 8, 8)
        more = [b.constant([0, 2, 2, 2], np.int64)] if kind == "Reshape" else []
        b.node(kind, x, *more, out="y", **attributes)
        b.output("y", dims, elem)
        return b.build()

    return build


def half() -> onnx.ModelProto:
    b = Builder()
    x = b.input("x", ["batch", 8], TensorProto.FLOAT16)
    weight = b.constant(np.random.default_rng(0).standard_normal((8, 3)), np.float16)
    b.node("MatMul", x, weight, out="y")
    b.output("y", ["batch", 3], TensorProto.FLOAT16)
    return b.build()


def flat() -> onnx.ModelProto:
    b = Builder()
    x = b.linear(b.input("x", ["batch", 8]), 8, 1)
    b.node("Squeeze", x, b.constant([1], np.int64), out="y")
    b.output("y", ["batch"])
    return b.build()


def less_mean(batch: int | str) -> onnx.ModelProto:
    """Subtract the mean over the batch, as a normalisation in training mode does."""
    b = Builder()
    x = b.linear(b.input("x", [batch, 8]), 8, 4)
    x = b.node("Add", b.node("Sub", x, b.node("ReduceMean", x, axes=[0], keepdims=1)), x)
    b.node("Softmax", x, out="y", axis=-1)
    b.output("y", [batch, 4])
    return b.build()


def mixing_large_values() -> onnx.ModelProto:
    """Add a small share of the cube of the batch's mean, which is nothing at normal inputs."""
    b = Builder()
    x = b.input("x", ["batch", 8])
    mean = b.node("ReduceMean", x, axes=[0], keepdims=1)
    cube = b.node("Mul", b.node("Mul", mean, mean), mean)
    small = b.node("Mul", cube, b.constant(1e-5, np.float32))
    b.node("Add", x, small, out="y")
    b.output("y", ["batch", 8])
    return b.build()


def unread() -> onnx.ModelProto:
    model = models.mlp()
    model.graph.input.append(
        helper.make_tensor_value_info("token_types", TensorProto.INT64, ["batch", 5])
    )
    return model


def pooled_map() -> onnx.ModelProto:
    b = Builder()
    x = b.conv(b.input("image", ["batch", 3, 8, 8]), (3, 4))
    b.node("GlobalAveragePool", x, out="y")
    b.output("y", ["batch", 4, 1, 1])
    return b.build()


CASES = {
    "symbolic batch": Case(models.residual_cnn),
    "batch fixed at 1": Case(lambda: models.vgg_chain(batch=1), rows=1),
    "batch fixed at 4": Case(lambda: models.vgg_chain(batch=4), rows=4),
    "an older opset": Case(lambda: models.vgg_chain(opset=11)),
    "tokens": Case(models.bert_like),
    "recurrent": Case(models.recurrent),
    "an unread input": Case(unread),
    "half precision": Case(half),
    "segmentation": Case(lambda: models.residual_cnn(dense="logits"), "segmentation"),
    "pixels' classes": Case(lambda: models.residual_cnn(dense="ArgMax"), "segmentation"),
    "a map of one pixel": Case(pooled_map),
    "the whole numbers of classes": Case(
        one_output("ArgMax", ["batch"], TensorProto.INT64, axis=1, keepdims=0), "other"
    ),
    "a number a sample": Case(flat, "other"),
    "any shape": Case(one_output("Reshape", ["batch", 2, 2, 2]), "segmentation"),
    "truth values": Case(one_output("IsNaN", ["batch", 8], TensorProto.BOOL), "other"),
    "the batch's size inside": Case(models.crossing_size, alone="samples change each other's"),
    "quantised by the batch": Case(models.dynamically_quantised, alone="range of the whole batch"),
    "rows that mix": Case(lambda: less_mean("batch"), alone="ReduceMean"),
    "rows that mix at large values": Case(
        mixing_large_values, alone="output 'y' of a random sample in a batch of 5"
    ),
    "rows that mix at 1": Case(lambda: less_mean(1), alone="fixed at 1", rows=1),
}


@pytest.fixture
def wrap(tmp_path: Path) -> Callable[..., Bundle]:
    def write_and_wrap(model: onnx.ModelProto, **options: Any) -> Bundle:
        path = tmp_path / "model.onnx"
        onnx.save(model, path)
        return wrap_model(WrapOptions(model=path, output=tmp_path / "model.ee", **options))

    return write_and_wrap


def made(bundle: Bundle, rows: int) -> dict[str, NDArray[Any]]:
    """Return inputs of 7 tokens where sizes are free: not those that wrapping made."""
    rng = np.random.default_rng(5)
    arrays = {}
    for spec in bundle.manifest.declared:
        shape = (rows, *(size if isinstance(size, int) else 7 for size in spec.shape[1:]))
        drawn = rng.integers(0, 2, shape) if spec.dtype == "int64" else rng.standard_normal(shape)
        arrays[spec.name] = drawn.astype(spec.dtype)
    return arrays


def served(bundle: Bundle, inputs: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    async def ask() -> NDArray[Any]:
        options = EngineOptions(mode=Mode.AUDIT, backend="onnxruntime", threads=1)
        async with await Engine.open({"m": bundle.path}, options) as engine:
            assert engine.statistics()["m"].mode == "off"
            alone = bool(bundle.manifest.no_batching)
            assert engine.model("m").max_batch_size == (1 if alone else 32)
            assert len(engine.model("m").notes) == 1 + alone
            result = await engine.infer("m", inputs)
            return result.outputs[bundle.manifest.answer.output]

    return asyncio.run(ask())


def answers_of(path: Path, inputs: Mapping[str, NDArray[Any]], at_once: int) -> NDArray[Any]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    count = len(next(iter(inputs.values())))
    parts = (
        {name: array[start : start + at_once] for name, array in inputs.items()}
        for start in range(0, count, at_once)
    )
    return np.concatenate([session.run(None, part)[0] for part in parts])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_models_are_served_as_they_are(case: Case, wrap: Any, tmp_path: Path) -> None:
    bundle = wrap(case.model())
    manifest = bundle.manifest
    assert manifest.answer.task.kind == case.kind
    assert case.alone in manifest.no_batching
    assert bool(case.alone) == bool(manifest.no_batching)
    assert (manifest.exits, len(manifest.segments), manifest.is_plain) == ((), 1, True)
    assert bundle.records()["split"].shape == (0,)
    assert bundle.profile().batch_sizes[0] == 1
    at_once = 1 if case.alone else case.rows
    inputs = made(bundle, 4 if case.rows == 4 else 3)
    wanted = answers_of(tmp_path / "model.onnx", inputs, at_once)
    answers = served(bundle, inputs)
    if case.kind == "classification":
        wanted = wanted.reshape(answers.shape)  # [batch, classes, 1, 1] is served flat
    assert answers.dtype == wanted.dtype
    if at_once == case.rows or case.alone:  # batches as they are served
        np.testing.assert_array_equal(answers, wanted)
    else:
        np.testing.assert_allclose(answers, wanted, rtol=0, atol=1e-6)


def text_input() -> onnx.ModelProto:
    model = models.mlp()
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.STRING
    return model


def two_outputs() -> onnx.ModelProto:
    model = models.mlp(layers=3)
    model.graph.output.insert(
        0, helper.make_tensor_value_info("hidden1", TensorProto.FLOAT, ["batch", 16])
    )
    return model


def batch_summed() -> onnx.ModelProto:
    b = Builder()
    x = b.linear(b.input("x", ["batch", 8]), 8, 4)
    b.node("ReduceMean", x, out="y", axes=[0], keepdims=1)
    b.output("y", [1, 4])
    return b.build()


def cached() -> onnx.ModelProto:
    model = models.mlp()
    past = helper.make_tensor_value_info("past_key_0", TensorProto.FLOAT, ["batch", 2, "past", 4])
    model.graph.input.append(past)
    return model


def no_dimensions() -> onnx.ModelProto:
    b = Builder()
    x, scale = b.input("x", ["batch", 8]), b.input("scale", [])
    b.node("Mul", b.linear(x, 8, 4), scale, out="y")
    b.output("y", ["batch", 4])
    return b.build()


@pytest.mark.parametrize(
    ("model", "error"),
    [
        (two_outputs, ("2 outputs (hidden1 (float32), logits (float32))", "one")),
        (text_input, ("'x'", "type string")),
        (no_dimensions, ("'scale'", "no dimensions")),
        (batch_summed, ("reduce", "other dimensions than the first")),
        (cached, ("cache",)),
        (lambda: less_mean(4), ("fixed at 4", "dynamic")),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    model: Model, error: Told, wrap: Any, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as caught:
        wrap(model())
    assert str(caught.value).startswith(f"{tmp_path / 'model.onnx'}: ")
    tells(str(caught.value), *error)
    assert not (tmp_path / "model.ee").exists()


def test_the_output_that_is_named_is_served(tmp_path: Path) -> None:
    path, notes = tmp_path / "model.onnx", list[str]()
    onnx.save(two_outputs(), path)
    options = WrapOptions(model=path, output=tmp_path / "a.ee", answer="logits")
    assert wrap_model(options, note=notes.append).manifest.outputs[0].name == "logits"
    others = [o.name for o in two_outputs().graph.output if o.name != "logits"]
    [said] = notes
    tells(said, "output 'logits' only", f"not served ({', '.join(others)})")


def labelled() -> onnx.ModelProto:
    """Return labels first, then their scores, as scikit-learn's exporter does."""
    model = models.mlp()
    output = model.graph.output[0].name
    model.graph.node.append(helper.make_node("ArgMax", [output], ["label"], axis=1, keepdims=0))
    model.graph.output.insert(
        0, helper.make_tensor_value_info("label", TensorProto.INT64, ["batch"])
    )
    return model


def test_scores_beside_labels_are_the_answer(wrap: Any, tmp_path: Path) -> None:
    scores = models.mlp().graph.output[0].name
    assert wrap(labelled()).manifest.outputs[0].name == scores
    path, notes = tmp_path / "labelled.onnx", list[str]()
    onnx.save(labelled(), path)
    wrap_model(WrapOptions(model=path, output=tmp_path / "a.ee"), note=notes.append)
    [said] = notes
    tells(said, f"output {scores!r} only", "not served (label)")


def test_a_name_is_not_used_where_there_is_one_output(tmp_path: Path) -> None:
    path, notes = tmp_path / "model.onnx", list[str]()
    onnx.save(models.mlp(), path)
    options = WrapOptions(model=path, output=tmp_path / "a.ee", answer="other")
    scores = models.mlp().graph.output[0].name
    assert wrap_model(options, note=notes.append).manifest.outputs[0].name == scores
    [said] = notes
    tells(said, "--answer other", f"{scores!r}")


def traced(tokens: int) -> onnx.ModelProto:
    """Declares its length free, and has it in a Reshape, as exporters that trace write it."""
    b = Builder()
    x = b.input("x", ["batch", "tokens", 8])
    split = b.node("Reshape", x, b.constant([0, tokens, 2, 4], np.int64))
    b.linear(b.node("ReduceMean", split, axes=[1, 3], keepdims=0), 2, 3, out="logits")
    b.output("logits", ["batch", 3])
    return b.build(opset=17)


def test_a_length_that_the_graph_fixes_is_served_as_fixed(tmp_path: Path) -> None:
    path, notes = tmp_path / "model.onnx", list[str]()
    onnx.save(traced(6), path)
    bundle = wrap_model(WrapOptions(model=path, output=tmp_path / "a.ee"), note=notes.append)
    assert bundle.manifest.inputs[0].shape == ("batch", 6, 8)
    (note,) = notes
    tells(note, "tokens = 6 only", "free")


def test_what_is_no_model_is_told_what_it_is(tmp_path: Path) -> None:
    torch_file, bundle = tmp_path / "model.pt", tmp_path / "model.ee"
    torch_file.write_bytes(b"PK weights")
    bundle.mkdir()
    (bundle / "manifest.json").write_text("{}")
    output = tmp_path / "out.ee"
    with pytest.raises(ModelError, match=facts("model.pt", "ONNX", "to")):
        wrap_model(WrapOptions(model=torch_file, output=output))
    with pytest.raises(ModelError, match=facts("model.ee", "bundle", "eeserve")):
        wrap_model(WrapOptions(model=bundle, output=output))


def test_a_task_that_is_asked_for_has_to_fit(wrap: Any) -> None:
    assert wrap(models.mlp(), task="regression").manifest.answer.task.kind == "regression"
    with pytest.raises(ModelError, match="for --task segmentation"):
        wrap(models.mlp(), task="segmentation", overwrite=True)


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    options = WrapOptions(model=path, output=tmp_path / "model.ee")
    with pytest.raises(ModelError, match=facts("model.onnx", "No such file")):
        wrap_model(options)
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(ModelError, match=r"model\.onnx: not an ONNX file"):
        wrap_model(options)


def test_external_data_are_part_of_the_bundle(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(models.mlp(width=64), path, save_as_external_data=True, location="w.bin")
    bundle = wrap_model(WrapOptions(model=path, output=tmp_path / "model.ee"))
    inputs = made(bundle, 3)
    wanted = answers_of(path, inputs, 3)
    (tmp_path / "w.bin").unlink()
    np.testing.assert_array_equal(served(bundle, inputs), wanted)


def test_what_would_be_served_is_compared_with_the_file(
    wrap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wrapping, "compare", lambda *_: Difference(share=0.5, worst="so much"))
    with pytest.raises(VerificationError, match=facts("differs", "5.0e-01")):
        wrap(models.mlp())


def test_a_model_that_no_made_input_fits_is_refused(wrap: Any) -> None:
    """Two free sizes that have to differ by one: made inputs have them equal."""
    b = Builder()
    x, y = b.input("x", ["batch", "n", 4]), b.input("y", ["batch", "m", 4])
    x = b.node(
        "Concat", x, b.node("Slice", x, b.constant([0]), b.constant([1]), b.constant([1])), axis=1
    )
    b.node("ReduceMean", b.node("Add", x, y), out="z", axes=[1], keepdims=0)
    b.output("z", ["batch", 4])
    with pytest.raises(ModelError, match=facts("fails", "x [1, 16, 4]")):
        wrap(b.build())


def test_values_beyond_a_table_are_bounded(wrap: Any) -> None:
    bounds = wrap(models.bert_like()).manifest.value_bounds
    assert [bound.input for bound in bounds] == ["input_ids"]
    assert bounds[0].lowest is not None


def test_a_bundle_that_is_there_is_kept(wrap: Any) -> None:
    wrap(models.mlp())
    with pytest.raises(BundleExistsError, match="add --overwrite"):
        wrap(models.mlp())
