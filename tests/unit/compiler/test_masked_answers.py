"""Classes that are masked: models whose rows mix are refused all the same, right ones are taken."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto
from tests.facts import facts
from tests.models import Builder

from offramp.compiler.common.errors import ModelError
from offramp.compiler.cuts.cuts import find_cuts
from offramp.compiler.cuts.slicing import TOLERANCE, split, verify
from offramp.compiler.frontend.model import read_model
from offramp.compiler.graphs.runtime import random_inputs
from offramp.compiler.graphs.source_model import SourceModel

WIDTH, CLASSES = 32, 6
MASKS = st.one_of(
    st.sampled_from([float("-inf"), -1e4, -65504.0, -1e9, float(np.finfo(np.float32).min)]),
    st.floats(4, 30).map(lambda power: -float(np.float32(10**power))),
)
MIXING = ["none", "BatchNormalization", "written out", "Softmax", "CumSum", "ReduceMean", "largest"]


def mixed(b: Builder, x: str, by: str) -> str:
    """Make rows depend on the others of their batch."""
    if by == "BatchNormalization":
        ones, zeros = (b.constant(make(WIDTH), np.float32) for make in (np.ones, np.zeros))
        return b.nodes(by, x, ones, zeros, zeros, ones, outs=["n", "m", "v"], training_mode=1)[0]
    if by == "written out":
        apart = b.node("Sub", x, b.node("ReduceMean", x, axes=[0], keepdims=1))
        spread = b.node("ReduceMean", b.node("Mul", apart, apart), axes=[0], keepdims=1)
        wide = b.node("Add", spread, b.constant(0.1, np.float32))
        return b.node("Div", apart, b.node("Sqrt", wide))
    if by == "Softmax":
        return b.node("Softmax", x, axis=0)
    if by == "CumSum":
        return b.node("CumSum", x, b.constant(0, np.int64))
    if by == "ReduceMean":
        return b.node("Sub", x, b.node("ReduceMean", x, axes=[0], keepdims=1))
    if by == "largest":
        return b.node("Sub", x, b.node("ReduceMax", x, keepdims=0))
    return x


def masked(b: Builder, logits: str, how: str, value: float, count: int) -> str:
    """Rule out the last classes, or those that an input says for each sample."""
    out = CLASSES - count
    if how == "added":
        added = b.constant([[0.0] * out + [value] * count], np.float32)
        return b.node("Add", logits, added, out="y")
    if how == "filled":
        keep = b.constant([[True] * out + [False] * count], np.bool_)
    else:
        b.input("allowed", ["batch", CLASSES], TensorProto.INT64)
        keep = b.node("Cast", "allowed", to=TensorProto.BOOL)
    return b.node("Where", keep, logits, b.constant(value, np.float32), out="y")


def model(by: str, how: str, value: float, count: int, seed: int) -> SourceModel:
    b = Builder(seed=seed)
    x = b.node("Relu", b.matmul(b.input("x", ["batch", 12]), 12, WIDTH))
    for _ in range(2):
        x = b.node("Add", x, b.node("Relu", b.matmul(x, WIDTH, WIDTH)))
    x = mixed(b, x, by)
    masked(
        b, b.linear(b.node("Relu", b.matmul(x, WIDTH, WIDTH)), WIDTH, CLASSES), how, value, count
    )
    b.output("y", ["batch", CLASSES])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(b.build(), path)
        return read_model(path)


def check(found: SourceModel, seed: int) -> float:
    """Cut and compare as a compilation does."""
    pieces = split(found, find_cuts(found).cuts)
    samples = random_inputs(found.proto, 64, seed=seed)
    return verify(found, pieces, samples, batch_sizes=(1, 7, 64))


DRAWN = {
    "how": st.sampled_from(["added", "filled", "by sample"]),
    "value": MASKS,
    "count": st.integers(1, CLASSES - 1),
    "seed": st.integers(0, 2**31),
}


@settings(deadline=None, max_examples=40)
@given(**DRAWN)
def test_right_models_with_masks_are_taken(how: str, value: float, count: int, seed: int) -> None:
    assert check(model("none", how, value, count, seed), seed) <= TOLERANCE


@settings(deadline=None, max_examples=60)
@given(by=st.sampled_from(MIXING[1:]), **DRAWN)
def test_models_whose_rows_mix_are_refused_under_every_mask(
    by: str, how: str, value: float, count: int, seed: int
) -> None:
    with pytest.raises(ModelError, match=facts("other samples of its batch")):
        check(model(by, how, value, count, seed), seed)
