"""Dissimilarity of two answers: a named measure or a user's function.

If the user names parts of the text that must be equal, a difference there counts as 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from runpy import run_path
from typing import Any

from offramp.compiler.common.errors import CompileError
from offramp.generation.compiling.text_options import (
    TextCompileOptions,
    TextSettings,
    exact_parts,
)
from offramp.generation.promise.dissimilarity import DISSIMILARITIES, Dissimilarity, differs


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeness:
    """Dissimilarity that the promise ``texts`` bounds."""

    name: str
    dissimilarity: Dissimilarity
    differing: bool
    """True if every difference counts as 1."""


def find_likeness(options: TextCompileOptions, settings: TextSettings) -> Likeness:
    """Return the requested dissimilarity; CompileError if it is unknown."""
    name = options.dissimilarity
    found = DISSIMILARITIES.get(name) or _own(name)
    if options.exact is None:
        return Likeness(name=name, dissimilarity=found, differing=found is differs)
    if settings.tokenizer is None:
        raise CompileError(
            "--exact needs the text of answers: put tokenizer.json next to the model, or name it "
            "with --tokenizer"
        )
    parts, tokens = exact_parts(options.exact), settings.tokenizer

    def with_exact_parts(one: Sequence[int], other: Sequence[int]) -> float:
        texts = tokens.decode(one), tokens.decode(other)
        same = parts.findall(texts[0]) == parts.findall(texts[1])
        return found(one, other) if same else 1.0

    name = f"{name}, exact in {options.exact}"
    return Likeness(name=name, dissimilarity=with_exact_parts, differing=found is differs)


def _own(name: str) -> Dissimilarity:
    """Import a user's function from ``FILE.py:NAME``."""
    file, _, function = name.rpartition(":")
    if not file or not Path(file).is_file():
        known = ", ".join(DISSIMILARITIES)
        raise CompileError(
            f"--dissimilarity {name}: expected {known}, or FILE.py:NAME of a function from two "
            "lists of tokens to a number from 0 to 1"
        )
    try:
        made: Callable[..., Any] | None = run_path(file).get(function)
    except Exception as error:  # the user's code
        raise CompileError(f"--dissimilarity {name}: {error!r}") from error
    if not callable(made):
        raise CompileError(f"--dissimilarity {name}: {file} has no function {function!r}")
    own = made

    def checked(one: Sequence[int], other: Sequence[int]) -> float:
        value = float(own(list(one), list(other)))
        if not 0.0 <= value <= 1.0:
            raise CompileError(f"--dissimilarity {name} returned {value}, expected 0 to 1")
        return value

    return checked
