"""The Python API: compile, load and serve; its main names are those of :mod:`offramp`.

May import: bundle, calibration, commands, compiler, compiler.data, engine, engine.learning,
engine.scheduling, server.
"""

from offramp.api.errors import (
    ExportCheckError,
    ForkedError,
    ModelClosedError,
    ModuleExportError,
)

__all__ = ["ExportCheckError", "ForkedError", "ModelClosedError", "ModuleExportError"]
