"""Models in this process: :class:`Model` for any thread, :class:`AsyncModel` for asyncio."""

from __future__ import annotations

import time
import weakref
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, Self, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offramp.api.engine_options import engine_options, model_name, path_of
from offramp.api.errors import ModelClosedError
from offramp.api.event_loop import LoopThread
from offramp.api.html import describe_model, model_html
from offramp.api.keywords import EngineKeywords, PathLike
from offramp.bundle import Bundle, TensorSpec
from offramp.engine.common.errors import BadInputError
from offramp.engine.core import Engine
from offramp.engine.models.options import EngineOptions
from offramp.engine.requests.results import EngineResult, ModelInfo
from offramp.engine.requests.statistics import ModelStatistics


class OpenedModel:
    """Base of both kinds of models: holds the engine, and converts inputs to arrays."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine: Engine | None = engine
        self._name = name
        self._info = engine.model(name)

    @property
    def name(self) -> str:
        """Name of the model: the name of the bundle or file, without its suffix."""
        return self._name

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Inputs with name, dtype and shape; the first size is the batch."""
        return self._info.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Outputs with name, dtype and shape."""
        return self._info.outputs

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {describe_model(self._info)}>"

    def _opened(self) -> Engine:
        if self._engine is None:
            raise ModelClosedError(f"{self._name} was closed; open it again")
        return self._engine

    def _arrays(
        self, inputs: Mapping[str, ArrayLike] | None, named: Mapping[str, ArrayLike]
    ) -> dict[str, NDArray[Any]]:
        """Return arrays by input name; lists become arrays of the input's dtype."""
        if inputs is not None and not isinstance(inputs, Mapping):
            raise TypeError(
                f"inputs are a {type(inputs).__name__}, expected arrays by input name, such as "
                f"{self._example()}; a model with one input also takes model(array)"
            )
        dtypes = {spec.name: spec.dtype for spec in self.inputs}
        given = {**(inputs or {}), **named}
        return {name: self._array(name, value, dtypes.get(name)) for name, value in given.items()}

    def _array(self, name: str, value: ArrayLike, dtype: str | None) -> NDArray[Any]:
        try:
            return np.asarray(value, None if hasattr(value, "dtype") else dtype)
        except (TypeError, ValueError, OverflowError) as error:
            raise BadInputError(
                f"{self._name}: input {name!r} is a {type(value).__name__} that is not an array of "
                f"{dtype or 'numbers'} ({error}); lists of a dimension must be of equal length, "
                "and numbers within the range of the dtype"
            ) from error

    def _only_input(self, array: ArrayLike) -> dict[str, ArrayLike]:
        read = [spec for spec in self.inputs if spec.name not in self._info.unread]
        if len(read) != 1:
            names = ", ".join(spec.describe() for spec in read)
            raise TypeError(
                f"{self._name} has {len(read)} inputs, but model(array) needs exactly one; "
                f"call model.predict({self._example()}). Inputs: {names}"
            )
        return {read[0].name: array}

    def _answer(self, result: EngineResult) -> NDArray[Any]:
        assert self._info.answer is not None, "bundles have one"
        return result.outputs[self._info.answer.output]

    def _example(self) -> str:
        return "{" + ", ".join(f"{spec.name!r}: …" for spec in self.inputs) + "}"

    def _facts(self) -> tuple[ModelInfo, ModelStatistics]:
        engine = self._opened()
        return engine.model(self._name), engine.statistics()[self._name]


async def _infer(
    engine: Engine, name: str, arrays: Mapping[str, NDArray[Any]], deadline_ms: float | None
) -> EngineResult:
    deadline_s = None if deadline_ms is None else time.monotonic() + deadline_ms / 1e3
    return await engine.infer(name, arrays, deadline_s=deadline_s)


