"""Bundles whose hashes are right and whose graphs are others than the manifest says."""

from __future__ import annotations

import asyncio
import io
import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from tests.engines import engine_bundle
from tests.facts import Told, facts
from tests.fuzz.bundle_campaign import campaign
from tests.fuzz.bundles import mutations
from tests.sliced import inputs_of, sliced
from tests.unit.bundle.examples import replace_file, rewrite_manifest

from offramp.bundle import Bundle, BundleError
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.common.errors import BackendError
from offramp.engine.core import Engine
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.stages.backend_protocol import StageResult
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import Mode, make_plan


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return engine_bundle("mlp", tmp_path / "m.ee").path


def change(root: Path, name: str, changed: Any) -> None:
    model = onnx.load(root / name)
    changed(model.graph)
    replace_file(root, name, model.SerializeToString())


def opened(root: Path, mode: Mode = Mode.LEAVE) -> None:
    """Use the bundle as a server does."""
    options = EngineOptions(
        mode=mode, backend="onnxruntime", threads=1, keep_state=False,
        defaults=ModelOptions(max_batch_size=2),
    )  # fmt: skip

    async def body() -> None:
        async with await Engine.open({"m": root}, options):
            pass

    asyncio.run(body())


def _other_input(graph: Any) -> None:
    graph.input[0].name = "elsewhere"
    for node in graph.node:
        for index, name in enumerate(node.input):
            if name == "x":
                node.input[index] = "elsewhere"


def _softmax_of_all(graph: Any) -> None:
    """Return a scalar in place of a confidence per row."""
    graph.node[-1].CopyFrom(
        helper.make_node("ReduceMax", [graph.node[-1].input[0]], [graph.output[1].name], keepdims=0)
    )
    del graph.output[1].type.tensor_type.shape.dim[:]


def test_a_name_that_is_no_text_is_refused_in_a_line(root: Path) -> None:
    """Protobuf's parser in ONNX Runtime takes it, and Python cannot read it."""
    model = onnx.load(root / "segments/00.onnx")
    _other_input(model.graph)
    content = model.SerializeToString().replace(b"elsewhere", b"\x98" * 9)
    replace_file(root, "segments/00.onnx", content)
    with pytest.raises(BackendError, match="cannot load stage 0: ") as caught:
        opened(root)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("segments/00.onnx", _other_input, ("stage 0", "['elsewhere']")),
        ("exits/01.onnx", lambda g: g.ClearField("output"), ("stage 0", "no part")),
        ("segments/00.onnx", lambda g: g.ClearField("initializer"), ("stage 0",)),
        ("exits/01.onnx", _softmax_of_all, ("confidences float32 []", "expected float32")),
    ],
)
def test_a_graph_that_is_another_is_refused_in_one_line(
    root: Path, name: str, changed: Any, message: Told
) -> None:
    change(root, name, changed)
    with pytest.raises(BackendError, match=facts(*message)) as caught:
        opened(root)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"x" * 10_000])
@pytest.mark.parametrize(
    ("name", "mode"), [("source.onnx", Mode.OFF), ("exits/01.onnx", Mode.LEAVE)]
)
def test_a_graph_that_is_none_is_refused_in_one_line(
    root: Path, name: str, mode: Mode, content: bytes
) -> None:
    replace_file(root, name, content)
    with pytest.raises(BackendError, match="ONNX Runtime cannot load stage 0") as caught:
        opened(root, mode)
    assert "\n" not in str(caught.value)


def test_nothing_is_printed_of_a_graph_that_cannot_be_loaded(
    root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """ONNX Runtime tells of an operator by bytes that are no text, and its wrapper tries again."""
    content = (root / "source.onnx").read_bytes()
    assert b"Gemm" in content
    replace_file(root, "source.onnx", content.replace(b"Gemm", b"G\x85mm"))
    with pytest.raises(BackendError, match="ONNX Runtime cannot load stage 0"):
        opened(root, Mode.OFF)
    assert capfd.readouterr().out == ""


def test_a_model_of_another_size_is_refused_when_it_is_warmed_up(root: Path) -> None:
    """The manifest says seven classes, the graphs give what they gave."""

    def seven(manifest: Any) -> None:
        manifest["answer"]["classes"] = 7
        manifest["outputs"][0]["shape"][1] = 7

    rewrite_manifest(root, seven)
    with pytest.raises(BackendError, match=r"with float32 \[2, 3\].*expected .*\[2, 7\]"):
        opened(root, Mode.OFF)


def test_warming_up_looks_at_every_answer(root: Path) -> None:
    backend = OnnxRuntimeBackend()
    pipeline = Pipeline(backend, make_plan(Bundle.open(root)))
    slot = backend.open_slot()
    inputs = inputs_of(sliced("mlp"), 3)
    pipeline.warm_up(slot, inputs)
    run = slot.run

    def spoilt(stage: Any, batch: Any, threshold: float | None = None) -> StageResult:
        result = run(stage, batch, threshold)
        return result._replace(confidence=result.confidence.astype(np.float64))

    slot.run = spoilt  # type: ignore[method-assign]
    with pytest.raises(BackendError, match=r"confidences float64 \[3\], expected float32 \[3, 3\]"):
        pipeline.warm_up(slot, inputs)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        (
            [{"name": "elsewhere", "lowest": 0, "highest": 1}],
            r"names \['elsewhere'\], which are not inputs",
        ),
        ([{"name": "x", "lowest": 1, "highest": 0}], "input_ranges.json"),
        ([{"name": "x", "lowest": 0}], "input_ranges.json"),
    ],
)
def test_ranges_that_are_none_are_refused_in_one_line(
    root: Path, ranges: list[Any], message: str
) -> None:
    assert Bundle.open(root).input_ranges() is not None
    replace_file(root, "input_ranges.json", json.dumps({"inputs": ranges}).encode())
    with pytest.raises(BundleError, match=message) as caught:
        opened(root, Mode.AUDIT)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("split", "purpose"), [(1, "certify"), (2, "tune")])
def test_records_of_one_split_alone_are_refused_in_one_line(
    root: Path, split: int, purpose: str
) -> None:
    """Savings, and whether exits keep their promise, cannot be computed without samples."""
    records = Bundle.open(root).records()
    content = io.BytesIO()
    np.savez(content, **{**records, "split": np.full_like(records["split"], split)})
    replace_file(root, "records.npz", content.getvalue())
    with pytest.raises(BundleError, match=f"'split' has no sample to {purpose} on") as caught:
        opened(root, Mode.AUDIT)
    assert "\n" not in str(caught.value)


def test_the_campaign_changes_input_ranges_too(root: Path) -> None:
    changed = [mutation.told for mutation in islice(mutations(root, 14), 60)]
    assert any(told.startswith("input_ranges.json") for told in changed)


def test_mutated_bundles_are_refused_or_answer_rightly() -> None:
    """A part of the campaign that ``python -m tests.fuzz.bundle_campaign`` runs at length."""
    found = list(campaign(40, seed=14))
    assert [f for f in found if f.wrong] == []
    assert {f.outcome for f in found} == {"refused", "answered"}


@pytest.mark.slow
def test_many_mutated_bundles_are_refused_or_answer_rightly() -> None:
    found = list(campaign(300, seed=15))
    assert len(found) == 300
    assert [f for f in found if f.wrong] == []
