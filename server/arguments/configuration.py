"""The configuration file of ``eeserve``: settings of the engine, of all models, of each model.

::

    [engine]                  # fields of EngineOptions
    streams = 2
    [defaults]                # fields of ModelOptions, for every model
    policy = "run-through"
    [learning]                # fields of LearnOptions; the table means --learn
    [models.fashion]          # as in [defaults], for one model
    path = "fashion.ee"       # relative to this file; none for a model of the repository
    policy = "slackfit"
    slo_ms = 20
    max_disagreement = 0.005
    [server]                  # fields of ServerOptions, of its parts, and of LoggingOptions
    grpc_port = 9001
    token_file = "tokens"     # relative to this file

Keys and their types come from the dataclasses, so a new option is a new key. A model's table
overrides the command line, which overrides all other tables.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, Final, TypeAlias, get_args, get_type_hints

from offramp.bundle.engines import PRECISIONS
from offramp.commands.nearest import nearest
from offramp.engine.backends.factory import BACKENDS
from offramp.engine.common.extensions import extensions_for
from offramp.engine.models.learning_options import LearnOptions
from offramp.engine.models.options import (
    SHARE_WEIGHTS,
    EngineOptions,
    ModelOptions,
    controller_names,
)
from offramp.engine.scheduling.policies import PolicyName
from offramp.engine.stages.plan import Mode
from offramp.server.arguments.extension import SettingError
from offramp.server.arguments.logging_setup import FORMATS, LEVELS, LoggingOptions
from offramp.server.arguments.options import (
    DEFAULT_MODE,
    KeepaliveOptions,
    ModelRepositoryOptions,
    RepositoryControl,
    SecurityOptions,
    ServerOptions,
    VersionChoice,
)

_Options: TypeAlias = type[EngineOptions | ModelOptions | LearnOptions]


class ConfigurationError(ValueError):
    """A configuration file is invalid; the message names the file, the key and the expectation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfiguredModel:
    """A table ``[models.NAME]`` of a configuration file."""

    path: Path | None
    """The bundle folder or ONNX file; ``None`` for a model of the repository."""
    settings: Mapping[str, Any]
    """Fields of :class:`ModelOptions` that the table sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The settings in a configuration file; an empty object means that there is no file."""

    source: Path | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Fields of :class:`EngineOptions`, and of extensions' settings."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields of :class:`ModelOptions`, for all models."""
    models: Mapping[str, ConfiguredModel] = field(default_factory=dict)
    learning: Mapping[str, Any] | None = None
    """Fields of :class:`LearnOptions`; ``None`` if there is no such table."""
    server: Mapping[str, Any] = field(default_factory=dict)
    """Fields of :class:`ServerOptions`, of its parts, and of :class:`LoggingOptions`."""

    def options(
        self,
        *,
        engine: Mapping[str, Any],
        defaults: Mapping[str, Any],
        learning: Mapping[str, Any] | None = None,
    ) -> EngineOptions:
        """Return the engine's options: the file's settings, overridden by the command line.

        Paths in extensions' settings are resolved after overriding.

        Args:
            engine: Fields of :class:`EngineOptions`, and of extensions' settings.
            defaults: Fields of :class:`ModelOptions`.
            learning: Fields of :class:`LearnOptions`; ``None`` if the command line does not ask for
                learning.

        Raises:
            ConfigurationError: The file's settings contradict each other or refer to something
                invalid.
            SettingError: A setting of the command line refers to something invalid.
            ValueError: The command line's settings contradict each other.
        """
        common = {**self.defaults, **defaults}
        overruled = self._overruled(engine)
        ours = {name: value for name, value in self.engine.items() if name not in overruled}
        joined: dict[str, Any] = {"mode": DEFAULT_MODE, **ours, **engine}
        joined["defaults"] = ModelOptions(**common)
        joined["models"] = {
            name: ModelOptions(**{**common, **model.settings})
            for name, model in self.models.items()
            if model.settings
        }
        if learning is not None or self.learning is not None:
            joined["learning"] = LearnOptions(**{**(self.learning or {}), **(learning or {})})
        try:
            for extension in extensions_for("server"):
                names = {f.name for f in fields(extension.settings)}
                for name in names:
                    joined.pop(name, None)
                file = {name: value for name, value in ours.items() if name in names}
                line = {name: value for name, value in engine.items() if name in names}
                folder = None if self.source is None else self.source.parent
                made = extension.engine_options(file, line, folder)
                extended = {**joined.get("extensions", {}), **made.get("extensions", {})}
                joined |= {**made, "extensions": extended}
            return EngineOptions(**joined)
        except SettingError as error:
            if error.key in engine:
                raise
            raise ConfigurationError(f"{self.source}: [engine] {error.key}: {error}") from error
        except ValueError as error:
            if self.engine.keys() <= engine.keys():
                raise
            besides = " with the command line" if engine else ""
            raise ConfigurationError(f"{self.source}: [engine]{besides}: {error}") from error

    def _overruled(self, engine: Mapping[str, Any]) -> frozenset[str]:
        """Return the engine settings of the file that the command line replaces by another name."""
        return _ALTERNATIVES if _ALTERNATIVES & engine.keys() else frozenset()