class Model(OpenedModel):
    """A model in this process; any thread may call it, and concurrent calls share batches.

    ::

        with offramp.load("resnet.ee") as model:
            logits = model(images)                # numpy in, numpy out
            result = model.predict(image=images)  # the same, with exits and confidences
    """

    def __init__(self, path: PathLike, options: EngineOptions) -> None:
        """Use :func:`offramp.load`."""
        name = model_name(path)
        thread = LoopThread(f"the model {name}")
        try:
            engine = thread.call(Engine.open, {name: Path(path)}, options)
        except BaseException:
            thread.stop()
            raise
        super().__init__(engine, name)
        self._thread = thread
        # The finalizer has no reference to the model, so that a forgotten model is closed, too.
        self._closing = weakref.finalize(self, _close, engine, thread)
        self._closing.atexit = False  # at exit, threads can no longer run

    def __call__(self, inputs: ArrayLike, /) -> NDArray[Any]:
        """Return the answers to n samples, for a model with one input; errors as :meth:`predict`.

        Raise TypeError if the model has several inputs.
        """
        return self._answer(self.predict(self._only_input(inputs)))

    def predict(
        self,
        inputs: Mapping[str, ArrayLike] | None = None,
        /,
        *,
        deadline_ms: float | None = None,
        **named: ArrayLike,
    ) -> EngineResult:
        """Answer n samples, passed by input name: as a mapping, or as keyword arguments.

        The result has ``outputs`` by name and, for each sample, ``exits`` (the exit that answered;
        -1 is the model's end) and ``confidences``. ``deadline_ms`` is the longest wait for the
        answer; the default is the option ``slo_ms``.

        Raises:
            BadInputError: An array is missing, unknown, or has another dtype or shape.
            CapacityError: The queue is full, or the deadline passed.
            BackendError: The batch failed.
            ModelClosedError: The model was closed.
            ForkedError: The process was forked after the model was opened.
        """
        engine, arrays = self._opened(), self._arrays(inputs, named)
        return self._thread.call(_infer, engine, self._name, arrays, deadline_ms)

    def statistics(self) -> ModelStatistics:
        """Return counts since the model was opened: exits, batches, latencies, audits."""
        return self._looked()[1]

    def close(self) -> None:
        """Finish requests in progress, save learned state, and release threads and memory.

        Harmless if the model is closed already; does nothing in a forked process.
        """
        if not self._thread.is_inherited:
            self._engine = None
            self._closing()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _repr_html_(self) -> str:
        return model_html(*self._looked())

    def _looked(self) -> tuple[ModelInfo, ModelStatistics]:
        async def look() -> tuple[ModelInfo, ModelStatistics]:
            return self._facts()

        self._opened()
        return self._thread.call(look)


def _close(engine: Engine, thread: LoopThread) -> None:
    if thread.is_inherited:
        return
    thread.call(_drain_and_close, engine)
    thread.stop()


async def _drain_and_close(engine: Engine) -> None:
    await engine.drain(DRAIN_S)
    await engine.close()


DRAIN_S = 30.0
"""Time limit, in seconds, for other threads' calls to finish; as ``--shutdown-timeout-s``."""


class AsyncModel(OpenedModel):
    """A model on the caller's event loop, for services; used only from that loop.

    ::

        async with offramp.AsyncModel.open("resnet.ee") as model:
            result = await model.predict(image=images)
    """

    @classmethod
    def open(cls, model: PathLike | Bundle, /, **options: Unpack[EngineKeywords]) -> Opening:
        """Open a bundle or an ONNX file: use ``async with``, or ``await`` and later :meth:`close`.

        Options and errors are those of :func:`offramp.load`.
        """
        path = path_of(model)
        return Opening(path, engine_options("AsyncModel.open", options, [path]))

    async def __call__(self, inputs: ArrayLike, /) -> NDArray[Any]:
        """Return the answers to n samples, for a model with one input; see :class:`Model`."""
        return self._answer(await self.predict(self._only_input(inputs)))

    async def predict(
        self,
        inputs: Mapping[str, ArrayLike] | None = None,
        /,
        *,
        deadline_ms: float | None = None,
        **named: ArrayLike,
    ) -> EngineResult:
        """Answer n samples; see :meth:`Model.predict`.

        The arrays must not change before the answer is returned. Cancelling the task withdraws the
        request.
        """
        engine = self._opened()
        return await _infer(engine, self._name, self._arrays(inputs, named), deadline_ms)

    def statistics(self) -> ModelStatistics:
        """Return counts since the model was opened: exits, batches, latencies, audits."""
        return self._facts()[1]

    async def close(self) -> None:
        """Finish requests in progress, save learned state, and release the engine."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await _drain_and_close(engine)

    def _repr_html_(self) -> str:
        return model_html(*self._facts())


class Opening:
    """A model that is being opened: await it, or enter it with ``async with``."""

    def __init__(self, path: PathLike, options: EngineOptions) -> None:
        self._path, self._options = path, options
        self._model: AsyncModel | None = None

    def __await__(self) -> Generator[Any, None, AsyncModel]:
        return self._open().__await__()

    async def _open(self) -> AsyncModel:
        name = model_name(self._path)
        engine = await Engine.open({name: Path(self._path)}, self._options)
        return AsyncModel(engine, name)

    async def __aenter__(self) -> AsyncModel:
        self._model = await self._open()
        return self._model

    async def __aexit__(self, *_: object) -> None:
        if self._model is not None:
            await self._model.close()


def load(model: PathLike | Bundle, /, **options: Unpack[EngineKeywords]) -> Model:
    """Open a bundle or an ONNX file in this process; a bundle may be ``compile``'s result.

    Takes seconds. Use the model as a context manager, or close it. It answers as ``eeserve`` does
    with the same options, whose names follow its flags: ``--max-batch-size 16`` is
    ``max_batch_size=16``, ``--no-padding`` is ``padding=False``. State that the controller learned
    is saved next to the bundle, unless ``state=False``.

    Raises:
        TypeError: An option is unknown or has another type.
        ValueError: An option's value is out of range, or two options exclude each other.
        BundleError: The bundle is absent, damaged or of another version.
        EngineError: The backend cannot run here, or an option does not fit the model.
    """
    path = path_of(model)
    return Model(path, engine_options("load", options, [path]))
