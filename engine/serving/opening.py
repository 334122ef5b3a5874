"""Opening: loads and warms up models from bundles and options, and opens their backend."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from offramp.bundle import Bundle
from offramp.engine.backends import Backend, Slot, make_backend
from offramp.engine.backends.factory import CPU_RUNTIMES
from offramp.engine.common.errors import BackendError, OptionsError, StageNotLoadedError
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.models.plain_serving import served_mode
from offramp.engine.models.served_model import ServedModel, warm_slots
from offramp.engine.onnx_files import OnnxFileError, WrappedFiles, is_onnx_file
from offramp.engine.scheduling import ParallelLimit
from offramp.engine.stages.plan import Mode
from offramp.engine.tensorrt.probe import parse_devices

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class LoadedModel(NamedTuple):
    """A model that was loaded while other models are served."""

    model: ServedModel
    release: Callable[[], None]
    """Function that removes the model's temporary files; called once nothing runs the model."""


class OpenedModels(NamedTuple):
    """Models that are loaded and warm, with their backend and slots."""

    models: Mapping[str, ServedModel]
    backend: Backend
    parallel: ParallelLimit
    slots: Sequence[Slot]
    """Open and warm slots, for the streams' first starts."""
    wrapped: WrappedFiles
    """Bundles of models that are ONNX files; the caller closes this object after the backend."""


async def open_models(
    models: Mapping[str, Path], options: EngineOptions, backend: Backend | None
) -> OpenedModels:
    """Load, check and warm up bundles and ONNX files, in threads; see :meth:`.Engine.open`."""
    check_names(models)
    wrapped = WrappedFiles()
    try:
        bundles = await bundles_of(models, options, wrapped)
        return await _open_bundles(bundles, options, backend, wrapped)
    except BaseException:
        wrapped.close()
        raise


async def bundles_of(
    models: Mapping[str, Path], options: EngineOptions, wrapped: WrappedFiles
) -> dict[str, Path]:
    """Return the paths of models' bundles; bundles of ONNX files are made, one by one."""
    found, refused = dict[str, Path](), list[str]()
    for name, path in models.items():
        try:
            found[name] = await _bundle_of(name, path, options, wrapped)
        except OnnxFileError as error:
            refused.append(str(error) if len(models) == 1 else f"{name}: {error}")
    if not refused:
        return found
    if found:
        those, them = ("it", "it") if len(refused) == 1 else ("these", "them")
        refused.append(f"without {those}, {', '.join(found)} can be served: leave {them} out")
    raise OnnxFileError("\n".join(refused))


async def _bundle_of(name: str, path: Path, options: EngineOptions, wrapped: WrappedFiles) -> Path:
    """Return the path of a model's bundle; for an ONNX file, the bundle is made first."""
    if not is_onnx_file(path):
        return path
    if options.devices is not None and options.devices.elsewhere:
        raise OptionsError(
            f"{name}: {path} is an ONNX file, whose bundle is made in a temporary folder that "
            "workers on other hosts do not have; make one that they have too: "
            f"eecompile wrap {path} --output {path.stem}.ee"
        )
    began_s = time.monotonic()
    if not await asyncio.to_thread(path.is_file):
        raise OnnxFileError(f"{path}: there is no such file; pass the path of an ONNX file")
    _log.info("%s: reading %s, to serve it as it is", name, path)
    bundle = await wrapped.bundle(path, answer=options.of(name).answer, task=options.of(name).task)
    _log.info("%s: read after %.1f s", name, time.monotonic() - began_s)
    return bundle


async def _open_bundles(
    models: Mapping[str, Path],
    options: EngineOptions,
    backend: Backend | None,
    wrapped: WrappedFiles,
) -> OpenedModels:
    bundles = {n: await asyncio.to_thread(_open_held, path) for n, path in models.items()}
    owned = backend is None
    if backend is None:
        backend = await in_thread(backend_for, models, options)
    parallel = ParallelLimit(
        _largest_batch(models, options),
        fixed=options.parallel_below,
        max_violations=options.max_violations,
        devices=len(parse_devices(options.device)),
    )
    loaded: dict[str, ServedModel] = {}
    try:
        for name, bundle in bundles.items():
            began_s = time.monotonic()
            file = wrapped.file_of(bundle.path)
            _log.info("%s: loading %s", name, "the model" if file else bundle.path)
            alone = len(bundles) == 1  # with several models, every worker holds all of them
            load = _load_split if alone else ServedModel.load
            load = partial(load, file=file)
            loaded[name] = await in_thread(load, name, bundle, backend, options, parallel)
            _log.info("%s: ready after %.1f s", name, time.monotonic() - began_s)
        slots = await in_thread(warm_slots, backend, loaded, options.streams)
    except BaseException:
        if owned:
            _close_after_failure(backend)
        raise
    return OpenedModels(loaded, backend, parallel, slots, wrapped)


