"""Models with ``Loop``, ``If`` and ``Scan`` compiled with exits in use, served and exported."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from tests.bundles import compile_tiny
from tests.unit.compiler.test_bodies import MODELS, WIDTH

from offramp.compiler.export.export import ExportOptions, export_bundle
from offramp.engine.core import Engine
from offramp.engine.models.options import EngineOptions


@pytest.mark.parametrize("name", ["loop", "if", "scan"])
def test_compiled_served_and_exported(name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    kinds = rng.standard_normal((8, WIDTH)) * 3
    x = kinds[rng.integers(0, 8, 1400)] + rng.standard_normal((1400, WIDTH)) * 0.3
    bundle = compile_tiny(
        MODELS[name], {"x": x.astype(np.float32)}, tmp_path, epochs=3, simplify=False
    )
    assert bundle.policy.active
    asked = x[:64].astype(np.float32)
    source = ort.InferenceSession(bundle.read("source.onnx"), providers=["CPUExecutionProvider"])
    (wanted,) = source.run(["logits"], {"x": asked})

    async def ask():
        options = EngineOptions(keep_state=False, backend="onnxruntime")
        async with await Engine.open({"m": bundle.path}, options) as engine:
            return await engine.infer("m", {"x": asked})

    found = asyncio.run(ask())
    answer, ended = found.outputs["logits"], found.exits == -1
    assert (~ended).any()
    assert (answer.argmax(axis=1) == wanted.argmax(axis=1)).mean() > 0.9
    np.testing.assert_allclose(answer[ended], wanted[ended], rtol=1e-4, atol=1e-4)

    data, output = tmp_path / "data.npz", tmp_path / "exits.onnx"
    done = export_bundle(ExportOptions(bundle=bundle.path, data=data, output=output))
    assert done.verified.samples == 1400
