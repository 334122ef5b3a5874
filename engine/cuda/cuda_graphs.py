"""CUDA graphs through ``cuda.bindings``, because PyCUDA has none.

A launch of a graph takes the host a few microseconds, for any number of kernels.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

from offramp.bundle.optional_imports import optional_import
from offramp.engine.common.errors import BackendError
from offramp.engine.cuda.driver import Stream

INSTALL = "pip install cuda-bindings"

logger = logging.getLogger(__name__)


class CudaGraphs:
    """Captures and launches graphs; without ``cuda.bindings``, there are no graphs."""

    def __init__(self) -> None:
        self._logged: set[str] = set()
        self._driver: Any = None
        try:
            with optional_import("cuda", install=INSTALL, raises=BackendError):
                self._driver = importlib.import_module("cuda.bindings.driver")
        except BackendError as error:
            self._log_once(str(error))

    def capture(self, stream: Stream, enqueue: Callable[[], None]) -> CudaGraph | None:
        """Capture a graph; see :meth:`offramp.engine.cuda.driver.Driver.capture`."""
        if self._driver is None:
            return None
        try:
            return CudaGraph(self._driver, self._record(stream, enqueue))
        except BackendError as error:
            self._log_once(str(error))
        except RuntimeError as error:  # the bindings' own: no libcuda, or one too old for them
            self._log_once(f"cuda-bindings: {error}")
            self._driver = None
        return None

    def _record(self, stream: Stream, enqueue: Callable[[], None]) -> Any:
        """Capture the enqueued work as a ``CUgraph``; the stream's capture always ends."""
        driver = self._driver
        handle = driver.CUstream(stream.handle)
        # Thread-local mode: other slots' threads may allocate during a capture, this one may not.
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        checked(driver, "begin a capture", driver.cuStreamBeginCapture(handle, mode))
        try:
            enqueue()
        except BaseException:
            # The cause is the failed enqueue, not the invalid capture that follows from it.
            status, graph = driver.cuStreamEndCapture(handle)
            if status == driver.CUresult.CUDA_SUCCESS and int(graph):
                driver.cuGraphDestroy(graph)
            raise
        (graph,) = checked(driver, "end a capture", driver.cuStreamEndCapture(handle))
        if not int(graph):
            raise BackendError(
                "CUDA could not capture a graph: something in it may not be captured"
            )
        return graph

    def _log_once(self, reason: str) -> None:
        if reason not in self._logged:
            self._logged.add(reason)
            logger.warning("Stages run without CUDA graphs: %s", reason)


class CudaGraph:
    """An executable graph, made of a ``CUgraph``: a :class:`offramp.engine.cuda.driver.Graph`."""

    def __init__(self, driver: Any, graph: Any) -> None:
        self._driver = driver
        try:
            made = checked(driver, "instantiate a graph", driver.cuGraphInstantiate(graph, 0))
        finally:
            driver.cuGraphDestroy(graph)
        self._executable: Any = made[0]

    def launch(self, stream: Stream) -> None:
        """Enqueue the whole graph; BackendError if it is closed, or CUDA cannot."""
        driver = self._driver
        if self._executable is None:
            raise BackendError("a CUDA graph was launched after it was closed")
        launched = driver.cuGraphLaunch(self._executable, driver.CUstream(stream.handle))
        checked(driver, "launch a graph", launched)

    def close(self) -> None:
        """Release the graph; may be called again."""
        executable, self._executable = self._executable, None
        if executable is not None:
            checked(self._driver, "destroy a graph", self._driver.cuGraphExecDestroy(executable))


def checked(driver: Any, what: str, returned: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the results of a ``cuda.bindings.driver`` call; BackendError for an error."""
    status, *results = returned
    if status != driver.CUresult.CUDA_SUCCESS:
        found, text = driver.cuGetErrorString(status)
        said = text.decode() if found == driver.CUresult.CUDA_SUCCESS else "an unknown error"
        raise BackendError(f"CUDA could not {what}: {said} ({getattr(status, 'name', status)})")
    return tuple(results)
