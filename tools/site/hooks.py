"""Hooks of mkdocs: links into the repository work on the site, some pages come from the code.

Pages are Markdown that reads well in the repository too, so a link may leave ``docs/``. On the
site, each target of such a link is a page or a copy below ``repository/``: no link leaves the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File
from pymdownx.slugs import slugify

from offramp.tools.site import commands, python_api

ROOT: Final = Path(__file__).resolve().parents[2]
DOCS: Final = "docs"
COPIES: Final = "repository"
"""Folder of the site with the files outside of ``docs/`` that pages link to."""
LINK: Final = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")
"""Relative links of Markdown; those with a scheme have a colon."""
CODE: Final = re.compile(r"^```.*?^```|`[^`\n]+`", re.DOTALL | re.MULTILINE)
LANGUAGES: Final = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".sh": "sh"}
AS_THEY_ARE: Final = {".json", ".svg", ".png"}
"""Files that browsers show; other files become a page with a block of code."""
HIDDEN: Final = "---\nsearch:\n  exclude: true\n---\n"
MADE: Final = {"commands.md": commands.page, "python_reference.md": python_api.page}
"""Pages that are generated from the code when the site is built, by path below ``docs/``."""


def on_config(config: Any) -> Any:
    """Use GitHub's anchors of headings, so that links work on GitHub and on the site."""
    config.mdx_configs["toc"] = {"permalink": True, "slugify": slugify(case="lower")}
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages generated from the code, and files outside of ``docs/`` that are linked."""
    for name, page in MADE.items():
        files.append(File.generated(config, name, content=page()))
    waiting = sorted(ROOT.joinpath(DOCS).rglob("*.md"))
    known = set(files.src_uris)
    while waiting:
        document = waiting.pop()
        for target in linked(document):
            place = place_of(target)
            if place in known or target.startswith(f"{DOCS}/"):
                continue
            known.add(place)
            path = ROOT / target
            if path.suffix in AS_THEY_ARE:
                files.append(File.generated(config, place, abs_src_path=str(path)))
                continue
            files.append(File.generated(config, place, content=page_of(path)))
            waiting += [path] if path.suffix == ".md" else []
            waiting += sorted(path.rglob("*.md")) if path.is_dir() else []
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change links so that they point to their targets on the site."""
    origin = in_repository(page.file.src_uri)
    return relink(markdown, origin, page.file.src_uri)


def relink(markdown: str, origin: str, place: str) -> str:
    """Return a page with its links as they are on the site.

    Args:
        markdown: The page, with links relative to its place in the repository.
        origin: Path of the page in the repository, such as ``CONTRIBUTING.md``.
        place: Where the site has the page, such as ``repository/CONTRIBUTING.md``.
    """
    folder = posixpath.dirname(place)

    def point(link: re.Match[str]) -> str:
        target = resolve(link[2], origin)
        where = posixpath.relpath(place_of(target), folder or ".")
        return f"{link[1]}{where}{link[3] or ''}{link[4]}"

    parts, end = [], 0
    for code in CODE.finditer(markdown):  # a link in code is no link, its text in code is
        parts += [LINK.sub(point, markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, LINK.sub(point, markdown[end:])])


def linked(document: Path) -> list[str]:
    """Return the files that a document links to, by their paths in the repository."""
    text = CODE.sub("`", document.read_text(encoding="utf-8"))
    origin = document.relative_to(ROOT).as_posix()
    return sorted({resolve(link[2], origin) for link in LINK.finditer(text)})


def resolve(link: str, origin: str) -> str:
    """Return the path in the repository that a link in the document ``origin`` leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))


def place_of(target: str) -> str:
    """Return the place on the site of a path in the repository."""
    if target.startswith(f"{DOCS}/"):
        return target.removeprefix(f"{DOCS}/")
    path = ROOT / target
    if path.is_dir():
        return f"{COPIES}/{target}/index.md"
    if path.name == "README.md":  # mkdocs makes it the index of its folder
        return f"{COPIES}/{target.removesuffix('README.md')}about.md"
    return f"{COPIES}/{target}" + ("" if path.suffix in {*AS_THEY_ARE, ".md"} else ".md")


def in_repository(place: str) -> str:
    """Return the path in the repository of a page of the site."""
    if not place.startswith(f"{COPIES}/"):
        return f"{DOCS}/{place}"
    target = place.removeprefix(f"{COPIES}/")
    return re.sub(r"(^|/)about\.md$", r"\1README.md", target)


def page_of(path: Path) -> str:
    """Return the page of a file or folder outside of ``docs/``, kept out of the search."""
    if path.suffix == ".md":
        return HIDDEN + path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        inside = [
            f for f in sorted(path.rglob("*")) if f.is_file() and "__pycache__" not in f.parts
        ]
        lines = [f"- `{file.relative_to(ROOT).as_posix()}`" for file in inside]
        return f"{HIDDEN}# `{name}/`\n\nFiles of the repository:\n\n" + "\n".join(lines) + "\n"
    text = path.read_text(encoding="utf-8").rstrip("\n")
    language = LANGUAGES.get(path.suffix, "")
    return f"{HIDDEN}# `{name}`\n\n````{language}\n{text}\n````\n"
