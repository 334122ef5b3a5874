"""What pages say of code is so: blocks run or have a reason, and quoted messages are there."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator

import pytest
from tests.documents import DOCUMENTS, PAGES, ROOT, CodeBlock, blocks_of, path_of
from tests.unit.test_documented_commands import LINE

from offramp.compiler.common.options import COMPILE
from offramp.server.arguments.combinations import combinations
from offramp.server.common.errors import REFUSALS

RUN = {
    "docs/bundle.md": "tests/integration/test_python_docs.py",
    "docs/python.md": "tests/integration/test_python_docs.py",
    "docs/tutorial.md": "tests/integration/test_python_docs.py",
    "docs/testing.md": "tests/unit/testing/test_documentation.py",
    "docs/security.md": "tests/unit/server/test_security_doc.py",
}
"""Pages whose blocks a test runs, and the test."""
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
MODULE = re.compile(r"python -m ((?:benchmarks|examples|offramp|tests)[\w.]*)")
METRIC_MODULES = (
    "server/pages/metrics.py",
    "cluster/serving/plan_metrics.py",
    "generation/serving/text_pages.py",
)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python"], ids=str)
def test_python_runs_in_a_test_or_says_why_not(block: CodeBlock) -> None:
    compile(block.code, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    assert block.reason is not None or path_of(block.document) in RUN


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "sh"], ids=str)
def test_shell_has_our_commands_alone_or_says_why_not(block: CodeBlock) -> None:
    """Our commands are parsed by tests/unit/test_documented_commands.py."""
    if block.reason is None and path_of(block.document) not in RUN:
        for line in re.sub(r"\\\n\s*", "", block.code).splitlines():
            assert LINE.fullmatch(line), f"{block}: {line!r} is no command of ours"


def test_tests_that_run_pages_name_them() -> None:
    for page, test in RUN.items():
        assert page.rpartition("/")[2] in (ROOT / test).read_text(encoding="utf-8")


def test_reasons_name_files_that_are_there() -> None:
    reasons = [block.reason for block in BLOCKS if block.reason is not None]
    assert len(reasons) > 10
    for path in re.findall(r"tests/[\w/]+\.py", " ".join(reasons)):
        assert (ROOT / path).is_file(), path


@pytest.mark.parametrize("document", DOCUMENTS, ids=path_of)
def test_named_modules_are_there(document: object) -> None:
    for name in MODULE.findall(document.read_text(encoding="utf-8")):  # type: ignore[attr-defined]
        assert importlib.util.find_spec(name) is not None, name


def test_quoted_messages_are_those_of_the_code() -> None:
    """In the first column of the tables of ``docs/troubleshooting.md``."""
    known = " ".join(f" {text} " for text in messages())
    quoted = list(quotations())
    assert len(quoted) > 35
    missing: list[str] = []
    for message in quoted:
        for part in message.split("…"):
            missing += [] if part.strip() in known else [part.strip()]
    assert missing == []


def quotations() -> Iterator[str]:
    """Yield messages that are quoted: code of several words that is no command and no option."""
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    for line in text.splitlines():
        for code in re.findall(r"`([^`]+)`", line.split(" | ")[0]):
            if " " in code and not re.match(r"ee|http|--\S+ \S+$", code):
                yield code


def messages() -> Iterator[str]:
    """Yield the texts of the product, with a blank where a value is put in.

    Messages on options that exclude or need each other are composed by the commands: a message
    that the code also has elsewhere need not be what a command prints.
    """
    for row in (*combinations(), *COMPILE):
        if " " not in f"{row.option}{row.other}":  # without a value, which the user chose
            yield row.message({})
    for package in ("bundle", "calibration", "certify", "compiler", "engine", "server", "commands"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = (v.value if isinstance(v, ast.Constant) else "" for v in node.values)
                    yield re.sub(r"\[/?[a-z ]*\]", "", "".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield re.sub(r"\[/?[a-z ]*\]|%[\d.]*[sdgf]", "", node.value)


def test_reasons_of_refusals_are_all_explained() -> None:
    rows = table("docs/troubleshooting.md", "reasons")
    explained = {
        (reason, code)
        for row in rows
        for reason in re.findall(r"`(\w+)`", row[0])
        for code in re.findall(r"[A-Z_]{4,}", row[1])
    }
    refused = {(refusal.reason, refusal.code.name) for refusal in REFUSALS.values()}
    assert refused <= explained
    assert {reason for reason, _ in explained} == {reason for reason, _ in refused}


def test_benchmarks_are_modules_with_results() -> None:
    rows = table("docs/benchmarks.md", "benchmarks")
    assert len(rows) > 15
    for _, command, figures in rows:
        assert "benchmarks/results/" in figures, command


def table(page: str, name: str) -> list[list[str]]:
    """Return the rows of the table between ``<!-- name -->`` and ``<!-- end -->``."""
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = text.partition(f"<!-- {name} -->\n")[2].partition("<!-- end -->")[0].splitlines()
    return [line.strip("| ").split(" | ") for line in lines[2:]]


def test_metrics_are_all_in_the_reference() -> None:
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| `(offramp_\w+)`(?: \([^)]*\))? \| (\w+) \|", text, re.MULTILINE)
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in told)
    assert len(told) == len(dict(told))
    assert {re.sub("_(total|info)$", "", name) for name, _ in told} == set(metrics())


def metrics() -> Iterator[str]:
    """Yield the names of all metrics: keys of tables, and first arguments of families."""
    for module in METRIC_MODULES:
        for node in ast.walk(ast.parse((ROOT / module).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Dict):
                names = node.keys
            elif isinstance(node, ast.Call) and "MetricFamily" in ast.unparse(node.func):
                names = node.args[:1]
            else:
                continue
            for name in names:
                if isinstance(name, ast.Constant) and str(name.value).startswith("offramp_"):
                    yield str(name.value)
