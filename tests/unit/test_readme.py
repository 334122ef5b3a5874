"""Links, commands, options and names in the documents exist."""

from __future__ import annotations

import argparse
import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
from tests.documents import DOCUMENTS, PAGES, path_of

from offramp.cluster.planning.cluster_file import parse_cluster
from offramp.cluster.planning.ray_entry import RayEntry
from offramp.cluster.remote import eeworker
from offramp.compiler.commands.cli import COMMANDS as SUBCOMMANDS
from offramp.compiler.commands.cli import COMPILE
from offramp.compiler.data.reading_options import OPTIONS
from offramp.engine.models.options import ModelOptions
from offramp.engine.scheduling.policies import POLICIES, PolicyName
from offramp.server.arguments import make_parser
from offramp.tools.bench.cli import make_parser as bench_parser

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = "".join([README, *(p.read_text() for p in PAGES)])


@pytest.mark.parametrize("document", DOCUMENTS, ids=path_of)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    places = ("CONTRIBUTING.md", ".ci/run", ".github/workflows/ci.yml")
    text = README + "".join((ROOT / place).read_text() for place in places)
    named = set(re.findall(r"make ([a-z-]+)", text))
    assert {"demo", "test"} <= named
    for target in named - {"a"}:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


def test_python_blocks_compile() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        compile(block, "README.md", "exec")


def test_the_configuration_that_is_shown_is_one() -> None:
    shown = re.findall(r"```toml\n(.*?)```", COMMANDS, re.DOTALL)
    clusters = [parse_cluster(text.encode()) for text in shown if "[devices." in text]
    assert {tuple(device.name for device in file.devices) for file in clusters} == {
        ("fast", "slow"),
        ("cpu",),
        ("cuda",),
        ("large",),
    }
    (actors,) = [file for file in clusters if file.router.ray]
    assert actors.devices[0].resources == {"CPU": 2.0, "rack7": 1.0}
    assert actors.router.ray == RayEntry(address="node-a:6379", least=3)
    (on_gpus,) = [file for file in clusters if any(entry.gpus for entry in file.workers)]
    assert [(entry.address, entry.gpus) for entry in on_gpus.workers] == [
        (None, (0,)),
        ("10.0.0.2:7070", (1,)),
    ]
    (serving,) = [file for file in clusters if file.workers and file is not on_gpus]
    assert [(entry.address, entry.count) for entry in serving.workers] == [
        ("10.0.0.2:7070", 1),
        (None, 2),
    ]
    data = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/data.md").read_text(), re.DOTALL)
    assert data
    assert {key for text in data for key in tomllib.loads(text)} <= {o.field for o in OPTIONS}
    others = [text for text in shown if "[devices." not in text and text not in data]
    (text,) = [text for text in others if "[server]" not in text]
    document = tomllib.loads(text)
    assert set(document) == {"engine", "defaults", "models"}
    known = {field.name for field in fields(ModelOptions)} | {"path", "policy"}
    assert set(document["models"]["fashion"]) <= known


def test_every_policy_is_in_the_table() -> None:
    table = set(re.findall(r"`([a-z-]+)(?::[A-Z]+)?`", COMMANDS))
    assert {PolicyName.parse(f"{n}:final" if n == "fixed" else n).name for n in POLICIES} <= table


def test_every_option_is_explained() -> None:
    subparsers = [a for a in bench_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    commands = [parser for action in subparsers for parser in action.choices.values()]
    assert {parser.prog for parser in commands} == {
        "eebench compare", "eebench load", "eebench simulate",
    }  # fmt: skip
    compiling = [command.parser() for command in SUBCOMMANDS.values()]
    for parser in (COMPILE.parser(), *compiling, make_parser(), eeworker.make_parser(), *commands):
        for action in parser._actions:
            assert action.help, f"{parser.prog} {action.dest}"


def test_figures_are_filled_in() -> None:
    assert "FIGURES" not in README


def test_the_version_is_the_same_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = re.search(r"^## (\S+) – (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    cited = dict(
        re.findall(r"^([a-z-]+): (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    )
    assert newest[1] == cited["version"] == version
    assert newest[2] == cited["date-released"]
