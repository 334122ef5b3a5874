"""Names of models and versions for clients, and the engine's models that they refer to."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from offramp.engine.common.errors import ModelNotServedError
from offramp.engine.requests.results import ModelInfo
from offramp.server.common.served import ServedEngine

ONLY_VERSION: Final = "1"
"""The version of a model that is named only by its path."""


@dataclass(frozen=True, slots=True)
class ServedName:
    """A version of a model that answers requests."""

    name: str
    """Name in clients' requests."""
    version: str
    """Version number, for instance ``3``."""
    engine_name: str
    """Name under which the engine serves this version."""


class Catalog:
    """The served versions of all models, by name; used on the event loop's thread.

    The newest version answers a request that names no version.
    """

    def __init__(self, engine: ServedEngine) -> None:
        """Start with all models of the engine, each as version 1."""
        self._engine = engine
        self.missing: set[str] = set()
        """Models that the server should have had from its start, and that could not be loaded."""
        self.failed: dict[tuple[str, str], str] = {}
        """Reasons why the newest file of a version could not be loaded, by name and version."""
        self._served: dict[str, dict[str, ServedName]] = {}
        """Served names by model and version, newest version first."""
        for model in engine.models():
            self.put(model.name, {ONLY_VERSION: model.name})

    def put(self, name: str, versions: Mapping[str, str]) -> None:
        """Serve exactly these versions of a model: engine names by version, newest first."""
        self.remove(name)
        self._served[name] = {v: ServedName(name, v, engine) for v, engine in versions.items()}

    def remove(self, name: str) -> None:
        """Stop serving a model, and expect it no more."""
        self._served.pop(name, None)
        self.missing.discard(name)
        self.drop_failures(name)

    def drop_failures(self, name: str, *, but: Collection[str] = ()) -> None:
        """Drop the reasons of a model's versions, except those of the versions in ``but``."""
        for key in [key for key in self.failed if key[0] == name and key[1] not in but]:
            del self.failed[key]

    def wanted(self) -> set[str]:
        """Return the names of all models that are served, or that could not be loaded."""
        return {*self._served, *self.missing, *(name for name, _ in self.failed)}

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
        """Return a description of the version that answers, or raise ModelNotServedError."""
        return self._engine.model(self.find(name, version).engine_name)

    def served(self, name: str) -> Sequence[ServedName]:
        """Return the versions of a model, the oldest first; none if it is not served."""
        return sorted(self._served.get(name, {}).values(), key=lambda served: int(served.version))

    def ready(self, name: str, version: str = "") -> bool:
        """Return whether a model is served and takes requests."""
        try:
            return self._engine.ready(self.find(name, version).engine_name)
        except ModelNotServedError:
            return False

    def all_ready(self) -> bool:
        """Return whether every model takes requests, and none is missing since the start."""
        return self._engine.ready() and not self.missing

    def __iter__(self) -> Iterator[ServedName]:
        """Iterate over all versions of all models."""
        for versions in tuple(self._served.values()):
            yield from versions.values()

    def names(self) -> Sequence[str]:
        """Return the names of the served models."""
        return tuple(self._served)
