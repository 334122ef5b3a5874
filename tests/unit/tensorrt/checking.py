"""Holds code against the names that the bindings have.

A small type inference over the syntax tree: the types of variables are known from annotations
(``builder: "trt.Builder"``), from constructors and from what the fixtures say that a method
returns. What stays unknown falls under a weaker rule: an attribute must be one that *some* class
of the bindings has, or one of ordinary Python or of our own code.

In the compatibility module, and only there, code may depend on the version. It is read once for
each version, and branches that the version rules out are left out: ``if major(trt) >= 10:``,
``if version < (10, 0):``, ``if hasattr(config, "progress_monitor"):``.
"""

from __future__ import annotations

import ast
import ctypes
import logging
import re
import subprocess
import threading
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from tests.unit.tensorrt.bindings import Bindings, signatures_of
from tests.unit.tensorrt.branches import decide
from tests.unit.tensorrt.members import FOREIGN, Finding, Members, Type
from tests.unit.tensorrt.sources import (
    imported_by,
    is_library,
    last_name,
    predicates,
    return_types,
)

_MODULE_NAMES = {"trt": "tensorrt", "tensorrt": "tensorrt"}
"""Variables or attributes of these names refer to the module, from any source."""
_ORDINARY = (
    str, bytes, bytearray, memoryview, int, float, list, dict, set, tuple, type, BaseException,
    Path, re.Pattern, re.Match, logging.Logger, logging.LogRecord, threading.Thread,
    threading.Lock, threading.Event, threading.Condition, ExitStack, np.ndarray, np.dtype,
    np.float32, ctypes.CDLL, ctypes.Array, ctypes.c_int, subprocess.CompletedProcess,
    subprocess.Popen, type(cache(len)),
)  # fmt: skip
ORDINARY_NAMES = frozenset(name for class_ in _ORDINARY for name in dir(class_)) | {"value"}
"""Attributes of what is no object of the bindings."""


def check(
    tree: ast.Module,
    bindings: Collection[Bindings],
    *,
    own: Collection[str] = (),
    returns: Mapping[str, ast.expr] | None = None,
    by_version: bool = False,
) -> list[Finding]:
    """Everything in a module that these versions of the libraries do not have.

    Args:
        tree: The module.
        bindings: At most one version of each library.
        own: Attributes of our own objects.
        returns: Annotations of our own functions.
        by_version: Leave out branches that are for other versions.
    """
    checker = _Checker(
        members=Members({one.library: one for one in bindings}),
        ordinary=ORDINARY_NAMES | set(own),
        returns={**(returns or {}), **return_types([tree])},
        by_version=by_version,
        predicates=predicates(tree),
    )
    checker.run(tree)
    return sorted(set(checker.members.findings))


