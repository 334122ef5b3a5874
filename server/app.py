"""Life cycle of a server: open the engine, listen, wait for a signal, drain, close.

SIGHUP makes the server read its configuration file again and apply it. A server without a
configuration file stops at SIGHUP, as at SIGTERM.

After the first stop signal the server is not ready, but answers new requests for a while, because
load balancers need time to notice. Then it accepts no more connections and asks clients to close
theirs; requests that still arrive are answered. Once the connections are closed or idle, the server
closes the rest, and the engine saves its state.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from offramp.engine.common.errors import EngineError
from offramp.engine.common.network import is_loopback
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.server.arguments.configuration import model_options
from offramp.server.arguments.options import MIB, ServerOptions
from offramp.server.common.event_loop import loop_factory
from offramp.server.common.served import ServedEngine
from offramp.server.frontends.frontends import FrontendOptions
from offramp.server.grpc_endpoint import GrpcEndpoint
from offramp.server.ports.http_endpoint import HttpEndpoint
from offramp.server.ports.sockets import check_free, fit_limits, join_address, raise_descriptors
from offramp.server.repository.repository import ModelRepository
from offramp.server.requests.admission import RequestAdmission
from offramp.server.requests.message_memory import keep_large_blocks
from offramp.server.requests.tracing import RequestTraces
from offramp.server.security.access import AccessRules
from offramp.server.security.tls import ServerTls, open_tls
from offramp.server.services.protocol_services import ProtocolServices

logger = logging.getLogger(__name__)


class StopSignals:
    """The stop signals received so far: the first asks to stop, the second to stop immediately.

    After the second signal the default handlers are active again, so that a third signal ends the
    process in any state.
    """

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        """Event that is set by the first stop signal."""
        self.forced = asyncio.Event()
        """Event that is set by the second stop signal."""
        self.patient = True
        """True if the drain delay applies; false after SIGINT, which comes from a terminal."""
        self.serving = False
        """True once the models of the start are loaded; until then, the first stop signal ends the
        loading, and the second one ends the process."""
        self.reload: Callable[[], None] | None = None
        """Called at SIGHUP; SIGHUP stops the server if this is ``None``."""

    def request(self, name: str) -> None:
        """Count one stop request; ``name`` is its source, for the log."""
        if not self.requested.is_set():
            logger.info("%s: stopping once the requests in flight are answered", name)
            self.patient = name != signal.SIGINT.name
            self.requested.set()
        else:
            logger.warning("%s again: stopping immediately", name)
            self.forced.set()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals of the process; call on its main thread, in a running event loop.

        SIGHUP stays ignored if the process was started that way, as by nohup.
        """
        loop = asyncio.get_running_loop()
        handled = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            handled.append(signal.SIGHUP)

        def handle(number: signal.Signals) -> None:
            if number is signal.SIGHUP and self.reload is not None:
                self.reload()
                return
            if not self.serving or self.requested.is_set():
                # Restored before the request is logged: the next signal may follow the log line.
                restore()
                for each in handled:
                    signal.signal(each, signal.SIG_DFL)
            self.request(number.name)
            if self.forced.is_set() and not self.serving:
                signal.raise_signal(number)

        def restore() -> None:
            for number in handled:
                loop.remove_signal_handler(number)

        for number in handled:
            loop.add_signal_handler(number, handle, number)
        try:
            yield
        finally:
            restore()


EXIT_OK: Final = 0
EXIT_UNANSWERED: Final = 1
"""Exit code if requests were abandoned: the time ran out, or a second signal came."""

_DESCRIPTORS_OF_MODELS: Final = 4096
"""File descriptors reserved for model files, in addition to those of connections."""
_ENDING_S: Final = 0.05
"""Wait in seconds, after a second signal, for calls that end because their answers were sent."""
_FLUSH_S: Final = 1.0
"""Longest wait, in seconds, for the last answers to be written."""

_T = TypeVar("_T")


class Listening(NamedTuple):
    """The addresses that a server listens on, as host and port."""

    grpc: str
    http: str


