"""Facts about our sources that the checker needs before it reads one of them."""

from __future__ import annotations

import ast
from collections.abc import Iterable

LIBRARIES = ("tensorrt", "pycuda")


def names_bindings(tree: ast.AST) -> bool:
    """Return True if a module uses one of the libraries at all."""
    return any(
        (isinstance(node, ast.Import) and any(is_library(a.name) for a in node.names))
        or (isinstance(node, ast.ImportFrom) and not node.level and is_library(node.module or ""))
        or (isinstance(node, ast.Name) and node.id == "trt")
        or (isinstance(node, ast.Call) and imported_by(node) != "")
        for node in ast.walk(tree)
    )


def own_names(trees: Iterable[ast.AST]) -> frozenset[str]:
    """Attributes that our own classes and modules have."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.update([node.attr] if ast.unparse(node.value) == "self" else [])
    return frozenset(found)


def return_types(trees: Iterable[ast.AST]) -> dict[str, ast.expr]:
    """Return the declared return types of our functions, by name."""
    found: dict[str, ast.expr] = {}
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef) and node.returns is not None:
            found[node.name] = node.returns
    return found


def is_library(module: str) -> bool:
    return module.partition(".")[0] in LIBRARIES


def imported_by(call: ast.Call) -> str:
    """The library's module that ``import_module("…")`` names."""
    if last_name(call.func) == "import_module" and call.args:
        argument = call.args[0]
        if isinstance(argument, ast.Constant) and is_library(str(argument.value)):
            return str(argument.value)
    return ""


def last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def predicates(tree: ast.Module) -> dict[str, ast.expr]:
    """Functions without arguments that return one expression, by name: ``has_progress()``."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.args.args:
            last = node.body[-1]
            only = all(isinstance(s, ast.Expr) for s in node.body[:-1])
            if only and isinstance(last, ast.Return) and last.value is not None:
                found[node.name] = last.value
    return found
