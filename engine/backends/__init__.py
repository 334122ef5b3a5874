"""Backends execute stages: their protocols are in :mod:`.base`, each has a module of its own.

May import: bundle, engine, engine.cuda, engine.kernels, engine.tensorrt.
"""

from offramp.engine.backends.base import Backend, Slot, StageResult, TensorBatch
from offramp.engine.backends.factory import BACKENDS, make_backend

__all__ = ["BACKENDS", "Backend", "Slot", "StageResult", "TensorBatch", "make_backend"]
