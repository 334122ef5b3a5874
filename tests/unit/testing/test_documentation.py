"""docs/testing.md: its examples run, and its names are there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from offramp import testing

PAGE = (Path(__file__).parents[3] / "docs" / "testing.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_run_as_written(number: int) -> None:
    assert "assert" in EXAMPLES[number] or "pytest.raises" in EXAMPLES[number]
    exec(compile(EXAMPLES[number], f"testing.md, example {number}", "exec"), {"__name__": "page"})


def test_there_are_examples_of_server_backend_and_driver() -> None:
    for fake in ("FakeServer(", "FakeEngine(", "FakeBackend(", "FakeDriver("):
        assert any(fake in example for example in EXAMPLES)


def test_every_public_name_is_there_and_the_page_has_every_fake() -> None:
    for name in testing.__all__:
        assert getattr(testing, name) is not None
    fakes = {name for name in testing.__all__ if name.startswith("Fake")} - {"FakeSlot"}
    assert fakes == set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))


def test_a_name_that_is_not_there_is_told_with_those_that_are() -> None:
    with pytest.raises(AttributeError, match=r"has no 'FakeGpu'; it has SCRIPT, FakeBackend"):
        _ = testing.FakeGpu


def test_the_fake_backend_needs_neither_grpc_nor_the_compiler() -> None:
    code = (
        "import sys; from offramp.testing import FakeBackend\n"
        "print(sorted({'grpc', 'onnx', 'offramp.compiler', 'offramp.server'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"
