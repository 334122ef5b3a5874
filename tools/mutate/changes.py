"""Single changes of the code: which there are, and some of them by chance.

Left out is what no test could or should notice: docstrings, annotations, ``__repr__``, log calls,
texts of errors and of command line help, and blocks for type checkers only.
"""

from __future__ import annotations

import ast
import copy
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

_LOGGERS: Final = {"logger", "_logger", "log", "_log", "logging"}
_UNCHECKED: Final = {
    "help", "description", "metavar", "epilog", "no_wrap", "style", "justify", "strict",
}  # fmt: skip
"""Keyword arguments that only people read, or that check what holds anyway."""
_UNREAD: Final = {"annotation", "returns", "decorator_list", "bases", "type_params"}
"""Fields of the syntax tree without behaviour that tests could check."""
_OTHER: Final[Mapping[type[ast.AST], Any]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.And: ast.Or, ast.Or: ast.And, ast.Break: ast.Continue, ast.Continue: ast.Break,
}  # fmt: skip
"""What operators and statements are exchanged for."""
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


_Change: TypeAlias = tuple[ast.expr | ast.stmt, str, ast.expr | ast.stmt]
"""The old node, the operator and the new node."""


def mutants_of(source: str, file: str) -> list[Mutant]:
    """Find every mutant of a file, in the order of its lines."""
    content = source.encode()
    starts = [0, *itertools.accumulate(map(len, content.splitlines(keepends=True)))]
    found = []
    for function, (node, operator, new) in _walk(ast.parse(source), "<module>", ""):
        text = ast.unparse(new)
        mutant = Mutant(
            file=file,
            line=node.lineno,
            operator=operator,
            before=ast.unparse(node),
            after=text,
            function=function,
            start=starts[node.lineno - 1] + node.col_offset,
            end=starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0),
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


def _walk(node: ast.AST, function: str, prefix: str) -> Iterator[tuple[str, _Change]]:
    """Yield every change below a node, with the function that it is in."""
    if _is_skipped(node):
        return
    in_init = function.endswith("__init__")
    for change in itertools.chain(_expressions(node), _statements(node, in_init=in_init)):
        yield function, change
    if isinstance(node, ast.Raise):
        return  # its message
    for name, value in ast.iter_fields(node):
        inside, inner = function, prefix
        if name == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside, inner = prefix + node.name, f"{prefix}{node.name}.<locals>."
        elif name == "body" and isinstance(node, ast.ClassDef):
            inner = f"{prefix}{node.name}."
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in _UNREAD:
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


def _expressions(node: ast.AST) -> Iterator[_Change]:
    match node:
        case ast.Constant(value=bool(flag)):
            yield node, "constant", ast.Constant(not flag)
        case ast.Constant(value=int(number)):
            yield node, "constant", ast.Constant(number + 1)
            yield node, "constant", ast.Constant(number - 1)
        case ast.Constant(value=float(number)):
            yield node, "constant", ast.Constant(2 * number or 1.0)
        case ast.Call():
            yield from _calls(node)
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                others = [*ops[:i], _OTHER[type(op)](), *ops[i + 1 :]]
                yield node, "comparison", _with(node, ops=others)
        case ast.BinOp(op=op) if type(op) in _OTHER:
            yield node, "arithmetic", _with(node, op=_OTHER[type(op)]())
        case ast.BoolOp(op=op):
            yield node, "and/or", _with(node, op=_OTHER[type(op)]())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, "negation", operand
        case ast.IfExp(body=body, orelse=orelse):
            yield node, "swapped branches", _with(node, body=orelse, orelse=body)
        case ast.comprehension(ifs=ifs):
            for test in ifs:
                yield from _negated(test)


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


def _statements(node: ast.AST, *, in_init: bool) -> Iterator[_Change]:
    match node:
        case ast.If(test=test) | ast.While(test=test):
            yield from _negated(test)
        case ast.AugAssign(op=op):
            if type(op) in _OTHER:
                yield node, "arithmetic", _with(node, op=_OTHER[type(op)]())
            yield node, "deleted", ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) if not in_init:
            yield node, "deleted", ast.Pass()
        case ast.Expr(value=ast.Call() | ast.Await() as value) if not _is_skipped(value):
            yield node, "deleted", ast.Pass()
        case ast.Raise():
            yield node, "deleted", ast.Pass()
        case ast.Return(value=ast.Constant(value=None)):
            pass
        case ast.Return(value=ast.expr()):
            yield node, "returns None", _with(node, value=ast.Constant(None))
        case ast.Break() | ast.Continue():
            yield node, "break/continue", _OTHER[type(node)]()


def _negated(test: ast.expr) -> Iterator[_Change]:
    if not isinstance(test, ast.UnaryOp | ast.Compare):  # these change by themselves
        yield test, "negation", ast.UnaryOp(op=ast.Not(), operand=test)


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