@dataclass(slots=True)
class _Checker:
    members: Members
    ordinary: Collection[str]
    returns: Mapping[str, ast.expr]
    by_version: bool
    predicates: Mapping[str, ast.expr]
    scopes: list[dict[str, Type | None]] = field(default_factory=lambda: [{}])
    attributes: dict[str, Type] = field(default_factory=dict)
    """Attributes of ``self``, and of our own objects, by name."""

    @property
    def release(self) -> tuple[int, ...]:
        return self.members.bindings["tensorrt"].release

    def run(self, tree: ast.Module) -> None:
        self._collect_imports(tree)
        for _ in range(2):  # what one method puts into an attribute, a method above may use
            self.members.findings.clear()
            self.block(tree.body)

    # --- names -----------------------------------------------------------------------------

    def _collect_imports(self, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    name = alias.name if alias.asname else alias.name.partition(".")[0]
                    bound = alias.asname or name
                    self.scopes[0][bound] = Type("module", name) if is_library(name) else FOREIGN
            elif isinstance(node, ast.ImportFrom):
                ours = not node.level and is_library(node.module or "")
                for alias in node.names:
                    bound = alias.asname or alias.name
                    self.scopes[0][bound] = FOREIGN
                    if ours:
                        self.scopes[0][bound] = self._from(node, alias.name)

    def _from(self, node: ast.ImportFrom, name: str) -> Type | None:
        if node.module == "pycuda":
            return Type("module", f"pycuda.{name}")
        return self.members.member(Type("module", str(node.module)), name, node)

    def _annotated(self, annotation: ast.expr | None) -> Type | None:
        """The type that an annotation names, written as a string or not."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            try:
                return self._annotated(ast.parse(annotation.value, mode="eval").body)
            except SyntaxError:
                return None
        if isinstance(annotation, ast.BinOp):  # X | None
            return self._annotated(annotation.left) or self._annotated(annotation.right)
        if isinstance(annotation, ast.Attribute):
            named = self._quiet(annotation)
            owner = self._quiet(annotation.value)
            if (
                named is None
                and owner is not None
                and not self.members.ever(owner, annotation.attr)
            ):
                self.members.find(
                    annotation, f"{owner.library} has no {annotation.attr} to annotate with"
                )
            if named is not None and named.kind == "class":
                return Type("object", named.library, named.name)
            if named is not None and named.kind == "foreign":
                return FOREIGN
        if isinstance(annotation, ast.Name):
            named = self._lookup(annotation.id)
            if named is not None and named.kind == "class":
                return Type("object", named.library, named.name)
            if annotation.id not in ("Any", "object"):
                return FOREIGN  # of Python or ours: mypy's business
        if isinstance(annotation, ast.Subscript):
            return FOREIGN
        return None

    def _quiet(self, node: ast.expr) -> Type | None:
        """The type of an expression, without findings: annotations are not executed."""
        kept = list(self.members.findings)
        found = self.expression(node)
        self.members.findings[:] = kept
        return found

    def _lookup(self, name: str) -> Type | None:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return Type("module", _MODULE_NAMES[name]) if name in _MODULE_NAMES else None

    # --- statements ------------------------------------------------------------------------

    def block(self, body: Iterable[ast.stmt]) -> bool:
        """Reads statements in their order; returns whether the end is never reached."""
        return any(self.statement(node) for node in body)

    def statement(self, node: ast.stmt) -> bool:
        match node:
            case ast.If():
                return self._if(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._function(node)
            case ast.ClassDef():
                self._class(node)
            case ast.Assign():
                for target in node.targets:
                    self._assign(target, self.expression(node.value))
            case ast.AnnAssign():
                value = self.expression(node.value) if node.value is not None else None
                self._assign(node.target, self._annotated(node.annotation) or value)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    entered = self.expression(item.context_expr)
                    if item.optional_vars is not None:
                        self._assign(item.optional_vars, entered)
                return self.block(node.body)
            case ast.Return() | ast.Raise() | ast.Continue() | ast.Break():
                self._children(node)
                return True
            case ast.Import() | ast.ImportFrom():
                pass
            case _:
                self._children(node)
        return False

    def _children(self, node: ast.AST) -> None:
        for name, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                self.block(value)
            elif name == "target" and isinstance(node, ast.For | ast.AsyncFor):
                self._assign(value, None)
            else:
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.expr):
                        self.expression(child)
                    elif isinstance(child, ast.AST):
                        self._children(child)

    def _if(self, node: ast.If) -> bool:
        decided = self._decide(node.test)
        if decided is None:
            self.expression(node.test)
            ends = self.block(node.body)
            return self.block(node.orelse) and ends
        return self.block(node.body if decided else node.orelse)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        arguments = node.args
        scope: dict[str, Type | None] = {}
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        for argument in [*every, arguments.vararg, arguments.kwarg]:
            if argument is not None:
                known = self._annotated(argument.annotation)
                name = argument.arg
                if known is FOREIGN and name in _MODULE_NAMES:  # trt: ModuleType
                    known = None
                if known is None and name in _MODULE_NAMES:
                    known = Type("module", _MODULE_NAMES[name])
                scope[name] = known
        for default in [*arguments.defaults, *filter(None, arguments.kw_defaults)]:
            self.expression(default)
        self.scopes.append(scope)
        self.block(node.body)
        self.scopes.pop()

    def _class(self, node: ast.ClassDef) -> None:
        bases = [self.expression(base) for base in node.bases]
        self.scopes.append({})
        self.block(node.body)
        self.scopes.pop()
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                self._remember(statement.target.id, self._annotated(statement.annotation))
        for base in bases:
            if base is not None and base.kind == "class":
                self._overrides(node, base)

    def _overrides(self, node: ast.ClassDef, base: Type) -> None:
        """Methods that the library calls must take what it gives them."""
        members = self.members.bindings[base.library].classes.get(base.name, {})
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and not method.name.startswith("__"):
                signatures = signatures_of(members.get(method.name, ""))
                taken = len(method.args.posonlyargs) + len(method.args.args) - 1
                given = {len(signature.parameters) for signature in signatures}
                if given and taken not in given and method.args.vararg is None:
                    self.members.find(
                        method, f"{base.name}.{method.name} is given {given} arguments, not {taken}"
                    )

    def _assign(self, target: ast.expr, value: Type | None) -> None:
        if isinstance(target, ast.Name):
            if value is None and target.id in _MODULE_NAMES:
                value = Type("module", _MODULE_NAMES[target.id])
            self.scopes[-1][target.id] = value
        elif isinstance(target, ast.Attribute):
            self.expression(target)
            if isinstance(target.value, ast.Name) and target.value.id == "self":
                self._remember(target.attr, value)
        elif isinstance(target, ast.Tuple | ast.List):
            for element in target.elts:
                self._assign(element, None)
        else:
            self.expression(target)

    def _remember(self, attribute: str, value: Type | None) -> None:
        if value is not None and value.kind != "foreign":
            self.attributes[attribute] = value

    def _decide(self, test: ast.expr) -> bool | None:
        """Return the result of a version test; None for other tests, or if versions are not
        decided.
        """
        return decide(test, self.release, self._has, self.predicates) if self.by_version else None

    def _has(self, owner: ast.expr, name: str) -> bool | None:
        type_ = self.expression(owner)
        return None if type_ in (None, FOREIGN) else name in self.members.names_of(type_)

    # --- expressions -----------------------------------------------------------------------

    def expression(self, node: ast.expr) -> Type | None:
        match node:
            case ast.Name():
                return self._lookup(node.id)
            case ast.Attribute():
                return self._attribute(node)
            case ast.Call():
                return self._call(node)
            case ast.IfExp():
                return self._choice(node)
            case ast.NamedExpr():
                value = self.expression(node.value)
                self._assign(node.target, value)
                return value
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                self._comprehension(node)
                return FOREIGN
            case ast.Lambda():
                self.scopes.append({a.arg: None for a in node.args.args})
                self.expression(node.body)
                self.scopes.pop()
                return FOREIGN
            case ast.Constant() | ast.JoinedStr() | ast.Compare() | ast.Dict() | ast.List():
                self._children(node)
                return FOREIGN
            case _:
                self._children(node)
                return None

    def _choice(self, node: ast.IfExp) -> Type | None:
        decided = self._decide(node.test)
        if decided is not None:
            return self.expression(node.body if decided else node.orelse)
        self.expression(node.test)
        first, second = self.expression(node.body), self.expression(node.orelse)
        return first if second in (None, FOREIGN) else second

    def _comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
    ) -> None:
        self.scopes.append({})
        for generator in node.generators:
            self.expression(generator.iter)
            self._assign(generator.target, None)
            for condition in generator.ifs:
                self.expression(condition)
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        for part in parts:
            self.expression(part)
        self.scopes.pop()

    def _attribute(self, node: ast.Attribute) -> Type | None:
        owner = self.expression(node.value)
        if owner is None or (owner.kind == "function"):
            return self._loose(node)
        if owner.kind == "foreign":  # what our own objects have may be of the libraries
            return self.attributes.get(node.attr, FOREIGN)
        return self.members.member(owner, node.attr, node)

    def _loose(self, node: ast.Attribute) -> Type | None:
        """An attribute of something unknown."""
        if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            return self.attributes.get(node.attr, self._conventional(node.attr))
        if node.attr in self.attributes:
            return self.attributes[node.attr]
        known = node.attr in self.ordinary or node.attr.startswith("__")
        if not known and not any(b.has_member(node.attr) for b in self.members.bindings.values()):
            versions = " and ".join(map(str, self.members.bindings.values()))
            self.members.find(node, f"nothing has an attribute {node.attr}: no class of {versions}")
        return self._conventional(node.attr)

    def _conventional(self, name: str) -> Type | None:
        bare = name.lstrip("_")
        return Type("module", _MODULE_NAMES[bare]) if bare in _MODULE_NAMES else None

    def _call(self, node: ast.Call) -> Type | None:
        if imported := imported_by(node):
            return Type("module", imported)
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr", "setattr"):
            return self._by_name(node)
        if isinstance(node.func, ast.Name) and node.func.id == "cast" and len(node.args) == 2:
            return self._annotated(node.args[0]) or self.expression(node.args[1])
        called = self.expression(node.func)
        given = [self.expression(argument) for argument in node.args]
        for keyword in node.keywords:
            self.expression(keyword.value)
        if called is None or called.kind in ("foreign", "module", "object"):
            returns = self.returns.get(last_name(node.func))
            return self._annotated(returns) if returns is not None else None
        signatures = self.members.signatures(called)
        complaints = [signature.complaint(node) for signature in signatures]
        complaints = [
            complaint or self.members.wrong_type(called.library, signature, given)
            for complaint, signature in zip(complaints, signatures, strict=True)
        ]
        if signatures and all(complaints):
            self.members.find(node, f"{ast.unparse(node.func)} {complaints[0]}")
        if called.kind == "class":
            return Type("object", called.library, called.name)
        return self.members.instance(called.library, signatures[0].returns) if signatures else None

    def _by_name(self, node: ast.Call) -> Type | None:
        """``getattr(x, "name")`` and its like."""
        owner = self.expression(node.args[0])
        for argument in node.args[2:]:
            self.expression(argument)
        name = node.args[1] if len(node.args) > 1 else None
        if not isinstance(name, ast.Constant) or owner is None:
            return None
        asks = len(node.args) == 3 or getattr(node.func, "id", "") == "hasattr"
        if owner.kind in ("foreign", "function"):
            return None
        if asks and str(name.value) not in self.members.names_of(owner):
            if not self.members.ever(owner, str(name.value)):
                self.members.find(
                    node, f"{owner.name or owner.library} has {name.value} in no version"
                )
            return None
        return self.members.member(owner, str(name.value), node)
