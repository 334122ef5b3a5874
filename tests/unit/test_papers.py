"""docs/papers.md: what it names is there. Flags and links are held as those of every document."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "docs" / "papers.md").read_text().splitlines()
ROWS = [line.strip("| ").split(" | ") for line in LINES if re.match(r"\| \d", line)]
NONE = "–"
PAPERS = ["PAME", "Apparate", "E³", "SuperServe"]


def paths(cell: str) -> list[str]:
    """Return the paths in the repository that a cell names."""
    return re.findall(r"`([\w/]+\.(?:py|md))`", cell)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:30])
def test_a_row_names_what_there_is(row: list[str]) -> None:
    assert len(row) == 6, "section, here, where, by, test, figures"
    _, _, where, _, test, _ = row
    assert where == NONE or paths(where)
    assert test == NONE or paths(test)
    for path in paths(" ".join(row)):
        assert (ROOT / path).is_file(), path
    for path in paths(test):
        assert path.startswith("tests/")


def test_every_paper_has_its_sections() -> None:
    headings = [line for line in LINES if line.startswith("## ")]
    assert [heading.split()[1] for heading in headings[:-1]] == PAPERS
    assert len(ROWS) >= 30


def test_what_repeats_a_figure_is_there() -> None:
    lines = "\n".join(LINES).partition("## Figures and tables\n")[2].splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("| ")][1:]
    assert {row[0].split(",")[0].strip() for row in rows} == {*PAPERS, ""}
    for row in rows:
        assert len(row) == 5, "figure or table, shows, repeated by, kind, figures"
        assert re.search("measured|emulated|simulated|predicted", row[3]), row
        names = re.findall(r"`(benchmarks\.\w+|tools/gpu/benchmark\.sh)", row[2])
        assert names, row
        for name in names:
            path = ROOT / (name if "/" in name else name.replace(".", "/"))
            assert any(p.exists() for p in (path, path.with_suffix(".py"))), name
