"""Types and existence of members of the libraries' modules, classes and objects."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from tests.unit.tensorrt.bindings import (
    TENSORRT_VERSIONS,
    Bindings,
    Signature,
    short,
    signatures_of,
    tensorrt,
)


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Type:
    """Type of an expression: a module, a class or an object of a library."""

    kind: str
    """``module``, ``class``, ``object``, ``function``, or ``foreign``: surely of neither."""
    library: str = ""
    name: str = ""
    """Name of the class; for a function, the member's text in the fixture."""


FOREIGN = Type("foreign")


@dataclass(slots=True)
class Members:
    """Looks members up, and notes what is not there."""

    bindings: Mapping[str, Bindings]
    """One version each, by library."""
    findings: list[Finding] = field(default_factory=list)

    def names_of(self, owner: Type) -> Collection[str]:
        bindings = self.bindings.get(owner.library)
        if bindings is None:
            return ()
        if owner.kind == "module":
            return bindings.names
        return bindings.classes.get(owner.name, {})

    def member(self, owner: Type, name: str, node: ast.AST) -> Type | None:
        """Return the type of a member of a known owner; record a finding if it does not exist."""
        if owner.kind == "module" and owner.library == "pycuda":
            return Type("module", f"pycuda.{name}")
        bindings = self.bindings.get(owner.library)
        if bindings is None or (name.startswith("__") and name != "__version__"):
            return None  # another module of pycuda: only pycuda.driver is known by name
        if owner.kind == "module":
            kind = bindings.names.get(name)
            if kind is None:
                self.find(node, f"{bindings} has no {name}")
                return None
            if kind == "class":
                return Type("class", owner.library, short(name))
            return self._of_text(owner.library, kind)
        return self._of_class(bindings, owner, name, node)

    def _of_class(self, bindings: Bindings, owner: Type, name: str, node: ast.AST) -> Type | None:
        members = bindings.classes.get(owner.name)
        if members is None:
            return None  # the class is there, but the fixture does not say what it has
        text = members.get(name)
        if text is None:
            is_enum = f"value: {owner.name}" in members.values()
            if not (is_enum and name in ("name", "value")):
                self.find(node, f"{bindings}: {owner.name} has no {name}")
            return None
        if isinstance(getattr(node, "ctx", None), ast.Store) and "prop" not in text:
            self.find(node, f"{bindings}: {owner.name}.{name} cannot be set")
        if isinstance(getattr(node, "ctx", None), ast.Store) and text == "prop (ro)":
            self.find(node, f"{bindings}: {owner.name}.{name} is read only")
        if owner.kind == "class" and signatures_of(text) and "(self" in text:
            return None  # a method without its object
        if name == "Severity":
            return Type("class", owner.library, name)
        return self._of_text(owner.library, text)

    def _of_text(self, library: str, text: str) -> Type | None:
        if signatures_of(text):
            return Type("function", library, text)
        named = text.removeprefix("value: ")
        return self.instance(library, named) if text.startswith("value: ") else None

    def instance(self, library: str, name: str) -> Type | None:
        if name in self.bindings[library].classes:
            return Type("object", library, name)
        return FOREIGN if name in ("int", "str", "bool", "float", "None", "tuple") else None

    def signatures(self, called: Type) -> tuple[Signature, ...]:
        if called.kind == "function":
            return signatures_of(called.name)
        members = self.bindings[called.library].classes.get(called.name, {})
        return signatures_of(members.get("__init__", ""))

    def wrong_type(
        self, library: str, signature: Signature, given: list[Type | None]
    ) -> str | None:
        """An object of one class where the library takes another."""
        for parameter, type_ in zip(signature.parameters, given, strict=False):
            if type_ is None or type_.kind != "object" or type_.library != library:
                continue
            known = parameter.type in self.bindings[library].classes
            fits = parameter.type in (type_.name, f"I{type_.name}")
            if known and not fits:
                return f"takes a {parameter.type} as {parameter.name}, not a {type_.name}"
        return None

    def ever(self, owner: Type, name: str) -> bool:
        """Return True if some version has a member."""
        if owner.library != "tensorrt":
            return name in self.names_of(owner)
        every = [tensorrt(version) for version in TENSORRT_VERSIONS]
        if owner.kind == "module":
            return any(name in bindings.names for bindings in every)
        return any(name in bindings.classes.get(owner.name, ()) for bindings in every)

    def find(self, node: ast.AST, text: str) -> None:
        self.findings.append(Finding(getattr(node, "lineno", 0), text))
