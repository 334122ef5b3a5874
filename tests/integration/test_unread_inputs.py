"""Inputs that nothing reads, from the data to stock clients: taken, checked, and dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import tritonclient.grpc.aio as triton
from numpy.typing import NDArray
from onnx import TensorProto, helper
from tests import models
from tests.bundles import compile_tiny, equal_times
from tests.exports import exported
from tests.loopback import MODEL, serving
from tests.small import _vectors

from offramp.bundle import ActiveExit, Bundle, ExitPolicy, write_bundle
from offramp.calibration.data.dataset import read_samples
from offramp.client import InvalidInputError
from offramp.compiler.steps.bundle_check import VerifyOptions, verify_bundle
from offramp.engine.stages.plan import Mode
from offramp.tools.bench.common.compare import AdditionalModel, AdditionalRunner
from offramp.tools.bench.load.reference import input_specs, read_data

NAMES = ["token_type_ids", "x", "scale"]


def model() -> onnx.ModelProto:
    proto = models.mlp(layers=4)
    types = helper.make_tensor_value_info("token_type_ids", TensorProto.INT64, ["batch", 16])
    proto.graph.input.insert(0, types)
    proto.graph.input.append(helper.make_tensor_value_info("scale", TensorProto.FLOAT, []))
    return proto


def inputs(rows: int, seed: int = 0) -> dict[str, NDArray[Any]]:
    x = _vectors(rows, seed)
    return {
        "x": x,
        "token_type_ids": np.zeros((rows, 16), np.int64),
        "scale": np.array(2, np.float32),
    }


@pytest.fixture(scope="module", params=["held", "left out"])
def bundle(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bundle]:
    """Compiled on data that hold the inputs that nothing reads, and on data that do not."""
    arrays = inputs(1400)
    if request.param == "left out":
        arrays = {"x": arrays["x"]}
    folder = tmp_path_factory.mktemp("unread")
    with equal_times():
        compiled = compile_tiny(model(), arrays, folder, epochs=2, candidates=2)
    half = np.median(compiled.records()["confidence"], axis=1)
    active = tuple(ActiveExit(exit=i, threshold=float(c)) for i, c in enumerate(half))
    files = {e.path: compiled.read(e.path) for e in compiled.manifest.files}
    del files["policy.json"]
    source = compiled.path / compiled.manifest.source.file
    files[compiled.manifest.source.file] = source.read_bytes()
    policy = ExitPolicy(version=1, active=active, promise=None)
    yield write_bundle(folder / "half.ee", compiled.manifest, policy, files)


def test_the_bundle_declares_what_the_file_does(bundle: Bundle) -> None:
    assert [spec.name for spec in bundle.manifest.declared] == NAMES
    assert [spec.name for spec in bundle.manifest.inputs] == ["x"]
    file = bundle.path / bundle.manifest.source.file
    assert [i.name for i in ort.InferenceSession(file).get_inputs()] == NAMES
    run = ort.InferenceSession(bundle.read(bundle.manifest.source.file))
    assert [i.name for i in run.get_inputs()] == ["x"]


async def _check_served(bundle: Bundle, mode: Mode, folder: Path) -> None:
    async with serving(bundle, mode) as (_, client):
        assert list((await client.metadata(MODEL)).inputs) == NAMES
        optional = await client.optional_inputs(MODEL)
        assert optional == {"token_type_ids", "scale"}
        specs = input_specs(await client.metadata(MODEL))
        for arrays in (inputs(6), {"x": inputs(6)["x"]}):
            np.savez(folder / "load.npz", **arrays)
            data = read_data(folder / "load.npz", specs, samples=4, optional=optional)
            assert list(data.inputs) == ["x"]
        sent = inputs(6)
        whole = await client.infer(MODEL, sent)
        alone = await client.infer(MODEL, {"x": sent["x"]})
        np.testing.assert_array_equal(whole.outputs["logits"], alone.outputs["logits"])
        np.testing.assert_array_equal(whole.exits, alone.exits)
        for name, array, why in (
            ("token_type_ids", np.zeros((6, 16), np.float32), "convert it with"),
            ("token_type_ids", np.zeros((5, 16), np.int64), "must be the same"),
            ("token_type_ids", np.zeros((6, 17), np.int64), "size 17 of dimension 1 is not 16"),
            ("scale", np.zeros(1, np.float32), "expected scale: float32"),
        ):
            with pytest.raises(InvalidInputError, match=why):
                await client.infer(MODEL, {**sent, name: array})
        address = client._settings.address
        async with triton.InferenceServerClient(address) as stock:
            metadata = await stock.get_model_metadata(MODEL)
            assert [tensor.name for tensor in metadata.inputs] == NAMES
            tensors = []
            for tensor in metadata.inputs:
                array = np.asarray(sent[tensor.name])
                tensors.append(triton.InferInput(tensor.name, list(array.shape), tensor.datatype))
                tensors[-1].set_data_from_numpy(array)
            answer = await stock.infer(MODEL, tensors)
            np.testing.assert_array_equal(answer.as_numpy("logits"), whole.outputs["logits"])


@pytest.mark.parametrize("mode", [Mode.LEAVE, Mode.AUDIT, Mode.OFF])
def test_they_are_taken_checked_and_dropped(bundle: Bundle, mode: Mode, tmp_path: Path) -> None:
    asyncio.run(_check_served(bundle, mode, tmp_path))


def test_an_export_declares_them_too(bundle: Bundle, tmp_path: Path) -> None:
    path = exported(bundle, tmp_path, {"x": inputs(64)["x"]}, with_exits=False)
    session = ort.InferenceSession(path)
    assert [i.name for i in session.get_inputs()] == NAMES
    given = session.run(None, {n: np.asarray(a) for n, a in inputs(8).items()})[0]
    assert given.shape == (8, 3)


def test_a_bundle_is_verified_on_data_with_and_without_them(bundle: Bundle, tmp_path: Path) -> None:
    for name, arrays in (("with", inputs(64)), ("without", {"x": inputs(64)["x"]})):
        np.savez(tmp_path / f"{name}.npz", **arrays)
        dataset = read_samples(tmp_path / f"{name}.npz", bundle.manifest)
        assert list(dataset.inputs) == ["x"]
        found = verify_bundle(VerifyOptions(bundle=bundle.path, data=tmp_path / f"{name}.npz"))
        assert found.samples == 64


def test_the_file_itself_is_compared_with(bundle: Bundle, tmp_path: Path) -> None:
    onnx.save(model(), tmp_path / "model.onnx")
    runner = AdditionalRunner(AdditionalModel(name="file", path=tmp_path / "model.onnx"), bundle, 1)
    (departure,) = runner.run({"x": inputs(3)["x"]})
    assert departure.answer.shape == (3, 3)
