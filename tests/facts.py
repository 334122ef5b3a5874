"""The facts that an error tells, whichever words are between them, and what is not part of it."""

from __future__ import annotations

import re

Told = tuple[str, ...]
"""The facts of one error, in a table of them."""


def facts(*told: str) -> str:
    """A regular expression for ``match=`` that finds each of the facts in this order."""
    return "(?s)" + ".*?".join(re.escape(fact) for fact in told)


def tells(text: str, *told: str) -> None:
    """Asserts that a text tells each of the facts in this order."""
    at = 0
    for number, fact in enumerate(told, 1):
        found = text.find(fact, at)
        where = f" after {told[number - 2]!r}" if number > 1 else ""
        assert found >= 0, f"fact {number}, {fact!r}, is not told{where} in: {text}"
        at = found + len(fact)


_STEP = re.compile(r"^ *\d+ s  (.*)\n", re.MULTILINE)
"""Line that the compiler prints as a step begins, where standard error is not a terminal."""


def steps_of(stderr: str) -> list[str]:
    """Return the titles of the compiler's steps on standard error."""
    return _STEP.findall(stderr)


def without_steps(stderr: str) -> str:
    """Return what else the compiler printed on standard error."""
    return _STEP.sub("", stderr)
