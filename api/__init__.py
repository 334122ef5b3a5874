"""The Python API: models in this process; its main names are those of :mod:`offramp`.

May import: bundle, engine, engine.scheduling, server.
"""

from offramp.api.event_loop import ForkedError
from offramp.api.models import AsyncModel, Model, ModelClosedError, load

__all__ = ["AsyncModel", "ForkedError", "Model", "ModelClosedError", "load"]
