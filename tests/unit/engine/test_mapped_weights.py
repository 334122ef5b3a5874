"""Stages whose weights are mapped from the bundle's file answer as those that hold them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from tests import models
from tests.bundles import sharing_weights
from tests.engines import engine_bundle
from tests.sliced import inputs_of, sliced

from offramp.bundle import Bundle
from offramp.bundle.graph_weights import WEIGHTS, named_weights
from offramp.compiler.graphs import weights
from offramp.compiler.graphs.weights import WeightSizes, pack_weights
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend, make_session
from offramp.engine.core import Engine
from offramp.engine.models.options import EngineOptions
from offramp.engine.stages.plan import Mode, Plan, StageGraph, make_chained_plan, make_plan

ROWS = 5
MODELS = ("residual", "vgg", "bert", "recurrent", "towers", "dense", "conditional")


def shared(name: str, folder: Path) -> Bundle:
    """A bundle whose graphs name all of their weights."""
    return sharing_weights(engine_bundle(name, folder / "held.ee"), folder / "named.ee")


def holding(plan: Plan) -> Plan:
    """The same with graphs that hold their weights, as other runtimes get them."""
    stages = (replace(spec, load=lambda graph=spec.load: graph()) for spec in plan.stages)
    return replace(plan, stages=tuple(stages))


def answers(plan: Plan, inputs: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    """Return all outputs of every stage, as if no sample left."""
    backend = OnnxRuntimeBackend()
    slot = backend.open_slot()
    batch, found = slot.upload(inputs), []
    for spec in plan.stages:
        result = slot.run(backend.prepare(spec), batch)
        found += [a for a in (result.answer, result.confidence) if a is not None]
        if result.carry is not None:
            found += list(result.carry.tensors.values())
            batch = result.carry
    return found


@pytest.mark.parametrize("name", MODELS)
def test_answers_are_the_same_to_the_bit(name: str, tmp_path: Path) -> None:
    bundle, inputs = shared(name, tmp_path), inputs_of(sliced(name), ROWS)
    assert WeightSizes.of(bundle).graph_bytes > 0
    for plan in (
        make_plan(bundle),
        make_plan(bundle, mode=Mode.OFF),
        make_chained_plan(bundle),
    ):
        for stage in plan.stages:
            graph, folder = stage.load_light()
            assert folder == bundle.path.resolve()
            assert not named_weights(stage.load(), 0)
            assert bool(named_weights(graph, 2**40)) == (len(graph) < len(stage.load()))
        found, expected = answers(plan, inputs), answers(holding(plan), inputs)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_stage_of_a_graph_of_somebodys_own_holds_its_weights(tmp_path: Path) -> None:
    named = shared("residual", tmp_path)
    stage = make_plan(named).stages[0]
    assert isinstance(stage.load, StageGraph)
    whole = stage.load()
    other = replace(stage, load=lambda: b"another graph")
    assert other.load_light() == (b"another graph", None)
    assert replace(stage, bundle=None).load_light() == (whole, None)


def test_a_bundle_whose_graphs_hold_their_weights_gives_no_folder(tmp_path: Path) -> None:
    stage = make_plan(Bundle.open(Path(__file__).parents[2] / "golden/bundle")).stages[0]
    assert stage.load_light() == (stage.load(), None)


def test_a_folder_whose_name_is_no_text_is_not_told_to_onnx_runtime(tmp_path: Path) -> None:
    held = shared("residual", tmp_path)
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.ee"))
    named = sharing_weights(held, folder)
    stage = make_plan(named).stages[0]
    assert stage.load_light() == (stage.load(), None)
    inputs = inputs_of(sliced("residual"), ROWS)
    found = answers(make_plan(named), inputs)
    for a, b in zip(answers(make_plan(held), inputs), found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_place_where_a_program_was_started_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither does a file of that name there, which ONNX Runtime would read if it were asked."""
    named = shared("residual", tmp_path)
    inputs = inputs_of(sliced("residual"), ROWS)
    expected = answers(make_plan(named), inputs)
    monkeypatch.chdir(tmp_path)
    Path(WEIGHTS).write_bytes(bytes((named.path / WEIGHTS).stat().st_size))
    found = answers(make_plan(Bundle.open("named.ee")), inputs)
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_engine_serves_what_was_replaced_meanwhile_as_it_was(tmp_path: Path) -> None:
    """A bundle is replaced by a rename, as the compiler does: what is mapped stays what it was."""
    named = shared("residual", tmp_path)
    inputs = inputs_of(sliced("residual"), ROWS)
    options = EngineOptions(mode=Mode.OFF, backend="onnxruntime", threads=1, keep_state=False)

    async def serve() -> tuple[Any, Any]:
        async with await Engine.open({"m": named.path}, options) as engine:
            before = await engine.infer("m", inputs)
            other = tmp_path / "other"
            other.write_bytes(bytes((named.path / WEIGHTS).stat().st_size))
            other.replace(named.path / WEIGHTS)
            return before.outputs, (await engine.infer("m", inputs)).outputs

    before, after = asyncio.run(serve())
    for one, other in zip(before.values(), after.values(), strict=True):
        np.testing.assert_array_equal(one, other)


def half_precision() -> onnx.ModelProto:
    """A residual network of float16."""
    model = models.residual_cnn()
    graph = model.graph
    for tensor in graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            array = onnx.numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    del graph.value_info[:]
    return model


def test_weights_of_half_precision_are_mapped_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "LEAST_BYTES", 64)
    model = half_precision()
    whole = model.SerializeToString()
    packed = pack_weights({"m": whole}, None)
    (tmp_path / WEIGHTS).write_bytes(b"".join(packed.pieces()))
    light = packed.graphs["m"]
    assert len(light) < len(whole) / 2
    value = model.graph.input[0]
    sizes = [dim.dim_value or 3 for dim in value.type.tensor_type.shape.dim]
    image = np.random.default_rng(0).standard_normal(sizes).astype(np.float16)
    one, other = make_session(whole, 1), make_session(light, 1, tmp_path)
    for a, b in zip(
        one.run(None, {value.name: image}), other.run(None, {value.name: image}), strict=True
    ):
        np.testing.assert_array_equal(a, b)
