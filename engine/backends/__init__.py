"""What executes stages: protocols in :mod:`.base`, one module a backend."""

from offramp.engine.backends.base import Backend, Slot, StageResult, TensorBatch
from offramp.engine.backends.factory import BACKENDS, make_backend

__all__ = ["BACKENDS", "Backend", "Slot", "StageResult", "TensorBatch", "make_backend"]
