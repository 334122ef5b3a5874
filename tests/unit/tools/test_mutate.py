"""Mutants are single changes that tests could notice, and the nearest tests judge them."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import offramp
from offramp.tools.mutate.changes import choose, mutants_of
from offramp.tools.mutate.nearness import Nearness, likeness


def changed(source: str) -> dict[str, set[str]]:
    """Lines of all mutants of a source that has one line to change, by operator."""
    found: dict[str, set[str]] = {}
    for mutant in mutants_of(source, "a/b.py"):
        text = mutant.apply(source.encode()).decode()
        ast.parse(text)
        (line,) = set(text.splitlines()) - set(source.splitlines())
        found.setdefault(mutant.operator, set()).add(line.strip())
    return found


@pytest.mark.parametrize(
    ("line", "operator", "mutants"),
    [
        ("x = a < b", "comparison", {"x = (a <= b)"}),
        ("x = a < b <= c", "comparison", {"x = (a <= b <= c)", "x = (a < b < c)"}),
        ("x = a is not b", "comparison", {"x = (a is b)"}),
        ("x = (a + b) * c", "arithmetic", {"x = ((a + b) / c)", "x = ((a - b)) * c"}),
        ("x += y", "arithmetic", {"x -= y"}),
        ("x += y", "deleted", {"pass"}),
        ("x = 3", "constant", {"x = (4)", "x = (2)"}),
        ("x = 0.5", "constant", {"x = (1.0)"}),
        ("x = 0.0", "constant", {"x = (1.0)"}),
        ("x = True", "constant", {"x = (False)"}),
        ("x = a and b", "and/or", {"x = (a or b)"}),
        ("x = not a", "negation", {"x = (a)"}),
        ("x = [y for y in z if f(y)]", "negation", {"x = [y for y in z if (not f(y))]"}),
        ("x = a if b else c", "swapped branches", {"x = (c if b else a)"}),
        ("x = min(a, b)", "extreme", {"x = (max)(a, b)"}),
        ("x = np.minimum(a, b)", "extreme", {"x = (np.maximum)(a, b)"}),
        ("x = f(a, key=b)", "dropped key", {"x = (f(a))"}),
        ("x.y = a", "deleted", {"pass"}),
        ("await x.leave()", "deleted", {"pass"}),
        ("x.sort()", "deleted", {"pass"}),
        ("return a", "returns None", {"return None"}),
        ("raise ValueError(f'{a} is not 3')", "deleted", {"pass"}),
        ("'ß'; x = a < b", "comparison", {"'ß'; x = (a <= b)"}),
    ],
)
def test_changes(line: str, operator: str, mutants: set[str]) -> None:
    found = changed(f"async def f():\n    {line}\n")
    assert found[operator] == mutants
    assert set(found) <= {operator, "deleted", "arithmetic"}


@pytest.mark.parametrize(
    "source",
    [
        '"""Docstring."""',
        "x: Literal[3]\n",
        "x: TypeAlias = Literal[3] | None\n",
        "def f(a: Literal[1] | None) -> Literal[2] | None: ...\n",
        "@dataclass(frozen=True)\nclass A: ...\n",
        "if TYPE_CHECKING:\n    x = 1\n",
        "if __name__ == '__main__':\n    main()\n",
        "def __repr__(self):\n    return f(3)\n",
        "logger.info('%d', 1 + 2)\n",
        "x = f'{a + 1}'\n",
        "assert a == 1\n",
        "x = zip(a, b, strict=True)\n",
        "x = y\n",
        "return None\n",
    ],
)
def test_what_no_test_should_notice_is_left_alone(source: str) -> None:
    assert mutants_of(source, "a/b.py") == []


def test_loops_and_branches() -> None:
    source = "while a:\n    if b.c():\n        break\n    continue\n"
    found = [(m.line, m.after) for m in mutants_of(source, "a/b.py")]
    assert found == [(1, "not a"), (2, "not b.c()"), (3, "continue"), (4, "break")]


def test_functions_are_named_as_python_does() -> None:
    source = (
        "a = 1\n"
        "class A:\n"
        "    b = True\n"
        "    def f(self, x=True):\n"
        "        def g():\n"
        "            return True\n"
        "        return g\n"
    )
    names = {(m.line, m.function) for m in mutants_of(source, "a/b.py")}
    assert names == {
        *((1, "<module>"), (3, "<module>"), (4, "<module>")),
        *((6, "A.f.<locals>.g"), (7, "A.f")),
    }


TREE = {
    "toy/__init__.py": "",
    "toy/numbers.py": (
        "def larger(a, b):\n    return a if a > b else b\n\n\n"
        "def forgotten(a):\n    return a * 2\n\n\n"
        "def until(limit):\n    n = 0\n    while n < limit:\n        n += 1\n    return n\n"
    ),
    "tests/unit/test_numbers.py": (
        "from toy.numbers import larger, until\n\n\n"
        "def test_larger():\n    assert larger(1, 2) == 2\n    assert larger(2, 1) == 2\n\n\n"
        "def test_until():\n    assert until(3) == 3\n"
    ),
    "tests/unit/test_broken.py": (
        "import toy.numbers\n\n\ndef test_broken():\n    assert toy.numbers.larger(1, 2) == 1\n"
    ),
    "tests/unit/test_words.py": "def test_words():\n    assert 'a' < 'b'\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_same_seed_draws_the_same_mutants(tree: Path) -> None:
    drawn = choose(tree, ["toy/numbers.py"], count=4, seed=3)
    assert drawn == choose(tree, ["toy/numbers.py"], count=4, seed=3)
    assert len({mutant.line for mutant in drawn}) == 4
    assert len(choose(tree, ["toy/numbers.py"], count=99, seed=3)) == 6


def test_the_nearest_import_it_and_are_named_alike(tree: Path) -> None:
    tests = [name for name in TREE if name.startswith("tests/")]
    nearness = Nearness(tree, list(TREE), tests)
    assert nearness.ranked("toy/numbers.py") == [
        "tests/unit/test_numbers.py",
        "tests/unit/test_broken.py",
    ]
    assert likeness("tests/unit/engine/test_plan.py", "engine/plan.py") == 3
    assert likeness("tests/unit/plan/test_engine.py", "engine/plan.py") == 2.5
    assert likeness("tests/unit/engine/test_core.py", "engine/plan.py") == 1.5
    assert likeness("tests/unit/test_core.py", "engine/plan.py") == 0


def test_a_small_tree(tree: Path) -> None:
    """What is tested dies, what is not survives, and what hangs is stopped; the tree is as it was.

    The file that fails unchanged has no say.
    """
    results = tree.parent / f"{tree.name}.json"
    source = Path(offramp.__path__[0]).parent
    run = subprocess.run(
        [sys.executable, "-m", "offramp.tools.mutate", f"--root={tree}", "--count=99", "--seed=5",
         "--grace=1", f"--json={results}"],
        env={**os.environ, "PYTHONPATH": str(source)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    outcomes = {
        (entry["mutant"]["function"], entry["outcome"]) for entry in json.loads(results.read_text())
    }
    assert ("forgotten", "survived") in outcomes
    assert {outcome for function, outcome in outcomes if function == "forgotten"} == {"survived"}
    assert "until" in {function for function, outcome in outcomes if outcome == "killed"}
    assert "test_broken.py: fails unchanged" in run.stderr
    assert "survived: toy/numbers.py:6" in run.stdout
    assert {str(p.relative_to(tree)): p.read_text() for p in tree.rglob("*.py")} == TREE
