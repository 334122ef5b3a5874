"""Evaluation of version tests: the branches that a version of TensorRT takes.

Supported are ``major() >= 10``, ``version < (10, 0)``, ``hasattr(config, "name")``, ``not``,
``and``, ``or``, and calls of functions that only return one of these.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping

from tests.unit.tensorrt.sources import last_name

_COMPARISONS = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip


def decide(
    test: ast.expr,
    release: tuple[int, ...],
    has: Callable[[ast.expr, str], bool | None],
    predicates: Mapping[str, ast.expr],
) -> bool | None:
    """Return the result of a test for a version.

    Args:
        test: The test.
        release: The version.
        has: Function that is true if an object has a member in this version.
        predicates: Results of functions without arguments.

    Returns:
        None if the test is about something else.
    """

    def inner(part: ast.expr) -> bool | None:
        return decide(part, release, has, predicates)

    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            found = inner(operand)
            return None if found is None else not found
        case ast.BoolOp(op=op, values=values):
            parts = [inner(value) for value in values]
            final = isinstance(op, ast.Or)
            return final if final in parts else None if None in parts else not final
        case ast.Compare(left=left, ops=[op], comparators=[limit]):
            return _compare(left, op, limit, release)
        case ast.Call(func=ast.Name(id="hasattr"), args=[owner, ast.Constant(value=str(name))]):
            return has(owner, name)
        case ast.Call(func=ast.Name(id=name), args=[]) if name in predicates:
            return inner(predicates[name])
    return None


def _compare(
    left: ast.expr, op: ast.cmpop, right: ast.expr, release: tuple[int, ...]
) -> bool | None:
    asked = left.func if isinstance(left, ast.Call) else left
    compare = _COMPARISONS.get(type(op))
    if compare is None or not re.search("major|version|release", last_name(asked)):
        return None
    try:
        limit = ast.literal_eval(right)
    except ValueError:
        return None
    if not isinstance(limit, int | tuple):
        return None
    return bool(compare(release[0] if isinstance(limit, int) else release, limit))
