"""Packages of the code and their imports: the table in CONTRIBUTING.md, and its drawing.

Both are generated from the source, including lazy imports and those for types:

    python -m offramp.tools.layers            # writes CONTRIBUTING.md and docs/layers.svg
"""

from __future__ import annotations

import ast
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parents[1]
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
DRAWING = ROOT / "docs" / "layers.svg"
SCRIPTS: Final = ("tools.gpu", "tools.zoo")
"""Packages of scripts, which run on separate machines with other packages; they may import
everything."""
BEGIN, END = "<!-- packages -->\n", "<!-- end of packages -->\n"
"""Markers before and after the table."""

_WIDTH, _MARGIN, _GAP, _LINE = 960, 24, 16, 15
_HEAD, _PAD = 22, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package of the code, with its imports."""

    name: str
    """Dotted name without ``offramp``, such as ``engine.scheduling``."""
    purpose: str
    """Purpose: the first line of its docstring."""
    imports: tuple[str, ...]
    """Our other packages that it imports; packages inside these are separate."""
    third_party: tuple[str, ...]
    """Names of third-party packages that the package imports."""


def module_name(path: Path, root: Path = ROOT) -> str:
    """Return the dotted name of a file's module, with ``offramp`` in front."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(["offramp", *(part for part in parts if part != "__init__")])


def imports_of(source: str, module: str, *, is_package: bool) -> Iterator[str]:
    """Yield full names of all imports anywhere in a source, also lazy and type imports.

    A computed name yields ``?dynamic``.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")
            if node.level:
                base = base[: len(base) - node.level + is_package]
            prefix = [*base] if node.level else []
            name = ".".join([*prefix, *([node.module] if node.module else [])])
            yield from (f"{name}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            called = node.func.id if isinstance(node.func, ast.Name) else called
            if called in ("import_module", "__import__") and node.args:
                argument = node.args[0]
                yield str(argument.value) if isinstance(argument, ast.Constant) else "?dynamic"


def is_within(name: str, *packages: str) -> bool:
    """Return whether a dotted name is a package of a list, or inside one."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def top_folders(root: Path = ROOT) -> list[str]:
    """Return the top-level folders that are packages of ours, in the order of their names."""
    return sorted(link.name for link in (root / "src" / "offramp").iterdir() if link.is_symlink())


def read_modules(root: Path = ROOT) -> dict[str, set[str]]:
    """Return the imports of each module, by its dotted name."""
    return {
        module_name(path, root): set(
            imports_of(
                path.read_text(encoding="utf-8"),
                module_name(path, root),
                is_package=path.name == "__init__.py",
            )
        )
        for top in top_folders(root)
        for path in sorted((root / top).rglob("*.py"))
    }


def read_packages(root: Path = ROOT) -> dict[str, Package]:
    """Read all packages except those of scripts, by name; outer packages before inner ones."""
    modules = read_modules(root)
    purposes = {
        ".".join(path.parent.relative_to(root).parts): _first_line(path)
        for top in top_folders(root)
        for path in sorted((root / top).rglob("__init__.py"))
    }
    names = [name for name in sorted(purposes) if not is_within(name, *SCRIPTS)]

    def package_of(imported: str) -> str:
        """Return the innermost package that a name is in."""
        return max((n for n in purposes if is_within(imported, f"offramp.{n}")), key=len)

    packages = {}
    for name in names:
        own = [m for m in modules if package_of(m) == name]
        used = {imported for module in own for imported in modules[module]}
        ours = {i for i in used if is_within(i, "offramp") and i.count(".") > 1}
        others = {i.partition(".")[0] for i in used} - {*sys.stdlib_module_names, "offramp"}
        packages[name] = Package(
            name=name,
            purpose=purposes[name],
            imports=tuple(sorted({package_of(i) for i in ours} - {name})),
            third_party=tuple(sorted(others - {"?dynamic"})),
        )
    return packages


def _first_line(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0].rstrip()


def circles(packages: Iterable[Package]) -> list[list[str]]:
    """Return the sets of packages that import each other in a circle, outermost names first."""
    imported = {package.name: set(package.imports) for package in packages}
    reached = {name: _reached(name, imported) for name in imported}
    found = {
        tuple(sorted(other for other in reached[name] if name in reached.get(other, ())))
        for name in imported
    }
    return [list(circle) for circle in sorted(found) if circle]


def _reached(name: str, imported: Mapping[str, set[str]]) -> set[str]:
    """Return all direct and indirect imports of a package."""
    found: set[str] = set()
    new = set(imported[name])
    while new:
        found |= new
        new = {other for each in new for other in imported.get(each, ())} - found
    return found


def table(packages: Iterable[Package]) -> str:
    """Write the table: a row for each package."""
    rows = ["| package | what it is for | imports | besides |", "|---|---|---|---|"]
    for package in packages:
        ours = ", ".join(f"`{other}`" for other in package.imports) or "–"
        besides = ", ".join(f"`{other}`" for other in package.third_party) or "–"
        purpose = package.purpose.replace(":mod:", "").replace(":class:", "").replace("``", "`")
        rows.append(f"| `{package.name.replace('.', '/')}/` | {purpose} | {ours} | {besides} |")
    return "\n".join(rows) + "\n"