def read_configuration(path: Path) -> Configuration:
    """Read a file; raise ConfigurationError for invalid content."""
    document = _load(path)
    _refuse_unknown(document, TABLES, f"{path}", "table")
    models = _table(document, "models", f"{path}: [models]")
    return Configuration(
        source=path,
        engine=_settings(engine_settings(), _table(document, "engine", f"{path}: [engine]")),
        defaults=_checked(ModelOptions, _table(document, "defaults", f"{path}: [defaults]")),
        models={name: _model(path.parent, models, name) for name in models.content},
        learning=_learning(path, document) if "learning" in document else None,
        server=_server(path, document),
    )


def model_options(where: str, settings: Mapping[str, Any], base: ModelOptions) -> ModelOptions:
    """Return a model's options with some settings replaced, as by a table ``[models.NAME]``.

    ``where`` is the source of the settings, for the message of the ConfigurationError.
    """
    changed = _settings((ModelOptions,), _Table(where, settings, _OF_TRITON))
    try:
        return replace(base, **changed)
    except ValueError as error:
        raise ConfigurationError(f"{where}: {error}") from error


def _server(path: Path, document: Mapping[str, Any]) -> dict[str, Any]:
    kinds = (ServerOptions, LoggingOptions, *SERVER_PARTS.values())
    settings = _settings(kinds, _table(document, "server", f"{path}: [server]"))
    return {
        name: path.parent / value if isinstance(value, Path) else value
        for name, value in settings.items()
    }


def _learning(path: Path, document: Mapping[str, Any]) -> dict[str, Any]:
    settings = _checked(LearnOptions, _table(document, "learning", f"{path}: [learning]"))
    if "folder" in settings:
        settings["folder"] = path.parent / settings["folder"]
    return settings


@dataclass(frozen=True, slots=True)
class _Table:
    """A table and its location in the file, for messages."""

    where: str
    content: Mapping[str, Any]
    remedy: str = ""
    """End of the message about an unknown key."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """The accepted values of a key."""

    expected: str
    types: tuple[type, ...]
    """Exact types of the TOML value: a boolean is not a number."""
    convert: Callable[[Any], Any]
    """Converter of the value; raises ValueError with the reason."""


def _one_of(*names: str) -> Callable[[str], str]:
    def choose(text: str) -> str:
        if text not in names:
            raise ValueError(f"{text!r:.80} is not one of {', '.join(names)}{hint_at(text, names)}")
        return text

    return choose


def _strings(values: list[Any]) -> tuple[str, ...]:
    if others := [value for value in values if not isinstance(value, str)]:
        raise ValueError(f"{_describe(others[0])} is in the list, expected only strings")
    return tuple(values)


_KINDS: Final[Mapping[type, _Kind]] = {
    bool: _Kind("true or false", (bool,), bool),
    int: _Kind("a whole number", (int,), int),
    float: _Kind("a number", (int, float), float),
    str: _Kind("a string", (str,), str),
    Path: _Kind("a string", (str,), Path),
    Mode: _Kind("a string", (str,), lambda text: Mode(_one_of(*Mode)(text))),
    PolicyName: _Kind("a string", (str,), PolicyName.parse),
    VersionChoice: _Kind("a string", (str,), VersionChoice.parse),
    RepositoryControl: _Kind(
        "a string", (str,), lambda text: RepositoryControl(_one_of(*RepositoryControl)(text))
    ),
}
_KINDS_BY_FIELD: Final = {
    "backend": _Kind("a string", (str,), _one_of(*BACKENDS)),
    "controller": _Kind("a string", (str,), _one_of(*controller_names())),
    "precision": _Kind("a string", (str,), _one_of(*PRECISIONS)),
    "share_weights": _Kind("a string", (str,), _one_of(*SHARE_WEIGHTS)),
    "log_level": _Kind("a string", (str,), _one_of(*LEVELS)),
    "log_format": _Kind("a string", (str,), _one_of(*FORMATS)),
    "load_model": _Kind("an array of strings", (list,), _strings),
}
_KEYS_BY_FIELD: Final = {"scheduling": "policy"}
"""Keys that differ from the field's name."""
TABLES: Final = ("engine", "learning", "defaults", "models", "server")
"""Names of the top-level tables of a configuration file."""
SERVER_PARTS: Final[Mapping[str, type[Any]]] = {
    "repository": ModelRepositoryOptions,
    "keepalive": KeepaliveOptions,
    "security": SecurityOptions,
}
"""Fields of :class:`ServerOptions` that hold options, whose fields are keys of [server]."""
_NO_KEYS: Final = ("defaults", "models", "devices", "extensions", "learning", *SERVER_PARTS)
"""Fields that have their own tables, or that only programs set."""
_ALTERNATIVES: Final = frozenset({"parallel_below", "max_violations"})
"""Two forms of one setting: either form on the command line overrides both in the file."""
_OF_TRITON: Final = "; docs/howto/moving.md names the keys for Triton's settings"
_SHOWN: Final = 80
"""Largest number of characters of a value in a message."""
_TOML_TYPES: Final = {
    bool: "a boolean", int: "an integer", float: "a float", str: "a string", list: "an array",
    dict: "a table",
}  # fmt: skip


