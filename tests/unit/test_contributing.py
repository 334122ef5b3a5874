"""The walks and the map in CONTRIBUTING.md name files and functions that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
STEPS = re.findall(r"^\| `([\w/]+\.py)`: ((?:`\w+`(?:, )?)+) \| (.*?) \|", TEXT, re.MULTILINE)
FILES = sorted(set(re.findall(r"`((?:\w+/)+[a-z_]\w*\.py)`", TEXT)))


def names_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def test_both_walks_are_read() -> None:
    assert len(STEPS) > 18
    assert len(FILES) > 25


@pytest.mark.parametrize("path", FILES)
def test_named_files_exist(path: str) -> None:
    assert (ROOT / path).is_file()


@pytest.mark.parametrize(("path", "functions", "types"), STEPS)
def test_steps_name_functions_and_types_that_are_there(
    path: str, functions: str, types: str
) -> None:
    assert set(re.findall(r"`(\w+)`", functions)) <= names_in(path)
    text = (ROOT / path).read_text(encoding="utf-8")
    for name in re.findall(r"`(\w+)`", types):
        assert re.search(rf"\b{name}\b", text), f"{path} does not know {name}"
