"""``eeserve --self-check`` on a GPU: no check may fail there."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.gpu.conftest import lacking

from offramp.compiler.commands.cli import main
from offramp.engine.models.options import EngineOptions
from offramp.engine.self_check import run_self_check
from offramp.engine.stages.plan import Mode

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(580)]


def test_nothing_fails(small: Path, transformer: Path) -> None:
    """With the best backend that the machine has for bundles without engines."""
    report = run_self_check(
        {"small": small, "transformer": transformer}, EngineOptions(mode=Mode.AUDIT)
    )
    assert report.passed, report.document()


def test_nothing_fails_on_tensorrt(small: Path, transformer: Path, example: Path) -> None:
    if reason := lacking(tensorrt=True):
        pytest.skip(reason)
    models = {"small": small, "transformer": transformer, "example": example}
    for name, path in models.items():
        sizes = ["--parts", "source,stages", "--batch-profiles", "1,2-32"]
        sizes += ["--buckets", "sequence=8,16"] if name == "transformer" else []
        assert main(["build", str(path), "--device", "cuda:0", *sizes]) == 0
    options = EngineOptions(mode=Mode.AUDIT, backend="tensorrt")
    report = run_self_check(models, options)
    assert report.passed, report.document()
