"""Which test files are nearest to a file: by what they import, and by their names."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

FARTHEST = 3
"""Imports between a test file and a file that it tests, at most."""
_SURELY_ALIKE = 2.0
"""More than all the same folders, or the same name, make."""


class Nearness:
    """Imports among the files of a tree."""

    def __init__(self, root: Path, files: Sequence[str], tests: Sequence[str]) -> None:
        """Read the imports of all ``files``; ``tests`` are some of them."""
        self._tests = tests
        known = {name for name in files if name.endswith(".py")}
        self._imports = {
            name: set(_imported((root / name).read_text(encoding="utf-8"), name, known))
            for name in known
            if (root / name).is_file()
        }

    def ranked(self, file: str) -> list[str]:
        """Test files that import a file, directly or not, or that are named alike; nearest first.

        The second kind may run it in a process of its own.
        """
        nearness = {}
        for test in self._tests:
            steps, alike = self._steps(test, file), likeness(test, file)
            if steps or alike >= _SURELY_ALIKE:
                nearness[test] = alike + (3 / steps if steps else 0)
        return sorted(nearness, key=lambda test: (-nearness[test], test))

    def _steps(self, test: str, file: str) -> int:
        """Imports from a test file to a file; 0 if there is no short way."""
        reached = {test}
        for steps in range(1, FARTHEST + 1):
            reached = {there for here in reached for there in self._imports.get(here, ())}
            if file in reached:
                return steps
        return 0


def likeness(test: str, file: str) -> float:
    """How much the names of a test file and of a file have in common, from 0 to 3."""
    *folders, name = PurePosixPath(test).with_suffix("").parts
    *own_folders, own_name = PurePosixPath(file).with_suffix("").parts
    words, own = set(name.split("_")) - {"test"}, set(own_name.split("_"))
    named = len(own & {*words, *folders}) / len(own)
    alike = len(words & own) / max(len(words | own), 1)
    within = len({*own_folders} & {*words, *folders}) / max(len(own_folders), 1)
    return named + alike / 2 + 1.5 * within


def _imported(source: str, file: str, known: set[str]) -> Iterator[str]:
    """Files of the tree that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            folder = list(PurePosixPath(file).parts[: -node.level]) if node.level else []
            base = ".".join([*folder, *([node.module] if node.module else [])])
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            parts = name.split(".")
            # The distribution's own package may only be a link to the folders beside it.
            for path in ("/".join(parts), "/".join(parts[1:])):
                yield from {f"{path}.py", f"{path}/__init__.py"} & known
