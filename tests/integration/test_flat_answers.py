"""Models that answer with one number a sample, [batch]: served as that, with exits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper
from tests import models
from tests.bundles import compile_tiny, equal_times
from tests.facts import facts
from tests.loopback import MODEL, serving
from tests.small import _vectors

from offramp.bundle import Bundle
from offramp.compiler.common.errors import ModelError
from offramp.compiler.common.options import TaskOptions
from offramp.compiler.frontend.model import read_model
from offramp.engine.stages.plan import Mode
from offramp.tools.bench.common.compare import AdditionalModel, AdditionalRunner


def flat(ending: str | None) -> onnx.ModelProto:
    """An MLP whose one column is squeezed."""
    proto = models.mlp(layers=4, classes=1, ending=ending)
    graph = proto.graph
    (output,) = graph.output
    last = next(node for node in graph.node if output.name in node.output)
    last.output[0] = "column"
    graph.initializer.append(numpy_helper.from_array(np.array([1]), "axis"))
    graph.node.append(onnx.helper.make_node("Squeeze", ["column", "axis"], [output.name]))
    del output.type.tensor_type.shape.dim[1]
    return proto


CASES = {
    "yes or no": ("Sigmoid", TaskOptions()),
    "a logit": (None, TaskOptions(kind="multi-label")),
    "a value": (None, TaskOptions(kind="regression")),
}


@pytest.fixture(scope="module", params=CASES)
def bundle(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bundle]:
    ending, asked = CASES[request.param]
    folder = tmp_path_factory.mktemp("flat")
    x = _vectors(1400, 0)
    arrays = {"x": x}
    if request.param != "a value":
        arrays["label"] = (x[:, 0] > 0).astype(np.int64)
    options = {"task": asked.kind, "max_disagreement": 0.2}
    with equal_times():
        yield compile_tiny(flat(ending), arrays, folder, epochs=2, candidates=2, **options)


async def _check(bundle: Bundle, mode: Mode) -> None:
    x = _vectors(50, 1)
    model = ort.InferenceSession(bundle.path.parent / "model.onnx")
    (name,) = [output.name for output in model.get_outputs()]
    (wanted,) = model.run(None, {"x": x})
    async with serving(bundle, mode) as (_, client):
        (output,) = (await client.metadata(MODEL)).outputs.values()
        assert (output.name, output.shape) == (name, (-1,))
        result = await client.infer(MODEL, {"x": x})
        assert result.outputs[name].shape == wanted.shape == (50,)
        ends = result.exits == -1
        np.testing.assert_allclose(result.outputs[name][ends], wanted[ends], rtol=1e-4, atol=1e-5)
        assert mode is not Mode.OFF or ends.all()


@pytest.mark.parametrize("mode", [Mode.LEAVE, Mode.RELEASE, Mode.OFF])
def test_it_is_served_as_the_file_has_it(bundle: Bundle, mode: Mode) -> None:
    asyncio.run(_check(bundle, mode))


def test_the_file_itself_is_compared_with(bundle: Bundle) -> None:
    also = AdditionalModel(name="file", path=bundle.path.parent / "model.onnx")
    runner = AdditionalRunner(also, bundle, 1)
    runner.warm_up({"x": _vectors(3, 1)})
    (departure,) = runner.run({"x": _vectors(3, 1)})
    assert departure.answer.shape == (3, 1)


def test_what_cannot_be_told_is_asked(tmp_path: Path) -> None:
    onnx.save(flat(None), tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=facts("--task multi-label", "--task regression")):
        read_model(tmp_path / "model.onnx")
