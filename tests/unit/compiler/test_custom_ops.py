"""Models with operators of the user's own: read with their library, and refused without it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tests import models
from tests.facts import tells, without_steps
from tests.operators import DOMAIN, build_library, squash_mlp, squash_tokens, with_domain

from offramp.bundle.schema.compilation import OperatorLibrary
from offramp.compiler.commands.cli import main
from offramp.compiler.common.errors import ModelError
from offramp.compiler.common.options import CompileOptions
from offramp.compiler.cuts.cuts import find_cuts
from offramp.compiler.cuts.slicing import slice_model, verify
from offramp.compiler.graphs.runtime import libraries_of
from offramp.compiler.graphs.shape_trace import OperandType, run_alone
from offramp.compiler.graphs.shapes import declared_types
from offramp.engine.backends.custom_ops import libraries, using_libraries


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("operators"))


def fails(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one line on standard error of a run that fails."""
    assert main([str(argument) for argument in arguments]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    err = without_steps(err)
    assert err.startswith("eecompile: ")
    assert err.count("\n") == 1, err
    return err


@pytest.mark.parametrize("command", [["inspect"], []])
def test_without_the_flag_operator_domain_and_flag_are_named(
    capfd, tmp_path: Path, command: list[str]
) -> None:
    onnx.save(squash_mlp(), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", x=np.zeros((4000, 8), np.float32))
    data = [] if command else ["--data", tmp_path / "data.npz"]
    told = fails(capfd, *command, tmp_path / "model.onnx", *data)
    assert "model.onnx: ONNX Runtime " in told
    tells(told, "Squash", f"{DOMAIN}", "library")
    assert "with --custom-ops LIB.so" in told


def test_with_another_library_it_is_told_that_this_has_no_such(capfd, library, tmp_path) -> None:
    b = models.Builder()
    b.node("Stretch", b.linear(b.input("x", ["batch", 8]), 8, 4), domain=DOMAIN, out="y")
    b.output("y", ["batch", 4])
    onnx.save(with_domain(b.build()), tmp_path / "model.onnx")
    told = fails(capfd, "inspect", tmp_path / "model.onnx", "--custom-ops", library)
    tells(told, "Stretch", f"{DOMAIN}", "squash.so", "load")


def test_where_the_extensions_of_onnx_runtime_come_from(read) -> None:
    b = models.Builder()
    b.node("Inverse", b.linear(b.input("x", ["batch", 8]), 8, 4), domain="ai.onnx.contrib", out="y")
    b.output("y", ["batch", 4])
    model = b.build()
    model.opset_import.append(helper.make_opsetid("ai.onnx.contrib", 1))
    with pytest.raises(ModelError, match=r"pip install onnxruntime-extensions, whose get_library_"):
        read(model)


def test_operators_inside_of_a_body_are_looked_for_too(read) -> None:
    b = models.Builder()
    x = b.linear(b.input("x", ["batch", 8]), 8, 4)
    inner = helper.make_tensor_value_info("z", TensorProto.FLOAT, None)
    then = helper.make_graph(
        [helper.make_node("Squash", [x], ["z"], domain=DOMAIN)], "t", [], [inner]
    )
    other = helper.make_graph([helper.make_node("Identity", [x], ["z"])], "e", [], [inner])
    some = b.node("ReduceSum", x, keepdims=0)
    positive = b.node("Greater", some, b.constant(0.0, np.float32))
    b.node("If", positive, then_branch=then, else_branch=other, out="y")
    b.output("y", ["batch", 4])
    with pytest.raises(ModelError, match=f"no operator Squash of domain {DOMAIN}"):
        read(with_domain(b.build()))


def test_functions_of_the_model_itself_are_no_operators_of_a_library(read) -> None:
    node = helper.make_node("Relu", ["a"], ["b"])
    opsets = [helper.make_opsetid("", 17)]
    b = models.Builder()
    hidden = b.node("Own", b.linear(b.input("x", ["batch", 8]), 8, 8), domain="mine")
    b.linear(hidden, 8, 4, out="y")
    b.output("y", ["batch", 4])
    model = b.build()
    model.functions.append(helper.make_function("mine", "Own", ["a"], ["b"], [node], opsets))
    model.opset_import.append(helper.make_opsetid("mine", 1))
    assert read(model).outputs[0].name == "y"


@pytest.mark.parametrize("simplify", [True, False])
@pytest.mark.parametrize("batch", ["batch", 1, 4])
def test_blocks_with_the_operator_are_cut_around_and_compute_the_same(
    library, read, tmp_path, batch: int | str, simplify: bool
) -> None:
    with using_libraries([library]):
        model = read(squash_mlp(batch=batch), simplify=simplify)
        analysis = find_cuts(model)
        tensors = [cut.tensor for cut in analysis.cuts]
        assert {"block0", "block1", "block2"} <= set(tensors)
        assert {cut.shape for cut in analysis.cuts} == {("batch", 16)}
        assert analysis.unknown_work == ("Squash",)
        assert analysis.total_s is not None
        options = CompileOptions.of(model=tmp_path, data=tmp_path, output=tmp_path)
        sliced = slice_model(model, options)
        x = np.random.default_rng(0).standard_normal((7, 16)).astype(np.float32)
        assert verify(model, sliced.segments, {"x": x}) <= 1e-5


def test_symbolic_sizes_are_followed_through_the_operator(library, read) -> None:
    with using_libraries([library]):
        model = read(squash_tokens(), simplify=False)
        shapes = {name: tensor.shape for name, tensor in declared_types(model.proto).items()}
        tensors = [cut.tensor for cut in find_cuts(model).cuts]
    assert [shapes[f"squashed{i}"] for i in range(3)] == [("batch", 4, "tokens", 4)] * 3
    assert {"block0", "block1"} <= set(tensors)


def test_the_library_that_a_model_needs_is_known_by_name_hash_and_operators(
    library, tmp_path
) -> None:
    with using_libraries([library, library]):
        (needed,) = libraries_of(squash_mlp())
        assert libraries_of(models.mlp()) == ()
        (given,) = libraries()
    assert needed == OperatorLibrary(
        file="squash.so", sha256=given.sha256, operators=(f"{DOMAIN}:Squash",)
    )
    assert libraries() == ()


def test_files_that_are_no_library(capfd, tmp_path) -> None:
    onnx.save(models.mlp(), tmp_path / "model.onnx")
    text = tmp_path / "text.so"
    text.write_text("no code")
    missing = tmp_path / "missing.so"
    inspect = ("inspect", tmp_path / "model.onnx", "--custom-ops")
    tells(fails(capfd, *inspect, missing), f"--custom-ops {missing}", "No such file")
    told = fails(capfd, *inspect, text)
    assert f"--custom-ops {text}: ONNX Runtime " in told
    tells(told, "shared library", "RegisterCustomOps")


def test_what_is_given_grows_with_the_rows_it_was_run_on(library) -> None:
    node = helper.make_node("Squash", ["x"], ["y"], domain=DOMAIN)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    read = {"x": OperandType(TensorProto.FLOAT, (3001, 5, 7))}
    assert run_alone(node, read, opsets) == {}
    with using_libraries([library]):
        assert run_alone(node, read, opsets) == {"y": OperandType(TensorProto.FLOAT, (3001, 5, 7))}
        huge = {"x": OperandType(TensorProto.FLOAT, (4, 2**30))}
        assert run_alone(node, huge, opsets) == {}


def test_sizes_that_depend_on_what_is_read_stay_unknown() -> None:
    node = helper.make_node("NonZero", ["x"], ["y"])
    read = {"x": OperandType(TensorProto.INT64, (50, 3))}
    assert run_alone(node, read, [helper.make_opsetid("", 17)]) == {}


def test_onnx_runtime_extensions(read) -> None:
    """The library that Microsoft publishes, with operators whose shapes it does not tell."""
    extensions = pytest.importorskip("onnxruntime_extensions")
    b = models.Builder()
    x = b.input("x", [1, 16])
    for i in range(3):
        wide = b.linear(x, 16, 16)
        b._nodes.append(
            helper.make_node("NegPos", [wide], [f"low{i}", f"high{i}"], domain="ai.onnx.contrib")
        )
        x = b.node("Add", f"high{i}", b.node("Add", x, f"low{i}"), out=f"block{i}")
    b.linear(x, 16, 4, out="logits")
    b.output("logits", [1, 4])
    model = b.build()
    model.opset_import.append(helper.make_opsetid("ai.onnx.contrib", 1))
    with using_libraries([Path(extensions.get_library_path())]):
        cuts = find_cuts(read(model)).cuts
    assert {"block0", "block1"} <= {cut.tensor for cut in cuts}