def with_table(text: str, packages: Iterable[Package]) -> str:
    """Replace the table between its markers in a text; ValueError if the markers are missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected the marks {BEGIN.strip()} and {END.strip()}")
    return f"{before}{begin}\n{table(packages)}\n{end}{after}"


def levels(packages: Mapping[str, Package]) -> list[list[str]]:
    """Return the top-level packages by layer; each imports only from lower layers.

    Raises:
        ValueError: Packages import each other in a circle.
    """
    imported = _between_tops(packages)
    placed: list[list[str]] = []
    while left := [name for name in imported if not any(name in layer for layer in placed)]:
        done = {name for layer in placed for name in layer}
        layer = [name for name in left if imported[name] <= done]
        if not layer:
            raise ValueError(f"packages import each other in a circle: {sorted(left)}")
        placed.append(layer)
    return placed


def _top(name: str) -> str:
    return name.partition(".")[0]


def _between_tops(packages: Mapping[str, Package]) -> dict[str, set[str]]:
    """Return the imports of each top-level package, including its inner packages' imports."""
    imported: dict[str, set[str]] = {_top(name): set() for name in packages}
    for package in packages.values():
        imported[_top(package.name)] |= {_top(other) for other in package.imports} - {
            _top(package.name)
        }
    return imported


def draw(packages: Mapping[str, Package]) -> str:
    """Draw the layers as SVG: the base at the bottom, each package with its inner ones."""
    body, top = [], float(_MARGIN)
    for layer in reversed(levels(packages)):
        width = (_WIDTH - 2 * _MARGIN - _GAP * (len(layer) - 1)) / len(layer)
        boxes = [_box(packages, name, width) for name in layer]
        height = max(box_height for _, box_height in boxes)
        for column, (lines, _) in enumerate(boxes):
            left = _MARGIN + column * (width + _GAP)
            body.append(
                f'<rect x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" rx="6" '
                'fill="#eef3f8" stroke="#30475e"/>'
            )
            body += [_text(left + _PAD, top + y, text, style) for y, text, style in lines]
        top += height + _GAP
    total = top - _GAP + _MARGIN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {total:g}" '
        'font-family="system-ui, sans-serif" font-size="12" role="img" '
        'aria-label="The packages in layers: each imports from those below it only">'
    )
    return "\n".join((head, _DARK, *body, "</svg>\n"))


_DARK = (
    "<style>@media (prefers-color-scheme: dark) { "
    'rect { fill: #22303d; stroke: #5b7590 } text[fill="#1d2f40"] { fill: #e4e7ea } '
    'text[fill="#30475e"] { fill: #d5dee6 } text[fill="#2f5d2e"] { fill: #9fd39d } '
    'text[fill="#5b6b7a"] { fill: #a3b1bd } }</style>'
)
"""Colours for dark pages; the background is that of the page."""


_Line = tuple[float, str, str]
"""Distance from the box's top; text; style."""


def _box(packages: Mapping[str, Package], name: str, width: float) -> tuple[list[_Line], float]:
    """Return the lines of a package's box, and its height."""
    inside = [package for package in packages.values() if package.name.startswith(f"{name}.")]
    columns = int((width - 2 * _PAD) / 6.1)
    lines: list[_Line] = [(_HEAD, f"{name}/", "name")]
    y = float(_HEAD)
    for text in textwrap.wrap(packages[name].purpose, columns):
        y += _LINE
        lines.append((y, text, "text"))
    for package in inside:
        y += _LINE * 1.2
        first, *rest = textwrap.wrap(
            f"{package.name.partition('.')[2]}: {package.purpose}", columns
        )
        lines.append((y, first, "inside"))
        for text in rest:
            y += _LINE
            lines.append((y, f"   {text}", "inside"))
    imported = sorted(_between_tops(packages)[name])
    for text in textwrap.wrap(
        "imports " + (", ".join(imported) if imported else "no other package"), columns
    ):
        y += _LINE * 1.1
        lines.append((y, text, "imports"))
    return lines, y + _PAD


def _text(x: float, y: float, text: str, style: str) -> str:
    look = {
        "name": 'font-weight="600" font-size="14" fill="#1d2f40"',
        "text": 'fill="#30475e"',
        "inside": 'fill="#2f5d2e"',
        "imports": 'fill="#5b6b7a" font-style="italic"',
    }[style]
    return f'<text x="{x:g}" y="{y:g}" {look} xml:space="preserve">{escape(text)}</text>'


def main() -> None:
    """Write the table and the drawing."""
    packages = read_packages()
    text = with_table(CONTRIBUTING.read_text(encoding="utf-8"), packages.values())
    CONTRIBUTING.write_text(text, encoding="utf-8")
    DRAWING.write_text(draw(packages), encoding="utf-8")
    print(f"wrote {CONTRIBUTING.relative_to(ROOT)} and {DRAWING.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
