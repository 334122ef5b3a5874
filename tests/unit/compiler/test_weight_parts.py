"""Weights of convolutions come in parts where subnets read their first input channels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from offramp.bundle.graph_weights import WEIGHTS
from offramp.calibration.data.scratch import ScratchSpace
from offramp.compiler.graphs import weight_parts, weights
from offramp.compiler.graphs.weight_parts import has_first_channels, in_parts
from offramp.compiler.graphs.weights import pack_weights, weight_file
from offramp.engine.backends.onnxruntime import make_session
from offramp.engine.graphs.external_weights import WeightForm

WHOLE: NDArray[np.float32] = (
    np.random.default_rng(0).standard_normal((8, 16, 3, 3)).astype(np.float32)
)
KEPT = {"full": (8, 16), "three": (8, 12), "half": (8, 8), "narrow": (4, 8), "fewer": (4, 16)}
"""Output and input channels."""


@pytest.fixture(autouse=True)
def _store_small_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (weights, weight_parts):
        monkeypatch.setattr(module, "LEAST_BYTES", 64)


def convolution(weight: NDArray[Any]) -> onnx.ModelProto:
    outputs, inputs = weight.shape[:2]
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["y"], name="conv", pads=[1, 1, 1, 1])],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", inputs, 5, 5])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", outputs, 5, 5])],
        [numpy_helper.from_array(weight, "w")],
    )
    opset = helper.make_opsetid("", 17)
    return helper.make_model(graph, opset_imports=[opset], ir_version=9)


def subnets() -> dict[str, onnx.ModelProto]:
    return {name: convolution(WHOLE[:o, :i].copy()) for name, (o, i) in KEPT.items()}


def shapes(graph: bytes) -> list[list[int]]:
    return [list(t.dims) for t in onnx.ModelProto.FromString(graph).graph.initializer]


def test_parts_are_stored_once_and_joined_to_what_was_there(tmp_path: Path) -> None:
    graphs = {name: proto.SerializeToString() for name, proto in subnets().items()}
    parted = in_parts(graphs, None)
    assert shapes(parted["full"]) == [[8, 8, 3, 3], [8, 4, 3, 3], [8, 4, 3, 3]]
    assert shapes(parted["three"]) == [[8, 8, 3, 3], [8, 4, 3, 3]]
    assert shapes(parted["half"]) == [[8, 8, 3, 3]]
    assert shapes(parted["fewer"]) == [[4, 8, 3, 3], [4, 4, 3, 3], [4, 4, 3, 3]]
    packed = pack_weights(parted, None)
    # Nothing is there twice but what pages are rounded up to.
    assert packed.sizes.file_bytes < WHOLE.nbytes + 3 * 4096
    (tmp_path / WEIGHTS).write_bytes(b"".join(packed.pieces()))
    for name, (_, inputs) in KEPT.items():
        x = np.random.default_rng(1).standard_normal((3, inputs, 5, 5)).astype(np.float32)
        (wanted,) = make_session(graphs[name], 1).run(None, {"x": x})
        for form in WeightForm:
            session = make_session(packed.graphs[name], 1, tmp_path, form)
            (found,) = session.run(None, {"x": x})
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
        (packed_alike,) = make_session(packed.graphs[name], 1, tmp_path).run(None, {"x": x})
        np.testing.assert_array_equal(packed_alike, wanted)


def test_weights_that_are_named_in_a_file_are_read_from_there(tmp_path: Path) -> None:
    with weight_file(ScratchSpace(tmp_path)) as kept:
        light = {name: kept.light(proto).SerializeToString() for name, proto in subnets().items()}
        parted = in_parts(light, kept)
    plain = in_parts({n: p.SerializeToString() for n, p in subnets().items()}, None)
    for name, graph in parted.items():
        assert shapes(graph) == shapes(plain[name])
        if len(shapes(graph)) > 1:  # else it is a part as it is, and still named
            assert parts_of(graph) == parts_of(plain[name])


def parts_of(graph: bytes) -> list[bytes]:
    tensors = onnx.ModelProto.FromString(graph).graph.initializer
    return [numpy_helper.to_array(tensor).tobytes() for tensor in tensors]


def test_what_nobody_has_less_of_stays_as_it_is() -> None:
    other = WHOLE[:, :8].copy()
    other[3, 2, 1, 0] += 1
    graphs = {
        "whole": convolution(WHOLE).SerializeToString(),
        "fewer outputs": convolution(WHOLE[:4].copy()).SerializeToString(),
        "another": convolution(other).SerializeToString(),
    }
    assert in_parts(graphs, None) == graphs


def test_first_channels_are_those_on_both_sides() -> None:
    assert has_first_channels(WHOLE[:3, :5], WHOLE)
    assert has_first_channels(WHOLE, WHOLE)
    assert not has_first_channels(WHOLE[:3, 1:5], WHOLE)
    assert not has_first_channels(WHOLE, WHOLE[:3])
    assert not has_first_channels(WHOLE[..., :2], WHOLE)
    changed = WHOLE[:3, :5].copy()
    changed[2, 4] = 0
    assert not has_first_channels(changed, WHOLE)