EngineOpener = Callable[[], Coroutine[Any, Any, ServedEngine]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsToServe:
    """Models that the server serves by their paths, and the options of all models."""

    named: Mapping[str, Path] = field(default_factory=dict)
    """Paths by name; ``open_engine`` loads them."""
    engine: EngineOptions = field(default_factory=EngineOptions)
    """Engine options, which include the options of each model."""
    fixed: object = None
    """All other settings, which only take effect at a start."""


def serve(
    open_engine: EngineOpener,
    options: ServerOptions,
    models: ModelsToServe | None = None,
    *,
    read_again: Callable[[], ModelsToServe] | None = None,
) -> int:
    """Serve until a signal comes, on the main thread; return the exit code of the process.

    ``read_again`` reads the configuration file at SIGHUP. It raises ValueError or SystemExit if the
    file is invalid; the server then keeps its present settings.

    Raises:
        StartError: A port cannot be listened on.
        BundleError, BackendError: From ``open_engine``.
        ModelLoadError: A model named by ``--load-model`` cannot be loaded.
    """
    keep_large_blocks((options.max_message_mib + 1) * MIB)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_serve_until_signalled(open_engine, options, models, read_again))


async def _serve_until_signalled(
    open_engine: EngineOpener,
    options: ServerOptions,
    models: ModelsToServe | None,
    read_again: Callable[[], ModelsToServe] | None,
) -> int:
    stop = StopSignals()
    with stop.installed():
        return await serve_until_stopped(
            open_engine, options, stop, _spare_collections, models=models, read_again=read_again
        )


def _spare_collections(_: Listening) -> None:
    """Exclude long-lived objects from garbage collection, since a collection stops all threads."""
    gc.collect()
    gc.freeze()


async def serve_until_stopped(
    open_engine: EngineOpener,
    options: ServerOptions,
    stop: StopSignals,
    on_ready: Callable[[Listening], None] = lambda _: None,
    *,
    models: ModelsToServe | None = None,
    read_again: Callable[[], ModelsToServe] | None = None,
) -> int:
    """Serve as :func:`serve` does, in a running loop of any thread, until ``stop`` is requested.

    The caller handles signals. ``on_ready`` is called once requests are answered.
    """
    check_free(options.host, options.grpc_port, option="--grpc-port")
    check_free(options.host, options.http_port, option="--http-port")
    access, tls = AccessRules(options.security), open_tls(options.security)
    raise_descriptors(options.max_connections + _DESCRIPTORS_OF_MODELS)  # bundles hold files
    engine = await _unless(stop.requested, open_engine())
    if engine is None:
        return EXIT_OK
    models = models or ModelsToServe()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(engine.close)
        repository = ModelRepository(
            engine, options.repository, named=models.named, options=_options_by_name(models.engine)
        )
        stack.push_async_callback(repository.stop)
        await _unless(stop.requested, repository.start())
        if stop.requested.is_set():
            return EXIT_OK
        stop.serving = True
        if read_again is not None:
            stop.reload = ConfigurationReload(repository, models, read_again).request
        services = ProtocolServices(
            engine,
            admission=RequestAdmission(options, access=access, traces=_traces(stack, options)),
            repository=repository,
            read_options=model_options,
        )
        endpoint, listening = await _listen(stack, services, options, tls)
        on_ready(listening)
        await stop.requested.wait()
        return await _leave(engine, endpoint, options, stop)


def _options_by_name(options: EngineOptions) -> dict[str, ModelOptions]:
    """Return the options of each model that has its own, and of ``""`` for all others."""
    return {"": options.defaults, **options.models}


class ConfigurationReload:
    """Applies the configuration file to the repository on request."""

    def __init__(
        self,
        repository: ModelRepository,
        models: ModelsToServe,
        read_again: Callable[[], ModelsToServe],
    ) -> None:
        self._repository = repository
        self._first = models
        self._read_again = read_again
        self._reloading: asyncio.Task[None] | None = None
        self._wanted = False

    def request(self) -> None:
        """Start a reload, or repeat the one that is running; call on the event loop."""
        self._wanted = True
        if self._reloading is None or self._reloading.done():
            self._reloading = asyncio.create_task(self._reload(), name="configuration")

    async def _reload(self) -> None:
        while self._wanted:
            self._wanted = False
            try:
                models = await asyncio.to_thread(self._read_again)
                await self._repository.change(models.named, _options_by_name(models.engine))
            except (EngineError, OSError, ValueError) as error:
                logger.warning("the configuration file is not reloaded: %s", error)
                continue
            if _fixed(models) != _fixed(self._first):
                logger.warning(
                    "settings outside of [defaults] and [models] changed in the configuration "
                    "file; they take effect when the server is started again"
                )
            logger.info("the configuration file was read again")


def _fixed(models: ModelsToServe) -> tuple[EngineOptions, object]:
    """Return the settings that a reload does not change."""
    return replace(models.engine, defaults=ModelOptions(), models={}), models.fixed


