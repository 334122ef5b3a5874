"""Reads names and signatures from the real bindings, for the fixtures next to this file.

Run by hand, where the bindings can be imported; they need no GPU for it, and of the libraries
below them only their symbols:

    python tests/unit/tensorrt/read_api.py tensorrt ParserError … > part.json

Without class names, all classes are read.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from typing import Any

_BOOST_ARGUMENT = re.compile(r"\((\w+)\)(\w+)(?:=([^\s,\[\])]+))?")


def read_module(module: Any, classes: list[str]) -> dict[str, Any]:
    """``{"names": {name: kind}, "classes": {class: {member: signature}}}``."""
    public = {n: getattr(module, n) for n in dir(module) if not n.startswith("_")}
    public = {n: value for n, value in public.items() if not inspect.ismodule(value)}
    if hasattr(module, "__version__"):
        public["__version__"] = module.__version__
    wanted = classes or [name for name, value in public.items() if isinstance(value, type)]
    return {
        "names": {name: kind_of(name, value) for name, value in public.items()},
        "classes": {name: members_of(public[name]) for name in wanted if name in public},
    }


def kind_of(name: str, value: Any) -> str:
    if isinstance(value, type):
        return "class"
    if type(value).__name__ in ("function", "builtin_function_or_method"):
        return signature_of(name, value)
    return f"value: {type(value).__name__}"


def members_of(class_: type) -> dict[str, str]:
    members = {}
    for name in dir(class_):
        value = inspect.getattr_static(class_, name)
        static = isinstance(value, staticmethod)
        if name == "__init__" and ") ->" in (value.__doc__ or ""):
            members[name] = signature_of(name, value, static=False)
        elif name != "__call__" and (
            name.startswith("_") or hasattr(int, name) or hasattr(Exception, name)
        ):
            continue
        elif isinstance(value, property):
            members[name] = "prop" if value.fset else "prop (ro)"
        elif static or (callable(value) and not isinstance(value, type)):
            function = value.__func__ if static else value
            members[name] = signature_of(name, function, static=static)
        else:
            members[name] = f"value: {type(value).__name__}"
    return members


def signature_of(name: str, value: Any, *, static: bool = True) -> str:
    """All overloads of a function, one after the other, as pybind11 writes them."""
    lines = [re.sub(r"^\d+\. ", "", line.strip()) for line in (value.__doc__ or "").splitlines()]
    found = [line for line in lines if re.match(rf"{name}\(.*\) ->", line)]
    found = [_boost(name, line, static=static) if line.endswith(":") else line for line in found]
    found = [line.replace("tensorrt.tensorrt.", "") for line in found]
    if not found:
        try:
            found = [f"{name}{inspect.signature(value)}"]
        except (TypeError, ValueError):
            found = [f"{name}(*args, **kwargs)"]
    return " || ".join(dict.fromkeys(found))


def _boost(name: str, line: str, *, static: bool) -> str:
    """``f( (int)a [, (int)b=0]) -> T :`` as ``f(a: int, b: int = 0) -> T``."""
    inside, _, result = line.rpartition(") -> ")
    optional = inside.find("[")
    arguments = []
    for index, match in enumerate(_BOOST_ARGUMENT.finditer(inside)):
        type_, argument, default = match.groups()
        default = default or ("..." if match.start() > optional >= 0 else "")
        called = "self" if index == 0 and not static else argument
        arguments.append(f"{called}: {type_}" + (f" = {default}" if default else ""))
    return f"{name}({', '.join(arguments)}) -> {result.rstrip(' :')}"


if __name__ == "__main__":
    read = read_module(importlib.import_module(sys.argv[1]), sys.argv[2:])
    json.dump(read, sys.stdout, indent=1, sort_keys=True)
