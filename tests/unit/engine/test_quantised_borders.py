"""Tensors quantised on both sides of a border are carried as integers, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tests.quantised import quantised
from tests.sliced import inputs_of, sliced

from offramp.bundle import ActiveExit, Exit, Head
from offramp.calibration.data.dataset import Dataset
from offramp.compiler.blueprints.cascade import slice_cascade
from offramp.compiler.blueprints.packing import Draft
from offramp.compiler.common.options import CompileOptions
from offramp.compiler.cuts.slicing import Sliced
from offramp.compiler.exits.heads import build_exit, build_own
from offramp.engine.backends.onnxruntime import make_session
from offramp.engine.graphs.assembly import carries_steps, give_steps, take_steps
from offramp.engine.stages.answering_graphs import answering_graphs
from offramp.engine.stages.plan import plan_stages

SHAPE = ("batch", 4, 6, 6)
THREE = np.uint8(3)


def pair(
    kind: str, read: str, made: str, *, scale: float = 0.5, zero: Any = THREE
) -> tuple[onnx.NodeProto, list[onnx.TensorProto]]:
    constants = {f"{made}/scale": np.float32(scale), f"{made}/zero": zero}
    weights = [numpy_helper.from_array(np.asarray(v), name) for name, v in constants.items()]
    return helper.make_node(kind, [read, *constants], [made], name=made), weights


def graph(
    nodes: Sequence[onnx.NodeProto],
    weights: Sequence[onnx.TensorProto],
    given: str,
    made: str,
    shape: tuple[int | str, ...] = SHAPE,
) -> bytes:
    types = (TensorProto.FLOAT, shape)
    described = [helper.make_tensor_value_info(name, *types) for name in (given, made)]
    body = helper.make_graph(nodes, "part", described[:1], described[1:], weights)
    opset = [helper.make_opsetid("", 17)]
    return helper.make_model(body, opset_imports=opset, ir_version=8).SerializeToString()


def before(shape: tuple[int | str, ...] = SHAPE, **constants: Any) -> bytes:
    """Relu, rounded to steps and back: gives ``cut``."""
    relu = helper.make_node("Relu", ["x"], ["plain"], name="relu")
    down, first = pair("QuantizeLinear", "plain", "steps", **constants)
    up, second = pair("DequantizeLinear", "steps", "cut", **constants)
    return graph([relu, down, up], [*first, *second], "x", "cut", shape)


def after(
    *,
    also: bool = False,
    shape: tuple[int | str, ...] = SHAPE,
    zero: Any = THREE,
    **more: Any,
) -> bytes:
    """Return a graph that rounds ``cut`` and adds it to itself, or to the original if ``also``."""
    down, first = pair("QuantizeLinear", "cut", "again", zero=zero, **more)
    up, second = pair("DequantizeLinear", "again", "rounded", zero=zero, **more)
    other = "cut" if also else "rounded"
    total = helper.make_node("Add", ["rounded", other], ["y"], name="sum")
    return graph([down, up, total], [*first, *second], "cut", "y", shape)


def run(model: bytes, **tensors: NDArray[Any]) -> NDArray[Any]:
    found: NDArray[Any] = make_session(model, 1).run(None, tensors)[0]
    return found


@pytest.mark.parametrize("zero", [np.uint8(3), np.int8(-100)])
def test_integers_are_carried_channels_last_and_nothing_changes(zero: Any) -> None:
    first, second = before(zero=zero), after(zero=zero)
    assert carries_steps(first, second, "cut")
    x = np.random.default_rng(0).normal(0, 20, (3, 4, 6, 6)).astype(np.float32)
    plain = run(first, x=x)
    steps = run(give_steps(first, "cut"), x=x)
    assert steps.dtype == zero.dtype
    assert steps.shape == (3, 6, 6, 4)
    values = (steps.astype(np.float32) - np.float32(zero)) * np.float32(0.5)
    np.testing.assert_array_equal(values.transpose(0, 3, 1, 2), plain)
    np.testing.assert_array_equal(run(take_steps(second, "cut"), cut=steps), run(second, cut=plain))
    for changed in (give_steps(first, "cut"), take_steps(second, "cut")):
        onnx.checker.check_model(changed, full_check=True)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (before(), after(scale=0.25)),
        (before(), after(zero=np.uint8(4))),
        (before(), after(zero=np.int8(3))),
        (before(), after(also=True)),
        (before(("batch", 4, 6)), after(shape=("batch", 4, 6))),
        (before(), before().replace(b"cut", b"end").replace(b"x", b"c")),
        (after().replace(b"cut", b"was").replace(b"y", b"z"), after()),
    ],
    ids=["scale", "zero", "type", "its values are read", "tokens", "nobody", "no pair"],
)
def test_other_borders_stay_as_they_are(first: bytes, second: bytes) -> None:
    assert not carries_steps(first, second, "cut")


def draft_of(pieces: Sliced) -> Draft:
    """Return exits after each segment of the copy, with untrained heads."""
    answer = pieces.model.answer
    described, files = [], {}
    for index, cut in enumerate(pieces.cuts):
        prefix, head = f"exit_{index}/", Head(kind="own" if cut.is_answer else "grid", grid=2)
        if cut.is_answer:
            graph = build_own(cut, answer, prefix, **pieces.versions)
        else:
            weights = np.random.default_rng(index).normal(size=(4 * cut.width, answer.classes))
            graph = build_exit(
                cut,
                head,
                {
                    "weight": weights.astype(np.float32),
                    "bias": np.zeros(answer.classes, np.float32),
                },
                answer,
                prefix,
                answer_dtype="float32",
                **pieces.versions,
            )
        files[f"{index}"] = graph
        described.append(
            Exit(
                index=index,
                after_segment=index,
                file=f"{index}",
                inputs=(cut.name,),
                output=prefix + answer.output,
                confidence=prefix + "confidence",
                head=head,
                agreement=1.0,
            )
        )
    draft = Draft.of(pieces, [])
    return replace(draft, exits=tuple(described), files={**draft.files, **files})


def test_stages_of_a_quantised_cnn_carry_integers_and_answer_alike_to_the_bit() -> None:
    source = sliced("residual")
    samples = inputs_of(source, 64)
    copy = quantised(source.model, Dataset(inputs=samples, labels=None, sha256="0"))
    path = Path("model.onnx")
    options = CompileOptions.of(model=path, data=path, output=path, candidates=99, precision="int8")
    pieces = slice_cascade(source, copy, options)
    draft = draft_of(pieces)
    active = [ActiveExit(exit=e.index, threshold=0.9) for e in draft.exits]
    stages = plan_stages(draft, draft.read, active)

    outputs = [name for exit_ in draft.exits for name in (exit_.output, exit_.confidence)]
    joined = make_session(answering_graphs(draft, draft.read)[0], 1)
    wanted = dict(zip(outputs, joined.run(outputs, samples), strict=True))

    tensors: dict[str, NDArray[Any]] = dict(samples)
    for stage in stages[:-1]:
        session = make_session(stage.load(), 1)
        names = [output.name for output in session.get_outputs()]
        feeds = {i.name: tensors[i.name] for i in session.get_inputs()}
        tensors.update(zip(names, session.run(names, feeds), strict=True))
    for name in outputs:
        np.testing.assert_array_equal(tensors[name], wanted[name])
    carried = {cut.name: tensors[cut.name].dtype for cut in pieces.cuts[:-1] if cut.rank == 4}
    assert len(carried) > 1
    assert set(carried.values()) == {np.dtype(np.int8)}
