"""Messages of ``eecompile`` about models that it cannot compile, or only with limits.

Each message is one line that names the file, the limiting part of it, both numbers if there are
some, and the remedy.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from tests import models
from tests.decoders import decoder, prompts
from tests.facts import Told, tells
from tests.models import Builder
from tests.unit.compiler.test_answer import ending, trees

from offramp.calibration.torch import torch_graph
from offramp.compiler.commands.cli import main
from offramp.compiler.cuts import slicing
from offramp.compiler.frontend import preparation, simplifier
from offramp.engine.answers.differences import Difference


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Warnings are not wrapped, so that their words can be looked for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "1000")
    yield


def compiling(
    capfd: pytest.CaptureFixture[str],
    model: onnx.ModelProto,
    *arguments: str,
    **arrays: np.ndarray[Any, Any],
) -> str:
    """The one line of an error that ``eecompile model.onnx`` ends with, on samples of inputs."""
    onnx.save(model, "model.onnx")
    np.savez("data.npz", **arrays)
    return error_of(capfd, "model.onnx", "--data", "data.npz", *arguments)


def error_of(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert "Traceback" not in err
    found = [line for line in err.splitlines() if line.startswith("eecompile: ")]
    assert len(found) == 1, err
    return found[0]


def inspecting(capfd: pytest.CaptureFixture[str], model: onnx.ModelProto, *arguments: str) -> str:
    """Return the output of ``eecompile inspect``, in one line."""
    onnx.save(model, "model.onnx")
    assert main(["inspect", "model.onnx", *arguments]) == 0
    return " ".join(capfd.readouterr().out.split())


def samples(*shape: int, count: int = 800) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(0).standard_normal((count, *shape)).astype(np.float32)


def test_samples_that_change_each_others_answers(capfd) -> None:
    b = Builder()
    hidden = b.linear(b.input("x", ["batch", 16]), 16, 16)
    mean = b.node("ReduceMean", hidden, axes=[0], keepdims=1, out="mean")
    b.linear(b.node("Sub", hidden, mean), 16, 4, out="logits")
    b.output("logits", ["batch", 4])
    told = compiling(capfd, b.build())
    tells(told, "eecompile: model.onnx", "other samples")
    assert re.search(
        r"found among 3 rows, by \d\.\de[+-]\d\d: \S+ instead of \S+ \(sample \d, value \d; "
        r"its scale is \S+\), allowed are 1e-04\)",
        told,
    )
    tells(told, "1e-04", "'mean' (ReduceMean)", "other dimensions than the first")
    assert "batch_first=True" in told


def test_a_normalisation_that_was_exported_as_it_trains(capfd) -> None:
    b = Builder()
    hidden = b.linear(b.input("x", ["batch", 16]), 16, 16)
    parts = [b.constant(np.full(16, v), np.float32) for v in (1.0, 0.0, 0.0, 1.0)]
    b._nodes.append(
        helper.make_node(
            "BatchNormalization", [hidden, *parts], ["n", "m", "v"], name="bn", training_mode=1
        )
    )
    b.linear("n", 16, 4, out="logits")
    b.output("logits", ["batch", 4])
    told = compiling(capfd, b.build())
    assert "It enters at 'bn' (BatchNormalization)" in told
    assert "call model.eval() before the export" in told


def fixed(name: str = "") -> onnx.ModelProto:
    """Two rows are joined to one, and taken apart again."""
    b = Builder()
    hidden = b.linear(b.input("x", [2, 16]), 16, 16)
    joined = b.node("Reshape", hidden, b.constant([1, 32], np.int64))
    product = b.node("MatMul", joined, b.weight(32, 32), out="product", name=name)
    apart = b.node("Reshape", product, b.constant([2, 16], np.int64))
    b.linear(apart, 16, 4, out="logits")
    b.output("logits", [2, 4])
    return b.build()


@pytest.mark.parametrize(("name", "called"), [("", ""), ("/mix", " '/mix'")])
def test_a_fixed_batch_that_cannot_be_freed(capfd, name: str, called: str) -> None:
    told = compiling(capfd, fixed(name))
    tells(told, "eecompile: model.onnx", "fixed at 2", "operator")
    tells(told, f"{called} (MatMul", "'product'", "dynamic first dimension", "torch.onnx.export")


def test_inputs_that_were_fixed_to_different_batches(capfd) -> None:
    b = Builder()
    joined = b.node("Concat", b.input("x", [2, 16]), b.input("y", [3, 16]), axis=0)
    b.linear(joined, 16, 4, out="logits")
    b.output("logits", [5, 4])
    told = compiling(capfd, b.build())
    tells(told, "batch size", "{'x': 2, 'y': 3}")
    assert "export the model with that dimension dynamic" in told


def reading_again(*, joined: bool = False) -> onnx.ModelProto:
    """Each layer reads the input again, and works on it as long as on what the last one gave."""
    b = Builder()
    x = b.input("x", ["batch", 16])
    hidden = b.node("Relu", b.linear(x, 16, 16), out="first")
    for name in ("second", "third"):
        again = b.node("Tanh", b.linear(x, 16, 16))
        hidden = b.node("Relu", b.node("Add", b.linear(hidden, 16, 16), again), out=name)
        if joined:
            both = b.node("Concat", hidden, x, axis=1, out=f"{name}/both")
            hidden, x = (
                b.node("Slice", both, *(b.constant([v], np.int64) for v in (start, start + 16, 1)))
                for start in (0, 16)
            )
    b.node("Add", b.linear(hidden, 16, 4), b.linear(x, 16, 4), out="logits")
    b.output("logits", ["batch", 4])
    return b.build()


def test_an_input_that_is_read_again_with_work(capfd) -> None:
    told = compiling(capfd, reading_again(), "--max-cut-tensors", "1", x=samples(16))
    tells(told, "eecompile: model.onnx", "no cut point")
    assert re.search(
        r"inside a block: `\w+`, computed from the input `x`, also carries data past this place",
        told,
    )
    tells(told, "Concat, then Split", "cut point")
    assert re.search(r"eecompile inspect lists the reasons for all \d+ places$", told)


def test_the_remedy_of_joining_gives_a_cut_point(capfd) -> None:
    told = inspecting(capfd, reading_again(joined=True), "--max-cut-tensors", "1")
    assert "cut points 2" in told
    assert "second/both [batch, 32] Concat" in told


def test_a_side_input_with_more_work_than_may_be_done_again(capfd) -> None:
    b = Builder()
    x, y = b.input("x", ["batch", 16]), b.input("y", ["batch", 16])
    mask, side = b.node("Sigmoid", y), b.node("Tanh", b.linear(y, 16, 16))
    for i in range(4):
        x = b.node("Relu", b.node("Mul", b.linear(x, 16, 16), mask), out=f"masked{i}")
        x = b.node("Add", x, side, out=f"block{i}") if i < 2 else x
    b.linear(x, 16, 4, out="logits")
    b.output("logits", ["batch", 4])
    told = inspecting(capfd, b.build(), "--max-cut-tensors", "1")
    assert re.search(r"\d\d% of the work would have to be repeated after it, from `y`; at", told)
    tells(told, "at most 2%", "let the model")


def test_a_batch_that_is_not_in_front(capfd) -> None:
    b = Builder()
    hidden = b.matmul(b.input("x", ["first", "second", 16]), 16, 16)
    pooled = b.node("ReduceMean", hidden, axes=[0], keepdims=0, out="pooled")
    b.linear(pooled, 16, 4, out="logits")
    b.output("logits", ["rows", 4])
    told = compiling(capfd, b.build())
    tells(told, "'pooled' (ReduceMean)", "samples", "first", "batch in every input")
    assert "batch_first=True" in told


def test_a_batch_that_is_folded_into_another_dimension(capfd) -> None:
    b = Builder()
    folded = b.node("Reshape", b.input("x", ["batch", 32]), b.constant([-1, 8], np.int64))
    hidden = b.node("Relu", b.matmul(folded, 8, 8))
    apart = b.node("Reshape", b.matmul(hidden, 8, 4), b.constant([-1, 16], np.int64))
    b.node("Softmax", apart, out="y", axis=1)
    b.output("y", ["batch", 16])
    told = compiling(capfd, b.build(), x=samples(32))
    tells(told, "[4*batch, 8]", "first dimension", "let the model", "keep", "separate dimension")


def test_a_disk_with_too_little_space_for_features(capfd, monkeypatch) -> None:
    place = "offramp.calibration.data.scratch.shutil"
    monkeypatch.setattr(place, SimpleNamespace(**{**vars(shutil), "disk_usage": _full_disk}))
    told = compiling(
        capfd, models.mlp(), "--max-disagreement", "0.05", "--scratch", ".", x=samples(16)
    )
    needed = re.search(r"features take ([\d.]+) MiB \(([\d,]+) bytes\), but (\S+) has", told)
    assert needed is not None
    assert int(needed[2].replace(",", "")) == pytest.approx(float(needed[1]) * 2**20, rel=0.6)
    tells(told, "10,000 bytes", "free the space", "--scratch")
    assert "or bound them by --scratch-limit" in told


def _full_disk(_path: object) -> SimpleNamespace:
    return SimpleNamespace(free=10_000)


def test_a_limit_of_scratch_that_is_too_low(capfd) -> None:
    arguments = ("--max-disagreement", "0.05", "--scratch-limit", "0.00001")
    told = compiling(capfd, models.mlp(width=128), *arguments, x=samples(128))
    assert re.search(r"need at least \d+ samples; their features take [\d.]+ MiB", told)
    tells(told, "4 passes", "--scratch-limit", "raise", "--candidates", "fewer or smaller samples")


def test_columns_that_are_a_yes_or_no_each(capfd) -> None:
    told = compiling(capfd, ending("Sigmoid", classes=5), "--task", "classification")
    tells(told, "model.onnx", "'y'", "'Sigmoid:y' (Sigmoid)", "5 columns", "multi-label")
    tells(told, "before the Sigmoid", "logits")


def test_log_probabilities_are_an_answer(capfd) -> None:
    assert "4 classes, log-probabilities" in inspecting(capfd, ending("LogSoftmax"))


def test_an_answer_for_every_place_of_a_map(capfd) -> None:
    b = Builder()
    b.node("Relu", b.conv(b.input("x", ["batch", 3, 8, 8]), (3, 5)), out="map")
    b.output("map", ["batch", 5, 8, 8])
    told = compiling(capfd, b.build(), "--task", "classification")
    tells(told, "'map'", "[batch, 5, 8, 8] of float32", "floating-point")
    tells(told, "[batch, classes]", "at least 2 classes", "--task classification")
    tells(told, "leave --task out", "pool")


def inverting() -> onnx.ModelProto:
    """Return blocks of an ONNX Runtime operator with unknown arithmetic."""
    b = Builder()
    x = b.input("x", ["batch", 16, 16])
    for i in range(2):
        x = b.matmul(b.node("Inverse", x, domain="com.microsoft", out=f"inverse{i}"), 16, 16)
    b.linear(b.node("ReduceMean", x, axes=[1], keepdims=0), 16, 4, out="logits")
    b.output("logits", ["batch", 4])
    model = b.build()
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model


def test_work_that_nobody_knows_is_measured_and_said_so(capfd, caplog) -> None:
    told = inspecting(capfd, inverting())
    assert re.search(r"[\d.]+ ms measured, as the FLOPs of Inverse are not known", told)
    assert compiling(
        capfd, inverting(), "--max-disagreement", "0.05", "--exits", "x", x=samples(16, 16)
    )
    tells(caplog.text, "Inverse", "time")


def halved() -> onnx.ModelProto:
    b = Builder()
    x = b.node("Cast", b.input("x", ["batch", 16]), to=TensorProto.FLOAT16)
    for i in range(3):
        weight = b.constant(np.random.default_rng(i).standard_normal((16, 16)) / 4, np.float16)
        x = b.node("Tanh", b.node("MatMul", x, weight), out=f"hidden{i}")
    b.node("Cast", x, out="logits", to=TensorProto.FLOAT)
    b.output("logits", ["batch", 16])
    return b.build()


def test_pieces_that_round_more_than_is_allowed(capfd, monkeypatch) -> None:
    found = Difference(share=2.5e-2, worst="3 instead of 4 (sample 0, class 1; its scale is 40)")
    monkeypatch.setattr(slicing, "compare", lambda *_, **__: found)
    monkeypatch.setattr(slicing, "relative_difference", lambda *_: 2.5e-2)
    told = compiling(capfd, halved(), "--max-disagreement", "0.05", x=samples(16))
    tells(
        told,
        "eecompile: model.onnx",
        "batch 1, by 2.5e-02",
        "3 instead of 4",
        "sample 0, class 1",
        "40",
        "1.0e-02",
    )
    tells(told, "segment 0", "--tolerance 5e-02")


def test_operators_in_any_order_are_read(capfd) -> None:
    model = models.mlp()
    nodes = list(model.graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    assert "3 classes, logits" in inspecting(capfd, model)


def test_operators_that_wait_for_each_other(capfd) -> None:
    b = Builder()
    x = b.linear(b.input("x", ["batch", 8]), 8, 4)
    b.node("Add", x, "second", out="first")
    b.node("Relu", "first", out="second")
    b.output("second", ["batch", 4])
    told = compiling(capfd, b.build())
    tells(told, "model.onnx", "'first' (Add)", "'second'", "cycle", "export the model again")


def test_tensors_of_more_dimensions_than_heads_read(capfd) -> None:
    b = Builder()
    six = b.constant([0, 2, 2, 2, 2, 4], np.int64)
    hidden = b.matmul(b.node("Reshape", b.input("x", ["batch", 64]), six), 4, 4)
    scores = b.matmul(b.node("Relu", hidden, out="six"), 4, 4)
    b.node("ReduceMean", scores, axes=[1, 2, 3, 4], keepdims=0, out="logits")
    b.output("logits", ["batch", 4])
    told = compiling(capfd, b.build(), x=samples(64))
    tells(told, "6 dimensions", "2 to 5", "join")


def test_channels_of_no_fixed_size(capfd) -> None:
    b = Builder()
    x = b.input("x", ["batch", 16, "features"])
    for _ in range(2):
        x = b.node("Relu", b.node("MatMul", b.weight(16, 16), x))
    b.linear(b.node("ReduceMean", x, axes=[2], keepdims=0), 16, 4, out="logits")
    b.output("logits", ["batch", 4])
    told = compiling(capfd, b.build(), x=samples(16, 8))
    tells(told, "dimension 2", "channels", "no fixed size")
    assert "export the model with that size fixed" in told


@pytest.mark.parametrize(
    ("zipmap", "arguments"), [(False, ()), (True, ()), (False, ("--answer", "chances"))]
)
def test_trees_are_one_operator(capfd, zipmap: bool, arguments: tuple[str, ...]) -> None:
    told = compiling(capfd, trees(zipmap=zipmap), *arguments)
    output = "chances" if arguments else "label"
    tells(told, "model.onnx", f"'{output}'", "'forest' (TreeEnsembleClassifier)")
    tells(told, "one operator", "cut")
    assert "serve the model unchanged" in told


def test_which_of_several_outputs_answers(capfd) -> None:
    b = Builder()
    hidden = b.node("Relu", b.linear(b.input("x", ["batch", 16]), 16, 16), out="features")
    b.linear(hidden, 16, 4, out="scores")
    b.output("features", ["batch", 16])
    b.output("scores", ["batch", 4])
    told = compiling(capfd, b.build())
    tells(told, "model.onnx: 2 outputs (features, scores)", "name the answer")
    assert "for instance --answer features" in told


def test_an_opset_of_the_future(capfd) -> None:
    model = models.mlp()
    model.opset_import[0].version = 97
    told = compiling(capfd, model)
    newest = re.search(r"installed here takes \(up to (\d+)\)", told)
    assert newest is not None
    tells(told, "model.onnx: opset 97", "ONNX Runtime")
    tells(told, f"opset_version={newest[1]}", "install a newer onnx")
    assert int(newest[1]) >= 21, onnxruntime.__version__


def test_one_column(capfd) -> None:
    told = compiling(capfd, ending("Identity", classes=1))
    tells(told, "'y'", "[batch, 1] of float32")
    assert "with at least 2 classes" in told
    assert "one column is not a choice between classes" in told
    tells(told, "yes or no", "--task multi-label")
    assert "where it is a value, --task regression" in told


def test_a_class_that_was_picked(capfd) -> None:
    b = Builder()
    scores = b.linear(b.input("x", ["batch", 16]), 16, 4)
    b.node("ArgMax", scores, out="best", axis=1, keepdims=0)
    b.output("best", ["batch"], TensorProto.INT64)
    told = compiling(capfd, b.build())
    assert "output 'best' has shape [batch] of int64" in told
    tells(told, "'ArgMax:best' (ArgMax)", "before that", "scores")


def test_a_file_above_the_limit_of_one_message(capfd) -> None:
    with Path("model.onnx").open("wb") as file:
        os.truncate(file.fileno(), 3 * 2**30)  # a hole, which takes no disk
    np.savez("data.npz", x=samples(16))
    told = error_of(capfd, "model.onnx", "--data", "data.npz")
    tells(told, "model.onnx: 3.0 GiB", "2 GiB at most", "store")
    assert "the weights as external data" in told


def test_more_operators_than_are_simplified(capfd, caplog, monkeypatch) -> None:
    monkeypatch.setattr(preparation, "MOST_SIMPLIFIED", 5)
    inspecting(capfd, models.mlp())
    (told,) = [text for text in caplog.messages if "not simplified" in text]
    tells(told, "7 operators", "onnxslim", "5", "onnxslim MODEL.onnx SIMPLER.onnx")


def test_what_onnxslim_says_when_it_fails(capfd, caplog, monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a defect of its own")

    monkeypatch.setattr(simplifier.onnxslim, "slim", fail)
    inspecting(capfd, models.mlp())
    tells(caplog.text, "not simplified", "a defect of its own")


CACHED = "--answer-tokens ID,ID; for any other answer export it without a cache (use_cache=False)"


@pytest.mark.parametrize("arguments", [(), ("--answer", "logits"), ("--task", "classification")])
def test_a_decoder_with_a_cache_whose_tokens_are_not_named(capfd, arguments) -> None:
    told = compiling(capfd, decoder(cache=True), *arguments, **prompts(800, 12))
    tells(told, "'past_key_values.0.key' and 5 more", "cache of a decoder")
    tells(told, "'logits'", "[batch, tokens, vocabulary]")
    assert told.endswith(CACHED)
    assert main(["inspect", "model.onnx", *arguments]) == 1
    assert CACHED in capfd.readouterr().err


def forecasting() -> onnx.ModelProto:
    """Reads the past of a series, which is no cache."""
    b = Builder()
    x = b.node("Flatten", b.input("past_values", ["batch", 8, 2]))
    hidden = b.node("Relu", b.linear(x, 16, 16), out="hidden")
    b.linear(b.node("Relu", b.linear(hidden, 16, 16)), 16, 3, out="logits")
    b.output("logits", ["batch", 3])
    return b.build()


def test_the_past_of_a_series_is_no_cache(capfd) -> None:
    assert "past_values: float32 [batch, 8, 2]" in inspecting(capfd, forecasting())


def with_maps(output: str, *, head: str = "", ending: str = "Identity") -> onnx.ModelProto:
    """Maps of 5 channels, whose last convolution has a name."""
    b = Builder()
    hidden = b.node("Relu", b.conv(b.input("image", ["batch", 3, 16, 16]), (3, 8)), out="hidden")
    hidden = b.node("Relu", b.conv(hidden, (8, 8)), out="hidden1")
    x = b.node("Conv", hidden, b.weight(5, 8, 1, 1), name=head)
    b.node(ending, x, out=output)
    b.output(output, ["batch", 5, 16, 16])
    return b.build()


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (with_maps("heatmaps"), ("'heatmaps'", "heat maps")),
        (with_maps("y", head="/keypoint_head/Conv"), ("'/keypoint_head/Conv'", "heat maps")),
        (with_maps("y", head="/HRPose/final/Conv"), ("'/HRPose/final/Conv'", "heat maps")),
        (with_maps("y", ending="Sigmoid"), ("Sigmoid",)),
    ],
    ids=["output", "operator", "camels", "sigmoid"],
)
def test_what_looks_like_heat_maps_is_not_taken_for_classes_in_silence(
    capfd, caplog, model: onnx.ModelProto, why: Told
) -> None:
    inspecting(capfd, model)
    (told,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    tells(told, "[batch, 5, 16, 16]", "segmentation")
    tells(told, *why)
    tells(told, "key point", "--task pose")
    assert told.endswith("else --task segmentation ends this warning.")


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        (with_maps("heatmaps"), ["--task", "pose"]),
        (with_maps("heatmaps"), ["--task", "segmentation"]),
        (with_maps("heatmaps"), ["--class-map"]),
        (with_maps("y", head="/Transpose/wheat/Conv"), []),
    ],
    ids=["pose", "segmentation", "map", "others"],
)
def test_who_names_the_task_is_not_warned(
    capfd, caplog, model: onnx.ModelProto, arguments: list[str]
) -> None:
    inspecting(capfd, model, *arguments)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.fixture
def without_relu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove gradients of Relu; any run of the model, to time or record, fails."""
    monkeypatch.delitem(torch_graph.OPERATORS, "Relu")

    def too_late(*_arguments: Any, **_more: Any) -> None:
        raise AssertionError("the model is run before its operators were looked at")

    for name in ("verify", "measure_batch_effect", "TimedModel", "find_exits"):
        monkeypatch.setattr(f"offramp.compiler.steps.compile.{name}", too_late)


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ((), ("export", "segmentation", "bridges")),
        (("--train", "joint"), ("--heads bridges", "--train joint", "export")),
    ],
    ids=["dense", "joint"],
)
@pytest.mark.usefixtures("without_relu")
def test_operators_that_dense_answers_cannot_learn_through(capfd, arguments, remedy) -> None:
    model = models.residual_cnn(dense="logits")
    told = compiling(capfd, model, *arguments, image=samples(3, 16, 16))
    tells(told, "eecompile: model.onnx", "cannot be trained")
    tells(told, "no gradients", "Relu", "'Relu:")
    tells(told, *remedy)
    assert "offramp_exit" not in told, "as it is called in the user's file"


@pytest.mark.parametrize("arguments", [("--heads", "bridges"), ("--train", "joint")])
@pytest.mark.usefixtures("without_relu")
def test_operators_that_classifiers_cannot_learn_through(capfd, arguments) -> None:
    told = compiling(capfd, models.residual_cnn(), *arguments, image=samples(3, 16, 16))
    tells(told, "eecompile: model.onnx", "cannot be trained")
    assert "through Relu; the first is Relu " in told
    tells(told, "--heads bridges", "--train joint", "export")
