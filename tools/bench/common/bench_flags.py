"""Arguments of several subcommands of ``eebench``: numbers and arrival traces."""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from offramp.tools.bench.common.traces import (
    Trace,
    TraceError,
    accelerate,
    azure,
    bursty,
    constant,
    gamma,
    poisson,
    rate_file,
)

_DEFAULT_DURATION_S = 10.0
_Known = TypeVar("_Known")


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a whole number from 1 on")
    return int(text)


def share(text: str) -> float:
    """Read a number above 0, at most 1."""
    value = _float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a share: above 0, at most 1")
    return value


def _float(text: str) -> float:
    """Read a number; return NaN if the text is not a number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


COUNT: Final[Mapping[str, Any]] = {"type": positive, "metavar": "N"}
SHARE: Final[Mapping[str, Any]] = {"type": share, "metavar": "SHARE"}


def positives(text: str) -> list[int]:
    """Read whole numbers of at least 1, separated by commas."""
    return [positive(part) for part in text.split(",")]


def shares(text: str) -> tuple[float, ...]:
    """Read distinct numbers between 0 and 1, separated by commas; return them in rising order."""
    found = sorted({_float(part) for part in text.split(",")})
    for value in found:
        if not 0 < value < 1:
            raise argparse.ArgumentTypeError(
                f"{value:g} is not between 0 and 1; 1 % is written 0.01"
            )
    return tuple(found)


def look_up(what: str, names: Iterable[str], known: Mapping[str, _Known]) -> dict[str, _Known]:
    """Return the entries of these names; ValueError for an unknown one."""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"unknown {what} {name!r}; {hint}expected some of {', '.join(known)}")
    return {name: known[name] for name in names}


_OPTIONS = {
    "rate": "requests per second; accelerate: the first rate; files are scaled to it",
    "base_rate": "bursty: rate of its constant stream; --rate is that of its gamma stream",
    "cv2": "gamma gaps: their squared coefficient of variation (default: 1)",
    "rate_to": "accelerate: the last rate",
    "acceleration": "accelerate: requests per second per second",
    "duration_s": "length of the trace; azure:FILE is cut there, rate:FILE is squeezed into it "
    f"(default: {_DEFAULT_DURATION_S:g}, or all of azure:FILE)",
}
"""Numbers that describe a trace, by their names in the options."""


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``trace_of`` reads, as a group; absent options are ``None``."""
    group = parser.add_argument_group(
        "arrivals",
        "Kinds of traces: constant, poisson, gamma, bursty (constant and gamma), accelerate,\n"
        "azure:FILE (CSV of requests: TIMESTAMP,ContextTokens,GeneratedTokens) and rate:FILE\n"
        "(CSV: t_s,rate_rps).",
    )
    add = group.add_argument
    add(
        "--trace",
        default="poisson",
        metavar="KIND",
        help="when requests come: constant, poisson, gamma, bursty, …",
    )
    for name, words in _OPTIONS.items():
        add(_flag(name), type=float, metavar="X", help=words)
    add("--seed", type=int, default=0, metavar="K", help="seed of all random numbers")


def trace_of(options: argparse.Namespace) -> Trace:
    """Return the trace that the options of ``add_trace_arguments`` request; TraceError."""
    kind, colon, file = str(options.trace).partition(":")
    if kind not in _KINDS:
        close = difflib.get_close_matches(kind, _KINDS, n=1)
        meant = f"did you mean {close[0]}? " if close else ""
        raise TraceError(f"no trace is called '{kind}'; {meant}there are {', '.join(_KINDS)}")
    kind_spec = _KINDS[kind]
    if kind_spec.reads_file != bool(file):
        right = f"{kind}:FILE" if kind_spec.reads_file else kind
        raise TraceError(f"--trace {kind}{colon}{file} must be --trace {right}")
    for name, words in _OPTIONS.items():
        value = getattr(options, name)
        if value is None and name in kind_spec.needs:
            raise TraceError(f"--trace {kind} needs {_flag(name)}: {words}")
        if value is not None and name not in kind_spec.takes:
            users = ", ".join(other for other, spec in _KINDS.items() if name in spec.takes)
            raise TraceError(
                f"--trace {kind} has no {_flag(name)} (it is for {users}); leave it out"
            )
    return kind_spec.make(options)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _duration_s(options: argparse.Namespace) -> float:
    return _DEFAULT_DURATION_S if options.duration_s is None else float(options.duration_s)


def _cv2(options: argparse.Namespace) -> float:
    return 1.0 if options.cv2 is None else float(options.cv2)


def _file(options: argparse.Namespace) -> Path:
    return Path(str(options.trace).partition(":")[2]).expanduser()


class _Kind(NamedTuple):
    """A kind of trace: the options that it needs and accepts, and the function that makes it."""

    needs: tuple[str, ...]
    may: tuple[str, ...]
    make: Callable[[argparse.Namespace], Trace]
    reads_file: bool = False

    @property
    def takes(self) -> tuple[str, ...]:
        return (*self.needs, *self.may, "duration_s")


_KINDS = {
    "constant": _Kind(("rate",), (), lambda o: constant(o.rate, _duration_s(o))),
    "poisson": _Kind(("rate",), (), lambda o: poisson(o.rate, _duration_s(o), o.seed)),
    "gamma": _Kind(("rate",), ("cv2",), lambda o: gamma(o.rate, _cv2(o), _duration_s(o), o.seed)),
    "bursty": _Kind(
        ("rate", "base_rate"),
        ("cv2",),
        lambda o: bursty(o.base_rate, o.rate, _cv2(o), _duration_s(o), o.seed),
    ),
    "accelerate": _Kind(
        ("rate", "rate_to", "acceleration"),
        ("cv2",),
        lambda o: accelerate(
            o.rate, o.rate_to, o.acceleration, _cv2(o), _duration_s(o), seed=o.seed
        ),
    ),
    "azure": _Kind((), ("rate",), lambda o: azure(_file(o), o.rate, o.duration_s), reads_file=True),
    "rate": _Kind(
        (),
        ("rate",),
        lambda o: rate_file(_file(o), o.rate, _duration_s(o), seed=o.seed),
        reads_file=True,
    ),
}
