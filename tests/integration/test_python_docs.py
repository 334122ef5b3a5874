"""The blocks of ``docs/python.md`` run, one after the other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from tests.bundles import equal_times
from tests.models import mlp
from tests.small import _vectors

from offramp.bundle import Bundle
from offramp.engine.answers import criteria

DOCUMENT = Path(__file__).parents[2] / "docs" / "python.md"


@pytest.mark.slow
def test_every_block_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx.save(mlp(layers=4, classes=3), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", x=_vectors(1400, 0))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(criteria, "_REGISTERED", dict(criteria._REGISTERED))
    torch.set_num_threads(1)
    text = DOCUMENT.read_text(encoding="utf-8")
    blocks = [*re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)]
    assert len(blocks) == text.count("```python") > 8
    names: dict[str, Any] = {}
    with equal_times():
        for block in blocks:
            line = text.count("\n", 0, block.start(1))
            code = compile("\n" * line + block[1], str(DOCUMENT), "exec")
            exec(code, names)
    assert Bundle.open("model.ee").policy.active
    assert {path.name for path in tmp_path.glob("*.ee")} == {
        "model.ee", "Net.ee", "second.ee", "third.ee",
    }  # fmt: skip
    printed = capsys.readouterr().out.splitlines()
    assert "(8, 3)" in printed
    assert any(line.startswith("http://127.0.0.1:") for line in printed)
