"""The site is built strictly, its links lead somewhere, and it takes nothing from elsewhere."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from tests.documents import PAGES, ROOT

import offramp
import offramp.client
from offramp.tools.site import commands, hooks

LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}
"""Elements that a browser loads something for, and the attribute that says what."""


@dataclass(slots=True)
class Html(HTMLParser):
    """Links and names of a page."""

    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        HTMLParser.__init__(self)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.names |= {str(found[key]) for key in ("id", "name") if found.get(key)}
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))
        if tag in LOADED and found.get(LOADED[tag]):
            self.loaded.append(str(found[LOADED[tag]]))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}", "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Html]:
    found = {}
    for path in site.rglob("*.html"):
        found[path] = Html()
        found[path].feed(path.read_text(encoding="utf-8"))
    return found


def test_every_document_is_a_page(pages: dict[Path, Html], site: Path) -> None:
    names = {path.relative_to(site).with_suffix(".md").as_posix() for path in pages}
    assert {page.relative_to(ROOT / "docs").as_posix() for page in PAGES} <= names
    assert {"commands.md", "python_reference.md", "repository/CONTRIBUTING.md"} <= names


def test_links_lead_somewhere(pages: dict[Path, Html]) -> None:
    count = 0
    for path, page in pages.items():
        if path.name == "404.html":  # its links are from the root of a server
            continue
        for link in page.links:
            if re.match(r"[a-z]+:", link):
                continue
            place, _, name = link.partition("#")
            target = (path.parent / unquote(place)).resolve() if place else path
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file(), f"{path.name} links to {link}"
            if name and target in pages:
                assert unquote(name) in pages[target].names, f"{path.name} links to {link}"
            count += 1
    assert count > 1000


def test_nothing_is_loaded_from_elsewhere(pages: dict[Path, Html], site: Path) -> None:
    for path, page in pages.items():
        outside = [place for place in page.loaded if re.match(r"([a-z]+:)?//", place)]
        assert outside == [], path.name
        assert "mermaid" not in page.names
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?https?:", style.read_text(encoding="utf-8")), style.name


def test_commands_are_all_in_the_reference(site: Path) -> None:
    text = (site / "commands.html").read_text(encoding="utf-8")
    for name, parser in commands.parsers().items():
        section = re.search(rf"<h2 id=[^>]*><code>{name}</code>.*?(?=<h2 id=|\Z)", text, re.DOTALL)
        assert section is not None, name
        told = set(re.findall(r"<code>(--?[\w-]+)", section[0]))
        shown = [a for a in parser._actions if a.help != argparse.SUPPRESS]
        flags = {flag for action in shown for flag in action.option_strings}
        assert flags <= told, name


def test_public_names_are_all_in_the_reference(site: Path) -> None:
    text = (site / "python_reference.html").read_text(encoding="utf-8")
    for module in (offramp, offramp.client):
        for name in set(module.__all__) - {"__version__"}:
            assert f"<code>{module.__name__}.{name}</code>" in text
    assert "``" not in text
    assert ":class:" not in text


@pytest.mark.parametrize(
    ("text", "origin", "place", "wanted"),
    [
        ("[a](control.md#x)", "docs/a.md", "a.md", "[a](control.md#x)"),
        ("[a](../deploy)", "docs/a.md", "a.md", "[a](repository/deploy/index.md)"),
        ("[a](../../README.md)", "docs/howto/a.md", "howto/a.md", "[a](../repository/about.md)"),
        ("[a](docs/gpu.md)", "CONTRIBUTING.md", "repository/CONTRIBUTING.md", "[a](../gpu.md)"),
        ("`[a](b.md)` [a](#b)", "docs/a.md", "a.md", "`[a](b.md)` [a](#b)"),
        ("[a](https://a.example/b.md)", "docs/a.md", "a.md", "[a](https://a.example/b.md)"),
    ],
)
def test_links_are_pointed_at_places_of_the_site(
    text: str, origin: str, place: str, wanted: str
) -> None:
    assert hooks.relink(text, origin, place) == wanted
