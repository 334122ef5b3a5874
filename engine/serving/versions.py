"""Versions of the served models: each name is answered by one, until another replaces it.

A replacement is loaded beside serving, and takes over in one step of the event loop. Requests that
came before, and their audits, end with the version that took them; then it is removed. So no
request is lost, answered twice, or answered by two versions.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Final, Protocol

from offramp.engine.common.errors import DrainingError, ModelNotServedError, OptionsError
from offramp.engine.models.served_model import ServedModel
from offramp.engine.requests.statistics import CountersSnapshot
from offramp.engine.serving.executor import Executor
from offramp.engine.serving.extension import BackgroundTask
from offramp.engine.serving.opening import LoadedModel, in_thread
from offramp.engine.serving.totals import add_counts
from offramp.engine.stages.plan import Mode

_log = logging.getLogger(__name__)

POLL_S: Final = 0.01
"""Time between two looks whether a version is warm, or has nothing in flight any more."""


class ModelLoading(Protocol):
    """Loads a model beside serving; see :func:`.opening.load_model`."""

    def __call__(self, name: str, path: Path, mode: Mode | None) -> Awaitable[LoadedModel]:
        """Load a model to be served under a name."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelVersion:
    """A version of a served model."""

    name: str
    """What clients ask for."""
    number: int
    """1, 2, … for each name."""
    key: str
    """What executor, control and batch profiles know it by; used once."""
    model: ServedModel
    release: Callable[[], None] = lambda: None
    """Removes its temporary files, once nothing runs it any more."""


class ModelVersions:
    """The versions of all models of an engine; used on the event loop's thread.

    The first versions are served already: executor, control and batch profiles know them by their
    names. ``load`` loads further ones; without it none can be replaced.
    """

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        executor: Executor,
        beside: Sequence[BackgroundTask],
        load: ModelLoading | None = None,
    ) -> None:
        self.current = {
            name: ModelVersion(name=name, number=1, key=name, model=model)
            for name, model in models.items()
        }
        """By name, the versions that answer new requests."""
        self._executor = executor
        self._beside = tuple(beside)
        self._load = load
        self._ends = False
        """Whether nothing is replaced any more."""
        self._turn = asyncio.Lock()
        """Held while a model is replaced: one after the other."""
        self._finishing: dict[str, ModelVersion] = {}
        """By key, the versions that were replaced and have requests or audits in flight."""
        self._earlier: dict[str, CountersSnapshot] = {}
        """By name, the counts of the versions that were removed."""
        self._removals = set[asyncio.Task[None]]()

    def __getitem__(self, name: str) -> ModelVersion:
        """Return the version that answers new requests; ModelNotServedError if there is none."""
        try:
            return self.current[name]
        except KeyError:
            close = difflib.get_close_matches(name, self.current, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            served = ", ".join(map(repr, sorted(self.current)))
            raise ModelNotServedError(
                f"no model {name!r} is served here; {hint}served: {served}"
            ) from None

    def earlier(self, name: str) -> CountersSnapshot | None:
        """Return the counts of all versions before the current one; ``None`` without any."""
        counts = [self._earlier[name]] if name in self._earlier else []
        versions = [version for version in self._finishing.values() if version.name == name]
        counts += [self._executor.snapshot(version.key) for version in versions]
        return reduce(add_counts, counts) if counts else None

    async def replace(self, name: str, path: Path, mode: Mode | None = None) -> None:
        """Replace a model: see :meth:`.Engine.replace`."""
        async with self._turn:
            self._check(name)
            assert self._load is not None
            began_s = time.monotonic()
            loaded = await self._load(name, path, mode)
            number = self.current[name].number + 1
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
            self._switch(version)
            took_s = time.monotonic() - began_s
            _log.info("%s: version %d answers from now on, loaded from %s in %.1f s", name, number,
                      path, took_s)  # fmt: skip

    def end(self) -> None:
        """Replace nothing from now on; a replacement that is under way gives up."""
        self._ends = True

    async def close(self) -> None:
        """End, and wait until nothing is under way; the loops may be stopped then."""
        self.end()
        async with self._turn:
            pass
        await asyncio.gather(*self._removals)

    def release(self) -> None:
        """Remove the temporary files of all versions; nothing runs them any more."""
        for version in (*self.current.values(), *self._finishing.values()):
            version.release()

    def _check(self, name: str) -> None:
        """Raise why a model cannot be replaced."""
        self._check_open(name)
        if self[name].model.split_by is not None:
            raise OptionsError(
                f"{name} is split among workers by a plan, and cannot be replaced while it is "
                "served; start the server again with the other model, or serve without a plan"
            )
        if self._load is None:
            raise OptionsError(
                f"{name} was not loaded by this engine, which cannot replace it; open it with "
                "Engine.open"
            )

    def _check_open(self, name: str) -> None:
        if self._ends:
            raise DrainingError(f"{name} is not replaced: the server is shutting down")

    async def _prepare(self, version: ModelVersion) -> None:
        """Do all that comes before the switch; whatever fails, the old version serves on."""
        self._check_open(version.name)
        self._executor.add(version.key, version.name, version.model)
        try:
            while not self._executor.is_warm(version.key):
                await asyncio.sleep(POLL_S)
                self._check_open(version.name)
            for task in reversed(self._beside):
                await in_thread(task.add, version.key, version.name, version.model)
            self._check_open(version.name)
        except BaseException:
            try:
                await in_thread(partial(self._withdraw, version, save=False))
            finally:
                self._executor.remove(version.key)
            raise

    def _switch(self, version: ModelVersion) -> None:
        """Have a version answer new requests; the one before finishes what it has."""
        before = self.current[version.name]
        self.current[version.name] = version
        self._finishing[before.key] = before
        for task in self._beside:
            task.retire(before.key)
        self._executor.flush(before.key)
        removal = asyncio.create_task(self._remove(before), name=f"removing {before.name}")
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)

    async def _remove(self, version: ModelVersion) -> None:
        """Wait until a version has nothing in flight, keep what it learned, and forget it."""
        while not self._executor.is_idle(version.key):
            if self._ends:  # what it learned is kept when the loops are stopped
                return
            await asyncio.sleep(POLL_S)
        try:
            await asyncio.to_thread(self._withdraw, version)
        except Exception:
            _log.exception("%s: version %d: its state is lost", version.name, version.number)
        counts = self._executor.remove(version.key)
        del self._finishing[version.key]
        earlier = self._earlier.get(version.name)
        self._earlier[version.name] = add_counts(earlier, counts) if earlier else counts
        await asyncio.to_thread(version.release)
        _log.info("%s: version %d was removed", version.name, version.number)

    def _withdraw(self, version: ModelVersion, *, save: bool = True) -> None:
        """Have all that goes on beside the streams forget a version."""
        with ExitStack() as stack:
            for task in reversed(self._beside):
                stack.callback(task.remove, version.key, save=save)
