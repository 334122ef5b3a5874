"""The blocks of ``docs/python.md``, ``tutorial.md`` and ``bundle.md`` run, one after the other."""

from __future__ import annotations

import dataclasses
import re
import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from tests.bundles import compile_tiny, equal_times
from tests.documents import ROOT, CodeBlock, blocks_of
from tests.e2e.conftest import launcher
from tests.models import mlp
from tests.small import _vectors

import offramp
from offramp.bundle import Bundle
from offramp.engine.answers import criteria

SMALLER = {
    "SAMPLES = 20_000": "SAMPLES = 6_000",
    "BLOCKS = 12": "BLOCKS = 2",
    "REVIEWS = 16_000": "REVIEWS = 2_400",
    "LAYERS = 8": "LAYERS = 2",
    "REQUESTS = 1000": "REQUESTS = 20",
}
"""Lines of the tutorial that the test makes smaller."""


def run(block: CodeBlock, names: dict[str, Any]) -> None:
    """Run a block of Python; errors have its line of the page."""
    lines = "\n" * (block.line - 1)
    exec(compile(lines + block.code, str(block.document), "exec"), names)


@pytest.mark.slow
def test_every_block_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx.save(mlp(layers=4, classes=3), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", x=_vectors(1400, 0))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(criteria, "_REGISTERED", dict(criteria._REGISTERED))
    torch.set_num_threads(1)
    blocks = blocks_of(ROOT / "docs" / "python.md")
    assert {block.language for block in blocks} == {"python"}
    assert len(blocks) > 8
    names: dict[str, Any] = {}
    with equal_times():
        for block in blocks:
            run(block, names)
    assert Bundle.open("model.ee").policy.active
    assert {path.name for path in tmp_path.glob("*.ee")} == {
        "model.ee", "Net.ee", "second.ee", "third.ee",
    }  # fmt: skip
    printed = capsys.readouterr().out.splitlines()
    assert "(8, 3)" in printed
    assert any(line.startswith("http://127.0.0.1:") for line in printed)
    assert any(line.startswith("46 of 3000 differ, with the thresholds [") for line in printed)


def test_the_page_on_bundles_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it computes of new data is what is served."""
    compile_tiny(
        mlp(layers=4, classes=3), {"x": _vectors(1400, 0)}, tmp_path, name="fashion", epochs=2
    )
    x = _vectors(200, 1)
    np.savez(tmp_path / "new.npz", x=x)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks_of(ROOT / "docs" / "bundle.md"):
        if block.language == "python":
            run(block, names)
    exits = len(names["bundle"].manifest.exits)
    assert names["right"].shape[0] == exits
    assert names["agrees"].shape == (exits, 200)
    with offramp.load("fashion.ee", mode="leave", state=False) as model:
        served = model.predict(x=x)
    early = np.flatnonzero(served.exits >= 0)
    assert early.size
    left = served.exits[early], early
    answers = np.array(names["answers"])
    np.testing.assert_allclose(np.array(names["confidence"])[left], served.confidences[early], 1e-4)
    np.testing.assert_allclose(answers[left], served.outputs["logits"][early], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning")  # torch's own
def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On fewer samples and layers; each server serves until the next one is started."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    names: dict[str, Any] = {}
    made, served, address = [], [], ""
    with ExitStack() as servers, equal_times():
        launch = launcher(servers, tmp_path)
        for block in blocks_of(ROOT / "docs" / "tutorial.md"):
            if block.language == "python":
                code = block.code.replace("127.0.0.1:8001", address)
                for long, short in SMALLER.items():
                    made += [long] * code.count(long)
                    code = code.replace(long, short)
                run(dataclasses.replace(block, code=code), names)
            elif block.reason is None:
                servers.pop_all().close()
                launch = launcher(servers, tmp_path)
                command, *words = shlex.split(block.code)
                assert command == "eeserve"
                server = launch(*words)
                address = server.address
                served.append(server.models)
        page = server.get("/")
    assert sorted(made) == sorted(SMALLER), "each line is there once"
    assert served == [("garments",), ("garments", "reviews"), ("plain",)]
    assert re.search(r"recorded [1-9]\d* of 4,000", page)
    assert Bundle.open("reviews.ee").policy.active
    assert names["result"].outputs["logits"].argmax(1).tolist() == [1], "it likes the film"
