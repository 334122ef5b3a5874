"""Members of the bindings of TensorRT and PyCUDA by version, read from the fixtures.

- ``api.json``: TensorRT's classes that matter to us, 8.6.0, 10.16 and 11.4.
- ``api_names.json``: parts missing there: all names of the module, constructors, the parser's
  errors, severities. Read off the same bindings by ``read_api.py``.
- ``pycuda.json``: ``pycuda.driver`` of 2026.1, by ``read_api.py`` off a build of the real package.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
TENSORRT_VERSIONS = ("8.6.0", "10.16", "11.4")
_ALIASES = {"IParserError": "ParserError"}
"""Classes that signatures call by their C++ name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    name: str
    type: str
    """Without namespaces: ``BuilderFlag``; empty: anything."""
    optional: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One overload, without ``self``."""

    parameters: tuple[Parameter, ...]
    open_ended: bool
    """Takes any further arguments."""
    returns: str

    def complaint(self, call: ast.Call) -> str | None:
        """Return the error in the number or the names of a call's arguments."""
        keywords = [keyword.arg for keyword in call.keywords]
        if None in keywords or any(isinstance(a, ast.Starred) for a in call.args):
            return None  # f(*args, **kwargs): only the run can tell
        names = [parameter.name for parameter in self.parameters]
        by_position = names[: len(call.args)]
        if not self.open_ended:
            if len(call.args) > len(names):
                return f"takes {len(names)} arguments, not {len(call.args)}"
            for keyword in keywords:
                if keyword not in names[len(call.args) :]:
                    return f"takes no {keyword} there, but {', '.join(names) or 'nothing'}"
        given = {*by_position, *keywords}
        missing = [p.name for p in self.parameters if not p.optional and p.name not in given]
        return f"lacks {', '.join(missing)}" if missing else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bindings:
    """One version of one library."""

    library: str
    """``tensorrt`` or ``pycuda.driver``."""
    version: str
    names: Mapping[str, str]
    """All of the module; ``class``, a signature, or ``value: type``."""
    classes: Mapping[str, Mapping[str, str]]

    def __str__(self) -> str:
        return f"{self.library} {self.version}"

    @property
    def release(self) -> tuple[int, ...]:
        return tuple(int(part) for part in self.version.split("."))

    def has_member(self, name: str) -> bool:
        return any(name in members for members in self.classes.values())


@cache
def tensorrt(version: str) -> Bindings:
    main = _read("api.json")[version]
    more = _read("api_names.json")[version]
    classes: dict[str, dict[str, str]] = {}
    for name, members in main.items():
        if members is not None:
            enum = dict.fromkeys(members.get("enum", ()), f"value: {name}")
            classes[name] = enum or dict(members)
    for name, members in more["classes"].items():
        classes[name] = {**classes.get(name, {}), **members}
    return Bindings(library="tensorrt", version=version, names=more["names"], classes=classes)


@cache
def pycuda() -> Bindings:
    ((version, read),) = _read("pycuda.json").items()
    return Bindings(
        library="pycuda.driver", version=version, names=read["names"], classes=read["classes"]
    )


def _read(name: str) -> Any:
    return json.loads((FOLDER / name).read_text())


def signatures_of(text: str) -> tuple[Signature, ...]:
    """All overloads of a member as the fixtures write it; none: it is a value, not a function."""
    if text.startswith(("prop", "value:", "class")) or "(" not in text:
        return ()
    return tuple(_signature(overload) for overload in text.split(" || "))


def _signature(text: str) -> Signature:
    if ") -> " in text:
        inside, _, returns = text.partition("(")[2].rpartition(") -> ")
    else:
        inside, returns = text.partition("(")[2].rpartition(")")[0], ""
    parts = [part for part in _split(inside) if part not in ("/", "*")]
    names = [part.partition(":")[0].partition("=")[0].strip() for part in parts]
    own = 1 if names and names[0] in ("self", "func", "dev") else 0
    parameters = tuple(
        Parameter(
            name=name,
            type=short(part.partition(":")[2].partition(" = ")[0].strip()),
            optional="=" in part,
        )
        for name, part in list(zip(names, parts, strict=True))[own:]
        if not part.startswith("*")
    )
    open_ended = any(part.startswith("*") for part in parts)
    return Signature(parameters=parameters, open_ended=open_ended, returns=short(returns.strip()))


def _split(text: str) -> list[str]:
    """Split at commas outside brackets."""
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character in "([{<") - (character in ")]}>")
        if character == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    return [*parts, current.strip()] if current.strip() else parts


def short(name: str) -> str:
    """``nvinfer1::ILogger::Severity`` as ``Severity``."""
    last = name.replace("::", ".").rpartition(".")[2] if "[" not in name else name
    return _ALIASES.get(last, last)
