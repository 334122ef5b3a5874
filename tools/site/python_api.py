"""The page of the Python API, generated from signatures and docstrings."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final

MODULES: Final = ("offramp", "offramp.client", "offramp.api", "offramp.testing")
"""Modules whose ``__all__`` is the public API."""
_HEAD: Final = """\
# Python reference

This page is made of the docstrings. [The Python API](python.md) introduces it, with code that runs;
[Testing against Offramp](testing.md) does the same for the fakes.
"""
_SECTION: Final = re.compile(r"(Args|Returns|Raises|Yields):$")
_ROLE: Final = re.compile(r":\w+:`[~.]?(?:[^`<]*<)?([^`>]+)>?`")


def page() -> str:
    """Return the page on the Python API, as Markdown."""
    return "\n".join([_HEAD, *(line for name in MODULES for line in _module(name))])


def _module(name: str) -> Iterator[str]:
    module = pkgutil.resolve_name(name)
    yield f"## `{name}`\n"
    yield f"{_prose(module)}\n"
    for item in sorted(module.__all__, key=str.lower):
        found = getattr(module, item)
        if inspect.isclass(found):
            yield from _class(name, item, found)
        elif callable(found):
            yield f"### `{name}.{item}`\n"
            yield from _callable(item, found)


def _class(module: str, name: str, found: type) -> Iterator[str]:
    yield f"### `{module}.{name}`\n"
    if issubclass(found, BaseException):
        bases = ", ".join(f"`{base.__name__}`" for base in found.__bases__)
        yield f"{_prose(found)} An error, a kind of {bases}.\n"
        return
    if "\nArgs:\n" in (inspect.getdoc(found) or ""):  # other classes are not created by users
        yield f"```python\n{name}{_signature(found)}\n```\n"
    yield f"{_prose(found)}\n"
    fields = [*_fields(found)]
    if fields:
        yield "| field | |\n|---|---|"
        yield from (f"| `{field}` | {_cell(text)} |" for field, text in fields)
        yield ""
    for attribute, member in vars(found).items():
        if attribute.startswith("_") or not inspect.getdoc(member):
            continue
        if isinstance(member, property):
            yield f"#### `{name}.{attribute}`\n\n{_prose(member)}\n"
        elif callable(raw := getattr(member, "__func__", member)):
            yield f"#### `{name}.{attribute}`\n"
            yield from _callable(attribute, raw)


def _fields(found: type) -> Iterator[tuple[str, str]]:
    """Yield the documented attributes of a class: names, and the strings after them."""
    try:
        (tree,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(found))).body
    except (OSError, TypeError, SyntaxError):
        return
    assert isinstance(tree, ast.ClassDef)
    for now, then in zip(tree.body, tree.body[1:], strict=False):
        if not isinstance(now, ast.AnnAssign) or not isinstance(then, ast.Expr):
            continue
        name, text = ast.unparse(now.target), then.value
        documented = isinstance(text, ast.Constant) and isinstance(text.value, str)
        if documented and not name.startswith("_"):
            yield name, _roles(str(ast.literal_eval(text)))


def _callable(name: str, found: Any) -> Iterator[str]:
    yield f"```python\n{name}{_signature(found)}\n```\n"
    yield f"{_prose(found)}\n"


def _signature(found: Any) -> str:
    """Return the signature, without modules of types; a long one has several lines."""
    known = inspect.signature(found)
    parts: list[str] = []
    marks: dict[Any, str] = {inspect.Parameter.KEYWORD_ONLY: "*"}
    before = None
    for parameter in known.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if before is inspect.Parameter.POSITIONAL_ONLY and parameter.kind is not before:
            parts.append("/")
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            marks = {}
        parts += [mark] if (mark := marks.pop(parameter.kind, None)) else []
        parts.append(_short(str(parameter)))
        before = parameter.kind
    if before is inspect.Parameter.POSITIONAL_ONLY:
        parts.append("/")
    result = known.return_annotation
    end = "" if result is inspect.Signature.empty else f" -> {_short(_annotation(result))}"
    line = f"({', '.join(parts)}){end}"
    return line if len(line) < 80 else "(\n    " + ",\n    ".join(parts) + f",\n){end}"


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _short(text: str) -> str:
    """Return a parameter or type without quotes around types, and types without their modules."""
    text = re.sub(r"^([*\w]+: )'(.*?)'(?= = |$)", r"\1\2", text)
    return re.sub(r"\b(?:[A-Za-z_]\w*\.)+(?=[A-Z])", "", text)


def _prose(documented: Any) -> str:
    """Return the docstring as Markdown; its sections become lists."""
    if isinstance(documented, ModuleType):
        return _roles(_blocks(inspect.getdoc(documented) or ""))
    text = inspect.getdoc(documented) or ""
    parts, title, body = [], "", list[str]()
    for line in [*text.splitlines(), "end"]:
        begins = _SECTION.match(line)
        if begins or (title and line and not line.startswith(" ")):
            parts.append(f"*{title}*\n\n{_items(body)}" if title else _text(body))
            title, body = (begins[1], []) if begins else ("", [line])
        else:
            body.append(line)
    parts.append(_text(body[:-1]))
    return "\n\n".join(part for part in parts if part)


def _text(lines: list[str]) -> str:
    return _roles(_blocks("\n".join(lines).strip()))


def _items(lines: list[str]) -> str:
    """Return the entries of a section (``name: text``, continued by indented lines) as a list."""
    entries = re.split(r"\n(?=\S)", inspect.cleandoc("\n".join(["", *lines])))
    if not any(": " in entry for entry in entries):
        return _roles(" ".join(entries))
    flat = (_roles(re.sub(r"\s*\n\s*", " ", entry.strip())) for entry in entries)
    return "\n".join("- " + re.sub(r"^([\w.*, ]+): ", r"`\1`: ", entry) for entry in flat)


def _blocks(text: str) -> str:
    """Return text with ``::`` and what is indented after it as a block of code."""

    def block(found: re.Match[str]) -> str:
        code = inspect.cleandoc("\n" + found[2]).rstrip()
        head = f"{found[1]}:\n\n" if found[1].strip() else ""
        return f"{head}```{_language(code)}\n{code}\n```\n\n"

    return re.sub(r"^(.*?)::\n\n((?:(?: {4}.*)?\n?)+)", block, text, flags=re.MULTILINE)


def _language(code: str) -> str:
    try:
        compile(code, "docstring", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except SyntaxError:
        return "text"
    return "python"


def _roles(text: str) -> str:
    return re.sub(r"``(.+?)``", r"`\1`", _ROLE.sub(r"`\1`", text))


def _cell(text: str) -> str:
    return re.sub(r"\s*\n\s*", " ", text.strip()).replace("|", "\\|")
