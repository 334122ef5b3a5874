"""Opens the models to serve: bundles and ONNX files by the engine, other models by extensions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from offramp.engine.common.extensions import extensions_for
from offramp.engine.core import Engine
from offramp.engine.models.options import EngineOptions
from offramp.server.common.joined import JoinedEngine, ModelOpener, opener_of
from offramp.server.common.served import ServedEngine


class _BundleOpener:
    """Opens the models that no extension opens."""

    def opens(self, _path: Path) -> bool:
        return True

    async def open_models(self, models: Mapping[str, Path], options: EngineOptions) -> ServedEngine:
        return await Engine.open(models, options)


async def open_served(models: Mapping[str, Path], options: EngineOptions) -> ServedEngine:
    """Load models by the names to serve; raise the errors of :meth:`.Engine.open`."""
    if openers := _openers():
        return await JoinedEngine.open(models, options, openers, _BundleOpener())
    return await Engine.open(models, options)


def only_served(paths: Iterable[Path]) -> list[Path]:
    """Return the paths that extensions open; other commands cannot read these models."""
    openers = _openers()
    return [path for path in paths if opener_of(path, openers) is not None]


def _openers() -> list[ModelOpener]:
    return [each for each in extensions_for("server") if isinstance(each, ModelOpener)]
