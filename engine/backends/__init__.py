"""Backends execute stages, a module each; :mod:`.stages.backend_protocol` has their protocols."""

from offramp.engine.backends.factory import BACKENDS, make_backend
from offramp.engine.stages.backend_protocol import Backend, Slot, StageResult, TensorBatch

__all__ = ["BACKENDS", "Backend", "Slot", "StageResult", "TensorBatch", "make_backend"]
