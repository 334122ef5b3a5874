"""A GPU's primary context, through PyCUDA, made current around work on it.

The primary context is the one that TensorRT's own CUDA runtime, torch and CuPy use, so memory and
streams can be shared. A context is current per thread: every thread that works on the GPU enters
:meth:`PrimaryContext.current` itself.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

from offramp.engine.common.errors import BackendError

if TYPE_CHECKING:
    import pycuda.driver as cuda


class PrimaryContext:
    """Retains a GPU's primary context; use :func:`primary_context`.

    BackendError if CUDA has none, for instance if memory is short.
    """

    def __init__(self, index: int) -> None:
        import pycuda.driver as cuda  # noqa: PLC0415

        try:
            cuda.init()
            device: cuda.Device = cuda.Device(index)
            self._context: cuda.Context = device.retain_primary_context()
        except cuda.Error as error:
            raise BackendError(
                f"CUDA cannot be used on cuda:{index}: {error}; check nvidia-smi"
            ) from error

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the context current on the calling thread until the block ends; may be nested."""
        import pycuda.driver as cuda  # noqa: PLC0415

        self._context.push()
        try:
            yield
        finally:
            cuda.Context.pop()


@cache
def primary_context(index: int) -> PrimaryContext:
    """Return the primary context of GPU ``index``, retained until the process ends.

    It is not released earlier: TensorRT's CUDA runtime holds it until then, too, and PyCUDA 2026.1
    would leave a released context current on the thread that released it. Call
    :func:`offramp.engine.tensorrt.probe.require` and :func:`offramp.engine.tensorrt.compat.load`
    first.
    """
    atexit.register(primary_context.cache_clear)
    return PrimaryContext(index)
