"""The options of an engine, from keyword arguments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from offramp.api.keywords import (
    EngineKeywords,
    PathLike,
    check_keywords,
    options_from,
    without_flags,
)
from offramp.engine.options import EngineOptions, ModelOptions
from offramp.engine.plan import Mode
from offramp.engine.scheduling import PolicyName

_FIELDS: Final = {"state": "keep_state", "cuda_graphs": "graphs", "policy": "scheduling"}
"""Fields that are not called as their keyword is."""


def model_name(path: PathLike) -> str:
    """Return the name that a bundle or an ONNX file is served under."""
    return Path(path).resolve().name.removesuffix(".ee").removesuffix(".onnx")


def engine_options(
    function: str, given: Mapping[str, Any], kind: type = EngineKeywords
) -> EngineOptions:
    """Make the engine's options of the keyword arguments of a function.

    Raises:
        TypeError: An option is unknown, or of another type.
        ValueError: A value is out of range, or two options exclude each other.
    """
    check_keywords(function, given, kind)
    named = dict(given)
    mode = Mode(named.pop("mode", Mode.AUDIT))
    try:
        if "policy" in named:
            named["policy"] = PolicyName.parse(named["policy"])
        if "forbid_forced_exits" in named:
            named["forced_exits"] = not named.pop("forbid_forced_exits")
        if mode is not Mode.AUDIT:  # in which every option means something
            from offramp.server.arguments.settings import refuse_ignored  # noqa: PLC0415 - heavy

            fields = {_FIELDS.get(name, name): value for name, value in named.items()}
            fields.pop("keep_state", None)  # no state is kept, as asked for
            refuse_ignored(fields, mode)
        defaults = options_from(ModelOptions, named, _FIELDS)
        return options_from(EngineOptions, named, _FIELDS, mode=mode, defaults=defaults)
    except ValueError as error:
        raise ValueError(without_flags(str(error))) from error
