"""Keyword arguments of the API: their names, which follow the flags, and their types.

``--max-batch-size 16`` of ``eeserve`` is ``max_batch_size=16`` here; ``--no-padding`` is
``padding=False``. Type checkers and :func:`check_keywords` use the same tables; the options'
dataclasses check the ranges of values.
"""

from __future__ import annotations

import numbers
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, Literal, TypedDict, TypeVar, Union, get_args, get_origin, get_type_hints

from offramp.commands.combinations import Illegal, IllegalCombinationError, refuse_illegal
from offramp.commands.nearest import nearest

_Options = TypeVar("_Options")

PathLike = str | os.PathLike[str]
NUMBERS = {int: numbers.Integral, float: numbers.Real}
"""Accepted types for a type hint of a number; numpy's numbers are included."""


class EngineKeywords(TypedDict, total=False):
    """Options of the engine: flags of ``eeserve`` (see ``eeserve --help-all``)."""

    mode: Literal["audit", "release", "leave", "off"]
    backend: str
    device: str
    precision: str | None
    cuda_graphs: bool
    engine_build_minutes: float
    streams: int
    workers: int
    threads: int | None
    parallel_below: int | None
    max_violations: float | None
    state: bool
    profile_window_s: float
    policy: str
    slo_ms: float | None
    max_batch_size: int
    max_queue_delay_ms: float
    max_queue_samples: int
    padding: bool
    forbid_forced_exits: bool
    share_weights: str
    controller: str
    max_disagreement: float | None
    confidence: float
    audit_budget: float
    ramp_budget: float | None
    trust_inputs: bool
    uncertified_exits: bool
    max_source_share: float
    never_beyond_compiled: bool
    answer: str | None
    task: str | None
    learn: bool
    learn_samples: int
    learn_folder: PathLike | None
    learn_gib: float
    learn_keep: bool


class ServerKeywords(EngineKeywords, total=False):
    """Options of a server: engine, network, and models that generate text."""

    host: str
    max_message_mib: int
    max_queue_mib: int
    max_concurrent_requests: int
    frontends: int
    max_connections: int
    shutdown_timeout_s: float
    text_slots: int
    text_length: int | None


def check_keywords(
    function: str, given: Mapping[str, object], kind: type, *, named: Sequence[str] = ()
) -> None:
    """Check the names and types of keyword arguments against a table.

    ``named`` are keyword arguments of the function that are not in the table.

    Raises:
        TypeError: The option does not exist, or its value has another type.
        ValueError: The value is not one of the option's values.
    """
    hints = get_type_hints(kind)
    for name, value in given.items():
        if name not in hints:
            names = sorted({*hints, *named})
            close = nearest(name, names)
            known = (
                f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(names)}"
            )
            raise TypeError(f"{function}() has no option {name!r}; {known}")
        if not _fits(value, hints[name]):
            expected = f"{name} is {value!r:.80}, expected {_words(hints[name])}"
            raise ValueError(expected) if isinstance(value, str) else TypeError(expected)


def _fits(value: object, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return value in arguments
    if origin in (Union, UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is Sequence:  # refuses strings, although these are Sequences
        return not isinstance(value, str) and (
            isinstance(value, Sequence) and all(_fits(each, arguments[0]) for each in value)
        )
    if hint in NUMBERS:
        return isinstance(value, NUMBERS[hint]) and not isinstance(value, bool)
    return isinstance(value, origin or hint)


def _words(hint: Any) -> str:
    """Return a description of a type, for messages."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin in (Union, UnionType):
        return " or ".join(_words(argument) for argument in arguments)
    if origin is Sequence:
        return f"a list of {_words(arguments[0])}"
    names = {int: "an integer", float: "a number", bool: "True or False", str: "a text"}
    return names.get(hint, "None" if hint is NoneType else "a path")


def options_from(
    kind: Callable[..., _Options],
    given: Mapping[str, Any],
    renamed: Mapping[str, str],
    *,
    own: Collection[str] | None = None,
    **more: Any,
) -> _Options:
    """Return options of class ``kind`` from the keyword arguments that are its fields.

    ``renamed`` maps keywords to fields with another name; ``own`` are the fields to use, by default
    all. If ``kind`` raises a ValueError, the message names the keyword instead of the field.
    """
    if own is None:
        own = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    named = {renamed.get(name, name): value for name, value in given.items()}
    try:
        return kind(**{name: value for name, value in named.items() if name in own}, **more)
    except ValueError as error:
        message = str(error)
        for keyword, field in renamed.items():
            if message.startswith(f"{field} "):
                message = keyword + message.removeprefix(field)
        raise ValueError(message) from error


def refuse_illegal_keywords(
    table: Sequence[Illegal],
    given: Mapping[str, object],
    others: Mapping[str, str],
    *,
    also: Collection[str] = (),
) -> None:
    """Raise ValueError for keyword arguments that a command's table does not allow together.

    ``others`` are defaults, by flag, of options that the caller omits but the table uses; ``also``
    are further flags of the table that count as given.
    """
    values: dict[str, object] = dict(others)
    flags = set(also)
    for name, value in given.items():
        if value is not None:
            flag = f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
            values[flag] = value
            flags.add(flag)
    try:
        refuse_illegal(table, values, flags)
    except IllegalCombinationError as error:
        raise ValueError(without_flags(str(error))) from error


def without_flags(message: str) -> str:
    """Replace flags in a message with keyword arguments: ``--slo-ms`` becomes ``slo_ms``."""
    return re.sub(r"--([a-z][a-z-]*)", lambda flag: flag[1].replace("-", "_"), message)
