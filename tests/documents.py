"""The documents of the repository, and their blocks of code."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted(ROOT.glob("docs/**/*.md"))
"""Pages of the site."""
DOCUMENTS = sorted([*ROOT.glob("*.md"), *PAGES, *ROOT.glob("examples/*/*.md")])
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^>]+) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeBlock:
    """A block of code of a document."""

    document: Path
    line: int
    """Number of its first line of code, from 1."""
    language: str
    code: str
    reason: str | None
    """Reason why no test runs it, from the comment ``<!-- not run: REASON -->`` before it."""

    def __str__(self) -> str:
        return f"{path_of(self.document)}:{self.line}"


def blocks_of(document: Path) -> list[CodeBlock]:
    """Return all blocks of code of a document."""
    text = document.read_text(encoding="utf-8")
    return [
        CodeBlock(
            document=document,
            line=text.count("\n", 0, found.start("code")) + 1,
            language=found["language"],
            code=found["code"],
            reason=found["reason"],
        )
        for found in BLOCK.finditer(text)
    ]


def path_of(document: Path) -> str:
    """Return the path of a document in the repository."""
    return document.relative_to(ROOT).as_posix()