async def load_model(
    name: str,
    path: Path,
    mode: Mode | None,
    of_model: ModelOptions | None = None,
    *,
    backend: Backend,
    options: EngineOptions,
    parallel: ParallelLimit,
    wrapped: WrappedFiles,
) -> LoadedModel:
    """Load, check and warm up a bundle or an ONNX file while others are served, in threads.

    The model is served with the options of ``name``, or with ``of_model`` if set; and in the
    engine's mode, or in ``mode`` if set. Raises the errors of :meth:`.Engine.open`.
    """
    check_names({name: path})
    _log.info("%s: loading %s", name, path)
    models = options.models if of_model is None else {**options.models, name: of_model}
    options = replace(options, mode=mode or options.mode, models=models)
    found = await _bundle_of(name, path, options, wrapped)
    try:
        bundle = await in_thread(_open_held, found)
        load = partial(ServedModel.load, file=wrapped.file_of(found))
        served = await in_thread(load, name, bundle, backend, options, parallel)
    except BaseException:
        wrapped.remove(found)
        raise
    return LoadedModel(served, partial(wrapped.remove, found))


def check_names(models: Mapping[str, Path]) -> None:
    """Raise OptionsError for a name that messages and pages cannot show."""
    for name, path in models.items():
        if not name or not name.isprintable():
            raise OptionsError(
                f"{str(path)!r} would be served as {name!r}, which clients cannot ask for; "
                "expected printable Unicode: rename its folder, or add --model NAME=PATH"
            )


def _largest_batch(models: Iterable[str], options: EngineOptions) -> int:
    """Return the largest batch size of any model; the default if none is served yet."""
    sizes = (options.of(name).max_batch_size for name in models)
    return max(sizes, default=options.defaults.max_batch_size)


def _open_held(path: Path) -> Bundle:
    """Open a bundle, and hold its files: its path may get another bundle while it is served."""
    return Bundle.open(path).held()


def backend_for(models: Mapping[str, Path], options: EngineOptions) -> Backend:
    """Make the backend that the options name for bundles; the caller closes it.

    BackendError if it cannot run here, OptionsError if there are too few cores for its streams.
    """
    backend = make_backend(
        options.backend,
        threads=options.threads_per_stream(),
        streams=options.streams,
        devices=parse_devices(options.device) if options.devices is None else (),
        precision=options.precision,
        graphs=options.graphs,
        max_rows=_largest_batch(models, options),
        bundles=tuple(models.values()),
    )
    if backend.name in CPU_RUNTIMES:
        options.check_cores()
    if options.devices is None:
        return backend
    return options.devices.open(
        backend, tuple(models.values()), options, max_rows=_largest_batch(models, options)
    )


def _load_split(
    name: str,
    bundle: Bundle,
    backend: Backend,
    options: EngineOptions,
    parallel: ParallelLimit,
    *,
    file: Path | None = None,
) -> ServedModel:
    """Load a model; if it has exits to run, it is split among the devices of the streams.

    If a device cannot load its part, the next best split is tried.
    """
    mode = served_mode(bundle.manifest, options.mode, uncertified=options.uncertified_exits)
    if mode is Mode.OFF or options.devices is None:
        return ServedModel.load(name, bundle, backend, options, parallel, file=file)
    refused = list[StageNotLoadedError]()
    while True:
        splits = options.devices.split(name, bundle, backend, options, refused)
        try:
            return ServedModel.load(name, bundle, backend, options, parallel, splits=splits)
        except StageNotLoadedError as error:
            if splits is None:
                raise
            _log.warning("%s: %s; trying another split", name, error)
            refused.append(error)


def _close_after_failure(backend: Backend) -> None:
    try:
        backend.close()
    except BackendError:  # the earlier error is the one to raise
        _log.exception("the backend could not be closed")


async def in_thread(function: Callable[..., _T], *arguments: Any) -> _T:
    """Call a function in a thread; if cancelled, wait for its end before resources are released."""
    future = asyncio.get_running_loop().run_in_executor(None, function, *arguments)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise
