"""Backends execute stages, a module each; their protocols are in :mod:`.stages.base`."""

from offramp.engine.backends.factory import BACKENDS, make_backend
from offramp.engine.stages.base import Backend, Slot, StageResult, TensorBatch

__all__ = ["BACKENDS", "Backend", "Slot", "StageResult", "TensorBatch", "make_backend"]
