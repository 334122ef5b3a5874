"""The page of the Python API, made of signatures and docstrings."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any, Final

MODULES: Final = ("offramp", "offramp.client", "offramp.api", "offramp.testing")
"""Modules whose ``__all__`` is the public API."""
_HEAD: Final = """\
# Python reference

This page is made of the docstrings. [The Python API](python.md) introduces it, with code that runs;
[Testing against Offramp](testing.md) does the same for the fakes.
"""
_SECTION: Final = re.compile(r"^(Args|Returns|Raises|Yields):$", re.MULTILINE)
_ROLE: Final = re.compile(r":\w+:`[~.]?(?:[^`<]*<)?([^`>]+)>?`")


def page() -> str:
    """Return the page, as Markdown."""
    return "\n".join([_HEAD, *(line for name in MODULES for line in _module(name))])


def _module(name: str) -> Iterator[str]:
    module = import_module(name)
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
    """Yield the documented attributes of a class: names, and the strings behind them."""
    try:
        (tree,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(found))).body
    except (OSError, TypeError, SyntaxError):
        return
    assert isinstance(tree, ast.ClassDef)
    for now, then in zip(tree.body, tree.body[1:], strict=False):
        if not isinstance(now, ast.AnnAssign) or not isinstance(then, ast.Expr):
            continue
        if isinstance(then.value, ast.Constant) and isinstance(then.value.value, str):
            yield ast.unparse(now.target), _roles(then.value.value)


def _callable(name: str, found: Any) -> Iterator[str]:
    try:
        signature = str(inspect.signature(found))
    except (TypeError, ValueError):
        signature = "(…)"
    signature = re.sub(r"(?<![\w.])(?:\w+\.)+(\w+)", r"\1", signature.replace("'", ""))
    if len(signature) > 80:
        signature = re.sub(r"(?<=[(,]) ?(?=[\w*/]+(?::|,|\)|=| =))", "\n    ", signature)
    yield f"```python\n{name}{signature}\n```\n"
    yield f"{_prose(found)}\n"


def _prose(documented: Any) -> str:
    """Return the docstring as Markdown; its sections become lists."""
    if isinstance(documented, ModuleType):
        return _roles(_blocks(inspect.getdoc(documented) or ""))
    text = inspect.getdoc(documented) or ""
    head, *sections = _SECTION.split(text)
    parts = [_roles(_blocks(head.strip()))]
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        parts.append(f"*{title}*\n\n{_items(body)}")
    return "\n\n".join(part for part in parts if part)


def _items(body: str) -> str:
    """Return the entries of a section as a list: ``name: text``, indented lines go on."""
    text = inspect.cleandoc(body)
    entries = re.split(r"\n(?=\S)", text)
    lines = []
    for entry in entries:
        flat = _roles(re.sub(r"\s*\n\s*", " ", entry.strip()))
        lines.append("- " + re.sub(r"^([\w.*, ]+): ", r"`\1`: ", flat))
    return "\n".join(lines)


def _blocks(text: str) -> str:
    """Return text with ``::`` and what is indented after it as a block of code."""

    def block(found: re.Match[str]) -> str:
        code = inspect.cleandoc("\n" + found[2]).rstrip()
        head = f"{found[1]}:\n\n" if found[1].strip() else ""
        return f"{head}```python\n{code}\n```\n"

    return re.sub(r"^(.*?)::\n\n((?:(?: {4}.*)?\n?)+)", block, text, flags=re.MULTILINE)


def _roles(text: str) -> str:
    return re.sub(r"``(.+?)``", r"`\1`", _ROLE.sub(r"`\1`", text))


def _cell(text: str) -> str:
    return re.sub(r"\s*\n\s*", " ", text.strip()).replace("|", "\\|")
