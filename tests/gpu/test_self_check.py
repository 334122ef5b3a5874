"""What ``eeserve --self-check`` does on a GPU: nothing may fail there."""

from __future__ import annotations

from pathlib import Path

import pytest

from offramp.engine.options import EngineOptions
from offramp.engine.plan import Mode
from offramp.engine.self_check import run_self_check

pytestmark = pytest.mark.gpu


def test_nothing_fails(small: Path, transformer: Path) -> None:
    """With the best backend that the machine has for bundles without engines."""
    report = run_self_check(
        {"small": small, "transformer": transformer}, EngineOptions(mode=Mode.AUDIT)
    )
    assert report.passed, report.document()
