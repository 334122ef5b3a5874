"""The names that clients have for models and versions, and the models of the engine behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from offramp.engine.common.errors import ModelNotServedError
from offramp.engine.requests.results import ModelInfo
from offramp.server.common.served import ServedEngine

ONLY_VERSION: Final = "1"
"""The version of a model that was named by its path alone."""


@dataclass(frozen=True, slots=True)
class ServedName:
    """A version of a model that answers requests."""

    name: str
    """Name that clients ask for."""
    version: str
    """A number, for instance ``3``."""
    engine_name: str
    """Name that the engine has for it."""


class Catalog:
    """The versions that are served, by name; used on the event loop's thread.

    A request that names no version is answered by the newest.
    """

    def __init__(self, engine: ServedEngine) -> None:
        """Start with all models that the engine has, each as version 1."""
        self._engine = engine
        self._served: dict[str, dict[str, ServedName]] = {}
        """By name and version, the newest first."""
        for model in engine.models():
            self.put(model.name, {ONLY_VERSION: model.name})

    def put(self, name: str, versions: Mapping[str, str]) -> None:
        """Serve exactly these versions of a model: their names in the engine, the newest first."""
        self._served[name] = {v: ServedName(name, v, engine) for v, engine in versions.items()}

    def remove(self, name: str) -> None:
        """Serve a model no more."""
        self._served.pop(name, None)

    def find(self, name: str, version: str = "") -> ServedName:
        """Return the version of a model that answers a request.

        Raises:
            ModelNotServedError: No such model, or no such version of it.
        """
        versions = self._served.get(name)
        if versions is None:
            raise ModelNotServedError.of(name, self._served)
        if not version:
            return next(iter(versions.values()))
        if version not in versions:
            raise ModelNotServedError(
                f"model {name!r} has no version {version!r}; leave the version empty or send "
                f"{' or '.join(map(repr, versions))}"
            )
        return versions[version]

    def model(self, name: str, version: str = "") -> ModelInfo:
        """Describe the version of a model that answers a request; ModelNotServedError."""
        return self._engine.model(self.find(name, version).engine_name)

    def served(self, name: str) -> Sequence[ServedName]:
        """Return the versions of a model, the oldest first; none if it is not served."""
        return sorted(self._served.get(name, {}).values(), key=lambda served: int(served.version))

    def ready(self, name: str, version: str = "") -> bool:
        """Return whether a model takes requests; not if it is not served."""
        try:
            return self._engine.ready(self.find(name, version).engine_name)
        except ModelNotServedError:
            return False

    def __iter__(self) -> Iterator[ServedName]:
        """Iterate over all versions of all models."""
        for versions in tuple(self._served.values()):
            yield from versions.values()

    def names(self) -> Sequence[str]:
        """Return the names of the served models."""
        return tuple(self._served)
