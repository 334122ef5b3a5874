"""Options of compiling a model that generates text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from offramp.bundle import BundleError
from offramp.bundle.schema.serde import check_numbers
from offramp.calibration.data.data_sources import DataSource
from offramp.compiler.common.errors import CompileError
from offramp.generation.bundle.generating_bundle import TOKENIZER
from offramp.generation.bundle.text_model import SkippedLayers, TextCriterion, TextModel
from offramp.generation.bundle.text_tokens import BundleTokenizer

TextTraining: TypeAlias = Literal["adapters", "joint", "none"]
"""Parts that are trained: a small adapter per exit, a copy of the decoder with its exits, or
nothing."""
TRAININGS: Final = ("adapters", "joint", "none")
TextHead: TypeAlias = Literal["full", "subset", "low-rank"]
HEADS: Final = ("full", "subset", "low-rank")
SKIPPED: Final = ("auto", "propagation", "catch-up")
CRITERIA: Final[dict[str, TextCriterion]] = {
    "softmax-margin": "softmax margin",
    "max-probability": "max probability",
    "state-similarity": "state similarity",
    "learned-classifier": "learned classifier",
}
"""Criteria by their names on the command line."""
_HEAD_SIZE: Final = 1024
_CONFIGS: Final = ("generation_config.json", "config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCompileOptions:
    """Options of ``eecompile generation``, for :func:`.compile_text`."""

    model: Path
    """File of a decoder, or folder of an encoder-decoder."""
    data: DataSource
    """Source of the prompts."""
    output: Path
    overwrite: bool = False
    promise: Literal["tokens", "texts"] = "texts"
    """Risk that the promise bounds: wrong tokens, or the dissimilarity of whole texts."""
    dissimilarity: str = "differs"
    """Dissimilarity of whole answers: a name in ``DISSIMILARITIES``, or FILE.py:NAME of a
    function."""
    exact: str | None = None
    """Regular expression; its matches in an answer must be equal to those in the model's own
    answer."""
    max_disagreement: float = 0.01
    confidence_level: float = 0.95
    exits: tuple[int, ...] = ()
    """Candidate exits, as the number of layers before each; by default up to seven, evenly
    spread."""
    train: TextTraining = "adapters"
    criterion: TextCriterion = "softmax margin"
    head: TextHead = "full"
    """Head of exits: the model's own, or a smaller one that is trained."""
    head_size: int | None = None
    """Number of tokens, or rank, of a smaller ``head``. By default it is 1,024, or half of the
    number of the model's own head if this half is smaller."""
    skipped: SkippedLayers | Literal["auto"] = "auto"
    decay: float | None = None
    """τ of CALM 3.4, the speed at which thresholds fall along an answer; ``None``: constant
    thresholds."""
    most_tokens: int | None = None
    """Largest number of tokens in an answer; by default the model configuration's, or 128."""
    start_token: int | None = None
    stop_tokens: tuple[int, ...] = ()
    tokenizer: Path | None = None
    """A ``tokenizer.json`` for the bundle; by default the one next to the model, if any."""
    batch: int = 16
    """Number of rows in a measured step."""
    minutes: float = 5.0
    """Limit on the processor time of ``train="joint"``, in minutes."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_numbers(self, "max_disagreement", "confidence_level", above=0, below=1)
        check_numbers(self, "batch", "head_size", "most_tokens", least=1)
        check_numbers(self, "minutes", above=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings:
    """Settings that are taken from the files next to a model, unless options set them."""

    start_token: int | None
    stop_tokens: tuple[int, ...]
    most_tokens: int
    tokenizer: BundleTokenizer | None


def settle(options: TextCompileOptions) -> TextSettings:
    """Fill in defaults from the model's configuration; CompileError if a file cannot be read."""
    folder = options.model if options.model.is_dir() else options.model.parent
    known: dict[str, Any] = {}
    for name in reversed(_CONFIGS):
        known |= _config(folder / name)
    length = _first(*_whole(known, "max_new_tokens"), *_whole(known, "max_length"))
    beside = folder / TOKENIZER
    # A broken link counts as a file, and reading it then fails with an error.
    there = beside.exists() or beside.is_symlink()
    tokenizer = options.tokenizer or (beside if there else None)
    return TextSettings(
        start_token=_first(options.start_token, *_whole(known, "decoder_start_token_id")),
        stop_tokens=options.stop_tokens or _whole(known, "eos_token_id"),
        most_tokens=options.most_tokens or length or 128,
        tokenizer=None if tokenizer is None else _tokenizer(tokenizer),
    )


def exact_parts(pattern: str) -> re.Pattern[str]:
    """Compile a regular expression; CompileError if it is invalid."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise CompileError(f"--exact {pattern!r} is not a regular expression: {error}") from error


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def _whole(known: dict[str, Any], name: str) -> tuple[int, ...]:
    """Return the integers (one or a list) of a configuration's key; empty if the key is absent."""
    found = known.get(name, [])
    numbers = tuple(found) if isinstance(found, list) else (found,)
    if not all(type(number) is int for number in numbers):
        raise CompileError(
            f"the model's configuration has {name} {found!r}, expected whole numbers; mend "
            f"{' or '.join(_CONFIGS)}"
        )
    return numbers


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(_read(path))
    except ValueError as error:
        raise CompileError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CompileError(f"{path} holds {type(found).__name__}, expected an object")
    return {name: value for name, value in found.items() if value is not None}


def _tokenizer(path: Path) -> BundleTokenizer:
    try:
        return BundleTokenizer(_read(path), name=str(path))
    except BundleError as error:
        raise CompileError(str(error)) from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CompileError(
            f"{path} cannot be read: {error.strerror}; check the path and its permissions"
        ) from error


def with_head_size(options: TextCompileOptions, model: TextModel) -> TextCompileOptions:
    """Return the options with the size of a smaller head; CompileError if it is not smaller."""
    whole = {"subset": model.vocabulary, "low-rank": model.width}.get(options.head)
    if whole is None:
        return options
    if options.head_size is None:
        return replace(options, head_size=max(min(_HEAD_SIZE, whole // 2), 1))
    if options.head_size >= whole:
        what = "tokens" if options.head == "subset" else "dimensions of its state"
        raise CompileError(
            f"--head-size {options.head_size} is not a smaller head: the model's own has {whole} "
            f"{what}, expected 1 to {whole - 1}; choose a smaller --head-size, or --head full"
        )
    return options


def layers_to_try(count: int, asked: Sequence[int], most: int = 7) -> tuple[int, ...]:
    """Return the number of layers before each exit: the requested ones, or ``most`` evenly spread.

    Raise CompileError if an exit is not between two layers of the decoder.
    """
    wrong = [layer for layer in asked if not 0 < layer < count]
    if wrong:
        raise CompileError(
            f"exits after layers {wrong}: the decoder has {count} layers, expected 1 to {count - 1}"
        )
    if asked:
        return tuple(sorted(set(asked)))
    steps = min(most, count - 1)
    return tuple(sorted({round(count * (n + 1) / (steps + 1)) for n in range(steps)}))
