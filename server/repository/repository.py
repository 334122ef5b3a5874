"""The model repository: loads, replaces and unloads models while the server answers requests.

The old version serves while the new one is loaded; once the new version is ready, it takes new
requests, and the old one answers those that it has. If loading fails, the old version continues to
serve, and the index shows the reason (as Triton's ``RepositoryIndex``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from offramp.bundle import BundleError
from offramp.engine.common.errors import EngineError
from offramp.engine.models.options import ModelOptions
from offramp.engine.onnx_files import OnnxFileError
from offramp.server.arguments.options import ModelRepositoryOptions, RepositoryControl
from offramp.server.common.catalog import ONLY_VERSION, Catalog, ServedName
from offramp.server.common.errors import ModelControlError, ModelLoadError, StartError
from offramp.server.common.served import ServedEngine
from offramp.server.repository.layout import (
    TRITON_CONFIG,
    FileStamp,
    find_misplaced,
    find_models,
    find_versions,
    ignored_settings,
)

logger = logging.getLogger(__name__)

_POLL_S: Final = 15.0
"""Seconds between two checks of the folder if the options set none."""


class ModelState(StrEnum):
    """States of a version in the index, with Triton's names."""

    READY = "READY"
    LOADING = "LOADING"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexEntry:
    """A version of a model in the index."""

    name: str
    version: str
    state: ModelState
    reason: str = ""
    """Reason why the version is not ready, or why its newest file is not served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """File and options that a served version was loaded with."""

    path: Path
    stamp: FileStamp | None
    options: ModelOptions


class ModelRepository:
    """The models of a server; used on the event loop's thread.

    ``named`` are paths of models that are served already, by name. ``options`` are the options of
    each model by name; those of ``""`` apply to all other models.
    """

    def __init__(
        self,
        engine: ServedEngine,
        settings: ModelRepositoryOptions | None = None,
        *,
        named: Mapping[str, Path] | None = None,
        options: Mapping[str, ModelOptions] | None = None,
    ) -> None:
        self.catalog: Final = Catalog(engine)
        self._engine = engine
        self._settings = settings or ModelRepositoryOptions()
        self._named = dict(named or {})
        self._options = {"": ModelOptions(), **(options or {})}
        self._loaded: dict[tuple[str, str], _Loaded] = {
            (name, ONLY_VERSION): _Loaded(
                path=path, stamp=FileStamp.of(path), options=self.options_of(name)
            )
            for name, path in self._named.items()
        }
        self._changing: dict[tuple[str, str], ModelState] = {}
        self._reasons: dict[tuple[str, str], str] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        """One lock per model, so that a model has one change at a time."""
        self._configs_reported: set[str] = set()
        """Models whose ``config.pbtxt`` was reported."""
        self._polling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the models of the start, and begin to poll.

        Raises:
            ModelLoadError: A model of ``--load-model`` cannot be loaded. Other failing models are
                skipped: the server is not ready until they are loaded or removed; the log and the
                index show the reason.
            StartError: The repository cannot be read.
        """
        settings = self._settings
        if settings.model_repository is not None:
            try:
                names = await asyncio.to_thread(self._names_in_folder)
                misplaced = await asyncio.to_thread(find_misplaced, settings.model_repository)
            except OSError as error:
                raise StartError(
                    f"the model repository {settings.model_repository} cannot be read: "
                    f"{error.strerror}; expected a folder with models, such as NAME/1.ee"
                ) from error
            if misplaced:
                logger.warning("%s: ignored: %s; a version of a model NAME is NAME/1.ee, "
                               "NAME/1.onnx or NAME/1/model.onnx", settings.model_repository,
                               ", ".join(misplaced))  # fmt: skip
            for name in self._named.keys() & set(names):
                logger.warning("%s is served from %s, not from the repository, which has a model "
                               "of that name too", name, self._named[name])  # fmt: skip
            if settings.model_control is RepositoryControl.EXPLICIT:
                for name in settings.load_model:
                    await self._load(name)
            else:
                await self._follow_folder()
                self.catalog.missing |= set(names) - set(self.catalog.names())
        if settings.model_control is RepositoryControl.POLL:
            self._polling = asyncio.create_task(self._poll(), name="repository")

    async def stop(self) -> None:
        """Stop checking the folder for changes."""
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.wait((self._polling,))
            self._polling = None

    async def index(self, *, ready: bool = False) -> Sequence[IndexEntry]:
        """Return all versions that are served, or that the repository has."""
        known = await asyncio.to_thread(self._found)
        known |= {(served.name, served.version) for served in self.catalog}
        known |= self._changing.keys() | self._reasons.keys() | self.catalog.failed.keys()
        entries = [self._entry(name, version) for name, version in sorted(known, key=_order)]
        return [entry for entry in entries if not ready or entry.state is ModelState.READY]

    async def load(self, name: str, override: ModelOptions | None = None) -> None:
        """Load a model, or reload it if its files or options have changed.

        Raises:
            ModelControlError: This server does not let clients load models.
            ModelLoadError: The model does not exist or cannot be loaded.
        """
        self._check_control("loaded")
        await self._load(name, override)

    async def unload(self, name: str) -> None:
        """Stop serving a model; earlier requests are answered.

        Raises:
            ModelControlError: This server does not let clients unload models.
            ModelNotServedError: The model is not served, and was not to be loaded either.
        """
        self._check_control("unloaded")
        async with self._turn(name):
            if name not in self.catalog.wanted():
                self.catalog.find(name)  # raises ModelNotServedError
            await self._unload(name, "unloaded")

    async def change(self, named: Mapping[str, Path], options: Mapping[str, ModelOptions]) -> None:
        """Apply a changed configuration file: other named models, or other options.

        Models that are gone are unloaded, changed ones are reloaded, failed ones are tried again.
        If a load fails, the log shows the reason, and the old version continues to serve.
        """
        gone = self._named.keys() - named.keys()
        self._named, self._options = dict(named), {"": ModelOptions(), **options}
        for name in gone:
            await self._forget(name, "not in the configuration file any more")
        there = await asyncio.to_thread(self._names_in_folder)
        for name in self.catalog.wanted() - {*named, *there, *self.catalog.names()}:
            await self._forget(name, "removed from the repository")
        for name in (*named, *there):
            if name in named or name in self.catalog.wanted():
                await self._try_load(name)

    def options_of(self, name: str) -> ModelOptions:
        """Return the options of a model, which a client's load call may override."""
        return self._options.get(name, self._options[""])

    def _check_control(self, done: str) -> None:
        if self._settings.model_control is not RepositoryControl.EXPLICIT:
            raise ModelControlError(
                f"models are not {done} by clients here (--model-control is "
                f"{self._settings.model_control}); start the server with --model-control explicit"
            )

    async def _load(self, name: str, override: ModelOptions | None = None) -> None:
        async with self._turn(name):
            versions = await asyncio.to_thread(self._versions, name)
            try:
                chosen = self._chosen(name, versions)
            except ValueError as error:
                self.catalog.drop_failures(name)
                raise ModelLoadError(f"model {name!r} cannot be loaded: {error}") from None
            self.catalog.drop_failures(name, but=chosen)
            before = {served.version: served for served in self.catalog.served(name)}
            try:
                for version in chosen:
                    await self._refresh(name, version, versions[version], override)
            except ModelLoadError:
                new = {v for model, v in self._loaded if model == name} - before.keys()
                await self._drop(self._named_in_engine(name, new))
                raise
            self.catalog.put(name, {v: self._engine_name(name, v) for v in chosen})
            await self._drop(served for v, served in before.items() if v not in chosen)

    async def _refresh(
        self, name: str, version: str, path: Path, override: ModelOptions | None
    ) -> None:
        """Load a version unless it is already served from this file with these options."""
        options = override or self.options_of(name)
        stamp = await asyncio.to_thread(FileStamp.of, path)
        now = _Loaded(path=path, stamp=stamp, options=options)
        if self._loaded.get((name, version)) == now:
            self._reasons.pop((name, version), None)
        else:
            await asyncio.to_thread(self._warn_of_config, name)
            await self._load_version(name, version, now)

    async def _load_version(self, name: str, version: str, now: _Loaded) -> None:
        key, engine_name = (name, version), self._engine_name(name, version)
        self._changing[key] = ModelState.LOADING
        try:
            await self._engine.load(engine_name, now.path, options=now.options)
        except (BundleError, OnnxFileError, EngineError, OSError, ValueError) as error:
            self.catalog.failed[key] = str(error)
            raise ModelLoadError(
                f"model {name!r}, version {version}, cannot be loaded: {error}"
            ) from error
        except asyncio.CancelledError:
            self._reasons[key] = "not loaded: the client gave up, or the server stopped"
            logger.warning("%s, version %s: %s", name, version, self._reasons[key])
            raise
        finally:
            self._changing.pop(key, None)
        self._reasons.pop(key, None)
        self._loaded[key] = now

    async def _forget(self, name: str, reason: str) -> None:
        """Unload a model that is no longer wanted, if it is loaded; expect it no more."""
        async with self._turn(name):
            await self._unload(name, reason)

    async def _unload(self, name: str, reason: str) -> None:
        served = self.catalog.served(name)
        self.catalog.remove(name)
        await self._drop(served, reason)

    async def _drop(self, versions: Iterable[ServedName], reason: str = "") -> None:
        """Unload versions in the engine that the catalog no longer lists."""
        for served in versions:
            key = (served.name, served.version)
            self._changing[key] = ModelState.UNLOADING
            try:
                await self._engine.unload(served.engine_name)
            finally:
                self._changing.pop(key, None)
            self._loaded.pop(key, None)
            if reason:
                self._reasons[key] = reason

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._settings.repository_poll_s or _POLL_S)
            try:
                await self._follow_folder()
            except OSError as error:
                logger.warning("the model repository cannot be read: %s", error)

    async def _follow_folder(self) -> None:
        """Load new and changed models of the folder, and unload those that are gone."""
        there = set(await asyncio.to_thread(self._names_in_folder))
        for name in self.catalog.wanted() - there - self._named.keys():
            await self._forget(name, "removed from the repository")
        for name in sorted(there - self._named.keys()):
            await self._try_load(name)

    async def _try_load(self, name: str) -> None:
        try:
            await self._load(name)
        except ModelLoadError as error:
            logger.warning("%s", error)

    def _names_in_folder(self) -> Sequence[str]:
        folder = self._settings.model_repository
        return () if folder is None else tuple(find_models(folder))

    def _found(self) -> set[tuple[str, str]]:
        """Return name and version of all models in the folder."""
        folder = self._settings.model_repository
        models = {} if folder is None else find_models(folder)
        return {(name, version) for name, versions in models.items() for version in versions}

    def _versions(self, name: str) -> Mapping[str, Path]:
        """Return the paths of a model's versions, the newest first."""
        if name in self._named:
            return {ONLY_VERSION: self._named[name]}
        folder = self._settings.model_repository
        plain = name not in ("", ".", "..") and "/" not in name and "\0" not in name
        return {} if folder is None or not plain else find_versions(folder / name)

    def _warn_of_config(self, name: str) -> None:
        """Log, once for each model, which settings of its ``config.pbtxt`` have no effect."""
        root = self._settings.model_repository
        if root is None or name in self._named or name in self._configs_reported:
            return
        if ignored := ignored_settings(root / name):
            self._configs_reported.add(name)
            logger.warning(
                "%s is not read; ignored: %s; docs/howto/moving.md names the options for them",
                root / name / TRITON_CONFIG,
                ", ".join(ignored),
            )

    def _chosen(self, name: str, versions: Mapping[str, Path]) -> Sequence[str]:
        if name in self._named:
            return (ONLY_VERSION,)
        if not versions:
            folder = self._settings.model_repository
            places = f"{folder}/{name}/1.ee or {folder}/{name}/1/model.onnx"
            where = "" if folder is None else f"; expected for instance {places}"
            raise ValueError(f"there is no version of it{where}")
        return self._settings.model_versions.choose(versions)

    def _named_in_engine(self, name: str, versions: Iterable[str]) -> Sequence[ServedName]:
        return [ServedName(name, v, self._engine_name(name, v)) for v in versions]

    def _engine_name(self, name: str, version: str) -> str:
        """Return the engine's name of a version; named models keep their name."""
        return name if name in self._named else f"{name}:{version}"

    def _entry(self, name: str, version: str) -> IndexEntry:
        key = (name, version)
        served = any((s.name, s.version) == key for s in self.catalog)
        state = self._changing.get(key)
        if state is None:
            ready = served and self.catalog.ready(name, version)
            state = ModelState.READY if ready else ModelState.UNAVAILABLE
        reason = self.catalog.failed.get(key) or self._reasons.get(key, "")
        if state is ModelState.UNAVAILABLE and not reason:
            reason = "out of service" if served else "not loaded"
        return IndexEntry(name=name, version=version, state=state, reason=reason)

    def _turn(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())


def _order(key: tuple[str, str]) -> tuple[str, int]:
    return key[0], int(key[1])
