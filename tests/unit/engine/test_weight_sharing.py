"""Stages on shared weights: they answer as others do, run on the file itself, and are chosen so."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from tests.bundles import sharing_weights
from tests.engines import engine_bundle
from tests.facts import tells
from tests.sliced import inputs_of, sliced
from tests.unit.bundle import examples
from tests.unit.bundle.test_variants import variant

from offramp.bundle import Bundle, Manifest, SharingCost
from offramp.bundle.graph_weights import WEIGHTS
from offramp.bundle.schema.manifest import FileEntry
from offramp.compiler.graphs import weights
from offramp.compiler.graphs.weights import pack_weights
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend, make_session
from offramp.engine.backends.openvino import OpenVinoBackend
from offramp.engine.graphs.external_weights import WeightForm
from offramp.engine.models.options import ModelOptions
from offramp.engine.models.weight_sharing import MOST_MORE_TIME, share_weights
from offramp.engine.stages.plan import Plan, make_plan

PACKED, SHARED = WeightForm.PACKED, WeightForm.SHARED
ROWS = 5
COSTS = tuple(
    SharingCost(variant=number, time_ratio=ratio, half_width=0.01, packed_bytes=2**20)
    for number, ratio in enumerate((1.0, 1 + MOST_MORE_TIME, 1.25))
)
"""Costs of the full model and two variants: the first is cheap enough, the second is not."""


def shared_bundle(name: str, folder: Path) -> Bundle:
    return sharing_weights(engine_bundle(name, folder / "held.ee"), folder / "named.ee")


def mapped(folder: Path) -> int:
    """Return the number of this process's mappings of the folder's weights."""
    maps = Path("/proc/self/maps").read_text()
    return maps.count(f" {folder.resolve() / WEIGHTS}\n")


def answers(plan: Plan, form: WeightForm, inputs: Mapping[str, Any]) -> list[NDArray[Any]]:
    """Return the output of every stage, as if no sample left."""
    backend = OnnxRuntimeBackend()
    slot = backend.open_slot()
    batch, found = slot.upload(inputs), []
    for spec in plan.stages:
        result = slot.run(backend.prepare(replace(spec, weight_form=form)), batch)
        found += [a for a in (result.answer, result.confidence) if a is not None]
        if result.carry is not None:
            found += list(result.carry.tensors.values())
            batch = result.carry
    return found


@pytest.mark.parametrize("name", ["residual", "vgg", "bert", "recurrent", "towers", "dense"])
def test_shared_weights_give_the_same_answers(name: str, tmp_path: Path) -> None:
    """Sums are in another order: float32, so equal to 1e-5 of the largest."""
    plan, inputs = make_plan(shared_bundle(name, tmp_path)), inputs_of(sliced(name), ROWS)
    found, expected = answers(plan, SHARED, inputs), answers(plan, PACKED, inputs)
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        if one.dtype.kind == "f":
            scale = max(float(np.abs(other).max()), 1e-9)
            np.testing.assert_allclose(one / scale, other / scale, atol=1e-5)
        else:
            np.testing.assert_array_equal(one, other)


def test_a_stage_that_shares_runs_on_the_file_and_another_does_not(tmp_path: Path) -> None:
    bundle = shared_bundle("residual", tmp_path)
    stage, backend = make_plan(bundle).stages[0], OnnxRuntimeBackend()
    packed = backend.prepare(stage)
    assert mapped(bundle.path) == 0
    shared = backend.prepare(replace(stage, weight_form=SHARED))
    assert mapped(bundle.path) > 0
    del shared
    assert mapped(bundle.path) == 0
    assert packed.spec is stage


def test_graphs_that_hold_their_weights_are_not_slowed_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[WeightForm] = []
    stage = make_plan(engine_bundle("residual", tmp_path / "held.ee")).stages[0]
    backend = OnnxRuntimeBackend()
    load = backend.load

    def observed(model: bytes, folder: Path | None = None, form: WeightForm = PACKED) -> Any:
        asked.append(form)
        return load(model, folder, form)

    monkeypatch.setattr(backend, "load", observed)
    whole = replace(stage, load=partial(stage.load))
    backend.prepare(replace(whole, weight_form=SHARED))
    assert asked == [PACKED]


def settings_of(session: Any) -> dict[str, str]:
    options = session.get_session_options()
    keys = ("session.disable_prepacking", "optimization.disable_specified_optimizers")
    found = {}
    for key in keys:
        try:
            found[key] = options.get_session_config_entry(key)
        except RuntimeError:
            continue
    return {key: value for key, value in found.items() if value}


def test_the_form_reaches_the_session() -> None:
    model = onnx.helper.make_model(
        helper.make_graph(
            [helper.make_node("Abs", ["x"], ["y"])],
            "g",
            [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])],
            [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    ).SerializeToString()
    assert settings_of(make_session(model, 1)) == {}
    found = settings_of(make_session(model, 1, form=SHARED))
    assert found["session.disable_prepacking"] == "1"
    assert "ConvMulFusion" in found["optimization.disable_specified_optimizers"].split(";")


def scaled_convolution() -> onnx.ModelProto:
    """Return a convolution followed by a scale and a shift, as SubnetNorm creates for a subnet."""
    rng = np.random.default_rng(0)

    def constant(name: str, shape: Sequence[int]) -> onnx.TensorProto:
        return numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)

    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w", "b"], ["raw"], pads=[1, 1, 1, 1]),
            helper.make_node("Mul", ["raw", "scale"], ["scaled"]),
            helper.make_node("Add", ["scaled", "shift"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 16, 6, 6])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 16, 6, 6])],
        [
            constant("w", (16, 16, 3, 3)),
            constant("b", (16,)),
            constant("scale", (1, 16, 1, 1)),
            constant("shift", (1, 16, 1, 1)),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_a_scale_after_a_convolution_is_not_folded_into_shared_weights(tmp_path: Path) -> None:
    whole = scaled_convolution().SerializeToString()
    packed = pack_weights({"m": whole}, None)
    assert packed.sizes.file_bytes == 16 * 16 * 9 * 4
    (tmp_path / WEIGHTS).write_bytes(b"".join(packed.pieces()))
    image = np.random.default_rng(1).standard_normal((2, 16, 6, 6)).astype(np.float32)
    (expected,) = make_session(whole, 1).run(None, {"x": image})
    session = make_session(packed.graphs["m"], 1, tmp_path, SHARED)
    assert mapped(tmp_path) == 1, "the weight itself, and no product of it and the scale"
    (found,) = session.run(None, {"x": image})
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_stages_of_one_graph_are_one_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "LEAST_BYTES", 64)
    bundle = shared_bundle("residual", tmp_path)
    stage, backend = make_plan(bundle).stages[-1], OnnxRuntimeBackend()
    one, other = backend.prepare(stage), backend.prepare(replace(stage, index=7))
    assert one.execute.__self__ is other.execute.__self__  # type: ignore[attr-defined]
    apart = backend.prepare(replace(stage, weight_form=SHARED))
    assert apart.execute.__self__ is not one.execute.__self__  # type: ignore[attr-defined]
    again = tmp_path / "again"
    again.write_bytes((bundle.path / WEIGHTS).read_bytes())
    again.replace(bundle.path / WEIGHTS)
    newer = backend.prepare(stage)
    assert newer.execute.__self__ is not one.execute.__self__  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------------------------
# Who shares


def manifest(*, costs: tuple[SharingCost, ...] = COSTS, file: bool = True) -> Manifest:
    described = FileEntry(path=WEIGHTS, sha256="0" * 64, size_bytes=1)
    return replace(
        examples.MANIFEST,
        variants=(variant(1), variant(2, "width 0.5")),
        weight_sharing=costs,
        files=(described,) if file else (),
    )


@pytest.mark.parametrize(
    ("asked", "forms", "audits"),
    [
        ("never", (PACKED, PACKED, PACKED), PACKED),
        ("auto", (PACKED, SHARED, PACKED), SHARED),
        ("always", (SHARED, SHARED, SHARED), SHARED),
    ],
)
def test_what_is_asked_decides(
    asked: str, forms: tuple[WeightForm, ...], audits: WeightForm
) -> None:
    found = share_weights(manifest(), asked, OnnxRuntimeBackend(), served=2)
    assert (found.forms, found.audits) == (forms, audits)
    ratios = {n: COSTS[n].time_ratio for n, form in enumerate(forms) if form is SHARED}
    assert found.time_ratios == ratios


def test_bundles_that_were_not_measured_share_only_if_asked() -> None:
    """Older bundles do not; and if no variant serves, there is no other user of the weights."""
    backend, older = OnnxRuntimeBackend(), manifest(costs=())
    assert share_weights(older, "auto", backend, served=2).forms == (PACKED,) * 3
    asked = share_weights(older, "always", backend, served=2)
    assert asked.forms == (SHARED,) * 3
    assert asked.describe(older).endswith("width 0.5 (not measured)")
    assert share_weights(manifest(), "auto", backend, served=0).forms == (PACKED,)
    assert share_weights(manifest(), "always", backend, served=0).forms == (SHARED,)


def test_the_choice_of_weight_sharing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        share_weights(manifest(), "auto", OnnxRuntimeBackend(), served=2)
        share_weights(manifest(), "never", OnnxRuntimeBackend(), served=2)
        share_weights(manifest(), "auto", OnnxRuntimeBackend(), served=0)
    name = examples.MANIFEST.name
    assert caplog.messages == [
        f"{name}: one copy of weights in memory for depth 1 of 2 ({COSTS[1].describe()})",
        f"{name}: each model has its own weights in memory",
    ]


def test_what_cannot_share_says_why(caplog: pytest.LogCaptureFixture) -> None:
    held = share_weights(manifest(file=False), "always", OnnxRuntimeBackend(), served=2)
    assert held.forms == (PACKED,) * 3
    tells(caplog.text, "--share-weights always", "no effect", WEIGHTS)


def test_another_runtime_maps_nothing(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("openvino", reason="openvino is not installed")
    found = share_weights(manifest(), "always", OpenVinoBackend(), served=2)
    assert found.forms == (PACKED,) * 3
    tells(caplog.text, "openvino-cpu", "--backend onnxruntime")


def test_times_are_predicted_as_they_will_be() -> None:
    sharing = share_weights(manifest(), "always", OnnxRuntimeBackend(), served=2)
    profile = examples.PROFILE
    slowed = sharing.slowed(profile, 2)
    np.testing.assert_allclose(slowed.segments_ms, 1.25 * np.array(profile.segments_ms))
    np.testing.assert_allclose(slowed.source_ms, 1.25 * np.array(profile.source_ms))
    assert slowed.stages_ms == profile.stages_ms, "borders have no weights"
    packed = share_weights(manifest(), "never", OnnxRuntimeBackend(), served=2)
    assert packed.slowed(profile, 2) is profile


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'some', expected one of auto, always, never$"):
        ModelOptions(share_weights="some")
