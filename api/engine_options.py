"""Options of an engine from keyword arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from offramp.api.keywords import (
    EngineKeywords,
    PathLike,
    check_keywords,
    options_from,
    refuse_illegal_keywords,
    without_flags,
)
from offramp.bundle import Bundle
from offramp.engine.common.extensions import extensions_for
from offramp.engine.models.learning_options import LearnOptions
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.onnx_files import is_onnx_file
from offramp.engine.scheduling.policies import PolicyName
from offramp.engine.stages.plan import Mode

_FIELDS: Final = {"state": "keep_state", "cuda_graphs": "graphs", "policy": "scheduling"}
"""Names of the options' fields, by keyword argument, where the two names differ."""

_LEARNING: Final = {
    "learn_samples": "samples",
    "learn_folder": "folder",
    "learn_gib": "max_gib",
    "learn_keep": "keep",
}
_DEFAULTS: Final = {"--mode": Mode.AUDIT.value, "--policy": "run-through", "--backend": "auto"}


def path_of(model: PathLike | Bundle) -> Path:
    """Return a path unchanged, or the path of an opened bundle (the result of ``compile``)."""
    return model.path if isinstance(model, Bundle) else Path(model)


def model_name(path: PathLike) -> str:
    """Return the name that a bundle or an ONNX file is served under."""
    return Path(path).resolve().name.removesuffix(".ee").removesuffix(".onnx")


def engine_options(
    function: str,
    given: Mapping[str, Any],
    models: Iterable[Path],
    kind: type = EngineKeywords,
    *,
    named: Sequence[str] = (),
) -> EngineOptions:
    """Return the engine's options for the keyword arguments of a function that opens models.

    ``named`` are the function's keyword arguments that are not options of the engine.

    Raises:
        TypeError: An option is unknown or has another type.
        ValueError: A value is out of range, or two options exclude each other.
    """
    check_keywords(function, given, kind, named=named)
    if given:
        from offramp.server.arguments.combinations import ONNX_FILE, combinations  # noqa: PLC0415

        # Without exits there is no state, so this option is allowed in every combination.
        given_options = {name: value for name, value in given.items() if name != "state"}
        files = {ONNX_FILE} if any(map(is_onnx_file, models)) else set()
        refuse_illegal_keywords(combinations(), given_options, _DEFAULTS, also=files)
    values = dict(given)
    mode = Mode(values.pop("mode", Mode.AUDIT))
    try:
        if "policy" in values:
            values["policy"] = PolicyName.parse(values["policy"])
        if "forbid_forced_exits" in values:
            values["forced_exits"] = not values.pop("forbid_forced_exits")
        more = {"mode": mode, "learning": _learning(values), **_of_extensions(values)}
        defaults = options_from(ModelOptions, values, _FIELDS)
        return options_from(EngineOptions, values, _FIELDS, defaults=defaults, **more)
    except ValueError as error:
        raise ValueError(without_flags(str(error))) from error


def _of_extensions(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of extensions, made from their keyword arguments."""
    found: dict[str, Any] = {}
    for extension in extensions_for("server"):
        names = {field.name for field in fields(extension.settings)}
        own = {name: value for name, value in given.items() if name in names}
        if own:
            made = extension.engine_options({}, own, None)
            extended = {**found.get("extensions", {}), **made.get("extensions", {})}
            found |= {**made, "extensions": extended}
    return found


def _learning(named: Mapping[str, Any]) -> LearnOptions | None:
    """Return the options of learning; ``None`` if learning is not requested."""
    if not named.get("learn", False):
        return None
    given = {field: named[name] for name, field in _LEARNING.items() if name in named}
    if given.get("folder") is not None:
        given["folder"] = Path(given["folder"])
    return LearnOptions(**given)
