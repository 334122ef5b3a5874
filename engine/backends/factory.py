"""Choose a backend by name; the heavy imports stay behind this seam."""

from __future__ import annotations

from offramp.engine.backends.base import Backend
from offramp.engine.errors import BackendError

BACKENDS = ("auto", "onnxruntime")
"""What ``--backend`` takes; ``auto`` is the best that this machine has."""


def make_backend(name: str = "auto", *, threads: int = 1) -> Backend:
    """Make a backend.

    Args:
        name: One of :data:`BACKENDS`.
        threads: Intra-op threads of each running stage, on the CPU.

    Raises:
        BackendError: There is no such backend, or it cannot run here.
    """
    if name in ("auto", "onnxruntime"):
        from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend  # noqa: PLC0415

        return OnnxRuntimeBackend(threads=threads)
    raise BackendError(f"there is no backend {name!r}; choose one of {', '.join(BACKENDS)}")
