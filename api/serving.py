"""A server in a thread of this process, for notebooks and tests."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, Unpack

from offramp.api.engine_options import engine_options, model_name, path_of
from offramp.api.event_loop import LoopThread
from offramp.api.keywords import PathLike, ServerKeywords, options_from, without_flags
from offramp.bundle import Bundle
from offramp.engine.models.options import EngineOptions
from offramp.server.app import Listening, ModelsToServe, StopSignals, serve_until_stopped
from offramp.server.arguments.options import ServerOptions
from offramp.server.common.served import ServedEngine
from offramp.server.opening import open_served

ServedPaths = (
    PathLike | Bundle | Sequence[PathLike | Bundle] | Mapping[str, PathLike] | Mapping[str, Bundle]
)
"""Models to serve: one model, several, or a mapping from names to models."""


class _Serving:
    """The task that serves; it runs on the event loop's thread, but another thread creates it."""

    def __init__(
        self, models: Mapping[str, Path], engine: EngineOptions, server: ServerOptions
    ) -> None:
        self._models, self._engine, self._server = models, engine, server
        self._stop: StopSignals | None = None
        self._task: asyncio.Task[int] | None = None

    async def start(self) -> Listening:
        """Serve in a task; return once requests can be answered, or raise the start's error."""
        ready: asyncio.Future[Listening] = asyncio.get_running_loop().create_future()
        self._stop = StopSignals()

        async def open_engine() -> ServedEngine:
            return await open_served(self._models, self._engine)

        models = ModelsToServe(named=self._models, engine=self._engine)
        serving = serve_until_stopped(
            open_engine, self._server, self._stop, ready.set_result, models=models
        )
        self._task = asyncio.create_task(serving)
        try:
            await asyncio.wait((self._task, ready), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # an interrupt during the loading of models
            await self.stop()
            raise
        if not ready.done():
            ready.cancel()
            self._task.result()  # raises the error of the start
        return ready.result()

    async def stop(self) -> None:
        """Finish requests in progress, and stop the server."""
        assert self._stop is not None
        assert self._task is not None
        self._stop.request("close()")
        await self._task


class Server:
    """A server in this process; use it as a context manager, or call :meth:`close`."""

    def __init__(
        self, models: Mapping[str, Path], engine: EngineOptions, server: ServerOptions
    ) -> None:
        """Use :func:`offramp.serve`."""
        self.models = tuple(models)
        """Names of the served models."""
        serving, thread = _Serving(models, engine, server), LoopThread("the server")
        try:
            listening = thread.call(serving.start)
        except BaseException:
            thread.stop()
            raise
        self.grpc_address = listening.grpc
        """Host and port for :class:`offramp.client.Client`."""
        self.http_address = f"http://{listening.http}"
        """URL of the status page; also the base of ``/metrics`` and ``/health/ready``."""
        # The finalizer has no reference to the server, so that a forgotten server is closed, too.
        self._closing = weakref.finalize(self, _close, serving, thread)
        self._closing.atexit = False  # threads cannot run any more at exit

    def close(self) -> None:
        """Finish requests in progress and stop; harmless if already stopped, or in a fork."""
        self._closing()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"on {self.grpc_address}, {self.http_address}/" if self._closing.alive else "closed"
        return f"<Server of {', '.join(self.models)}, {state}>"

    def _repr_html_(self) -> str:
        return f'<a href="{self.http_address}/" target="_blank">{self.http_address}/</a>'


def _close(serving: _Serving, thread: LoopThread) -> None:
    if not thread.is_inherited:
        thread.call(serving.stop)
        thread.stop()


def serve(
    models: ServedPaths,
    *,
    grpc_port: int = 0,
    http_port: int = 0,
    **options: Unpack[ServerKeywords],
) -> Server:
    """Serve bundles or ONNX files in a thread of this process, as ``eeserve`` does.

    Args:
        models: One path, several paths, or paths by the names under which they are served; instead
            of a path, a bundle from ``compile`` is allowed.
        grpc_port: Port of gRPC; 0 chooses a free port.
        http_port: Port of status page, health and metrics; 0 chooses a free port.
        **options: Flags of ``eeserve``, named as for :func:`offramp.load`.

    Raises:
        TypeError, ValueError, BundleError, EngineError: As for :func:`offramp.load`.
        StartError: A port is not available.
    """
    named = _named(models)
    engine = engine_options(
        "serve", options, named.values(), ServerKeywords, named=("grpc_port", "http_port")
    )
    network: dict[str, Any] = {"grpc_port": grpc_port, "http_port": http_port, **options}
    try:
        # No drain delay: it gives load balancers time to notice, and there are none here.
        server = options_from(ServerOptions, network, {}, drain_delay_s=0.0)
    except ValueError as error:
        raise ValueError(without_flags(str(error))) from error
    return Server(named, engine, server)


def _named(models: ServedPaths) -> dict[str, Path]:
    """Return paths by model name; ValueError without models, or if two have the same name."""
    if isinstance(models, Mapping):
        named = {name: path_of(model) for name, model in models.items()}
    else:
        paths = models if isinstance(models, Sequence) and not isinstance(models, str) else [models]
        named = {}
        for path in map(path_of, paths):
            name = model_name(path)
            if name in named:
                raise ValueError(
                    f"two models are named {name!r}: {named[name]} and {path}; pass names: "
                    f"serve({{{name!r}: …, {name + '-2'!r}: …}})"
                )
            named[name] = path
    if not named:
        raise ValueError('there is no model to serve; name a bundle: serve("model.ee")')
    return named
