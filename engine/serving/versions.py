"""Versions of the served models: one version answers each name, until another replaces it.

A model is loaded while others are served, and takes over its name in one step of the event loop.
Earlier requests, and their audits, are finished by the version that accepted them; then that
version is removed. So no request is lost, answered twice, or answered by two versions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Final, Protocol

from offramp.engine.common.errors import DrainingError, ModelNotServedError, OptionsError
from offramp.engine.models.options import ModelOptions
from offramp.engine.models.served_model import ServedModel
from offramp.engine.requests.statistics import CountersSnapshot
from offramp.engine.serving.executor import Executor
from offramp.engine.serving.extension import BackgroundTask
from offramp.engine.serving.opening import LoadedModel, in_thread
from offramp.engine.serving.totals import add_counts
from offramp.engine.stages.plan import Mode

_log = logging.getLogger(__name__)

POLL_S: Final = 0.01
"""Seconds between two checks whether a version is warm, or has nothing in flight any more."""


class ModelLoading(Protocol):
    """Loads a model while serving; see :func:`.opening.load_model`."""

    def __call__(
        self, name: str, path: Path, mode: Mode | None, options: ModelOptions | None = None
    ) -> Awaitable[LoadedModel]:
        """Load a model to serve under a name, with the options of the name or with others."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelVersion:
    """A version of a served model: every load under a name makes a new version."""

    name: str
    """Name that clients use."""
    number: int
    """Number of the version: 1, 2, … for each name."""
    key: str
    """Unique key for executor, control and batch profiles."""
    model: ServedModel
    release: Callable[[], None] = lambda: None
    """Function that removes the version's temporary files; called once nothing runs the version."""


