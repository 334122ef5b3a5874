"""Backends, which execute stages: one module each. Protocols: :mod:`.stages.backend_protocol`."""

from offramp.engine.backends.factory import BACKENDS, make_backend
from offramp.engine.stages.backend_protocol import Backend, Slot, StageResult, TensorBatch

__all__ = ["BACKENDS", "Backend", "Slot", "StageResult", "TensorBatch", "make_backend"]
