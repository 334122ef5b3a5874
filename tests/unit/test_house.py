"""The house is kept: names are unique, files stay readable, words are those of the field."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OUTSIDE = ("tests", "tools/gpu", "tools/zoo", "src")
"""Folders outside the product."""
PRODUCT = sorted(
    path
    for path in ROOT.glob("*/**/*.py")
    if not path.relative_to(ROOT).as_posix().startswith((*OUTSIDE, ".", "build"))
)
LONG, MOST_LONG = 600, 0
"""Lines from which a file is long, and how many may be."""

WORDS = {
    r"lanes?": "bucket",
    r"ripe(n\w*)?": "ready",
    r"heirs?|succession|successive(?! halving)": "next version, hot swap",
    r"deployment generations?": "deployment",
    r"ledgers?": "request table",
    r"outbox": "completion queue",
    r"watchful": "shift detector",
    r"look(s|ing|ed)? on": "shadow mode",
    r"serials?|serial numbers?": "sample ids",
    r"anatomy|surveys?": "model structure, analysis",
    r"prospects?": "savings estimator",
    r"ladders?": "threshold path",
    r"bold(er|est|ly)?": "aggressive",
    r"cautious(ly)?": "conservative",
    r"tally|tallies": "counters",
    r"hopeless": "infeasible",
    r"parked|parking": "buffered",
    r"slowness": "latency margin",
    r"findings\.md|design\.md": "nothing that the project does not have",
}
"""Words that we do not use, and what the field says instead."""
KEPT = {
    "hopeless": "a label of metrics",
    "cautious": "a label of metrics and a value of the control state",
    "bold": "a style of rich's",
}
"""Words in quotes that files, metrics or other libraries know by that name."""
TEXTS = (".py", ".md", ".html", ".j2", ".toml", ".css", ".svg", ".yml")
"""Suffixes without CUDA sources, where a lane is a thread of a warp."""
EXEMPT = ("tests/unit/test_house.py", "tests/unit/kernels/test_shim.py", "CHANGELOG.md")


def classes(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    return [n.name for n in tree.body if isinstance(n, ast.ClassDef) and n.name[0] != "_"]


def test_no_public_class_name_occurs_twice() -> None:
    names = Counter(name for path in PRODUCT for name in classes(path))
    assert len(names) > 300
    assert {name for name, count in names.items() if count > 1} == set()


def test_few_files_are_long() -> None:
    lines = {path: path.read_text().count("\n") for path in PRODUCT}
    assert len(lines) > 200
    long = {path.relative_to(ROOT).as_posix() for path, count in lines.items() if count > LONG}
    assert len(long) <= MOST_LONG, long


def tracked() -> list[str]:
    try:
        found = subprocess.run(
            ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout: what is whose is not known")
    return [name for name in found.stdout.splitlines() if name.endswith(TEXTS)]


def test_words_are_those_of_the_field() -> None:
    pattern = re.compile(
        rf"(?<![A-Za-z])({'|'.join(f'(?:{word})' for word in WORDS)})(?![a-z])", re.IGNORECASE
    )
    others = (
        r"\[/?bold[ \w]*\]",  # rich's styles
        r'"bold [\w ]+"',
        r"font-weight: bold",
        r"cautious \(no exit answers\)",  # the help of a metric, which lists its labels
    )
    quoted = re.compile("|".join((rf"""["'`](?:{"|".join(KEPT)})["'`]""", *others)))
    found = []
    for name in tracked():
        if name in EXEMPT:
            continue
        text = quoted.sub("", (ROOT / name).read_text(encoding="utf-8"))
        for number, line in enumerate(text.splitlines(), 1):
            found += [f"{name}:{number}: {match[0]}" for match in pattern.finditer(line)]
    assert found == []


def messages(path: Path) -> list[tuple[int, str]]:
    """The string literals of a file with a space in them, docstrings left out, and their lines."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    documenting = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return [
        (node.lineno, node.value)
        for node in nodes
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and " " in node.value
        and id(node) not in documenting
    ]


def test_no_message_names_a_class() -> None:
    names = {name for path in PRODUCT for name in classes(path) if re.search("[a-z][A-Z]", name)}
    pattern = re.compile(rf"\b(?:{'|'.join(names)})\b")
    found = [
        f"{path.relative_to(ROOT)}:{line}: {match[0]}"
        for path in PRODUCT
        if "benchmarks" not in path.relative_to(ROOT).parts  # they name policies of papers
        for line, text in messages(path)
        if (match := pattern.search(text))
    ]
    assert found == []


def test_docstrings_name_modules_that_are_there() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in PRODUCT
        for name in re.findall(r":mod:`\.(\w+)`", path.read_text())
        if not any((path.parent / place).exists() for place in (f"{name}.py", name))
    ]
    assert found == []
