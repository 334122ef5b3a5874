"""The graphs that engines are built from, for every kind of unit and precision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto
from tests.engines import engine_bundle
from tests.sliced import dataset_of, inputs_of, sliced

from offramp.bundle import Bundle, write_bundle
from offramp.bundle.engines import Precision
from offramp.calibration.precision.quantization import Ranges
from offramp.compiler.common.errors import ModelError
from offramp.compiler.engines.units import (
    Unit,
    UnitGraphs,
    ranges_of,
    segment_units,
    source_unit,
    units_of,
)
from offramp.compiler.graphs.runtime import GraphRunner
from offramp.engine.answers.differences import relative_difference
from offramp.engine.stages.plan import make_plan

TOLERANCES: dict[Precision, float] = {"fp32": 1e-5, "tf32": 1e-5, "fp16": 1e-2, "int8": 0.15}
"""Tolerances as in test_halving and test_quantization."""


@pytest.fixture(scope="module", params=["residual", "bert", "text cnn"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return engine_bundle(request.param, tmp_path_factory.mktemp("b") / f"{request.param}.ee")


def ranges(bundle: Bundle) -> Ranges:
    return ranges_of(bundle, dataset_of(sliced(bundle.manifest.name), 64), threads=1)


def graphs(bundle: Bundle, precision: Precision, version: str = "10.16.0.72") -> UnitGraphs:
    measured = ranges(bundle) if precision == "int8" else None
    return UnitGraphs(bundle, precision, ranges=measured, tensorrt_version=version)


def test_fp32_stages_are_those_that_are_planned(bundle: Bundle) -> None:
    given = graphs(bundle, "fp32")
    for stage in make_plan(bundle).stages:
        assert given.of(Unit(*stage.unit)) == stage.load()


def test_the_source_is_the_bundles_own_file(bundle: Bundle) -> None:
    source = bundle.read(bundle.manifest.source.file)
    assert graphs(bundle, "fp32").of(source_unit(bundle.manifest)) == source
    assert graphs(bundle, "tf32").of(source_unit(bundle.manifest)) == source


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_units_have_the_same_borders_in_every_precision(
    bundle: Bundle, precision: Precision
) -> None:
    plain, given = graphs(bundle, "fp32"), graphs(bundle, precision)
    for unit in units_of(bundle):
        wanted, found = (onnx.ModelProto.FromString(g.of(unit)) for g in (plain, given))
        onnx.checker.check_model(found, full_check=True)
        for side in ("input", "output"):
            borders = [
                [(i.name, i.type.tensor_type.elem_type) for i in getattr(m.graph, side)]
                for m in (wanted, found)
            ]
            assert borders[0] == borders[1], unit


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "int8"])
def test_segments_chained_answer_like_the_source(bundle: Bundle, precision: Precision) -> None:
    manifest = bundle.manifest
    feeds = inputs_of(sliced(manifest.name), 6, seed=2)
    given = graphs(bundle, precision)
    values: dict[str, NDArray[np.generic]] = dict(feeds)
    for unit in segment_units(manifest):
        values |= GraphRunner(onnx.ModelProto.FromString(given.of(unit))).run(values)
    source = onnx.ModelProto.FromString(bundle.read(manifest.source.file))
    wanted = GraphRunner(source).run(feeds)[manifest.answer.output]
    assert relative_difference(values[manifest.answer.output], wanted) < TOLERANCES[precision]


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_an_exit_computes_in_float32_on_the_float32_cut_tensor(
    bundle: Bundle, precision: Precision
) -> None:
    exit_ = bundle.manifest.exits[1]
    unit = Unit(0, exit_.after_segment, exit_.index)
    found = onnx.ModelProto.FromString(graphs(bundle, precision).of(unit))
    alone = onnx.ModelProto.FromString(bundle.read(exit_.file))
    nodes = [node.SerializeToString() for node in found.graph.node]
    assert nodes[-len(alone.graph.node) :] == [n.SerializeToString() for n in alone.graph.node]
    weights = {t.name: t for t in found.graph.initializer}
    assert [weights[t.name] for t in alone.graph.initializer] == list(alone.graph.initializer)
    feeds = inputs_of(sliced(bundle.manifest.name), 6, seed=2)
    given = GraphRunner(found).run(feeds)
    wanted = GraphRunner(alone).run(given)  # of the cut tensor that the unit itself gave
    np.testing.assert_allclose(given[exit_.output], wanted[exit_.output], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_the_same_unit_gives_the_same_bytes(bundle: Bundle, precision: Precision) -> None:
    """Engines are keyed on them."""
    first, second = graphs(bundle, precision), graphs(bundle, precision)
    assert [first.of(u) for u in units_of(bundle)] == [second.of(u) for u in units_of(bundle)]


def test_fp16_weights_of_a_segment_are_half(bundle: Bundle) -> None:
    found = onnx.ModelProto.FromString(graphs(bundle, "fp16").of(Unit(1, 1, 1)))
    kinds = {
        t.data_type for t in found.graph.initializer if len(t.dims) > 1 and "exit" not in t.name
    }
    assert TensorProto.FLOAT16 in kinds
    assert TensorProto.FLOAT not in kinds


@pytest.mark.parametrize(("version", "opset"), [("8.6.1", 17), ("10.16.0.72", 18), ("11.4", 18)])
def test_only_tensorrt_8_gets_older_opsets(tmp_path: Path, version: str, opset: int) -> None:
    bundle = newer_bundle(tmp_path, 18)
    found = onnx.ModelProto.FromString(
        graphs(bundle, "fp16", version).of(source_unit(bundle.manifest))
    )
    assert found.opset_import[0].version == opset


def test_what_8_6_cannot_read_is_refused(tmp_path: Path) -> None:
    bundle = newer_bundle(tmp_path, 20)
    with pytest.raises(ModelError, match="Gelu came with opset 20"):
        graphs(bundle, "fp32", "8.6.1").of(source_unit(bundle.manifest))


def newer_bundle(folder: Path, opset: int) -> Bundle:
    """A bundle whose source file is of a newer opset, with an operator of 20 if it is that new."""
    bundle = engine_bundle("mlp", folder / "old.ee")
    source = onnx.ModelProto.FromString(bundle.read("source.onnx"))
    source.opset_import[0].version = opset
    if opset >= 20:
        relu = next(node for node in source.graph.node if node.op_type == "Relu")
        relu.op_type = "Gelu"
    files = {e.path: bundle.read(e.path) for e in bundle.manifest.files if e.path != "policy.json"}
    files["source.onnx"] = source.SerializeToString()
    bare = replace(bundle.manifest, files=())
    return write_bundle(folder / "new.ee", bare, bundle.policy, files)


def test_int8_needs_ranges(bundle: Bundle) -> None:
    with pytest.raises(ValueError, match="int8 needs the ranges of activations"):
        UnitGraphs(bundle, "int8", tensorrt_version="10.0")