async def _listen(
    stack: AsyncExitStack,
    services: ProtocolServices,
    options: ServerOptions,
    tls: ServerTls | None,
) -> tuple[GrpcEndpoint, Listening]:
    """Start both endpoints; the stack stops them."""
    limits = fit_limits(options.max_connections)
    stack.callback(services.close)
    max_message_bytes = options.max_message_mib * MIB
    http = HttpEndpoint(
        services, max_message_bytes=max_message_bytes, max_connections=limits.http, tls=tls
    )
    stack.push_async_callback(http.stop)
    endpoint = GrpcEndpoint(
        services,
        max_message_bytes=max_message_bytes,
        max_connections=limits.grpc,
        keepalive=options.keepalive,
        tls=tls,
        frontends=FrontendOptions.of(options),
    )
    stack.push_async_callback(endpoint.stop, 0.0)
    # Whoever finds either port ready may use both, so clients can connect to both before either
    # says so: front ends take seconds to listen.
    http_port = http.listen(options.host, options.http_port)
    grpc_port = await endpoint.start(options.host, options.grpc_port)
    await http.start()
    catalog = services.repository.catalog
    models = ", ".join(catalog.names()) or "no model yet"
    missing = ", ".join(sorted(catalog.missing))
    await endpoint.serving()
    listening = Listening(
        grpc=join_address(options.host, grpc_port), http=join_address(options.host, http_port)
    )
    scheme = "http" if tls is None else "https"
    logger.log(
        logging.WARNING if missing else logging.INFO,
        "%s: gRPC on %s, status page on %s://%s/, serving %s%s",
        "not ready" if missing else "ready", listening.grpc, scheme, listening.http, models,
        f"; could not be loaded: {missing}" if missing else "",
    )  # fmt: skip
    _warn_if_open(options)
    return endpoint, listening


def _traces(stack: AsyncExitStack, options: ServerOptions) -> RequestTraces:
    """Return the request traces; the stack sends the remaining ones when the server ends."""
    if options.trace_endpoint is None:
        return RequestTraces()
    # Rarely needed, and slow to import.
    from offramp.server.tracing.otlp import OtlpTraces  # noqa: PLC0415

    exporter = OtlpTraces(options.trace_endpoint)
    stack.push_async_callback(asyncio.to_thread, exporter.close)
    return RequestTraces(exporter, rate=options.trace_rate)


def _warn_if_open(options: ServerOptions) -> None:
    """Warn if others on the network can reach the server without encryption or tokens."""
    security = options.security
    missing = {
        "TLS (--tls-certificate)": security.tls_certificate,
        "tokens (--token-file)": security.token_file or security.tls_client_ca,
    }
    without = " and without ".join(name for name, file in missing.items() if file is None)
    if without and not is_loopback(options.host):
        logger.warning("others on the network can reach the server without %s", without)


async def _leave(
    engine: ServedEngine, endpoint: GrpcEndpoint, options: ServerOptions, stop: StopSignals
) -> int:
    """Report not ready, answer for a while, ask clients to leave, and close the connections."""
    engine.leave()
    await endpoint.leaving()
    delay_s = options.drain_delay_s if stop.patient else 0.0
    drained = await _unless(stop.forced, _drain(engine, endpoint, options, delay_s))
    if drained is None and endpoint.requests:
        await asyncio.sleep(_ENDING_S)
    unanswered = sum(model.queued + model.in_flight for model in engine.statistics().values())
    lost = not drained and (unanswered > 0 or endpoint.requests > 0)
    if lost:
        logger.error(
            "leaving with %d samples unanswered%s",
            unanswered,
            "" if drained is None else f" after {options.shutdown_timeout_s:g} s",
        )
    await endpoint.stop(0.0 if lost else _FLUSH_S)
    logger.info("stopped")
    return EXIT_UNANSWERED if lost else EXIT_OK


async def _drain(
    engine: ServedEngine, endpoint: GrpcEndpoint, options: ServerOptions, delay_s: float
) -> bool:
    """Wait until load balancers notice, ask clients to leave, and finish the requests in flight.

    Return whether this was done in time.
    """
    if delay_s > 0:
        logger.info("new requests are answered for %g s more (--drain-delay-s)", delay_s)
        await asyncio.sleep(delay_s)
    ends_s = time.monotonic() + options.shutdown_timeout_s
    if options.shutdown_timeout_s > 0:
        engine.flush()
        await endpoint.send_goaway(options.shutdown_timeout_s)
    return await engine.drain(max(0.0, ends_s - time.monotonic()))


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, _T]) -> _T | None:
    """Run ``work``; cancel it and return ``None`` as soon as ``event`` is set."""
    working = asyncio.create_task(work)
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)
