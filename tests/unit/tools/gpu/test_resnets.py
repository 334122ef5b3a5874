"""ResNets as they are measured: its stages make up the whole."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from offramp.tools.gpu import resnets

pytestmark = pytest.mark.slow


def run(piece: resnets.Piece, values: np.ndarray) -> dict[str, np.ndarray]:
    session = ort.InferenceSession(piece.graph, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, {piece.input: values}), strict=True))


def test_stages_one_after_the_other_answer_as_the_whole() -> None:
    values = np.random.default_rng(1).standard_normal((2, *resnets.INPUT_SHAPE)).astype(np.float32)
    whole = resnets.whole(seed=3)
    expected = run(whole, values)[whole.logits]
    stages = resnets.stages(seed=3)
    for stage in stages:
        assert values.shape[1:] == stage.input_shape
        found = run(stage, values)
        answer = found[stage.logits]
        assert answer.shape == (2, resnets.CLASSES)
        assert 1 < answer.std() < 20  # activations neither die nor grow without end
        if stage.carry:
            values = found[stage.carry]
            assert values.shape[1:] == stage.carry_shape
    assert [stage.carry is None for stage in stages] == [False, False, False, True]
    np.testing.assert_allclose(answer, expected, rtol=1e-4, atol=1e-4)


def test_it_has_the_weights_of_resnet50_and_the_seed_decides_them() -> None:
    whole = resnets.whole(seed=0)
    weights = onnx.load_from_string(whole.graph).graph.initializer
    # 25,557,032 with 53,120 scales and shifts of batch normalisation, of which one is left each.
    assert sum(int(np.prod(weight.dims)) for weight in weights) == 25_557_032 - 26_560
    assert resnets.whole(seed=0).graph == whole.graph
    assert resnets.whole(seed=1).graph != whole.graph


def test_resnet101_has_more_blocks_in_its_third_layer() -> None:
    graph = onnx.load_from_string(resnets.whole(model="resnet101").graph).graph
    # 44,549,160 with 105,344 scales and shifts of batch normalisation, of which one is left each.
    assert sum(int(np.prod(weight.dims)) for weight in graph.initializer) == 44_549_160 - 52_672
    ends = [node.name for node in graph.node if node.name.endswith(".relu")]
    assert ends[0] == "stem.relu"
    assert len(ends) == 1 + 33
    assert ends[13] == "layer3.5.relu"


def test_pixels_are_brought_to_the_scale_of_the_weights() -> None:
    model = resnets.of_pixels("resnet50")
    assert model.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.UINT8
    plain = onnx.load_from_string(resnets.whole().graph).graph
    names = [node.name for node in model.graph.node]
    assert names[3:] == [node.name for node in plain.node]
    assert names[:3] == ["pixels.float", "pixels.centred", "pixels.scaled"]
