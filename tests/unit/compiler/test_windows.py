"""Audio convolutions read hundreds of samples together: shorter inputs give no information."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.facts import tells

from offramp.compiler.common.errors import ModelError
from offramp.compiler.cuts.cuts import find_cuts
from offramp.compiler.frontend.model import read_model
from offramp.compiler.graphs.runtime import GraphRunner, random_inputs
from offramp.compiler.graphs.shapes import infer_types

WIDER_THAN_ALL_TRIED = 70_000


def of_sound(kernel: int = 400, *, batch: int | str = "batch", time: int | str = "time") -> bytes:
    """A classifier of sounds [batch, time]: a wide convolution with large strides, two narrow."""
    rng = np.random.default_rng(0)
    shapes = {"wide": (8, 1, kernel), "narrow": (8, 8, 3), "last": (4, 8)}
    constants = [
        numpy_helper.from_array(rng.standard_normal(shape, np.float32) / 8, name)
        for name, shape in shapes.items()
    ]
    constants.append(numpy_helper.from_array(np.array([1], np.int64), "one"))
    nodes = [
        helper.make_node("Unsqueeze", ["audio", "one"], ["signal"]),
        helper.make_node("Conv", ["signal", "wide"], ["c0"], strides=[max(kernel * 4 // 5, 1)]),
        helper.make_node("Relu", ["c0"], ["r0"]),
        helper.make_node("Conv", ["r0", "narrow"], ["c1"], pads=[1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("GlobalAveragePool", ["r1"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "last"], ["logits"], transB=1),
    ]
    given = helper.make_tensor_value_info("audio", TensorProto.FLOAT, [batch, time])
    answer = helper.make_tensor_value_info("logits", TensorProto.FLOAT, [batch, 4])
    graph = helper.make_graph(nodes, "sound", [given], [answer], constants)
    opset = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString()


@pytest.mark.parametrize(("kernel", "time"), [(3, 16), (16, 16), (60, 400), (400, 1600)])
def test_random_inputs_are_longer_than_the_windows(kernel: int, time: int) -> None:
    proto = onnx.load_from_string(of_sound(kernel))
    feeds = random_inputs(proto, 3)
    assert feeds["audio"].shape == (3, time)
    assert GraphRunner(proto).run(feeds)["logits"].shape == (3, 4)


def test_images_too() -> None:
    proto = onnx.ModelProto()
    proto.CopyFrom(onnx.load_from_string(of_sound(3)))
    graph = proto.graph
    del graph.node[:], graph.input[:], graph.initializer[:]
    graph.input.append(
        helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, "height", "width"])
    )
    graph.initializer.append(numpy_helper.from_array(np.ones((4, 3, 96, 96), np.float32), "w"))
    graph.node.extend(
        [
            helper.make_node("Conv", ["image", "w"], ["c"], strides=[32, 32]),
            helper.make_node("GlobalAveragePool", ["c"], ["p"]),
            helper.make_node("Flatten", ["p"], ["logits"]),
        ]
    )
    assert random_inputs(proto, 1)["image"].shape == (1, 3, 800, 800)


def test_shapes_behind_wide_windows_depend_on_the_length() -> None:
    shapes = {name: found.shape for name, found in infer_types(_proto()).items()}
    assert shapes["signal"] == ("batch", 1, "time")
    assert shapes["r0"] == shapes["r1"] == ("batch", 8, "?")  # no multiple of the length
    assert shapes["p"] == ("batch", 8, 1)


def _proto() -> onnx.ModelProto:
    return onnx.load_from_string(of_sound())


@pytest.mark.parametrize("batch", ["batch", 1])
def test_a_model_of_sound_is_read_and_cut(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, batch: int | str
) -> None:
    (tmp_path / "sound.onnx").write_bytes(of_sound(batch=batch))
    model = read_model(tmp_path / "sound.onnx")
    assert caplog.messages == []
    assert find_cuts(model).cuts[0].tensor == "r0"
    sound = np.random.default_rng(1).standard_normal((2, 4000)).astype(np.float32)
    apart = [GraphRunner(_proto()).run({"audio": row[None]})["logits"] for row in sound]
    found = GraphRunner(model.proto).run({"audio": sound})["logits"]
    np.testing.assert_allclose(found, np.concatenate(apart), rtol=1e-5, atol=1e-6)


def test_windows_wider_than_all_that_is_tried_are_left_to_the_data(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "sound.onnx"
    path.write_bytes(of_sound(WIDER_THAN_ALL_TRIED))
    with caplog.at_level(logging.WARNING):
        read_model(path, simplify=False)
    (said,) = caplog.messages
    tells(said, "not compared", "(audio [1, 16]) fail")


def test_a_fixed_batch_that_cannot_be_tried_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "sound.onnx"
    path.write_bytes(of_sound(WIDER_THAN_ALL_TRIED, batch=1))
    message = (
        r"fails on random inputs \(audio \[1, 16\]\), which test whether its batch of 1 can be "
        r"made dynamic; export it with a dynamic first dimension, or with all other sizes fixed"
    )
    with pytest.raises(ModelError, match=message):
        read_model(path)
