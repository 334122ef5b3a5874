"""Single changes of the code: which there are, and some of them by chance.

Left out is what no test could or should notice: docstrings, annotations, ``__repr__``, log calls,
texts of errors and of command line help, and blocks for type checkers only.
"""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

_MODULE: Final = "<module>"
_LOGGERS: Final = {"logger", "_logger", "log", "_log", "logging"}
_UNCHECKED: Final = {
    "help",
    "description",
    "metavar",
    "epilog",
    "no_wrap",
    "style",
    "justify",
    "strict",
}
"""Keyword arguments that only people read, or that check what holds anyway."""
_UNREAD: Final = {"annotation", "returns", "decorator_list", "bases", "type_params"}
"""Fields of the syntax tree without behaviour that tests could check."""
_COMPARED: Final[Mapping[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_CALCULATED: Final[Mapping[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
_EXTREMES: Final = {
    "min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "any": "all",
    "all": "any",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A change of one expression or statement."""

    file: str
    """Relative to the root."""
    line: int
    operator: str
    before: str
    after: str
    function: str
    """Qualified name of the function that it is in; ``<module>`` outside of functions."""
    start: int
    end: int
    """Bytes of the file that are replaced."""
    text: str
    """What by."""

    def apply(self, source: bytes) -> bytes:
        """Give the file's content with the change."""
        return source[: self.start] + self.text.encode() + source[self.end :]


def mutants_of(source: str, file: str) -> list[Mutant]:
    """Find every mutant of a file, in the order of its lines."""
    content = source.encode()
    starts = [0]
    for line in content.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for function, (node, operator, new) in _walk(ast.parse(source), _MODULE, ""):
        text = ast.unparse(new)
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        mutant = Mutant(
            file=file,
            line=node.lineno,
            operator=operator,
            before=ast.unparse(node),
            after=text,
            function=function,
            start=start,
            end=end,
            text=text if isinstance(new, ast.stmt) else f"({text})",
        )
        if _differs(content, mutant):
            found.append(mutant)
    return sorted(found, key=lambda m: (m.line, m.start, m.operator, m.after))


def _differs(content: bytes, mutant: Mutant) -> bool:
    """Whether the change is one of the program, and one that can be parsed."""
    old = content[mutant.start : mutant.end].decode()
    try:
        return ast.dump(ast.parse(f"({old})")) != ast.dump(ast.parse(f"({mutant.after})"))
    except SyntaxError:  # a statement
        return old != mutant.after


_Change: TypeAlias = tuple[ast.expr | ast.stmt, str, ast.expr | ast.stmt]


def _walk(node: ast.AST, function: str, prefix: str) -> Iterator[tuple[str, _Change]]:
    """Yield every change below a node, with the function that it is in."""
    if _is_skipped(node):
        return
    for change in _changes(node, in_init=function.endswith("__init__")):
        yield function, change
    if isinstance(node, ast.Raise):
        return  # its message
    for name, value in ast.iter_fields(node):
        if name in _UNREAD:
            continue
        inside, inner = function, prefix
        if name == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside, inner = prefix + node.name, f"{prefix}{node.name}.<locals>."
        elif name == "body" and isinstance(node, ast.ClassDef):
            inner = f"{prefix}{node.name}."
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walk(child, inside, inner)


def _is_skipped(node: ast.AST) -> bool:
    """Whether nothing below this node is worth changing."""
    match node:
        case (
            ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom()
            | ast.FunctionDef(name="__repr__")
            | ast.Expr(value=ast.Constant())
            | ast.If(test=ast.Name("TYPE_CHECKING") | ast.Compare(left=ast.Name("__name__")))
            | ast.AnnAssign(annotation=ast.Name("TypeAlias"))
        ):  # fmt: skip
            return True
        case ast.keyword(arg=str(name)):
            return name in _UNCHECKED
        case ast.Call(func=ast.Attribute(value=ast.Name(name))):
            return name in _LOGGERS
    return False


def _changes(node: ast.AST, *, in_init: bool) -> Iterator[_Change]:
    """Yield the old node, the operator and the new node of every change of one node."""
    match node:
        case ast.Constant():
            yield from _constants(node)
        case ast.Call():
            yield from _calls(node)
        case ast.expr() | ast.comprehension():
            yield from _operators(node)
        case ast.stmt():
            yield from _statements(node, in_init=in_init)


def _constants(node: ast.Constant) -> Iterator[_Change]:
    match node.value:
        case bool() as flag:
            yield node, "constant", ast.Constant(not flag)
        case int() as number:
            yield node, "constant", ast.Constant(number + 1)
            yield node, "constant", ast.Constant(number - 1)
        case float() as number:
            yield node, "constant", ast.Constant(2 * number or 1.0)


def _calls(node: ast.Call) -> Iterator[_Change]:
    for keyword in node.keywords:
        if keyword.arg and keyword.arg not in _UNCHECKED:
            kept = [other for other in node.keywords if other is not keyword]
            yield node, f"dropped {keyword.arg}", _with(node, keywords=kept)
    match node.func:
        case ast.Name(name) if name in _EXTREMES:
            yield node.func, "extreme", ast.Name(_EXTREMES[name])
        case ast.Attribute(attr=name) if name in _EXTREMES:
            yield node.func, "extreme", _with(node.func, attr=_EXTREMES[name])


def _operators(node: ast.expr | ast.comprehension) -> Iterator[_Change]:
    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                if new := _COMPARED.get(type(op)):
                    yield node, "comparison", _with(node, ops=[*ops[:i], new(), *ops[i + 1 :]])
        case ast.BinOp(op=op) if type(op) in _CALCULATED:
            yield node, "arithmetic", _with(node, op=_CALCULATED[type(op)]())
        case ast.BoolOp(op=ast.And()):
            yield node, "and/or", _with(node, op=ast.Or())
        case ast.BoolOp(op=ast.Or()):
            yield node, "and/or", _with(node, op=ast.And())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, "negation", operand
        case ast.IfExp(body=body, orelse=orelse):
            yield node, "swapped branches", _with(node, body=orelse, orelse=body)
        case ast.comprehension(ifs=ifs):
            for test in ifs:
                yield from _negated(test)


def _statements(node: ast.stmt, *, in_init: bool) -> Iterator[_Change]:
    match node:
        case ast.If(test=test) | ast.While(test=test):
            yield from _negated(test)
        case ast.AugAssign(op=op):
            if type(op) in _CALCULATED:
                yield node, "arithmetic", _with(node, op=_CALCULATED[type(op)]())
            yield node, "deleted", ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) if not in_init:
            yield node, "deleted", ast.Pass()
        case ast.Expr(value=ast.Call() | ast.Await() as value) if not _is_skipped(value):
            yield node, "deleted", ast.Pass()
        case ast.Return(value=ast.expr() as value) if not _is_none(value):
            yield node, "returns None", _with(node, value=ast.Constant(None))
        case ast.Raise():
            yield node, "deleted", ast.Pass()
        case ast.Break():
            yield node, "break/continue", ast.Continue()
        case ast.Continue():
            yield node, "break/continue", ast.Break()


def _negated(test: ast.expr) -> Iterator[_Change]:
    if not isinstance(test, ast.UnaryOp | ast.Compare):  # these change by themselves
        yield test, "negation", ast.UnaryOp(op=ast.Not(), operand=test)


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _with(node: Any, **fields: object) -> Any:
    """A copy with other fields."""
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def choose(root: Path, files: Sequence[str], *, count: int, seed: int) -> list[Mutant]:
    """Draw lines that can be changed, all equally likely, and of each one of its mutants."""
    lines: dict[tuple[str, int], list[Mutant]] = {}
    for file in sorted(files):
        for mutant in mutants_of((root / file).read_text(encoding="utf-8"), file):
            lines.setdefault((file, mutant.line), []).append(mutant)
    rng = random.Random(seed)
    drawn = rng.sample(sorted(lines), min(count, len(lines)))
    return [rng.choice(lines[line]) for line in drawn]


def describe(mutant: Mutant) -> str:
    """``file:line operator: before → after``."""
    before, after = (" ".join(text.split())[:100] for text in (mutant.before, mutant.after))
    return f"{mutant.file}:{mutant.line} {mutant.operator}: {before} → {after}"
