"""Combinations of settings that ``eeserve`` refuses: one table, checked in one place.

The table applies to the command line and to the configuration file. A setting without effect is
refused, so that nobody relies on it: always on the command line, and in a file if the file itself
makes the setting ineffective. So one file works with every ``--mode``. Values that contradict each
other within one set of options are checked by that class (:class:`EngineOptions`,
:class:`ModelOptions`, :class:`ServerOptions`), for programs too.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from offramp.commands.combinations import Illegal, IllegalCombinationError, refuse_illegal
from offramp.commands.parser import LayeredParser
from offramp.engine.common.extensions import extensions_for
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.onnx_files.wrapping import is_onnx_file
from offramp.engine.scheduling.policies import PolicyName
from offramp.server.arguments.configuration import Configuration, ConfigurationError, key_of
from offramp.server.arguments.option_groups import values_of
from offramp.server.arguments.options import DEFAULT_MODE

_OBSERVING: Final = (
    *("--controller", "--max-disagreement", "--confidence", "--audit-budget", "--ramp-budget"),
    *("--trust-inputs", "--max-source-share", "--never-beyond-compiled"),
)
_UNOBSERVED: Final = (
    "nothing is observed in that mode; leave it out, or choose --mode audit or release"
)
_NO_EXIT: Final = "no exit runs in that mode; leave it out, or choose another --mode"
_LEARNING: Final = ("--learn-samples", "--learn-folder", "--learn-gib", "--learn-keep")
_NOT_LEARNING: Final = "nothing is recorded; leave it out, or add --learn"
ONNX_FILE: Final = "MODEL.onnx"
"""Placeholder in the table for "one of the models is an ONNX file"."""
_ON_CPU: Final = "--backend onnxruntime|openvino"
_ON_GPU: Final = "--backend tensorrt|cuda"
_NO_GPU: Final = "that backend runs on the CPU; leave it out, or choose --backend tensorrt or cuda"
_ENGINES: Final = "only TensorRT has engines; leave it out, or choose --backend tensorrt"

TABLE: Final = (
    *(Illegal(option=o, other="--mode leave|off", why=_UNOBSERVED) for o in _OBSERVING),
    Illegal(
        option="--audit-budget",
        other="--mode release",
        why="every sample runs to the end there; leave it out, or choose --mode audit",
    ),
    Illegal(option="--uncertified-exits", other="--mode off", why=_NO_EXIT),
    Illegal(option="--no-state", other="--mode off", why=_NO_EXIT),
    Illegal(
        option="--max-queue-delay-ms",
        other="--policy slackfit|slackfit-bare|max-batch|max-accuracy|cheapest|clockwork|fixed",
        why="that policy never waits for more samples; leave it out, or choose --policy "
        "run-through, refill, rebatch or delay",
    ),
    Illegal(option="--device", other=_ON_CPU, why=_NO_GPU),
    Illegal(option="--no-cuda-graphs", other=_ON_CPU, why=_NO_GPU),
    Illegal(option="--precision", other="--backend onnxruntime|openvino|cuda", why=_ENGINES),
    Illegal(
        option="--engine-build-minutes",
        other="--backend onnxruntime|openvino|cuda",
        why=_ENGINES,
    ),
    Illegal(
        option="--threads",
        other=_ON_GPU,
        why="that backend runs on a GPU; leave it out, or choose --backend onnxruntime",
    ),
    Illegal(
        option="--custom-ops",
        other="--backend tensorrt|cuda|openvino",
        why="only ONNX Runtime on the CPU takes libraries of operators; choose --backend "
        "onnxruntime",
    ),
    Illegal(
        option="--criterion-module",
        other=_ON_GPU,
        why="a criterion of your own runs on the CPU; choose --backend onnxruntime",
    ),
    *(Illegal(option=o, without="--learn", why=_NOT_LEARNING) for o in _LEARNING),
    Illegal(
        option="--learn",
        other="--mode off",
        why="no exit answers in that mode; leave one of them out",
    ),
    Illegal(
        option="--learn",
        other="--self-check",
        why="a self-check serves nothing; leave one of them out",
    ),
    Illegal(
        option="--learn",
        without=ONNX_FILE,
        why="all models are bundles, which are served as they are; name the ONNX file that a "
        "bundle was compiled from, or leave it out",
    ),
    Illegal(
        option="--answer",
        without=ONNX_FILE,
        why="all models are bundles, which have one answer; leave it out",
    ),
    Illegal(
        option="--task",
        without=ONNX_FILE,
        why="all models are bundles, whose task is known; leave it out",
    ),
    Illegal(
        option="--json",
        without="--self-check",
        why="nothing else writes a report; leave it out, or add --self-check",
    ),
)
"""Combinations that are refused. In each row ``option``, a flag without its value, is the setting
that would have no effect."""


def combinations() -> tuple[Illegal, ...]:
    """Return the whole table, including the rows of extensions."""
    added = (row for extension in extensions_for("server") for row in extension.combinations)
    return *added, *TABLE


def refuse_illegal_settings(
    parser: LayeredParser,
    given: argparse.Namespace,
    flags: frozenset[str],
    file: Configuration,
    models: Collection[Path],
) -> None:
    """Refuse the first forbidden combination in the command line or the file.

    Args:
        parser: Parser of the command line.
        given: Parsed command line.
        flags: Flags on the command line.
        file: Configuration file.
        models: Paths of all models to serve.

    Raises:
        IllegalCombinationError: The command line has one, alone or with the file.
        ConfigurationError: The file alone has one.
    """
    usual = {**values_of(EngineOptions(mode=DEFAULT_MODE)), **values_of(ModelOptions())}
    for extension in extensions_for("server"):
        usual |= values_of(extension.settings())
    defaults = _by_flag(parser, usual, all_of_them=True)
    for table in _tables(file, models):
        asked = _by_flag(parser, {**table.engine, **table.settings})
        own = _by_flag(parser, table.settings)
        try:
            _refuse(own, {**defaults, **asked}, asked.keys(), table.models)
        except IllegalCombinationError as error:
            text = _with_keys(parser, str(error))
            raise ConfigurationError(f"{file.source}: {table.name}: {text}") from error
    common = _by_flag(parser, {**_of_engine(file), **file.defaults})
    values = {**defaults, **common, **_plain(parser.values(given))}
    _refuse(flags, values, flags | common.keys(), models)


def _refuse(
    options: Collection[str],
    values: Mapping[str, object],
    flags: Collection[str],
    models: Collection[Path],
) -> None:
    """Refuse combinations in which one of ``options`` has no effect."""
    rows = [row for row in combinations() if row.option in options]
    may_have_onnx = any(map(is_onnx_file, models)) or "--model-repository" in flags
    onnx_files = {ONNX_FILE} if may_have_onnx else set()
    refuse_illegal(rows, values, {*flags, *onnx_files})


class _Settings(NamedTuple):
    """Settings of a file that are active together."""

    name: str
    """Names of the tables that contain them."""
    engine: Mapping[str, Any]
    settings: Mapping[str, Any]
    """Settings to check, together with those of ``engine``."""
    models: Collection[Path]
    """Paths of the models that they apply to."""


def _tables(file: Configuration, models: Collection[Path]) -> Iterator[_Settings]:
    engine = _of_engine(file)
    common = {**engine, **file.defaults}
    yield _Settings("[engine] and [defaults]", engine, common, models)
    for name, model in file.models.items():
        yield _Settings(f"[models.{name}] and [engine]", engine, model.settings,
                        () if model.path is None else (model.path,))  # fmt: skip


def _of_engine(file: Configuration) -> dict[str, Any]:
    """Return the settings of all models; a table ``[learning]`` means ``--learn``."""
    return {**file.server, **file.engine, **({} if file.learning is None else {"learning": True})}


def _by_flag(
    parser: LayeredParser, settings: Mapping[str, Any], *, all_of_them: bool = False
) -> dict[str, object]:
    """Return settings by their flags; settings without a flag are left out.

    A flag without a value, such as ``--no-state``, means one value of its setting. It is left out
    if the setting has the other value, unless ``all_of_them`` is true.
    """
    found: dict[str, object] = {}
    for action in parser.options():
        if action.dest not in settings:
            continue
        value = settings[action.dest]
        if all_of_them or action.const is None or value == action.const:
            found |= dict.fromkeys(action.option_strings, value)
    return _plain(found)


def _plain(values: Mapping[str, object]) -> dict[str, object]:
    """Return the values; a policy is reduced to its name, without the exit of ``fixed``."""
    return {f: v.name if isinstance(v, PolicyName) else v for f, v in values.items()}


def _with_keys(parser: LayeredParser, text: str) -> str:
    """Return a message with the file's keys in place of flags."""
    keys = {f: key_of(action.dest) for action in parser.options() for f in action.option_strings}
    return re.sub(r"--[a-z-]+", lambda found: keys.get(found[0], found[0]), text)