class ModelVersions:
    """The versions of all models of an engine; used on the event loop's thread.

    The first versions are already served; executor, control and batch profiles use their names as
    keys. ``load`` loads further versions; without it, no version can be replaced.
    """

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        executor: Executor,
        background: Sequence[BackgroundTask],
        load: ModelLoading | None = None,
    ) -> None:
        self.current = {
            name: ModelVersion(name=name, number=1, key=name, model=model)
            for name, model in models.items()
        }
        """Versions that answer new requests, by name."""
        self._executor = executor
        self._background = tuple(background)
        self._load = load
        self._numbers = dict.fromkeys(models, 1)
        """Number of the last version, by name."""
        self._ends = False
        """True once versions are not loaded or unloaded any more."""
        self._turn = asyncio.Lock()
        """Held while a model is loaded, so that models are loaded one at a time."""
        self._finishing: dict[str, ModelVersion] = {}
        """Replaced versions with requests or audits in flight, by key."""
        self._earlier: dict[str, CountersSnapshot] = {}
        """Counts of the removed versions, by name."""
        self._removals = set[asyncio.Task[None]]()

    def __getitem__(self, name: str) -> ModelVersion:
        """Return the version that answers new requests; ModelNotServedError if there is none."""
        try:
            return self.current[name]
        except KeyError:
            raise ModelNotServedError.of(name, self.current) from None

    def earlier(self, name: str) -> CountersSnapshot | None:
        """Return the counts of all versions before the current one; ``None`` without any."""
        counts = [self._earlier[name]] if name in self._earlier else []
        versions = [version for version in self._finishing.values() if version.name == name]
        counts += [self._executor.snapshot(version.key) for version in versions]
        return reduce(add_counts, counts) if counts else None

    async def replace(self, name: str, path: Path, mode: Mode | None = None) -> None:
        """Replace a model: see :meth:`.Engine.replace`."""
        async with self._turn:
            self._check_open(name)
            await self._put(self[name].name, path, mode, None)

    async def load(self, name: str, path: Path, options: ModelOptions | None = None) -> None:
        """Serve a model under a name that may be new: see :meth:`.Engine.load`."""
        async with self._turn:
            self._check_open(name)
            await self._put(name, path, None, options)

    async def unload(self, name: str) -> None:
        """Stop serving a name: see :meth:`.Engine.unload`."""
        async with self._turn:
            self._check_open(name)
            self._check(name, self[name].model)
            self._finish(self.current.pop(name))

    async def _put(
        self, name: str, path: Path, mode: Mode | None, options: ModelOptions | None
    ) -> None:
        if name in self.current:
            self._check(name, self.current[name].model)
        if self._load is None:
            raise OptionsError(
                f"{name}: this engine loads no models while it serves; open it with Engine.open"
            )
        began_s = time.monotonic()
        loaded = await self._load(name, path, mode, options)
        number = self._numbers.get(name, 0) + 1
        version = ModelVersion(
            name=name,
            number=number,
            key=f"{name}\n{number}",  # no name has a line feed in it
            model=loaded.model,
            release=loaded.release,
        )
        try:
            await self._prepare(version)
        except BaseException:
            version.release()
            raise
        self._numbers[name] = number
        before = self.current.get(name)
        self.current[name] = version
        if before is not None:
            self._finish(before)
        took_s = time.monotonic() - began_s
        instead = "" if before is None else "; it replaces the model loaded before"
        _log.info("%s: %s answers from now on, loaded in %.1f s%s", name, path, took_s, instead)

    def end(self) -> None:
        """Replace no version from now on; a replacement in progress is cancelled."""
        self._ends = True

    async def close(self) -> None:
        """Call :meth:`end`, and wait until no version is loaded or removed any more."""
        self.end()
        async with self._turn:
            pass
        await asyncio.gather(*self._removals)

    def release(self) -> None:
        """Remove the temporary files of all versions, once nothing runs them any more."""
        for version in (*self.current.values(), *self._finishing.values()):
            version.release()

    def _check(self, name: str, model: ServedModel) -> None:
        """Raise OptionsError if a served model cannot be replaced or unloaded."""
        if model.split_by is not None:
            raise OptionsError(
                f"{name} is split among workers by a plan, and cannot be replaced while it is "
                "served; start the server again with the other model, or serve without a plan"
            )

    def _check_open(self, name: str) -> None:
        if self._ends:
            raise DrainingError(f"{name} is not changed: the server is shutting down")

    async def _prepare(self, version: ModelVersion) -> None:
        """Prepare a version for the switch; on any failure, the old version serves on."""
        self._check_open(version.name)
        self._executor.add(version.key, version.name, version.model)
        try:
            while not self._executor.is_warm(version.key):
                await asyncio.sleep(POLL_S)
                self._check_open(version.name)
            for task in reversed(self._background):
                await in_thread(task.add, version.key, version.name, version.model)
            self._check_open(version.name)
        except BaseException:
            try:
                await in_thread(partial(self._withdraw, version, save=False))
            finally:
                self._executor.remove(version.key)
            raise

    def _finish(self, version: ModelVersion) -> None:
        """Finish the requests of a version that gets no new requests, then remove the version."""
        self._finishing[version.key] = version
        for task in self._background:
            task.retire(version.key)
        self._executor.flush(version.key)
        removal = asyncio.create_task(self._remove(version), name=f"removing {version.name}")
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)

    async def _remove(self, version: ModelVersion) -> None:
        """Wait until a version has nothing in flight, save what it learned, and remove it."""
        while not self._executor.is_idle(version.key):
            if self._ends:  # its state is saved when the loops are stopped
                return
            await asyncio.sleep(POLL_S)
        try:
            await asyncio.to_thread(self._withdraw, version)
        except Exception:
            _log.exception(
                "%s: what was learned by the model loaded before could not be saved, and is lost",
                version.name,
            )
        counts = self._executor.remove(version.key)
        del self._finishing[version.key]
        self._keep_counts(version.name, counts)
        await asyncio.to_thread(version.release)
        replaced = "loaded before " if version.name in self.current else ""
        _log.info("%s: the model %swas removed", version.name, replaced)

    def _keep_counts(self, name: str, counts: CountersSnapshot) -> None:
        """Add a removed version's counts to its name's; drop all of them if the name is not served.

        Counts are dropped because a model repository has a name for each version that ever existed.
        """
        if name in self.current or any(each.name == name for each in self._finishing.values()):
            earlier = self._earlier.get(name)
            self._earlier[name] = add_counts(earlier, counts) if earlier else counts
        else:
            self._earlier.pop(name, None)
            del self._numbers[name]

    def _withdraw(self, version: ModelVersion, *, save: bool = True) -> None:
        """Remove a version from all background tasks."""
        with ExitStack() as stack:
            for task in reversed(self._background):
                stack.callback(task.remove, version.key, save=save)