def _load(path: Path) -> dict[str, Any]:
    content = _content(path)
    try:
        return tomllib.loads(content.decode())
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: is not UTF-8, as TOML has to be: {error}") from error
    except (ValueError, RecursionError) as error:  # also impossible dates, deep lists
        raise ConfigurationError(f"{path}: is not TOML: {error}") from error


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error


def _table(parent: Mapping[str, Any], name: str, where: str) -> _Table:
    content = parent.get(name, {})
    if not isinstance(content, dict):
        raise ConfigurationError(f"{where} is {_describe(content)}, expected a table")
    return _Table(where, content)


def _model(folder: Path, models: _Table, name: str) -> ConfiguredModel:
    where = f"{models.where.removesuffix(']')}.{name}]"
    if not name:
        raise ConfigurationError(f"{where} has no name; expected for instance [models.resnet]")
    table = _table(models.content, name, where)
    path = None
    if "path" in table.content:
        path = folder / _convert(table.content["path"], _KINDS[str], f"{where} path")
    rest = {key: value for key, value in table.content.items() if key != "path"}
    settings = _checked(ModelOptions, _Table(where, rest), besides=("path",))
    return ConfiguredModel(path=path, settings=settings)


def _checked(options: _Options, table: _Table, besides: Iterable[str] = ()) -> dict[str, Any]:
    """Read a table, and refuse values that its options class refuses."""
    settings = _settings((options,), table, besides)
    try:
        options(**settings)
    except ValueError as error:
        raise ConfigurationError(f"{table.where}: {error}") from error
    return settings


def engine_settings() -> tuple[type[Any], ...]:
    """Return the dataclasses whose fields are keys of ``[engine]``."""
    return EngineOptions, *(extension.settings for extension in extensions_for("server"))


def _settings(
    options: Sequence[type[Any]], table: _Table, besides: Iterable[str] = ()
) -> dict[str, Any]:
    """Read a table into fields of ``options``; ``besides`` are further keys that it may have."""
    hints = {name: hint for kind in options for name, hint in get_type_hints(kind).items()}
    every = [f for kind in options for f in fields(kind) if f.metadata.get("key", True)]
    names = {key_of(f.name): f.name for f in every}
    known = {key: name for key, name in names.items() if name not in _NO_KEYS}
    _refuse_unknown(table.content, [*besides, *known], table.where, "key", table.remedy)
    settings = {}
    for key, value in table.content.items():
        name = known[key]
        kind = _KINDS_BY_FIELD.get(name) or _KINDS[_without_none(hints[name])]
        settings[name] = _convert(value, kind, f"{table.where} {key}")
    return settings


def key_of(field: str) -> str:
    """Return the file's key for a field of the options."""
    return _KEYS_BY_FIELD.get(field, field)


def _without_none(hint: Any) -> type:
    (kind,) = [part for part in get_args(hint) or (hint,) if part is not NoneType]
    assert isinstance(kind, type)
    return kind


def _convert(value: object, kind: _Kind, where: str) -> Any:
    if type(value) not in kind.types:
        raise ConfigurationError(f"{where} is {_describe(value)}, expected {kind.expected}")
    try:
        return kind.convert(value)
    except (OverflowError, ValueError) as error:
        raise ConfigurationError(f"{where}: {error}") from error


def _refuse_unknown(
    content: Iterable[str], known: Iterable[str], where: str, what: str, remedy: str = ""
) -> None:
    known = tuple(known)
    for key in content:
        if key not in known:
            raise ConfigurationError(
                f"{where}: there is no {what} {key!r:.80}{hint_at(key, known)} "
                f"(expected: {', '.join(known)}){remedy}"
            )


def hint_at(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the names that it may mean, if any."""
    near = " or ".join(map(repr, nearest(name, known)))
    return f"; did you mean {near}?" if near else ""


def _describe(value: object) -> str:
    kind = _TOML_TYPES.get(type(value), "a date or time")
    text = json.dumps(value, default=str, ensure_ascii=False)
    return f"{text if len(text) <= _SHOWN else f'{text[:_SHOWN]}…'} ({kind})"
